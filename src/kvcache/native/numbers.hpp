// Single numbers of 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcache {
namespace {

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

}  // namespace
}  // namespace kvcache
