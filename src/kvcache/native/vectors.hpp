// Vectors of floats, by the compiler's vector extensions: one source for every instruction set.
//
// This header and what includes it is compiled once for each instruction set, with that set's flags and a namespace
// of its own (KVCACHE_ISA), so that no copy of a function can stand in for another's.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

// Floats in a vector.
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vector = typename VectorOf<T, N>::type;

using V = Vector<float, W>;
using I = Vector<int32_t, W>;
using U = Vector<uint32_t, W>;
using V4 = Vector<float, 4>;

// Two vectors: 2 W channels of a row, in the order that its format can be read in fastest.
struct Pair {
  V a, b;
};

#define KVCACHE_INLINE __attribute__((always_inline))

// Call f with 0, 1 ... N - 1 as constants: arrays indexed by them stay in registers.
template <class F, int... Is>
KVCACHE_INLINE inline void unroll(const F& f, std::integer_sequence<int, Is...>) {
  (f(std::integral_constant<int, Is>()), ...);
}
template <int N, class F>
KVCACHE_INLINE inline void unroll(const F& f) {
  unroll(f, std::make_integer_sequence<int, N>());
}

template <class X>
inline X load(const void* from) {
  X x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class X>
inline void store(void* to, X x) {
  std::memcpy(to, &x, sizeof x);
}

template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)x;
}

// Loops, because compilers turn them into one instruction and take many for __builtin_convertvector.
template <class From, int N>
inline Vector<uint32_t, N> widen(const void* numbers) {
#if defined(__AVX512F__)
  // GCC 12 takes this for four vectors, and memory between.
  if constexpr (sizeof(From) == 1 && N == 16) return (Vector<uint32_t, N>)_mm512_cvtepu8_epi32(load<__m128i>(numbers));
#elif defined(__AVX2__)
  if constexpr (sizeof(From) == 1 && N == 8) {
    // Bytes that are in both halves already are put in their places by one cheap shuffle; the instruction that widens
    // takes two.
    const __m256i bytes = _mm256_set1_epi64x(load<long long>(numbers));
    const __m256i places = _mm256_setr_epi8(0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3, -1, -1, -1,  //
                                            4, -1, -1, -1, 5, -1, -1, -1, 6, -1, -1, -1, 7, -1, -1, -1);
    return (Vector<uint32_t, N>)_mm256_shuffle_epi8(bytes, places);
  }
#endif
  From narrow[N];
  std::memcpy(narrow, numbers, sizeof narrow);
  uint32_t wide[N];
  for (int i = 0; i < N; ++i) wide[i] = narrow[i];
  return load<Vector<uint32_t, N>>(wide);
}

inline V splat(float x) { return x - V{}; }  // minus, because -0 + 0 is 0

inline V greater(V x, V y) { return x > y ? x : y; }  // y where x is NaN

// All lanes of a vector joined to one, halves with halves.
template <class T, int N, class F>
inline T fold(Vector<T, N> x, const F& join) {
  if constexpr (N == 4) {
    return join(join(x[0], x[1]), join(x[2], x[3]));
  } else {
    Vector<T, N / 2> halves[2];
    std::memcpy(halves, &x, sizeof x);
    return fold<T, N / 2>(join(halves[0], halves[1]), join);
  }
}

template <int N>
inline Vector<float, N> half_to_float(Vector<uint16_t, N> half) {
#if defined(__F16C__)
  if constexpr (N == 4) return (V4)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)&half));
  if constexpr (N == 8) return (Vector<float, N>)_mm256_cvtph_ps((__m128i)half);
#if defined(__AVX512F__)
  if constexpr (N == 16) return (Vector<float, N>)_mm512_cvtph_ps((__m256i)half);
#endif
#else
  using Floats = Vector<float, N>;
  using Words = Vector<uint32_t, N>;
  const Words word = widen<uint16_t, N>(&half);
  const Words magnitude = word & 0x7fffu;
  // As the exponent field of a float the half's exponent is 112 too small; the product is right for subnormals too.
  const Floats scaled = (Floats)(magnitude << 13) * 0x1p112f;
  const Words special = (Words)(magnitude >= 0x7c00u) & 0x7f800000u;  // infinities and NaN
  return (Floats)((Words)scaled | special | (word & 0x8000u) << 16);
#endif
}

// 2^x for x <= 0, within 2e-7; 0 below 2^-126; NaN stays NaN.
// Taylor's polynomial of 2^f on [-1/2, 1/2], whose last term is under 1.3e-7.
inline V exp2(V x) {
  const V low = splat(-126.0f), rounder = splat(0x1.8p23f);  // adding 1.5 * 2^23 leaves no bits for a fraction
  const V c = x < low ? low : x;
  const V n = (c + rounder) - rounder;
  const V f = c - n;
  V p = splat(1.5403530393381609e-4f);
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910072e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
  const U exponent = (U)__builtin_convertvector(n, I) << 23;  // 0 for NaN: processors convert it to 0 or to 2^31
  const V power = (V)((U)p + exponent);
  return x < low ? splat(0.0f) : power;
}

// tanh, within 2e-7 of its value. Source: Cephes, tanhf.c.
inline V tanh(V x) {
  const V magnitude = x < 0.0f ? -x : x;
  const V e = exp2(magnitude * -2.8853900817779268f);  // exp(-2 |x|)
  const V large = (1.0f - e) / (1.0f + e);
  const V z = x * x;
  V p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const V small = p * z * x + x;
  return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}

// The sums of four vectors. Two rounds of unpacking add lanes beside each other without crossing 128 bits.
inline V4 horizontal_sums(V a, V b, V c, V d) {
#if defined(__AVX512F__)
#define LOW_PAIRS 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_PAIRS 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW_QUADS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_QUADS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif defined(__AVX__)
#define LOW_PAIRS 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_PAIRS 2, 10, 3, 11, 6, 14, 7, 15
#define LOW_QUADS 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_QUADS 2, 3, 10, 11, 6, 7, 14, 15
#else
#define LOW_PAIRS 0, 4, 1, 5
#define HIGH_PAIRS 2, 6, 3, 7
#define LOW_QUADS 0, 1, 4, 5
#define HIGH_QUADS 2, 3, 6, 7
#endif
  const V ab = __builtin_shufflevector(a, b, LOW_PAIRS) + __builtin_shufflevector(a, b, HIGH_PAIRS);
  const V cd = __builtin_shufflevector(c, d, LOW_PAIRS) + __builtin_shufflevector(c, d, HIGH_PAIRS);
  const V all = __builtin_shufflevector(ab, cd, LOW_QUADS) + __builtin_shufflevector(ab, cd, HIGH_QUADS);
#undef LOW_PAIRS
#undef HIGH_PAIRS
#undef LOW_QUADS
#undef HIGH_QUADS
#if defined(__AVX512F__)
  const Vector<float, 8> halves = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
                                  __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX__)
  const V halves = all;
#endif
#if defined(__AVX__)
  return __builtin_shufflevector(halves, halves, 0, 1, 2, 3) + __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
#else
  return all;
#endif
}

// Into the second-level cache: of requests into the first a core keeps too few open to fill its share of the memory.
KVCACHE_INLINE inline void prefetch(const char* from) { __builtin_prefetch(from, 0, 2); }

}  // namespace
}  // namespace KVCACHE_ISA
}  // namespace kvcache
