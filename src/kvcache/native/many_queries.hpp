// The arithmetic of a tile for many query rows: keys stand slot by slot in vectors, so that a row's scores are one too.
//
// Keys and values of the tile are decoded once for all rows of a work, keys transposed on the way. Rows are then taken up
// to SCORE_ROWS at a time, as many as leave registers for two vectors of sums each.
#pragma once

#include "attention.hpp"
#include "panels.hpp"
#include "vectors.hpp"

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

static_assert(MAX_TILE % PAIR == 0);

// Write four rows of numbers as columns: to[c * MAX_TILE + row].
inline void transpose_four(const float* const* rows, int count, float* to) {
  for (int c = 0; c < count; c += 4) {
    const V4 a = load<V4>(rows[0] + c), b = load<V4>(rows[1] + c), d = load<V4>(rows[2] + c), e = load<V4>(rows[3] + c);
    const V4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const V4 de_low = __builtin_shufflevector(d, e, 0, 4, 1, 5), de_high = __builtin_shufflevector(d, e, 2, 6, 3, 7);
    store(to + (c + 0) * MAX_TILE, __builtin_shufflevector(ab_low, de_low, 0, 1, 4, 5));
    store(to + (c + 1) * MAX_TILE, __builtin_shufflevector(ab_low, de_low, 2, 3, 6, 7));
    store(to + (c + 2) * MAX_TILE, __builtin_shufflevector(ab_high, de_high, 0, 1, 4, 5));
    store(to + (c + 3) * MAX_TILE, __builtin_shufflevector(ab_high, de_high, 2, 3, 6, 7));
  }
}

// Add a pair of vectors, times a factor for each row, to the rows' sums.
template <int N>
KVCACHE_INLINE inline void add_pair(V (&sums)[N][2], const float* pair, const float* factors, int stride) {
  const V a = load<V>(pair), b = load<V>(pair + W);
  unroll<N>([&](auto i) KVCACHE_INLINE {
    const float factor = factors[i * stride];
    sums[i][0] = a * factor + sums[i][0];
    sums[i][1] = b * factor + sums[i][1];
  });
}

// Write the products of N query rows with a tile's keys (channels, MAX_TILE): scores[row * MAX_TILE + slot].
template <int N>
void score_many(const float* queries, int q_stride, int channels, const float* keys, int slots, float* scores) {
  for (int s = 0; s < slots; s += PAIR) {
    V sum[N][2] = {};
    for (int c = 0; c < channels; ++c) add_pair<N>(sum, keys + c * MAX_TILE + s, queries + c, q_stride);
    unroll<N>([&](auto i) KVCACHE_INLINE {
      store(scores + i * MAX_TILE + s, sum[i][0]);
      store(scores + i * MAX_TILE + s + W, sum[i][1]);
    });
  }
}

// Add a tile's weighted values (slots, channels) to the sums of N rows.
template <int N>
void accumulate_many(const float* weights, int slots, const float* values, int v_stride, int channels,
                     float* const* sums) {
  for (int d = 0; d < channels; d += PAIR) {
    V sum[N][2];
    unroll<N>([&](auto i) KVCACHE_INLINE {
      sum[i][0] = load<V>(sums[i] + d);
      sum[i][1] = load<V>(sums[i] + d + W);
    });
    for (int s = 0; s < slots; ++s) add_pair<N>(sum, values + s * v_stride + d, weights + s, MAX_TILE);
    unroll<N>([&](auto i) KVCACHE_INLINE {
      store(sums[i] + d, sum[i][0]);
      store(sums[i] + d + W, sum[i][1]);
    });
  }
}

constexpr void (*SCORE_MANY[SCORE_ROWS])(const float*, int, int, const float*, int, float*) = {
    score_many<1>, score_many<2>, score_many<3>, score_many<4>, score_many<5>, score_many<6>};
constexpr void (*ACCUMULATE_MANY[SCORE_ROWS])(const float*, int, const float*, int, int, float* const*) = {
    accumulate_many<1>, accumulate_many<2>, accumulate_many<3>,
    accumulate_many<4>, accumulate_many<5>, accumulate_many<6>};

// One row's greatest score and sum of weights so far, and its weighted values (padded Dv).
struct RowState {
  float *row_max, *row_sum, *sums;
};

// Turn a row's scores into weights relative to its greatest score so far, and bring what was summed to that measure.
inline void softmax_row(float* scores, const RowState& row, int v_dim) {
  V top = load<V>(scores);
  for (int i = W; i < MAX_TILE; i += W) top = greater(load<V>(scores + i), top);
  const float before = *row.row_max, here = fold<float, W>(top, [](auto x, auto y) { return x > y ? x : y; });
  const float now = here > before ? here : before;
  const V zero_point = splat(now == -INF ? 0.0f : now);  // a row that sees nothing yet: weights 0, not NaN
  V sum = splat(0.0f);
  for (int i = 0; i < MAX_TILE; i += W) {
    const V weight = exp2(load<V>(scores + i) - zero_point);
    store(scores + i, weight);
    sum += weight;
  }
  const float total = fold<float, W>(sum, [](auto x, auto y) { return x + y; });
  if (now == before || before == -INF) {
    *row.row_sum += total;
  } else {
    const float rescale = exp2(splat(before - now))[0];
    *row.row_sum = *row.row_sum * rescale + total;
    for (int d = 0; d < v_dim; d += W) store(row.sums + d, load<V>(row.sums + d) * rescale);
  }
  *row.row_max = now;
}

}  // namespace
}  // namespace KVCACHE_ISA
}  // namespace kvcache
