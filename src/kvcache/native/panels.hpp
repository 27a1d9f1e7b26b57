// The arithmetic of a tile: scores, softmax and weighted sums of values for a panel of up to 4 query rows.
//
// A key or value, once it is in a register, serves all rows of a panel. Everything is a template over the format of the
// rows and the number of query rows, and reached at run time through `Reader`.
#pragma once

#include "attention.hpp"
#include "numbers.hpp"
#include "rows.hpp"
#include "vectors.hpp"

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr float INF = __builtin_inff();

// Scores of a panel of n rows stand slot by slot, with this many floats a slot: a power of two, so that one lane of
// every vector belongs to one row.
constexpr int score_stride(int rows) { return rows == 3 ? 4 : rows; }

// Rows that will be read next, to be brought into the cache while others are worked on. Inlined always: GCC drops calls
// of functions that do nothing but prefetch.
class Ahead {
 public:
  Ahead() = default;
  // For each row that is worked on, in `pairs` pairs of channels, one is brought in.
  Ahead(const char* rows, int64_t stride, int64_t size, int pairs) : next(rows), due(rows) {
    if (stride == size) share = (size + pairs - 1) / pairs;
    else apart = stride, row_size = size;
  }

  // With each pair a share of N rows, because a core keeps few requests open at a time and what comes in a bunch waits.
  // It stands in the innermost loops: few instructions, for rows without gaps.
  template <int N>
  KVCACHE_INLINE void bring_shares() {
    for (due += N * share; next < due; next += 64) prefetch(next);
  }

  // Rows with gaps between them come one at a time.
  template <int N>
  KVCACHE_INLINE void bring_rows() {
    if (!apart) return;
    for (int j = 0; j < N; ++j, next += apart)
      for (int64_t i = 0; i < row_size; i += 64) prefetch(next + i);
    due = next;
  }

 private:
  const char* next = nullptr;  // what is asked for next
  const char* due = nullptr;   // what lies before it has had its turn
  int64_t share = 0, apart = 0, row_size = 0;
};

// Rows beside each other in memory.
struct Run {
  const char* rows;
  int64_t stride;
  int count;
  Ahead ahead;
};

template <class F, int NQ, int NK>
KVCACHE_INLINE inline void score_rows(const typename F::Row* row, int head_dim, const float* q, int q_stride,
                                      float* scores, Ahead& ahead) {
  // With one query row, two sums a key: a single one would wait for itself.
  constexpr int CHAINS = NQ == 1 ? 2 : 1, S = score_stride(NQ);
  V sum[CHAINS][NK][NQ] = {};
  const auto add = [&](auto pair_of, int c) KVCACHE_INLINE {
    Pair x[NK];
    unroll<NK>([&](auto j) KVCACHE_INLINE { x[j] = pair_of(row[j]); });
    unroll<NQ>([&](auto i) KVCACHE_INLINE {
      const V qa = load<V>(q + i * q_stride + c * PAIR), qb = load<V>(q + i * q_stride + c * PAIR + W);
      unroll<NK>([&](auto j) KVCACHE_INLINE { sum[0][j][i] = x[j].a * qa + sum[0][j][i]; });
      unroll<NK>([&](auto j) KVCACHE_INLINE { sum[CHAINS - 1][j][i] = x[j].b * qb + sum[CHAINS - 1][j][i]; });
    });
  };
  const int full = head_dim / PAIR, rest = head_dim % PAIR;
  for (int c = 0; c < full; ++c) {
    ahead.bring_shares<NK>();
    add([c](const auto& r) KVCACHE_INLINE { return F::pair(r, c); }, c);
  }
  if (rest) add([=](const auto& r) KVCACHE_INLINE { return F::tail(r, full, rest); }, full);
  V total[(NK * S + 3) / 4 * 4] = {};
  unroll<NK>([&](auto j) KVCACHE_INLINE {
    unroll<NQ>([&](auto i) KVCACHE_INLINE {
      total[j * S + i] = CHAINS == 1 ? sum[0][j][i] : sum[0][j][i] + sum[CHAINS - 1][j][i];
    });
  });
  unroll<(NK * S + 3) / 4>([&](auto j) KVCACHE_INLINE {
    const V4 four = horizontal_sums(total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]);
    constexpr int count = NK * S < 4 ? NK * S : 4;
    std::memcpy(scores + 4 * j, &four, count * sizeof(float));
  });
}

// Write the products of a panel's queries with the keys of a run.
template <class F, int NQ>
void score(const Run& run, int head_dim, const float* q, int q_stride, float* scores) {
  // As many keys at a time as leave registers for a sum of each key and query.
  constexpr int NK = NQ <= 2 || W == 16 ? 4 : 2, S = score_stride(NQ);
  typename F::Row row[NK];
  Ahead ahead = run.ahead;
  int t = 0;
  for (; t + NK <= run.count; t += NK) {
    for (int j = 0; j < NK; ++j) F::open(run.rows + (t + j) * run.stride, head_dim, row[j]);
    ahead.bring_rows<NK>();
    score_rows<F, NQ, NK>(row, head_dim, q, q_stride, scores + t * S, ahead);
  }
  for (; t < run.count; ++t) {
    F::open(run.rows + t * run.stride, head_dim, row[0]);
    ahead.bring_rows<1>();
    score_rows<F, NQ, 1>(row, head_dim, q, q_stride, scores + t * S, ahead);
  }
}

template <class F, int NQ, int NR>
KVCACHE_INLINE inline void add_rows(const typename F::Row* row, int head_dim, const float* weights, float* sums,
                                    int sums_stride, Ahead& ahead) {
  // With few query rows, two sums a channel: a single one would wait for itself.
  constexpr int CHAINS = NQ <= 2 && NR > 1 ? 2 : 1, S = score_stride(NQ);
  const auto add = [&](auto pair_of, int c) KVCACHE_INLINE {
    Pair sum[CHAINS][NQ] = {};
    unroll<NQ>([&](auto i) KVCACHE_INLINE {
      const float* at = sums + i * sums_stride + c * PAIR;
      sum[0][i] = {load<V>(at), load<V>(at + W)};
    });
    unroll<NR>([&](auto t) KVCACHE_INLINE {
      const Pair x = pair_of(row[t]);
      unroll<NQ>([&](auto i) KVCACHE_INLINE {
        const float weight = weights[t * S + i];
        Pair& into = sum[t % CHAINS][i];
        into.a = x.a * weight + into.a;
        into.b = x.b * weight + into.b;
      });
    });
    unroll<NQ>([&](auto i) KVCACHE_INLINE {
      float* at = sums + i * sums_stride + c * PAIR;
      store(at, CHAINS == 1 ? sum[0][i].a : sum[0][i].a + sum[CHAINS - 1][i].a);
      store(at + W, CHAINS == 1 ? sum[0][i].b : sum[0][i].b + sum[CHAINS - 1][i].b);
    });
  };
  const int full = head_dim / PAIR, rest = head_dim % PAIR;
  for (int c = 0; c < full; ++c) {
    ahead.bring_shares<NR>();
    add([c](const auto& r) KVCACHE_INLINE { return F::pair(r, c); }, c);
  }
  if (rest) add([=](const auto& r) KVCACHE_INLINE { return F::tail(r, full, rest); }, full);
}

// Add the weighted values of a run to a panel's sums.
template <class F, int NQ>
void accumulate(const Run& run, int head_dim, const float* weights, float* sums, int sums_stride) {
  constexpr int NR = 8, S = score_stride(NQ);  // rows that share one loading and storing of the sums
  typename F::Row row[NR];
  Ahead ahead = run.ahead;
  int t = 0;
  for (; t + NR <= run.count; t += NR) {
    for (int j = 0; j < NR; ++j) F::open(run.rows + (t + j) * run.stride, head_dim, row[j]);
    ahead.bring_rows<NR>();
    add_rows<F, NQ, NR>(row, head_dim, weights + t * S, sums, sums_stride, ahead);
  }
  for (; t < run.count; ++t) {
    F::open(run.rows + t * run.stride, head_dim, row[0]);
    ahead.bring_rows<1>();
    add_rows<F, NQ, 1>(row, head_dim, weights + t * S, sums, sums_stride, ahead);
  }
}

// Write the rows of a run as floats, pair by pair, `padded(head_dim)` of them a row.
template <class F>
void decode(const Run& run, int head_dim, float* to) {
  const int full = head_dim / PAIR, rest = head_dim % PAIR;
  Ahead ahead = run.ahead;
  for (int t = 0; t < run.count; ++t, to += padded(head_dim)) {
    typename F::Row row;
    F::open(run.rows + t * run.stride, head_dim, row);
    ahead.bring_rows<1>();
    for (int c = 0; c < full + (rest > 0); ++c) {
      ahead.bring_shares<1>();
      const Pair x = c < full ? F::pair(row, c) : F::tail(row, c, rest);
      store(to + c * PAIR, x.a);
      store(to + c * PAIR + W, x.b);
    }
  }
}

// What depends on a format, chosen at run time.
struct Reader {
  void (*score[PANEL])(const Run&, int, const float*, int, float*);  // [rows of the panel - 1]
  void (*accumulate[PANEL])(const Run&, int, const float*, float*, int);
  void (*decode)(const Run&, int, float*);
  bool interleaved;
};

template <class F>
constexpr Reader reader_of() {
  return {{score<F, 1>, score<F, 2>, score<F, 3>, score<F, 4>},
          {accumulate<F, 1>, accumulate<F, 2>, accumulate<F, 3>, accumulate<F, 4>},
          decode<F>,
          F::interleaved};
}

constexpr Reader READERS[] = {reader_of<Float32>(), reader_of<BFloat16>(), reader_of<Float16>(), reader_of<Int8>(),
                              reader_of<Int4>()};  // as in Format

// What a split has come to for the rows of a panel: a lane of `row_max` and `row_sum` belongs to row lane % stride, the
// lanes of a row holding the same greatest score so far and shares of its sum of weights.
struct PanelState {
  float* sums;  // (PANEL, padded Dv), weighted sums of values, in the order of the values' format
  float* row_max;
  float* row_sum;

  // The one of the panel `index` in the memory that a split has for a key/value head.
  PanelState(float* memory, int index, int v_head_dim) {
    sums = memory + index * panel_size(v_head_dim);
    row_max = sums + PANEL * padded(v_head_dim);
    row_sum = row_max + LANES;
  }

  void reset() const {
    for (float* x = sums; x < row_max; ++x) *x = 0.0f;
    for (int i = 0; i < LANES; ++i) row_max[i] = -INF, row_sum[i] = 0.0f;
  }
};

// A lane of the result is the greatest of all lanes that belong to the same row of scores S floats apart.
template <int S>
inline V greatest_of_row(V x) {
  alignas(64) float lane[W];
  store(lane, x);
  for (int shift = W / 2; shift >= S; shift /= 2)
    for (int i = 0; i < shift; ++i) lane[i] = lane[i] > lane[i + shift] ? lane[i] : lane[i + shift];
  for (int i = S; i < W; ++i) lane[i] = lane[i - S];
  return load<V>(lane);
}

// Turn scores (base 2) into weights relative to each row's greatest score so far, and bring what was summed before to
// the same measure.
template <int S>
void softmax(float* scores, int count, const PanelState& state, int rows, int v_dim) {
  const int padded_count = (count + W - 1) / W * W;
  for (int i = count; i < padded_count; ++i) scores[i] = -INF;
  V top = splat(-INF);
  for (int i = 0; i < padded_count; i += W) top = greater(load<V>(scores + i), top);
  const V before = load<V>(state.row_max), now = greater(greatest_of_row<S>(top), before);
  const V zero_point = now == -INF ? splat(0.0f) : now;  // a row that sees nothing yet: weights 0, not NaN
  V sum = splat(0.0f);
  for (int i = 0; i < padded_count; i += W) {
    const V weight = exp2(load<V>(scores + i) - zero_point);
    store(scores + i, weight);
    sum += weight;
  }
  const V rescale = exp2(before - zero_point);
  store(state.row_max, now);
  store(state.row_sum, load<V>(state.row_sum) * rescale + sum);
  for (int i = 0; i < rows; ++i) {
    if (rescale[i] == 1.0f) continue;
    for (float* x = state.sums + i * v_dim; x < state.sums + (i + 1) * v_dim; x += W) store(x, load<V>(x) * rescale[i]);
  }
}

// Put numbers in the order in which an interleaved format is read pair by pair, and back.
void interleave(float* numbers, int count) {
  for (float* pair = numbers; pair < numbers + count; pair += PAIR) {
    float ordered[PAIR];
    for (int i = 0; i < W; ++i) ordered[i] = pair[2 * i], ordered[W + i] = pair[2 * i + 1];
    std::memcpy(pair, ordered, sizeof ordered);
  }
}

void deinterleave(float* numbers, int count) {
  for (float* pair = numbers; pair < numbers + count; pair += PAIR) {
    float ordered[PAIR];
    for (int i = 0; i < W; ++i) ordered[2 * i] = pair[i], ordered[2 * i + 1] = pair[W + i];
    std::memcpy(pair, ordered, sizeof ordered);
  }
}

}  // namespace
}  // namespace KVCACHE_ISA
}  // namespace kvcache
