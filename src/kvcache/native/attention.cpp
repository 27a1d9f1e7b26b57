// Attention of new tokens over stored rows, each of which is read once for some of them.
//
// A split's slots are taken in tiles. For each key/value head of a tile: the scores of all query rows of its group
// (heads x new tokens), an online softmax, and the weighted sum of the values, panel by panel (panels.hpp).
//
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1; the splits are Flash-Decoding's.
#include "attention.hpp"

#include "many_queries.hpp"
#include "panels.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvcache {
namespace KVCACHE_ISA {
namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

class Kernel {
 public:
  Kernel(const Attention& a, const Plan& plan)
      : a(a), plan(plan), group(a.group), k_dim(padded(a.k.head_dim)), v_dim(padded(a.v.head_dim)),
        k_reader(READERS[int(a.k.format)]), v_reader(READERS[int(a.v.format)]) {}

  int64_t items() const { return int64_t(plan.num_splits) * head_ranges(); }

  void run_item(int64_t item, float* scratch) const {
    const int split = int(item / head_ranges()), first_head = int(item % head_ranges()) * plan.heads_together;
    const int heads = int(min(plan.heads_together, a.kv_heads - first_head));
    const Split& slots = plan.splits[split];
    const Work& work = plan.works[slots.work];
    const int64_t queries_size = int64_t(rows_of(work)) * k_dim;
    float* queries = scratch;
    float* decoded = queries + heads * queries_size;
    float* scores = decoded + MAX_TILE * (2 * k_dim + v_dim);
    for (int h = 0; h < heads; ++h) {
      load_queries(work, first_head + h, queries + h * queries_size);
      for (int panel = 0; panel * PANEL < rows_of(work); ++panel) state_of(split, first_head + h, panel).reset();
    }
    for (int64_t begin = slots.begin, end; begin < slots.end; begin = end) {
      end = min((begin / plan.tile + 1) * plan.tile, slots.end);
      for (int h = 0; h < heads; ++h) {
        // What is read after this: the next head's keys, or those of the next tile.
        const char* next = nullptr;
        if (h + 1 < heads) next = address(a.k, work, first_head + h + 1, begin);
        else if (end < slots.end) next = address(a.k, work, first_head, end);
        const Tile tile = {work, split, first_head + h, begin, end, queries + h * queries_size, scores, next};
        if (rows_of(work) <= PANEL) run_panel(tile);
        else run_many(tile, decoded);
      }
    }
  }

  // Merge the splits of a work for one key/value head and write the results.
  void finish(const Work& work, int kv_head) const {
    for (int row = 0; row < rows_of(work); ++row) {
      const int token = work.first_token + row / group, head = kv_head * group + row % group;
      const int panel = row / PANEL, lane = row % PANEL, stride = score_stride(panel_rows(work, panel));
      const float sink = a.sink_logits ? a.sink_logits[head] * LOG2E : -INF;
      float top = sink;
      for (int s = work.first_split; s < work.first_split + work.splits; ++s) {
        const float row_max = state_of(s, kv_head, panel).row_max[lane];
        top = row_max > top ? row_max : top;
      }
      float total = top > -INF && top < INF ? __builtin_exp2f(sink - top) : 0.0f;
      alignas(64) float sums[MAX_HEAD_DIM] = {};
      const bool sink_takes_all = sink == INF;  // in base 2 so has a logit near float's largest number
      for (int s = work.first_split; s < work.first_split + work.splits; ++s) {
        const PanelState state = state_of(s, kv_head, panel);
        float row_sum = 0.0f;
        for (int i = lane; i < W; i += stride) row_sum += state.row_sum[i];
        // It saw nothing here. With NaN for all its scores, which no score is greater than, the sum is NaN.
        if (sink_takes_all || (state.row_max[lane] == -INF && row_sum == 0.0f)) continue;
        const float weight = __builtin_exp2f(state.row_max[lane] - top);
        total += weight * row_sum;
        const float* from = state.sums + lane * v_dim;
        for (int d = 0; d < v_dim; d += W) store(sums + d, load<V>(from + d) * weight + load<V>(sums + d));
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      for (int d = 0; d < v_dim; d += W) store(sums + d, load<V>(sums + d) * inverse);
      if (v_reader.interleaved) deinterleave(sums, v_dim);
      write_output(sums, work.sequence * a.out_strides.batch + head * a.out_strides.head + token * a.out_strides.token);
      if (a.lse) {
        const Strides& s = a.lse_strides;
        a.lse[work.sequence * s.batch + head * s.head + token * s.token] =
            sink_takes_all ? a.sink_logits[head] : (top + __builtin_log2f(total)) * LN2;
      }
    }
  }

 private:
  // Some slots of a split, for one key/value head.
  struct Tile {
    const Work& work;
    int split, kv_head;
    int64_t begin, end;
    const float* queries;
    float* scores;
    const char* next_keys;  // what is read after this tile, or null
  };

  const Attention& a;
  const Plan& plan;
  const int group, k_dim, v_dim;
  const Reader &k_reader, &v_reader;

  int head_ranges() const { return (a.kv_heads + plan.heads_together - 1) / plan.heads_together; }
  int rows_of(const Work& work) const { return group * work.tokens; }
  int panel_rows(const Work& work, int panel) const { return int(min(PANEL, rows_of(work) - panel * PANEL)); }

  PanelState state_of(int split, int kv_head, int panel) const {
    return {plan.states + (int64_t(split) * a.kv_heads + kv_head) * plan.state_size, panel, a.v.head_dim};
  }

  const char* address(const Store& store, const Work& work, int kv_head, int64_t slot) const {
    int64_t block = work.sequence, row = slot;
    if (a.table) {
      block = a.table[work.sequence * a.table_stride + slot / a.block_size];
      row = slot % a.block_size;
    }
    return store.data + block * store.block_stride + kv_head * store.head_stride + row * store.row_stride;
  }

  // What to bring in of `store` from `rows` on while rows of head_dim channels are worked on.
  static Ahead ahead(const Store& store, const char* rows, int head_dim) {
    return {rows, store.row_stride, store.row_size, int(max(1, head_dim / PAIR))};
  }

  // Query rows, token by token and head by head, scaled, in the order in which keys are read.
  void load_queries(const Work& work, int kv_head, float* queries) const {
    const float scale = a.softcap > 0 ? a.scale / a.softcap : a.scale * LOG2E;
    for (int row = 0; row < rows_of(work); ++row, queries += k_dim) {
      const int token = work.first_token + row / group, head = kv_head * group + row % group;
      read_query(work.sequence * a.q_strides.batch + head * a.q_strides.head + token * a.q_strides.token, queries);
      for (int d = 0; d < a.k.head_dim; ++d) queries[d] *= scale;
      for (int d = a.k.head_dim; d < k_dim; ++d) queries[d] = 0.0f;
      if (k_reader.interleaved) interleave(queries, k_dim);
    }
  }

  void read_query(int64_t at, float* to) const {
    const char* q = (const char*)a.q;
    if (a.q_format == Format::Float32) read_numbers<Format::Float32>(q + 4 * at, a.k.head_dim, to);
    else if (a.q_format == Format::BFloat16) read_numbers<Format::BFloat16>(q + 2 * at, a.k.head_dim, to);
    else read_numbers<Format::Float16>(q + 2 * at, a.k.head_dim, to);
  }

  void write_output(const float* from, int64_t at) const {
    char* out = (char*)a.out;
    if (a.q_format == Format::Float32) write_numbers<Format::Float32>(from, a.v.head_dim, out + 4 * at);
    else if (a.q_format == Format::BFloat16) write_numbers<Format::BFloat16>(from, a.v.head_dim, out + 2 * at);
    else write_numbers<Format::Float16>(from, a.v.head_dim, out + 2 * at);
  }

  // Call `use(run, first)` for each run of the tile's rows that lie beside each other in memory, its first slot counted
  // from the tile's. While keys are read the tile's values are brought in, and while values are, the next keys.
  template <class Use>
  void for_key_runs(const Tile& tile, const Use& use) const {
    for_runs(a.k, tile, [&](Run run, int first) {
      run.ahead = ahead(a.v, address(a.v, tile.work, tile.kv_head, tile.begin + first), a.k.head_dim);
      use(run, first);
    });
  }
  template <class Use>
  void for_value_runs(const Tile& tile, const Use& use) const {
    for_runs(a.v, tile, [&](Run run, int first) {
      // Where the next tile's first run is; its others, if it has any, come unasked.
      if (first == 0 && tile.next_keys) run.ahead = ahead(a.k, tile.next_keys, a.v.head_dim);
      use(run, first);
    });
  }
  template <class Use>
  void for_runs(const Store& store, const Tile& tile, const Use& use) const {
    for (int64_t slot = tile.begin, stop; slot < tile.end; slot = stop) {
      stop = min(tile.end, (slot / a.block_size + 1) * a.block_size);
      const char* rows = address(store, tile.work, tile.kv_head, slot);
      use(Run{rows, store.row_stride, int(stop - slot), {}}, int(slot - tile.begin));
    }
  }

  // All query rows are one panel, which reads keys and values as they are stored.
  void run_panel(const Tile& tile) const {
    const int rows = panel_rows(tile.work, 0), stride = score_stride(rows);
    const PanelState state = state_of(tile.split, tile.kv_head, 0);
    for_key_runs(tile, [&](const Run& run, int first) {
      k_reader.score[rows - 1](run, a.k.head_dim, tile.queries, k_dim, tile.scores + first * stride);
    });
    weigh(tile, state);
    for_value_runs(tile, [&](const Run& run, int first) {
      v_reader.accumulate[rows - 1](run, a.v.head_dim, tile.scores + first * stride, state.sums, v_dim);
    });
  }

  // More query rows read keys and values that are decoded once.
  void run_many(const Tile& tile, float* decoded) const {
    const int slots = int(tile.end - tile.begin), k_channels = whole_pairs(a.k.head_dim);
    float *rows = decoded, *keys = rows + MAX_TILE * k_dim, *values = keys + MAX_TILE * k_dim;
    for_key_runs(tile, [&](const Run& run, int first) { k_reader.decode(run, a.k.head_dim, rows + first * k_dim); });
    for_value_runs(tile, [&](const Run& run, int first) { v_reader.decode(run, a.v.head_dim, values + first * v_dim); });
    for (int s = 0; s < slots; s += 4) {
      const float* four[4];
      for (int j = 0; j < 4; ++j) four[j] = rows + min(s + j, slots - 1) * k_dim;
      transpose_four(four, k_channels, keys + s);
    }
    for (int row = 0; row < rows_of(tile.work); row += SCORE_ROWS) {
      const int count = int(min(SCORE_ROWS, rows_of(tile.work) - row));
      SCORE_MANY[count - 1](tile.queries + int64_t(row) * k_dim, k_dim, k_channels, keys, slots, tile.scores);
      float* sums[SCORE_ROWS];
      for (int i = 0; i < count; ++i) {
        const PanelState panel = state_of(tile.split, tile.kv_head, (row + i) / PANEL);
        const int lane = (row + i) % PANEL;
        sums[i] = panel.sums + lane * v_dim;
        weigh_row(tile, row + i, slots, tile.scores + i * MAX_TILE, {panel.row_max + lane, panel.row_sum + lane, sums[i]});
      }
      ACCUMULATE_MANY[count - 1](tile.scores, slots, values, v_dim, whole_pairs(a.v.head_dim), sums);
    }
  }

  // Turn a row's scores into weights; slots that it does not see have none.
  void weigh_row(const Tile& tile, int row, int slots, float* scores, const RowState& state) const {
    if (a.softcap > 0)
      for (int i = 0; i < MAX_TILE; i += W) store(scores + i, tanh(load<V>(scores + i)) * (a.softcap * LOG2E));
    const int64_t slot = tile.work.slot + row / group;
    const Visible seen = visible(a, tile.work.start, slot);
    for (int s = int(min(slots, max(0, slot + 1 - tile.begin))); s < MAX_TILE; ++s) scores[s] = -INF;
    for (int64_t s = max(tile.begin, seen.sinks_end); s < min(tile.end, seen.window_start); ++s)
      scores[s - tile.begin] = -INF;
    softmax_row(scores, state, v_dim);
  }

  // Turn a panel's scores into weights.
  void weigh(const Tile& tile, const PanelState& state) const {
    const int rows = panel_rows(tile.work, 0), stride = score_stride(rows);
    const int count = int(tile.end - tile.begin) * stride;
    if (a.softcap > 0)
      for (int i = 0; i < count; i += W)
        store(tile.scores + i, tanh(load<V>(tile.scores + i)) * (a.softcap * LOG2E));
    mask(tile, rows, stride);
    const auto apply = stride == 1 ? softmax<1> : stride == 2 ? softmax<2> : softmax<4>;
    apply(tile.scores, count, state, rows, v_dim);
  }

  // Hide what a row's own token does not see of a tile that another token of the work sees.
  void mask(const Tile& tile, int rows, int stride) const {
    for (int i = 0; i < rows; ++i) {
      const int64_t slot = tile.work.slot + i / group;
      const Visible seen = visible(a, tile.work.start, slot);
      if (tile.end <= slot + 1 && (tile.begin >= seen.window_start || tile.end <= seen.sinks_end)) continue;
      for (int64_t s = tile.begin; s < tile.end; ++s)
        if (s > slot || (s < seen.window_start && s >= seen.sinks_end)) tile.scores[(s - tile.begin) * stride + i] = -INF;
    }
  }
};

}  // namespace

void attend_in_team(const Attention& a, const Plan& plan) {
  const Kernel kernel(a, plan);
  const int64_t items = kernel.items(), results = int64_t(plan.num_works) * a.kv_heads;
#if defined(_OPENMP)
  float* scratch = plan.scratch + omp_get_thread_num() * plan.scratch_size;
#pragma omp for schedule(dynamic)
#else
  float* scratch = plan.scratch;
#endif
  for (int64_t item = 0; item < items; ++item) kernel.run_item(item, scratch);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
  for (int64_t i = 0; i < results; ++i) kernel.finish(plan.works[i / a.kv_heads], int(i % a.kv_heads));
}

void attend(const Attention& a, const Plan& plan) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(plan.threads) if (plan.threads > 1)
#endif
  attend_in_team(a, plan);
}

}  // namespace KVCACHE_ISA
}  // namespace kvcache
