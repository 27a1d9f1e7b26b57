// What keys, values and queries are made of in memory.
#pragma once

#include <cstdint>

namespace kvcache {

// How a row is kept; storage/codecs.py says what it holds. Python asks for these numbers by name.
enum class Format : int { Float32, BFloat16, Float16, Int8, Int4 };

constexpr int GROUP = 32;  // channels of an encoded row that share an offset and a step
constexpr int MAX_HEAD_DIM = 512;

// In elements; the channels of a row stand side by side.
struct Strides {
  int64_t batch, head, token;
};

// Keys or values in blocks: slot j of a sequence is row j % block_size of one of its blocks. All but head_dim in bytes.
struct Store {
  char* data;
  Format format;
  int head_dim;
  int64_t block_stride, head_stride, row_stride;
  int64_t row_size;
};

}  // namespace kvcache
