// Attention of a few new tokens over stored rows, each of which is read once.
//
// A part's slots are taken in tiles. For each key/value head of a tile: the scores of all query rows of its group
// (heads x new tokens), an online softmax, and the weighted sum of the values. Query rows are worked on in panels of
// up to 4, so that a key or value, once it is in a register, serves 4 of them.
//
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1; the split over parts is Flash-Decoding's.
#include "attention.hpp"

#include "numbers.hpp"
#include "rows.hpp"
#include "vectors.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float INF = __builtin_inff();

inline int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t max(int64_t x, int64_t y) { return x > y ? x : y; }

// Scores of a panel of n rows stand slot by slot, with this many floats a slot: a power of two, so that one lane of
// every vector belongs to one row.
constexpr int score_stride(int rows) { return rows == 3 ? 4 : rows; }

// Rows that will be read next, to be brought into the cache while others are worked on: a share of them with each pair
// of channels, because a core keeps few requests open at a time and what comes in a bunch waits.
struct Ahead {
  const char* rows = nullptr;
  int64_t stride = 0, size = 0;
  int64_t share = 0;  // of a row, with each pair

  // Bring in the share of the N rows from `first` on that belongs to pair c. Inlined always: GCC drops calls of
  // functions that do nothing but prefetch.
  template <int N>
  KVCACHE_INLINE void prefetch_share(int first, int c) const {
    if (!rows) return;
    // What lies in one piece comes in order, so that the processor's own prefetcher sees where it goes on.
    const int pieces = stride == size ? 1 : N;
    const int64_t bytes = share * N / pieces;
    for (int piece = 0; piece < pieces; ++piece)
      for (int64_t i = 0; i < bytes; i += 64) prefetch(rows + (first + piece) * stride + c * bytes + i);
  }
};

// Rows beside each other in memory.
struct Run {
  const char* rows;
  int64_t stride;
  int count;
  Ahead ahead;
};

template <class F, int NQ, int NK>
inline void score_rows(const typename F::Row* row, int head_dim, const float* q, int q_stride, float* scores,
                       const Ahead& ahead, int t) {
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
    ahead.prefetch_share<NK>(t, c);
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
    const V4 four = sums(total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]);
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
  int t = 0;
  for (; t + NK <= run.count; t += NK) {
    for (int j = 0; j < NK; ++j) {
      F::open(run.rows + (t + j) * run.stride, head_dim, row[j]);
    }
    score_rows<F, NQ, NK>(row, head_dim, q, q_stride, scores + t * S, run.ahead, t);
  }
  for (; t < run.count; ++t) {
    F::open(run.rows + t * run.stride, head_dim, row[0]);
    score_rows<F, NQ, 1>(row, head_dim, q, q_stride, scores + t * S, run.ahead, t);
  }
}

template <class F, int NQ, int NR>
inline void add_rows(const typename F::Row* row, int head_dim, const float* weights, float* sums, int sums_stride,
                     const Ahead& ahead, int first) {
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
    ahead.prefetch_share<NR>(first, c);
    add([c](const auto& r) KVCACHE_INLINE { return F::pair(r, c); }, c);
  }
  if (rest) add([=](const auto& r) KVCACHE_INLINE { return F::tail(r, full, rest); }, full);
}

// Add the weighted values of a run to a panel's sums.
template <class F, int NQ>
void accumulate(const Run& run, int head_dim, const float* weights, float* sums, int sums_stride) {
  constexpr int NR = 8, S = score_stride(NQ);  // rows that share one loading and storing of the sums
  typename F::Row row[NR];
  int t = 0;
  for (; t + NR <= run.count; t += NR) {
    for (int j = 0; j < NR; ++j) {
      F::open(run.rows + (t + j) * run.stride, head_dim, row[j]);
    }
    add_rows<F, NQ, NR>(row, head_dim, weights + t * S, sums, sums_stride, run.ahead, t);
  }
  for (; t < run.count; ++t) {
    F::open(run.rows + t * run.stride, head_dim, row[0]);
    add_rows<F, NQ, 1>(row, head_dim, weights + t * S, sums, sums_stride, run.ahead, t);
  }
}

// Write the rows of a run as floats, pair by pair, `padded(head_dim)` of them a row.
template <class F>
void decode(const Run& run, int head_dim, float* to) {
  const int full = head_dim / PAIR, rest = head_dim % PAIR;
  for (int t = 0; t < run.count; ++t, to += padded(head_dim)) {
    typename F::Row row;
    F::open(run.rows + t * run.stride, head_dim, row);
    for (int c = 0; c < full + (rest > 0); ++c) {
      run.ahead.prefetch_share<1>(t, c);
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
void softmax(float* scores, int count, float* greatest, float* total, float* sums, int rows, int v_dim) {
  const int padded_count = (count + W - 1) / W * W;
  for (int i = count; i < padded_count; ++i) scores[i] = -INF;
  V top = splat(-INF);
  for (int i = 0; i < padded_count; i += W) top = max(load<V>(scores + i), top);
  const V before = load<V>(greatest), now = max(greatest_of_row<S>(top), before);
  const V zero_point = now == -INF ? splat(0.0f) : now;  // a row that sees nothing yet: weights 0, not NaN
  V sum = splat(0.0f);
  for (int i = 0; i < padded_count; i += W) {
    const V weight = exp2(load<V>(scores + i) - zero_point);
    store(scores + i, weight);
    sum += weight;
  }
  const V shrink = exp2(before - zero_point);
  store(greatest, now);
  store(total, load<V>(total) * shrink + sum);
  for (int i = 0; i < rows; ++i)
    if (shrink[i] != 1.0f)
      for (int d = 0; d < v_dim; d += W) store(sums + i * v_dim + d, load<V>(sums + i * v_dim + d) * shrink[i]);
}

// Put numbers in the order in which a format is read pair by pair, and back.
void in_pairs(float* numbers, bool interleaved, int count) {
  if (!interleaved) return;
  for (float* pair = numbers; pair < numbers + count; pair += PAIR) {
    float ordered[PAIR];
    for (int i = 0; i < W; ++i) ordered[i] = pair[2 * i], ordered[W + i] = pair[2 * i + 1];
    std::memcpy(pair, ordered, sizeof ordered);
  }
}

void in_order(float* numbers, bool interleaved, int count) {
  if (!interleaved) return;
  for (float* pair = numbers; pair < numbers + count; pair += PAIR) {
    float ordered[PAIR];
    for (int i = 0; i < W; ++i) ordered[2 * i] = pair[i], ordered[2 * i + 1] = pair[W + i];
    std::memcpy(pair, ordered, sizeof ordered);
  }
}

// Numbers of a float format from element `at` on, scaled.
void read_numbers(const char* from, int64_t at, Format format, int count, float scale, float* to) {
  if (format == Format::Float32)
    for (int i = 0; i < count; ++i) to[i] = load<float>(from + 4 * (at + i)) * scale;
  else if (format == Format::BFloat16)
    for (int i = 0; i < count; ++i) to[i] = float_of_bfloat16(load<uint16_t>(from + 2 * (at + i))) * scale;
  else
    for (int i = 0; i < count; ++i) to[i] = float_of_half(load<uint16_t>(from + 2 * (at + i))) * scale;
}

void write_numbers(const float* numbers, int count, Format format, char* to, int64_t at) {
  if (format == Format::Float32)
    for (int i = 0; i < count; ++i) store(to + 4 * (at + i), numbers[i]);
  else if (format == Format::BFloat16)
    for (int i = 0; i < count; ++i) store(to + 2 * (at + i), bfloat16_of(numbers[i]));
  else
    for (int i = 0; i < count; ++i) store(to + 2 * (at + i), half_of(numbers[i]));
}

class Kernel {
 public:
  Kernel(const Attention& a, const Plan& plan)
      : a(a), plan(plan), group(a.group), k_dim(padded(a.k.head_dim)), v_dim(padded(a.v.head_dim)),
        k_reader(READERS[int(a.k.format)]), v_reader(READERS[int(a.v.format)]) {}

  int items() const { return plan.num_parts * head_ranges(); }

  void run_item(int item, float* scratch) const {
    const Part& part = plan.parts[item / head_ranges()];
    const int first_head = item % head_ranges() * plan.heads_together;
    const int heads = int(min(plan.heads_together, a.kv_heads - first_head));
    const Work& work = plan.works[part.work];
    const int rows = group * work.tokens;
    float* queries = scratch;
    float* decoded = queries + plan.heads_together * int64_t(query_rows()) * k_dim;
    float* scores = decoded + MAX_TILE * (k_dim + v_dim);
    for (int h = 0; h < heads; ++h) {
      load_queries(work, first_head + h, queries + h * int64_t(rows) * k_dim);
      clear(state_of(int(&part - plan.parts), first_head + h), rows);
    }
    for (int64_t begin = part.begin; begin < part.end;) {
      const int64_t end = min((begin / plan.tile + 1) * plan.tile, part.end);
      for (int h = 0; h < heads; ++h) {
        // What is read after this: the next head's keys, or those of the next tile.
        const char* next = nullptr;
        if (h + 1 < heads) next = address(a.k, work, first_head + h + 1, begin);
        else if (end < part.end) next = address(a.k, work, first_head, end);
        run_tile(work, first_head + h, begin, end, queries + h * int64_t(rows) * k_dim, decoded, scores,
                 state_of(int(&part - plan.parts), first_head + h), next);
      }
      begin = end;
    }
  }

  // Merge the parts of a work for one key/value head and write the results.
  void finish(const Work& work, int kv_head) const {
    const int rows = group * work.tokens;
    for (int row = 0; row < rows; ++row) {
      const int token = work.first_token + row / group, head = kv_head * group + row % group;
      const int panel = row / PANEL, lane = row % PANEL, stride = score_stride(int(min(PANEL, rows - panel * PANEL)));
      float sink = a.sink_logits ? a.sink_logits[head] * LOG2E : -INF, top = sink, total = 0.0f;
      for (int p = 0; p < work.parts; ++p) {
        const float* greatest = state_of(work.first_part + p, kv_head) + panel * panel_size(a.v.head_dim) + PANEL * v_dim;
        top = greatest[lane] > top ? greatest[lane] : top;
      }
      alignas(64) float sums[MAX_HEAD_DIM] = {};
      if (top > -INF) total = __builtin_exp2f(sink - top);
      for (int p = 0; p < work.parts; ++p) {
        const float* state = state_of(work.first_part + p, kv_head) + panel * panel_size(a.v.head_dim);
        const float* greatest = state + PANEL * v_dim;
        float part_total = 0.0f;
        for (int i = lane; i < W; i += stride) part_total += greatest[LANES + i];
        if (greatest[lane] == -INF && part_total == 0.0f) continue;  // saw nothing here
        const float weight = __builtin_exp2f(greatest[lane] - top);
        total += weight * part_total;
        for (int d = 0; d < v_dim; d += W) store(sums + d, load<V>(state + lane * v_dim + d) * weight + load<V>(sums + d));
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      for (int d = 0; d < v_dim; d += W) store(sums + d, load<V>(sums + d) * inverse);
      in_order(sums, v_reader.interleaved, v_dim);
      const int64_t at = work.sequence * a.out_strides.batch + head * a.out_strides.head + token * a.out_strides.token;
      write_numbers(sums, a.v.head_dim, a.q_format, (char*)a.out, at);
      if (a.lse) {
        const Strides& s = a.lse_strides;
        a.lse[work.sequence * s.batch + head * s.head + token * s.token] = (top + __builtin_log2f(total)) * LN2;
      }
    }
  }

 private:
  const Attention& a;
  const Plan& plan;
  const int group, k_dim, v_dim;
  const Reader &k_reader, &v_reader;

  int head_ranges() const { return (a.kv_heads + plan.heads_together - 1) / plan.heads_together; }

  int query_rows() const { return (group * int(min(a.queries, QUERY_TOKENS)) + PANEL - 1) / PANEL * PANEL; }

  float* state_of(int part, int kv_head) const {
    return plan.states + (int64_t(part) * a.kv_heads + kv_head) * plan.state_size;
  }

  const char* address(const Store& store, const Work& work, int kv_head, int64_t slot) const {
    int64_t block = work.sequence, row = slot;
    if (a.table) {
      block = a.table[work.sequence * a.table_stride + slot / a.block_size];
      row = slot % a.block_size;
    }
    return store.data + block * store.block_stride + kv_head * store.head_stride + row * store.row_stride;
  }

  // What to bring in of `store` from `rows` on while rows of head_dim channels are worked on.
  static Ahead ahead(const Store& store, const char* rows, int head_dim) {
    return {rows, store.row_stride, store.row_size, store.row_size * PAIR / max(head_dim, PAIR)};
  }

  // Query rows, token by token and head by head, scaled, in the order in which keys are read.
  void load_queries(const Work& work, int kv_head, float* queries) const {
    const float scale = a.softcap > 0 ? a.scale / a.softcap : a.scale * LOG2E;
    for (int row = 0; row < group * work.tokens; ++row, queries += k_dim) {
      const int token = work.first_token + row / group, head = kv_head * group + row % group;
      const int64_t at = work.sequence * a.q_strides.batch + head * a.q_strides.head + token * a.q_strides.token;
      for (int d = a.k.head_dim; d < k_dim; ++d) queries[d] = 0.0f;
      read_numbers((const char*)a.q, at, a.q_format, a.k.head_dim, scale, queries);
      in_pairs(queries, k_reader.interleaved, k_dim);
    }
  }

  void clear(float* state, int rows) const {
    for (int row = 0; row < rows; row += PANEL, state += panel_size(a.v.head_dim)) {
      for (int i = 0; i < PANEL * v_dim; ++i) state[i] = 0.0f;
      for (int i = 0; i < LANES; ++i) state[PANEL * v_dim + i] = -INF;
      for (int i = 0; i < LANES; ++i) state[PANEL * v_dim + LANES + i] = 0.0f;
    }
  }

  // Call `run(rows, slot)` for each run of slots in [begin, end) that lie beside each other in memory.
  template <class F>
  void for_runs(const Store& store, const Work& work, int kv_head, int64_t begin, int64_t end, F run) const {
    for (int64_t slot = begin; slot < end;) {
      const int64_t stop = min(end, (slot / a.block_size + 1) * a.block_size);
      run(Run{address(store, work, kv_head, slot), store.row_stride, int(stop - slot), {}}, int(slot - begin));
      slot = stop;
    }
  }

  void run_tile(const Work& work, int kv_head, int64_t begin, int64_t end, const float* queries, float* decoded,
                float* scores, float* state, const char* next_keys) const {
    const int rows = group * work.tokens, slots = int(end - begin);
    const bool decode_first = rows > PANEL;  // then every panel reads floats
    float* k_rows = decoded;
    float* v_rows = decoded + MAX_TILE * k_dim;
    if (decode_first) {
      for_runs(a.k, work, kv_head, begin, end, [&](Run run, int at) {
        run.ahead = ahead(a.v, address(a.v, work, kv_head, begin + at), a.k.head_dim);
        k_reader.decode(run, a.k.head_dim, k_rows + at * k_dim);
      });
      for_runs(a.v, work, kv_head, begin, end, [&](Run run, int at) {
        if (at == 0) run.ahead = ahead(a.k, next_keys, a.v.head_dim);
        v_reader.decode(run, a.v.head_dim, v_rows + at * v_dim);
      });
    }
    for (int first = 0; first < rows; first += PANEL, state += panel_size(a.v.head_dim)) {
      const int panel = int(min(PANEL, rows - first)), stride = score_stride(panel);
      const float* q = queries + int64_t(first) * k_dim;
      float* greatest = state + PANEL * v_dim;
      if (decode_first) {
        READERS[int(Format::Float32)].score[panel - 1]({(const char*)k_rows, k_dim * 4, slots, {}}, whole_pairs(a.k.head_dim), q, k_dim, scores);
      } else {
        for_runs(a.k, work, kv_head, begin, end, [&](Run run, int at) {
          run.ahead = ahead(a.v, address(a.v, work, kv_head, begin + at), a.k.head_dim);
          k_reader.score[panel - 1](run, a.k.head_dim, q, k_dim, scores + at * stride);
        });
      }
      if (a.softcap > 0) cap(scores, slots * stride);
      mask(work, first, panel, stride, begin, end, scores);
      const auto apply = stride == 1 ? softmax<1> : stride == 2 ? softmax<2> : softmax<4>;
      apply(scores, slots * stride, greatest, greatest + LANES, state, panel, v_dim);
      if (decode_first) {
        READERS[int(Format::Float32)].accumulate[panel - 1]({(const char*)v_rows, v_dim * 4, slots, {}}, whole_pairs(a.v.head_dim), scores, state, v_dim);
      } else {
        for_runs(a.v, work, kv_head, begin, end, [&](Run run, int at) {
          if (at == 0) run.ahead = ahead(a.k, next_keys, a.v.head_dim);
          v_reader.accumulate[panel - 1](run, a.v.head_dim, scores + at * stride, state, v_dim);
        });
      }
    }
  }

  void cap(float* scores, int count) const {
    for (int i = 0; i < count; i += W) store(scores + i, tanh(load<V>(scores + i)) * (a.softcap * LOG2E));
  }

  // Hide what a row's own token does not see of a tile that another token of the work sees.
  void mask(const Work& work, int first, int panel, int stride, int64_t begin, int64_t end, float* scores) const {
    for (int i = 0; i < panel; ++i) {
      const int64_t slot = work.slot + (first + i) / group;
      const int64_t window_start = a.window ? max(work.start, slot - a.window + 1) : work.start;
      const int64_t sinks_end = a.window ? min(work.start + a.sinks, window_start) : window_start;
      if (end <= slot + 1 && (begin >= window_start || end <= sinks_end)) continue;
      for (int64_t s = begin; s < end; ++s)
        if (s > slot || (s < window_start && s >= sinks_end)) scores[(s - begin) * stride + i] = -INF;
    }
  }
};

}  // namespace

void attend(const Attention& a, const Plan& plan) {
  const Kernel kernel(a, plan);
  const int items = kernel.items(), works = plan.num_works * a.kv_heads;
#if defined(_OPENMP)
#pragma omp parallel num_threads(plan.threads) if (plan.threads > 1)
#endif
  {
#if defined(_OPENMP)
    float* scratch = plan.scratch + omp_get_thread_num() * plan.scratch_size;
#pragma omp for schedule(dynamic)
#else
    float* scratch = plan.scratch;
#endif
    for (int item = 0; item < items; ++item) kernel.run_item(item, scratch);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
    for (int i = 0; i < works; ++i) kernel.finish(plan.works[i / a.kv_heads], i % a.kv_heads);
  }
}

}  // namespace KVCACHE_ISA
}  // namespace kvcache
