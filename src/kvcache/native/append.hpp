// New rows on their way into blocks: what one call stores, keys and values both.
#pragma once

#include "format.hpp"

namespace kvcache {

// Rows (B, Hkv, T, D) of a float format, each in one piece.
struct Rows {
  const char* data;
  Format format;
  Strides strides;
};

struct Append {
  Rows k, v;
  Store k_target, v_target;
  int64_t batch, heads, tokens;
  // (B, T), where the rows of each token go: the block and the row in it; or null: in block b from row `start` on.
  const int64_t *blocks, *rows;
  int64_t start;
  int threads;
};

// In threads of its own, and as the part of one of a team's threads, which all of them call.
#define KVCACHE_APPEND(isa)            \
  namespace isa {                      \
  void append(const Append&);          \
  void append_in_team(const Append&);  \
  }
KVCACHE_APPEND(portable)
KVCACHE_APPEND(avx2)
KVCACHE_APPEND(avx512)
#undef KVCACHE_APPEND

}  // namespace kvcache
