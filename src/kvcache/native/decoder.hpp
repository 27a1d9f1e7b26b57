// A decoder like Llama as plain data, and one step of it: what the kernels are given. decoder/description.py says the
// same in Python.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "format.hpp"

namespace kvcache {

// Numbers of a float format side by side, or none.
struct Numbers1D {
  const char* data = nullptr;
  Format format = Format::Float32;
};

// The weights of a linear layer: a row for each number that comes out. With Int8 a row is codes, and each GROUP of them
// has a scale, the upper half of a float.
struct Matrix {
  const char* data = nullptr;
  Format format = Format::Float32;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0;  // in bytes
  const uint16_t* scales = nullptr;
  Numbers1D bias;
};

// Root mean square normalisation: x / sqrt(mean(x^2) + eps) * (weight + offset).
struct Norm {
  Numbers1D weight;
  float eps = 0.0f, offset = 0.0f;
};

enum class Activation : int { Silu, GeluTanh };

struct DecoderLayer {
  Norm input, query, key, attended, mlp, computed;  // all but `input` and `mlp` may be without a weight: not there
  Matrix q, k, v, out, gate, up, down;
  int heads = 0, kv_heads = 0, k_dim = 0, v_dim = 0;
  float scale = 0.0f, softcap = 0.0f;
  Activation activation = Activation::Silu;
  int kind = 0;    // of its blocks
  int plan = 0;    // of attention: layers of one kind and of the same sizes share it
  int rotary = 0;  // of its tables
};

// A row of numbers for each id, times a number, in the weights' own format.
struct Embedding {
  const char* data = nullptr;
  Format format = Format::Float32;
  int64_t row_stride = 0;  // in bytes
  float scale = 1.0f;
};

struct Decoder {
  int64_t hidden = 0;
  Embedding embedding;
  std::vector<DecoderLayer> layers;
  Norm norm;
  Matrix head;
  float head_softcap = 0.0f;
};

// Cosines and sines of positions, half a head of them each: (P, D / 2).
struct RotaryTable {
  const float *cos, *sin;
};

// Where the new tokens' rows go in the layers of one kind, and what attention reads.
struct KindRows {
  std::vector<int64_t> blocks, rows;  // (N,)
  std::vector<int64_t> table;         // (B, M)
  int64_t table_stride;
  std::vector<int64_t> lengths;  // (B,)
  int64_t window, sinks;
};

// The blocks of one layer.
struct LayerBlocks {
  Store k, v;
  int64_t block_size, num_blocks;
};

struct DecoderStep {
  int64_t batch;
  std::vector<int64_t> ids, positions;  // (N,)
  std::vector<int64_t> firsts;          // (B + 1,)
  std::vector<KindRows> kinds;
  const std::vector<LayerBlocks>& blocks;
  std::vector<RotaryTable> rotary;
  std::vector<int64_t> places;  // (R,), the tokens whose logits are wanted
  float* logits;                // (R, vocabulary)
  int threads;
};

// Sizes and places are not checked, but for what `make_plan` checks.
#define KVCACHE_DECODER(isa)                    \
  namespace isa {                               \
  void run(const Decoder&, const DecoderStep&); \
  }
KVCACHE_DECODER(portable)
KVCACHE_DECODER(avx2)
KVCACHE_DECODER(avx512)
#undef KVCACHE_DECODER

}  // namespace kvcache
