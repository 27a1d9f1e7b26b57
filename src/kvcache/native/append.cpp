// Encodes new rows and puts them into blocks. storage/codecs.py says how a row is kept; here the same numbers are
// computed in the same order, so that the bits are the same.
#include "append.hpp"

#include "numbers.hpp"
#include "vectors.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr int64_t TOGETHER = 64;         // tokens of a head that are worked on together
constexpr int64_t PER_THREAD = 1 << 15;  // numbers that are worth a thread
constexpr float LARGEST_HALF = 65504.0f, HALF_EPS = 0x1p-10f, SMALLEST_HALF = 0x1p-24f;

// What 32 channels share, as 16 bits each, and their codes, each in the last bits of a word.
struct Group {
  uint16_t offset, step;
  uint32_t codes[GROUP];
};

inline void encode_group(const float* numbers, float top, Group& group) {
  constexpr int N = GROUP / W;
  const auto less = [](auto x, auto y) { return x < y ? x : y; };
  const auto more = [](auto x, auto y) { return x > y ? x : y; };
  V x[N];
  for (int i = 0; i < N; ++i) x[i] = load<V>(numbers + i * W);
  V low = x[0], high = x[0];
  I nan = x[0] != x[0];
  for (int i = 1; i < N; ++i) {
    low = less(low, x[i]);
    high = more(high, x[i]);
    nan |= x[i] != x[i];
  }
  if (fold<int32_t, W>(nan, [](auto x, auto y) { return x | y; })) {  // then all is NaN, and codes mean nothing
    group = {0x7e00, uint16_t(0x7fc00000u >> 15), {}};
    return;
  }
  const float smallest = fold<float, W>(low, less), largest = fold<float, W>(high, more);
  const float clamped = smallest < -LARGEST_HALF ? -LARGEST_HALF : smallest > LARGEST_HALF ? LARGEST_HALF : smallest;
  group.offset = half_of(clamped);
  if (group.offset == 0x8000) group.offset = 0;  // 0 and not -0
  const float offset = float_of_half(group.offset);
  const float spacing = float_of_half(group.offset & 0x7c00) * HALF_EPS;
  const float finest = spacing < SMALLEST_HALF ? SMALLEST_HALF : spacing;
  const float even = (largest - offset) / top;
  group.step = uint16_t((bits_of(even < finest ? finest : even) + 0x4000) >> 15);
  const V offsets = splat(offset), steps = splat(float_of_bits(uint32_t(group.step) << 15));
  const V zero = splat(0.0f), tops = splat(top), rounder = splat(0x1p23f);
  for (int i = 0; i < N; ++i) {
    const V exact = (x[i] - offsets) / steps;
    const V positive = exact > zero ? exact : zero;  // NaN is no more than 0
    const V inside = positive < tops ? positive : tops;
    store(group.codes + i * W, inside + rounder);  // no fractions above 2^23: rounded, ties to even
  }
}

// Loops over a number of codes that the compiler does not know: it unrolls others before it could make vectors of them.
template <int BITS>
inline void write_codes(const uint32_t* codes, int64_t count, char* to) {
  if constexpr (BITS == 8) {
    for (int64_t i = 0; i < count; ++i) to[i] = char(codes[i]);
  } else {  // two in a byte: the even channel's in the lower half
    for (int64_t i = 0; i < count / 2; ++i) to[i] = char((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    if (count % 2) to[count / 2] = char(codes[count - 1] & 15);
  }
}

template <Format F, int BITS>
inline void encode_row(const char* from, int64_t head_dim, char* to) {
  const int64_t groups = (head_dim + GROUP - 1) / GROUP;
  char* codes = to + 4 * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t count = min(GROUP, head_dim - g * GROUP);
    float numbers[GROUP];
    read_numbers<F>(from + g * GROUP * item_size<F>(), count, numbers);
    for (int64_t i = count; i < GROUP; ++i) numbers[i] = numbers[count - 1];
    Group group;
    encode_group(numbers, float((1 << BITS) - 1), group);
    store(to + 2 * g, group.offset);
    store(to + 2 * (groups + g), group.step);
    write_codes<BITS>(group.codes, count, codes + g * GROUP * BITS / 8);
  }
}

template <Format From, Format To>
inline void cast_row(const char* from, int64_t head_dim, char* to) {
  if constexpr (From == To) {
    std::memmove(to, from, head_dim * item_size<From>());
    return;
  }
  constexpr int64_t CHUNK = 128;
  float numbers[CHUNK];
  for (int64_t i = 0; i < head_dim; i += CHUNK) {
    const int64_t count = min(CHUNK, head_dim - i);
    read_numbers<From>(from + i * item_size<From>(), count, numbers);
    write_numbers<To>(numbers, count, to + i * item_size<To>());
  }
}

using PutRow = void (*)(const char* from, int64_t head_dim, char* to);

template <Format From>
PutRow put_row_from(Format to) {
  switch (to) {
    case Format::Float32: return cast_row<From, Format::Float32>;
    case Format::BFloat16: return cast_row<From, Format::BFloat16>;
    case Format::Float16: return cast_row<From, Format::Float16>;
    case Format::Int8: return encode_row<From, 8>;
    case Format::Int4: return encode_row<From, 4>;
  }
  return nullptr;
}

PutRow put_row(Format from, Format to) {
  switch (from) {
    case Format::Float32: return put_row_from<Format::Float32>(to);
    case Format::BFloat16: return put_row_from<Format::BFloat16>(to);
    default: return put_row_from<Format::Float16>(to);
  }
}

// The rows of one head's tokens [first, last).
void put_run(const Append& a, const Rows& source, const Store& target, PutRow put, int64_t sequence, int64_t head,
             int64_t first, int64_t last) {
  const int64_t item = source.format == Format::Float32 ? 4 : 2;
  const char* from = source.data + (sequence * source.strides.batch + head * source.strides.head) * item;
  char* to = target.data + head * target.head_stride;
  if (a.blocks) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t place = sequence * a.tokens + t;
      put(from + t * source.strides.token * item, target.head_dim,
          to + a.blocks[place] * target.block_stride + a.rows[place] * target.row_stride);
    }
    return;
  }
  to += sequence * target.block_stride + a.start * target.row_stride;
  const int64_t size = target.head_dim * item;
  if (source.format == target.format && target.row_stride == size && source.strides.token * item == size) {
    std::memmove(to + first * size, from + first * size, (last - first) * size);
    return;
  }
  for (int64_t t = first; t < last; ++t)
    put(from + t * source.strides.token * item, target.head_dim, to + t * target.row_stride);
}

}  // namespace

void append_in_team(const Append& a) {
  const PutRow put_k = put_row(a.k.format, a.k_target.format), put_v = put_row(a.v.format, a.v_target.format);
  const int64_t runs = (a.tokens + TOGETHER - 1) / TOGETHER, pieces = a.batch * a.heads * runs;
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t first = piece % runs * TOGETHER, last = min(first + TOGETHER, a.tokens);
    const int64_t head = piece / runs % a.heads, sequence = piece / runs / a.heads;
    put_run(a, a.k, a.k_target, put_k, sequence, head, first, last);
    put_run(a, a.v, a.v_target, put_v, sequence, head, first, last);
  }
}

void append(const Append& a) {
  const int64_t numbers = a.batch * a.heads * a.tokens * (a.k_target.head_dim + a.v_target.head_dim);
  const int threads = int(max(1, min(a.threads, numbers / PER_THREAD)));
  (void)threads;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  append_in_team(a);
}

}  // namespace KVCACHE_ISA
}  // namespace kvcache
