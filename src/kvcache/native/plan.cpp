// What is read by whom: the queries of each sequence, the slots that they see, and how many threads are worth it. Plain
// C++ for every processor, and the one place that checks the numbers in lengths, starts and block tables.
#include "attention.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvcache {
namespace {

constexpr int64_t SPLIT = 512;  // slots: few enough that one sequence keeps many threads busy
constexpr int64_t LONG_RUN = 32 * 1024;  // bytes after which jumping to another place in memory costs little
constexpr int64_t WORTH_A_THREAD = 64 * 1024;  // bytes that take longer to read than a thread to wake

void check(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::out_of_range(std::string(name) + " holds " + std::to_string(value) + "; expected every entry in [" +
                            std::to_string(low) + ", " + std::to_string(high) + "]");
}

void check_blocks(const Attention& a, int sequence, int64_t begin, int64_t end) {
  if (!a.table) return;
  const int64_t* row = a.table + sequence * a.table_stride;
  for (int64_t j = begin / a.block_size; j * a.block_size < end; ++j)
    if (row[j] < 0 || row[j] >= a.num_blocks)
      throw std::out_of_range("block_table holds " + std::to_string(row[j]) + "; expected a block in [0, " +
                              std::to_string(a.num_blocks) + ")");
}

// The calling thread keeps its memory, so that a step allocates nothing.
thread_local std::vector<Work> works;
thread_local std::vector<Split> splits;
thread_local std::unique_ptr<float[]> memory;
thread_local int64_t memory_size = 0;
constexpr int64_t KEPT = 16 << 20;  // floats: more, which long softcapped prompts take, is given back at the next call

void add_splits(const Attention& a, int64_t begin, int64_t end) {
  if (begin >= end) return;
  check_blocks(a, works.back().sequence, begin, end);
  // Many queries are enough works for all threads, and each split costs memory for its results.
  const int64_t size = a.queries > QUERY_TOKENS ? end : SPLIT;
  for (int64_t slot = begin; slot < end; slot = (slot / size + 1) * size)
    splits.push_back({int(works.size()) - 1, slot, std::min(end, (slot / size + 1) * size)});
}

float* aligned_floats(int64_t count) {
  count += LANES;
  if (memory_size < count || (memory_size > KEPT && count <= KEPT)) {
    memory.reset();  // before, so that both are never there at a time
    memory_size = 0;
    memory.reset(new float[count]);
    memory_size = count;
  }
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

}  // namespace

Plan make_plan(const Attention& a) {
  works.clear();
  splits.clear();
  for (int b = 0; b < a.batch; ++b) {
    const int64_t length = a.lengths ? a.lengths[b] : a.num_slots;
    int64_t start = a.starts ? a.starts[b] : 0;
    check("lengths", length, 0, a.num_slots);
    if (start < 0) throw std::out_of_range("starts holds " + std::to_string(start) + "; expected every entry >= 0");
    start = std::min(start, a.num_slots);
    for (int t = 0; t < a.queries; t += QUERY_TOKENS) {
      const int tokens = std::min(QUERY_TOKENS, a.queries - t);
      const int64_t slot = length - a.queries + t, end = slot + tokens;
      const Visible seen = visible(a, start, slot);  // by the first of them; the others see the next slots too
      works.push_back({b, t, tokens, slot, start, int(splits.size()), 0});
      add_splits(a, start, std::min(seen.sinks_end, end));
      add_splits(a, seen.window_start, end);
      works.back().splits = int(splits.size()) - works.back().first_split;
    }
  }
  if (!a.q || (!splits.empty() && (!a.k.data || !a.v.data)))
    throw std::runtime_error("q, k or v has no memory: its storage was resized to nothing");
  Plan plan;
  plan.works = works.data();
  plan.splits = splits.data();
  plan.num_works = int(works.size());
  plan.num_splits = int(splits.size());

  // Short runs of memory are read at half the speed, so with small blocks all heads of a block are read together.
  const bool long_runs = a.block_size * a.k.row_size >= LONG_RUN;
  plan.heads_together = long_runs ? 1 : a.kv_heads;
  const int64_t block_size = std::max<int64_t>(1, std::min<int64_t>(a.block_size, MAX_TILE));
  const int64_t least_tile = long_runs ? MAX_TILE : 16;  // fewer slots are not worth a softmax
  plan.tile = int(block_size * std::max<int64_t>(1, least_tile / block_size));

  int64_t slots = 0;
  for (const Split& split : splits) slots += split.end - split.begin;
  const int64_t bytes = slots * a.kv_heads * (a.k.row_size + a.v.row_size);
  plan.threads = int(std::max<int64_t>(1, std::min<int64_t>(a.threads, bytes / WORTH_A_THREAD)));
  while (plan.heads_together > 1 && int64_t(plan.num_splits) * (a.kv_heads / plan.heads_together) < 2 * plan.threads)
    plan.heads_together = (plan.heads_together + 1) / 2;

  const int64_t panels = (int64_t(a.group) * std::min(a.queries, QUERY_TOKENS) + PANEL - 1) / PANEL;
  const int64_t k_dim = padded(a.k.head_dim), v_dim = padded(a.v.head_dim);
  plan.state_size = panels * panel_size(a.v.head_dim);
  plan.scratch_size = plan.heads_together * panels * PANEL * k_dim  // queries
                      + MAX_TILE * (k_dim + v_dim)                  // decoded rows
                      + MAX_TILE * PANEL + LANES;                   // scores
  const int64_t states = int64_t(plan.num_splits) * a.kv_heads * plan.state_size;
  plan.states = aligned_floats(states + plan.threads * plan.scratch_size);
  plan.scratch = plan.states + states;
  return plan;
}

}  // namespace kvcache
