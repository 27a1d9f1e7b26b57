// Numbers of the float formats, one by one and in rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "format.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvcache {
namespace {  // each instruction set has a copy of its own

inline int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t max(int64_t x, int64_t y) { return x > y ? x : y; }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float float_of_bfloat16(uint16_t bits) { return float_of_bits(uint32_t(bits) << 16); }

inline uint16_t bfloat16_of(float x) {  // to the nearest, ties to even
  const uint32_t bits = bits_of(x);
  if (x != x) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_of_half(uint16_t half) {
  // As the exponent field of a float the half's exponent is 112 too small; the product is right for subnormals too.
  const float scaled = float_of_bits(uint32_t(half & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // infinities and NaN
  return float_of_bits(bits_of(scaled) | special | uint32_t(half & 0x8000) << 16);
}

inline uint16_t half_of(float x) {  // to the nearest, ties to even
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000)  // subnormal: adding 1/2 lets the hardware round at the half's last bit
    return uint16_t(sign | (bits_of(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

template <Format F>
struct Number;
template <>
struct Number<Format::Float32> {
  using Bits = uint32_t;
  static float read(Bits x) { return float_of_bits(x); }
  static Bits write(float x) { return bits_of(x); }
};
template <>
struct Number<Format::BFloat16> {
  using Bits = uint16_t;
  static float read(Bits x) { return float_of_bfloat16(x); }
  static Bits write(float x) { return bfloat16_of(x); }
};
template <>
struct Number<Format::Float16> {
  using Bits = uint16_t;
  static float read(Bits x) { return float_of_half(x); }
  static Bits write(float x) { return half_of(x); }
};

template <Format F>
constexpr int item_size() {
  return sizeof(typename Number<F>::Bits);
}

template <Format F>
inline typename Number<F>::Bits bits_at(const char* from, int64_t i) {
  typename Number<F>::Bits bits;
  std::memcpy(&bits, from + i * item_size<F>(), sizeof bits);
  return bits;
}

template <Format F>
inline void read_numbers(const char* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = Number<F>::read(bits_at<F>(from, i));
}

inline float number_at(Format format, const char* from, int64_t i) {
  switch (format) {
    case Format::Float32: return Number<Format::Float32>::read(bits_at<Format::Float32>(from, i));
    case Format::BFloat16: return Number<Format::BFloat16>::read(bits_at<Format::BFloat16>(from, i));
    default: return Number<Format::Float16>::read(bits_at<Format::Float16>(from, i));
  }
}

template <Format F>
inline void write_numbers(const float* from, int64_t count, char* to) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (F == Format::Float16)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128((__m128i*)(to + i * 2), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; ++i) {
    const auto bits = Number<F>::write(from[i]);
    std::memcpy(to + i * item_size<F>(), &bits, sizeof bits);
  }
}

}  // namespace
}  // namespace kvcache
