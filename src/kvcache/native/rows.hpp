// How stored rows are read, one struct a format. storage/codecs.py says what a row holds.
//
// A row is read in pairs of vectors, 2 W channels. Formats whose two neighbours share a word are read even channels
// first, then odd ones (`interleaved`): that takes one instruction a vector instead of two, and queries are put in
// the same order once.
#pragma once

#include "format.hpp"
#include "numbers.hpp"
#include "vectors.hpp"

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr int PAIR = 2 * W;
static_assert(GROUP % PAIR == 0);  // a pair never crosses a group

// Channels of a row that is read pair by pair to its end.
inline int whole_pairs(int head_dim) { return (head_dim + PAIR - 1) / PAIR * PAIR; }

// What rows of plain numbers, of SIZE bytes each, have in common. `F` reads a pair.
template <class F, int SIZE>
struct Numbers {
  using Row = const char*;
  static void open(const char* at, int, Row& row) { row = at; }
  static Pair tail(const Row& row, int c, int n) {
    char padded[PAIR * SIZE] = {};
    std::memcpy(padded, row + c * PAIR * SIZE, n * SIZE);
    return F::pair(padded, 0);
  }
};

struct Float32 : Numbers<Float32, 4> {
  static constexpr bool interleaved = false;
  static Pair pair(const Row& row, int c) {
    const char* from = row + c * PAIR * 4;
    return {load<V>(from), load<V>(from + W * 4)};
  }
};

struct BFloat16 : Numbers<BFloat16, 2> {
  static constexpr bool interleaved = true;
  static Pair pair(const Row& row, int c) {
    const U words = load<U>(row + c * PAIR * 2);
    return {(V)(words << 16), (V)(words & 0xffff0000u)};
  }
};

struct Float16 : Numbers<Float16, 2> {
  static constexpr bool interleaved = false;
  static Pair pair(const Row& row, int c) {
    const char* from = row + c * PAIR * 2;
    using Halves = Vector<uint16_t, W>;
    return {half_to_float<W>(load<Halves>(from)), half_to_float<W>(load<Halves>(from + W * 2))};
  }
};

// An encoded row with its offsets and steps as floats.
struct GroupRow {
  const char* codes;
  alignas(16) float offsets[MAX_HEAD_DIM / GROUP];
  alignas(16) float steps[MAX_HEAD_DIM / GROUP];

  void open(const char* row, int head_dim) {
    const int groups = (head_dim + GROUP - 1) / GROUP;
    codes = row + 4 * groups;
    if (head_dim < 12) {  // fewer than 8 bytes behind the step in an int4 row: too short to be read 4 at a time
      offsets[0] = float_of_half(load<uint16_t>(row));
      steps[0] = float_of_bits(uint32_t(load<uint16_t>(row + 2)) << 15);
      return;
    }
    using Four = Vector<uint16_t, 4>;
    for (int g = 0; g < groups; g += 4) {  // behind the last parameter are codes, which become numbers nobody uses
      store(offsets + g, half_to_float<4>(load<Four>(row + 2 * g)));
      store(steps + g, widen<uint16_t, 4>(row + 2 * (groups + g)) << 15);
    }
  }

  Pair decode(U low, U high, int c) const {
    const float offset = offsets[c * PAIR / GROUP], step = steps[c * PAIR / GROUP];
    return {__builtin_convertvector((I)low, V) * step + offset, __builtin_convertvector((I)high, V) * step + offset};
  }
};

struct Int8 {
  static constexpr bool interleaved = false;
  using Row = GroupRow;
  static void open(const char* at, int head_dim, Row& row) { row.open(at, head_dim); }
  static Pair pair(const Row& row, int c) { return decode(row, row.codes + c * PAIR, c); }
  static Pair tail(const Row& row, int c, int n) {
    char padded[PAIR] = {};
    std::memcpy(padded, row.codes + c * PAIR, n);
    return decode(row, padded, c);
  }

 private:
  static Pair decode(const Row& row, const char* from, int c) {
    return row.decode(widen<uint8_t, W>(from), widen<uint8_t, W>(from + W), c);
  }
};

struct Int4 {
  static constexpr bool interleaved = true;
  using Row = GroupRow;
  static void open(const char* at, int head_dim, Row& row) { row.open(at, head_dim); }
  static Pair pair(const Row& row, int c) { return decode(row, row.codes + c * W, c); }
  static Pair tail(const Row& row, int c, int n) {
    char padded[W] = {};
    std::memcpy(padded, row.codes + c * W, (n + 1) / 2);
    return decode(row, padded, c);
  }

 private:
  static Pair decode(const Row& row, const char* from, int c) {
    const U codes = widen<uint8_t, W>(from);
    return row.decode(codes & 15u, codes >> 4, c);
  }
};

}  // namespace
}  // namespace KVCACHE_ISA
}  // namespace kvcache
