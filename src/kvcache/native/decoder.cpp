// All layers of a decoder for a few new tokens, in one parallel region: every weight is read once for all of them.
//
//   norm, q k v  |  q k norm, rotary, append  |  attention  |  out, + x  |  norm, gate * up  |  down, + x
//
// Each bar is a barrier. Activations are float32 throughout. What a thread can do for itself as fast as it could wait for
// another, norms of all tokens, each does for itself.
#include "decoder.hpp"

#include "append.hpp"
#include "products.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

int64_t whole_vectors(int64_t count) { return (count + 15) / 16 * 16; }  // of any instruction set

inline int team_size() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}

inline int team_place() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// x * sigmoid(x)
inline V silu(V x) {
  const V e = exp2((x < 0.0f ? x : -x) * 1.4426950408889634f);  // exp(-|x|)
  return x * (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// Gaussian error linear unit, by tanh. Source: arXiv:1606.08415.
inline V gelu_tanh(V x) { return x * 0.5f * (1.0f + tanh((x * x * x * 0.044715f + x) * 0.7978845608028654f)); }

// gate = activation(gate) * up, for `count` numbers, of which there is room for whole vectors.
inline void gated(Activation activation, float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += W) {
    const V x = load<V>(gate + i);
    store(gate + i, (activation == Activation::Silu ? silu(x) : gelu_tanh(x)) * load<V>(up + i));
  }
}

inline void normalise(const Norm& norm, const float* x, int64_t count, float* to) {
  V sums = splat(0.0f);
  int64_t i = 0;
  for (; i + W <= count; i += W) sums += load<V>(x + i) * load<V>(x + i);
  float sum = 0.0f;
  for (int j = 0; j < W; ++j) sum += sums[j];
  for (; i < count; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / float(count) + norm.eps);
  const auto scale = [&](auto format) {
    constexpr Format F = decltype(format)::value;
    for (int64_t j = 0; j < count; ++j)
      to[j] = x[j] * factor * (Number<F>::read(bits_at<F>(norm.weight.data, j)) + norm.offset);
  };
  switch (norm.weight.format) {
    case Format::Float32: return scale(std::integral_constant<Format, Format::Float32>());
    case Format::BFloat16: return scale(std::integral_constant<Format, Format::BFloat16>());
    default: return scale(std::integral_constant<Format, Format::Float16>());
  }
}

// Rotates pairs of channels half a head apart. Source: RoFormer (arXiv:2104.09864), in Llama's order of channels.
inline void rotate(float* head, int head_dim, const float* cos, const float* sin) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

inline void softcapped(float* x, int64_t count, float softcap) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(x + i, tanh(load<V>(x + i) / softcap) * softcap);
  for (; i < count; ++i) x[i] = tanh(splat(x[i] / softcap))[0] * softcap;
}

constexpr int64_t TOKENS = 64;  // that are multiplied with a matrix at a time

// Some of a step's tokens.
struct Tokens {
  int64_t first, count;
};

// Sizes of a step's rows in floats, each with room for whole vectors.
struct Widths {
  int64_t hidden, q, kv_k, kv_v, attended, inner;
};

Widths widths_of(const Decoder& d) {
  Widths most = {whole_vectors(d.hidden), 0, 0, 0, 0, 0};
  for (const DecoderLayer& layer : d.layers) {
    most.q = max(most.q, whole_vectors(layer.heads * layer.k_dim));
    most.kv_k = max(most.kv_k, whole_vectors(layer.kv_heads * layer.k_dim));
    most.kv_v = max(most.kv_v, whole_vectors(layer.kv_heads * layer.v_dim));
    most.attended = max(most.attended, whole_vectors(layer.heads * layer.v_dim));
    most.inner = max(most.inner, whole_vectors(layer.gate.rows));
  }
  return most;
}

class Run {
 public:
  // Memory of the calling thread, which stays for its next step.
  Run(const Decoder& d, const DecoderStep& s)
      : d(d), s(s), n(s.ids.size()), places(s.places.size()), width(widths_of(d)) {
    thread_local PlanMemory rows_memory;
    thread_local std::vector<PlanMemory> plan_memory;
    const int64_t of_a_thread = max(n, places) * width.hidden + 2 * TILE_ROWS * TOKENS;
    const int64_t of_all = n * (width.q + width.kv_k + width.kv_v + width.attended + width.inner + 2 * width.hidden);
    own_size = whole_vectors(of_a_thread);
    float* memory = rows_memory.floats(of_all + s.threads * own_size);
    const auto rows = [&](int64_t of_a_row) {
      float* start = memory;
      memory += n * of_a_row;
      return start;
    };
    q = rows(width.q), k = rows(width.kv_k), v = rows(width.kv_v);
    attended = rows(width.attended), inner = rows(width.inner), added = rows(width.hidden);
    x = rows(width.hidden);
    own = memory;
    for (int64_t b = 0; b < s.batch; ++b) most_queries = max(most_queries, s.firsts[b + 1] - s.firsts[b]);
    for (size_t i = 0; i < d.layers.size(); ++i) {
      const size_t plan = d.layers[i].plan;  // counted from 0 in the order of the layers
      if (plan < plans.size()) continue;
      if (plan == plan_memory.size()) plan_memory.emplace_back();
      plans.push_back(make_plan(attention_of(i), plan_memory[plan], s.threads));
    }
  }

  void run() {
#if defined(_OPENMP)
#pragma omp parallel num_threads(s.threads)
#endif
    {
      float* mine = own + team_place() * own_size;
      float* tile = mine + max(n, places) * width.hidden;
      embed();
      for (size_t i = 0; i < d.layers.size(); ++i) run_layer(i, mine, tile);
      for (int64_t r = 0; r < places; ++r)
        normalise(d.norm, x + s.places[r] * width.hidden, d.hidden, mine + r * width.hidden);
      for_tiles(d.head.rows, places,
                [&](int64_t first, int count, Tokens t) { head_tile(first, count, t, mine, tile); });
    }
  }

 private:
  const Decoder& d;
  const DecoderStep& s;
  const int64_t n, places;
  const Widths width;
  float *q, *k, *v, *attended, *inner, *added, *x;  // rows of all tokens; x is what goes from layer to layer
  float* own;                                   // own_size for each thread: normed rows, and tiles of products
  int64_t own_size;
  int64_t most_queries = 1;  // of a sequence
  std::vector<Plan> plans;

  Attention attention_of(size_t i) const {
    const DecoderLayer& layer = d.layers[i];
    const KindRows& kind = s.kinds[layer.kind];
    const LayerBlocks& blocks = s.blocks[i];
    Attention a = {};
    a.q = q, a.q_format = Format::Float32, a.q_strides = {0, layer.k_dim, width.q};
    a.k = blocks.k, a.v = blocks.v;
    a.batch = int(s.batch), a.heads = layer.heads, a.kv_heads = layer.kv_heads, a.queries = int(most_queries);
    a.group = layer.heads / layer.kv_heads;
    a.block_size = blocks.block_size, a.num_blocks = blocks.num_blocks, a.num_slots = kind.table_stride * blocks.block_size;
    a.table = kind.table.data(), a.table_stride = kind.table_stride, a.lengths = kind.lengths.data();
    a.firsts = s.firsts.data();
    a.window = kind.window, a.sinks = kind.sinks, a.scale = layer.scale, a.softcap = layer.softcap;
    a.out = attended, a.out_strides = {0, layer.v_dim, width.attended};
    a.threads = s.threads;
    return a;
  }

  Append append_of(size_t i) const {
    const DecoderLayer& layer = d.layers[i];
    const KindRows& kind = s.kinds[layer.kind];
    return {{(const char*)k, Format::Float32, {0, layer.k_dim, width.kv_k}},
            {(const char*)v, Format::Float32, {0, layer.v_dim, width.kv_v}},
            s.blocks[i].k,
            s.blocks[i].v,
            1,
            layer.kv_heads,
            n,
            kind.blocks.data(),
            kind.rows.data(),
            0,
            s.threads};
  }

  // Call `use(first, count, tokens)` for tiles of so many matrix rows, each in one thread; then wait for all. Many tokens
  // are taken some at a time, whose numbers stay in the second cache while the whole matrix passes by.
  template <class Use>
  static void for_tiles(int64_t rows, int64_t num_tokens, const Use& use) {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t token = 0; token < num_tokens; token += TOKENS) {
      const Tokens tokens = {token, min(TOKENS, num_tokens - token)};
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
      for (int64_t t = 0; t < tiles; ++t) use(t * TILE_ROWS, int(min(TILE_ROWS, rows - t * TILE_ROWS)), tokens);
    }
  }

  void embed() const {
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
    for (int64_t i = 0; i < n; ++i) {
      const char* from = d.embedding.data + s.ids[i] * d.embedding.row_stride;
      float* to = x + i * width.hidden;
      switch (d.embedding.format) {
        case Format::Float32: embed_row<Format::Float32>(from, to); break;
        case Format::BFloat16: embed_row<Format::BFloat16>(from, to); break;
        default: embed_row<Format::Float16>(from, to);
      }
    }
  }

  // What is multiplied is rounded to the weights' format, as torch rounds it.
  template <Format F>
  void embed_row(const char* from, float* to) const {
    read_numbers<F>(from, d.hidden, to);
    if (d.embedding.scale == 1.0f) return;
    for (int64_t c = 0; c < d.hidden; ++c) to[c] = Number<F>::read(Number<F>::write(to[c] * d.embedding.scale));
  }

  void norm_all(const Norm& norm, float* to) const {
    for (int64_t i = 0; i < n; ++i) normalise(norm, x + i * width.hidden, d.hidden, to + i * width.hidden);
  }

  void run_layer(size_t i, float* mine, float* tile) const {
    const DecoderLayer& layer = d.layers[i];
    norm_all(layer.input, mine);
    const int64_t k_tiles = (layer.k.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    const int64_t q_tiles = (layer.q.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for_tiles(q_tiles + k_tiles + layer.v.rows, n, [&](int64_t first, int, Tokens t) {
      if (first < q_tiles) put_tile(layer.q, first, t, mine, width.hidden, tile, q, width.q);
      else if (first < q_tiles + k_tiles) put_tile(layer.k, first - q_tiles, t, mine, width.hidden, tile, k, width.kv_k);
      else put_tile(layer.v, first - q_tiles - k_tiles, t, mine, width.hidden, tile, v, width.kv_v);
    });
    place_heads(layer);
    append_in_team(append_of(i));
    attend_in_team(attention_of(i), plans[layer.plan]);
    add(layer.out, layer.attended, attended, width.attended, mine, tile);
    norm_all(layer.mlp, mine);
    for_tiles(layer.gate.rows, n, [&](int64_t first, int count, Tokens t) {
      float* up = tile + TILE_ROWS * TOKENS;
      multiply(layer.gate, first, count, mine + t.first * width.hidden, width.hidden, t.count, tile);
      multiply(layer.up, first, count, mine + t.first * width.hidden, width.hidden, t.count, up);
      gated(layer.activation, tile, up, count * t.count);
      put(tile, first, count, t, inner, width.inner);
    });
    add(layer.down, layer.computed, inner, width.inner, mine, tile);
  }

  // Products of a tile of rows, as rows of each token.
  void put_tile(const Matrix& m, int64_t first, Tokens t, const float* from, int64_t stride, float* tile, float* to,
                int64_t to_stride) const {
    const int count = int(min(TILE_ROWS, m.rows - first));
    multiply(m, first, count, from + t.first * stride, stride, t.count, tile);
    put(tile, first, count, t, to, to_stride);
  }

  static void put(const float* tile, int64_t first, int count, Tokens t, float* to, int64_t to_stride) {
    for (int64_t i = 0; i < t.count; ++i)
      for (int r = 0; r < count; ++r) to[(t.first + i) * to_stride + first + r] = tile[r * t.count + i];
  }

  // Normalise and rotate the heads of queries and keys.
  void place_heads(const DecoderLayer& layer) const {
    const RotaryTable& table = s.rotary[layer.rotary];
    const int64_t heads = layer.heads + layer.kv_heads, half = layer.k_dim / 2;
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
    for (int64_t item = 0; item < n * heads; ++item) {
      const int64_t token = item / heads, head = item % heads;
      const bool is_query = head < layer.heads;
      float* at = is_query ? q + token * width.q + head * layer.k_dim
                           : k + token * width.kv_k + (head - layer.heads) * layer.k_dim;
      const Norm& norm = is_query ? layer.query : layer.key;
      if (norm.weight.data) normalise(norm, at, layer.k_dim, at);
      rotate(at, layer.k_dim, table.cos + s.positions[token] * half, table.sin + s.positions[token] * half);
    }
  }

  // Add a matrix' products with rows of numbers to x, normalised before where there is a norm for it.
  void add(const Matrix& m, const Norm& norm, const float* from, int64_t stride, float* mine, float* tile) const {
    if (!norm.weight.data) {
      for_tiles(m.rows, n, [&](int64_t first, int count, Tokens t) {
        multiply(m, first, count, from + t.first * stride, stride, t.count, tile);
        for (int64_t i = 0; i < t.count; ++i)
          for (int r = 0; r < count; ++r) x[(t.first + i) * width.hidden + first + r] += tile[r * t.count + i];
      });
      return;
    }
    for_tiles(m.rows, n,
              [&](int64_t first, int, Tokens t) { put_tile(m, first, t, from, stride, tile, added, width.hidden); });
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
    for (int64_t i = 0; i < n; ++i) {
      normalise(norm, added + i * width.hidden, d.hidden, mine);
      for (int64_t c = 0; c < d.hidden; ++c) x[i * width.hidden + c] += mine[c];
    }
  }

  void head_tile(int64_t first, int count, Tokens t, const float* mine, float* tile) const {
    multiply(d.head, first, count, mine + t.first * width.hidden, width.hidden, t.count, tile);
    for (int64_t i = 0; i < t.count; ++i) {
      float* to = s.logits + (t.first + i) * d.head.rows + first;
      for (int r = 0; r < count; ++r) to[r] = tile[r * t.count + i];
      if (d.head_softcap > 0) softcapped(to, count, d.head_softcap);
    }
  }
};

}  // namespace

void run(const Decoder& d, const DecoderStep& s) { Run(d, s).run(); }

}  // namespace KVCACHE_ISA
}  // namespace kvcache
