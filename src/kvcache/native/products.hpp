// Products of a few rows of numbers with a matrix, which is read from memory once for all of them, as it is stored.
//
// Rows of the matrix are taken in tiles that stay in the first cache while panels of up to PANEL_ROWS rows of numbers
// are multiplied with them. For up to two panels or so the time is that of reading the matrix.
#pragma once

#include "decoder.hpp"
#include "numbers.hpp"
#include "vectors.hpp"

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr int TILE_ROWS = 16;   // of a matrix
constexpr int PANEL_ROWS = 4;   // of numbers
constexpr int64_t LONG_ROW = 16 * 1024;  // bytes of a row of which some side by side fill much of the second cache

// W weights of a format, as floats.
template <Format F>
KVCACHE_INLINE inline V weights(const char* from) {
  if constexpr (F == Format::Float32) return load<V>(from);
  else if constexpr (F == Format::BFloat16) return (V)(widen<uint16_t, W>(from) << 16);
  else if constexpr (F == Format::Float16) return half_to_float<W>(load<Vector<uint16_t, W>>(from));
  else return __builtin_convertvector((I)(widen<uint8_t, W>(from) << 24), V);  // 2^24 times the code, with its sign
}

template <Format F>
constexpr int weight_size() {
  return F == Format::Float32 ? 4 : F == Format::Int8 ? 1 : 2;
}

// Sums of products of NR matrix rows with NX rows of numbers, lane by lane.
template <Format F, int NX, int NR>
KVCACHE_INLINE inline void multiply_rows(const char* const* row, const uint16_t* const* scales, int64_t columns,
                                         int64_t ahead, const float* x, int64_t x_stride, V (&sum)[NR][NX]) {
  constexpr int SIZE = weight_size<F>();
  // A single sum would wait for itself.
  constexpr int CHAINS = NX * NR >= 6 ? 1 : NX * NR >= 2 ? 2 : 4;
  V part[CHAINS][NR][NX] = {};
  const auto add = [&](auto chain, const V (&w)[NR], const float* at, int64_t stride) KVCACHE_INLINE {
    unroll<NX>([&](auto i) KVCACHE_INLINE {
      const V numbers = load<V>(at + i * stride);
      unroll<NR>([&](auto r) KVCACHE_INLINE { part[chain][r][i] = w[r] * numbers + part[chain][r][i]; });
    });
  };
  int64_t c = 0;
  if constexpr (F == Format::Int8) {
    for (; c < columns; c += GROUP) {  // columns are whole groups
      V of_group[NR][NX] = {};
      for (int r = 0; r < NR; ++r) prefetch(row[r] + c + ahead);
      unroll<GROUP / W>([&](auto j) KVCACHE_INLINE {
        V w[NR];
        unroll<NR>([&](auto r) KVCACHE_INLINE { w[r] = weights<F>(row[r] + c + j * W); });
        unroll<NX>([&](auto i) KVCACHE_INLINE {
          const V numbers = load<V>(x + i * x_stride + c + j * W);
          unroll<NR>([&](auto r) KVCACHE_INLINE { of_group[r][i] = w[r] * numbers + of_group[r][i]; });
        });
      });
      unroll<NR>([&](auto r) KVCACHE_INLINE {
        const Vector<uint16_t, 2 * W> twice = scales[r][c / GROUP] - Vector<uint16_t, 2 * W>{};
        const V scale = (V)((U)twice & 0xffff0000u);
        unroll<NX>([&](auto i) KVCACHE_INLINE { part[0][r][i] = of_group[r][i] * scale + part[0][r][i]; });
      });
    }
  } else {
    for (; c + CHAINS * W <= columns; c += CHAINS * W) {
      unroll<NR>([&](auto r) KVCACHE_INLINE {
        for (int b = 0; b < CHAINS * W * SIZE; b += 64) prefetch(row[r] + c * SIZE + ahead + b);
      });
      unroll<CHAINS>([&](auto chain) KVCACHE_INLINE {
        V w[NR];
        unroll<NR>([&](auto r) KVCACHE_INLINE { w[r] = weights<F>(row[r] + (c + chain * W) * SIZE); });
        add(chain, w, x + c + chain * W, x_stride);
      });
    }
    for (; c < columns; c += W) {
      V w[NR];
      const std::integral_constant<int, 0> chain;
      if (c + W <= columns) {
        unroll<NR>([&](auto r) KVCACHE_INLINE { w[r] = weights<F>(row[r] + c * SIZE); });
        add(chain, w, x + c, x_stride);
        continue;
      }
      // What lies behind rows may be no numbers.
      const int64_t count = columns - c;
      unroll<NR>([&](auto r) KVCACHE_INLINE {
        char padded[W * SIZE] = {};
        std::memcpy(padded, row[r] + c * SIZE, count * SIZE);
        w[r] = weights<F>(padded);
      });
      float numbers[NX][W] = {};
      for (int i = 0; i < NX; ++i) std::memcpy(numbers[i], x + i * x_stride + c, count * sizeof(float));
      add(chain, w, numbers[0], W);
    }
  }
  unroll<NR>([&](auto r) KVCACHE_INLINE {
    unroll<NX>([&](auto i) KVCACHE_INLINE {
      sum[r][i] = part[0][r][i];
      unroll<CHAINS - 1>([&](auto chain) KVCACHE_INLINE { sum[r][i] += part[chain + 1][r][i]; });
      if (F == Format::Int8) sum[r][i] *= 0x1p-24f;
    });
  });
}

// Write the products of `count` matrix rows with NX rows of numbers: out[r * out_stride + i].
template <Format F, int NX>
void multiply_tile(const Matrix& m, int64_t first, int count, const float* x, int64_t x_stride, float* out,
                   int64_t out_stride) {
  // So many rows side by side as leave registers for their sums: each number that is loaded serves all of them. While they
  // are read those behind them are brought in, so that memory is always asked for one piece after another.
  constexpr int NR = W == 8 && NX > 2 ? 3 : 4;
  const auto take = [&](auto rows, int r) KVCACHE_INLINE {
    constexpr int R = decltype(rows)::value;
    const char* row[R];
    const uint16_t* scales[R] = {};
    for (int j = 0; j < R; ++j) {
      row[j] = m.data + (first + r + j) * m.row_stride;
      if (F == Format::Int8) scales[j] = m.scales + (first + r + j) * (m.columns / GROUP);
    }
    V sum[R][NX];
    const int64_t ahead = (m.row_stride < LONG_ROW ? 2 : 1) * R * m.row_stride;
    multiply_rows<F, NX, R>(row, scales, m.columns, ahead, x, x_stride, sum);
    V total[(R * NX + 3) / 4 * 4] = {};
    for (int j = 0; j < R * NX; ++j) total[j] = sum[j / NX][j % NX];
    alignas(16) float flat[(R * NX + 3) / 4 * 4];
    for (int j = 0; j < R * NX; j += 4)
      store(flat + j, horizontal_sums(total[j], total[j + 1], total[j + 2], total[j + 3]));
    for (int j = 0; j < R * NX; ++j) out[(r + j / NX) * out_stride + j % NX] = flat[j];
  };
  int r = 0;
  for (; r + NR <= count; r += NR) take(std::integral_constant<int, NR>(), r);
  for (; r < count; ++r) take(std::integral_constant<int, 1>(), r);
}

using MultiplyTile = void (*)(const Matrix&, int64_t, int, const float*, int64_t, float*, int64_t);

template <Format F>
constexpr MultiplyTile multiply_by_rows(int rows) {
  constexpr MultiplyTile by_rows[PANEL_ROWS] = {multiply_tile<F, 1>, multiply_tile<F, 2>, multiply_tile<F, 3>,
                                                multiply_tile<F, 4>};
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
// out[r * n + i]. Rows of numbers are x_stride apart.
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
