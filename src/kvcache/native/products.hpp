// Products of a few rows of numbers with a matrix, which is read once for all of them, row after row, as it is stored.
//
// Rows of the matrix are taken in tiles that stay in the first cache while panels of up to PANEL_ROWS rows of numbers
// are multiplied with them. For one row the time is that of reading the matrix.
#pragma once

#include "decoder.hpp"
#include "numbers.hpp"
#include "vectors.hpp"

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr int TILE_ROWS = 16;   // of a matrix
constexpr int PANEL_ROWS = 8;   // of numbers
constexpr int64_t AHEAD = 2048;  // bytes by which memory is asked for before it is needed

// W weights of a format, as floats.
template <Format F>
KVCACHE_INLINE inline V weights(const char* from) {
  if constexpr (F == Format::Float32) return load<V>(from);
  else if constexpr (F == Format::BFloat16) return (V)(widen<uint16_t, W>(from) << 16);
  else if constexpr (F == Format::Float16) return half_to_float<W>(load<Vector<uint16_t, W>>(from));
  else {
    int8_t narrow[W];
    std::memcpy(narrow, from, sizeof narrow);
    float wide[W];
    for (int i = 0; i < W; ++i) wide[i] = narrow[i];
    return load<V>(wide);
  }
}

template <Format F>
constexpr int weight_size() {
  return F == Format::Float32 ? 4 : F == Format::Int8 ? 1 : 2;
}

// Sums of products of NR matrix rows with NX rows of numbers, lane by lane.
template <Format F, int NX, int NR>
KVCACHE_INLINE inline void multiply_rows(const char* const* row, const uint16_t* const* scales, int64_t columns,
                                         const float* x, int64_t x_stride, V (&sum)[NR][NX]) {
  constexpr int SIZE = weight_size<F>();
  // A single sum would wait for itself.
  constexpr int CHAINS = NX * NR >= 6 ? 1 : NX * NR >= 2 ? 2 : 4;
  V part[CHAINS][NR][NX] = {};
  const auto add = [&](auto chain, const V (&w)[NR], const float* at) KVCACHE_INLINE {
    unroll<NX>([&](auto i) KVCACHE_INLINE {
      const V numbers = load<V>(at + i * x_stride);
      unroll<NR>([&](auto r) KVCACHE_INLINE { part[chain][r][i] = w[r] * numbers + part[chain][r][i]; });
    });
  };
  int64_t c = 0;
  if constexpr (F == Format::Int8) {
    for (; c < columns; c += GROUP) {  // columns are whole groups
      V of_group[NR][NX] = {};
      for (int r = 0; r < NR; ++r) prefetch(row[r] + c + AHEAD);
      unroll<GROUP / W>([&](auto j) KVCACHE_INLINE {
        V w[NR];
        unroll<NR>([&](auto r) KVCACHE_INLINE { w[r] = weights<F>(row[r] + c + j * W); });
        unroll<NX>([&](auto i) KVCACHE_INLINE {
          const V numbers = load<V>(x + i * x_stride + c + j * W);
          unroll<NR>([&](auto r) KVCACHE_INLINE { of_group[r][i] = w[r] * numbers + of_group[r][i]; });
        });
      });
      unroll<NR>([&](auto r) KVCACHE_INLINE {
        const float scale = float_of_bfloat16(scales[r][c / GROUP]);
        unroll<NX>([&](auto i) KVCACHE_INLINE { part[0][r][i] = of_group[r][i] * scale + part[0][r][i]; });
      });
    }
  } else {
    for (; c + CHAINS * W <= columns; c += CHAINS * W) {
      unroll<NR>([&](auto r) KVCACHE_INLINE {
        for (int b = 0; b < CHAINS * W * SIZE; b += 64) prefetch(row[r] + c * SIZE + AHEAD + b);
      });
      unroll<CHAINS>([&](auto chain) KVCACHE_INLINE {
        V w[NR];
        unroll<NR>([&](auto r) KVCACHE_INLINE { w[r] = weights<F>(row[r] + (c + chain * W) * SIZE); });
        add(chain, w, x + c + chain * W);
      });
    }
    for (; c < columns; c += W) {
      V w[NR];
      const int64_t count = min(W, columns - c);
      unroll<NR>([&](auto r) KVCACHE_INLINE {
        if (count == W) {
          w[r] = weights<F>(row[r] + c * SIZE);
        } else {  // what lies behind the row may be no number
          char padded[W * SIZE] = {};
          std::memcpy(padded, row[r] + c * SIZE, count * SIZE);
          w[r] = weights<F>(padded);
        }
      });
      add(std::integral_constant<int, 0>(), w, x + c);  // rows of numbers are padded with zeros
    }
  }
  unroll<NR>([&](auto r) KVCACHE_INLINE {
    unroll<NX>([&](auto i) KVCACHE_INLINE {
      sum[r][i] = part[0][r][i];
      unroll<CHAINS - 1>([&](auto chain) KVCACHE_INLINE { sum[r][i] += part[chain + 1][r][i]; });
    });
  });
}

// Write the products of `count` matrix rows with NX rows of numbers: out[r * out_stride + i].
template <Format F, int NX>
void multiply_tile(const Matrix& m, int64_t first, int count, const float* x, int64_t x_stride, float* out,
                   int64_t out_stride) {
  // So many rows side by side, as registers allow; a single row of numbers reads one matrix row after the other, as
  // memory is fastest, and only their last sums are taken together.
  constexpr int NR = NX == 1 ? 1 : W == 16 || NX <= 4 ? 2 : 1, RUN = NX == 1 ? 4 : 1;
  const auto take = [&](auto rows, auto run, int r) KVCACHE_INLINE {
    constexpr int R = decltype(rows)::value, N = R * decltype(run)::value;
    V total[(N * NX + 3) / 4 * 4] = {};
    for (int done = 0; done < N; done += R) {
      const char* row[R];
      const uint16_t* scales[R] = {};
      for (int j = 0; j < R; ++j) {
        row[j] = m.data + (first + r + done + j) * m.row_stride;
        if (F == Format::Int8) scales[j] = m.scales + (first + r + done + j) * (m.columns / GROUP);
      }
      V sum[R][NX];
      multiply_rows<F, NX, R>(row, scales, m.columns, x, x_stride, sum);
      for (int j = 0; j < R; ++j)
        for (int i = 0; i < NX; ++i) total[(done + j) * NX + i] = sum[j][i];
    }
    alignas(16) float flat[(N * NX + 3) / 4 * 4];
    for (int j = 0; j < N * NX; j += 4)
      store(flat + j, horizontal_sums(total[j], total[j + 1], total[j + 2], total[j + 3]));
    for (int j = 0; j < N; ++j)
      for (int i = 0; i < NX; ++i) out[(r + j) * out_stride + i] = flat[j * NX + i];
  };
  const std::integral_constant<int, 1> one;
  int r = 0;
  for (; r + NR * RUN <= count; r += NR * RUN)
    take(std::integral_constant<int, NR>(), std::integral_constant<int, RUN>(), r);
  for (; r < count; ++r) take(one, one, r);
}

using MultiplyTile = void (*)(const Matrix&, int64_t, int, const float*, int64_t, float*, int64_t);

template <Format F>
constexpr MultiplyTile multiply_by_rows(int rows) {
  constexpr MultiplyTile by_rows[PANEL_ROWS] = {multiply_tile<F, 1>, multiply_tile<F, 2>, multiply_tile<F, 3>,
                                                multiply_tile<F, 4>, multiply_tile<F, 5>, multiply_tile<F, 6>,
                                                multiply_tile<F, 7>, multiply_tile<F, 8>};
  return by_rows[rows - 1];
}

inline MultiplyTile multiply_of(Format format, int rows) {
  switch (format) {
    case Format::Float32: return multiply_by_rows<Format::Float32>(rows);
    case Format::BFloat16: return multiply_by_rows<Format::BFloat16>(rows);
    case Format::Float16: return multiply_by_rows<Format::Float16>(rows);
    default: return multiply_by_rows<Format::Int8>(rows);
  }
}

// Write the products of `count` matrix rows from `first` on with n rows of numbers, and their bias:
// out[r * n + i]. Rows of numbers are x_stride apart and padded with zeros to whole vectors.
inline void multiply(const Matrix& m, int64_t first, int count, const float* x, int64_t x_stride, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += PANEL_ROWS) {
    const int rows = int(min(PANEL_ROWS, n - i));
    multiply_of(m.format, rows)(m, first, count, x + i * x_stride, x_stride, out + i, n);
  }
  if (!m.bias.data) return;
  for (int r = 0; r < count; ++r) {
    const float bias = number_at(m.bias.format, m.bias.data, first + r);
    for (int64_t i = 0; i < n; ++i) out[r * n + i] += bias;
  }
}

}  // namespace
}  // namespace KVCACHE_ISA
}  // namespace kvcache
