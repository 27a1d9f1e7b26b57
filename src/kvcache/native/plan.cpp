// What is read by whom: the queries of each sequence, the slots that they see, and how many threads are worth it. Plain
// C++ for every processor, and the one place that checks the numbers in lengths, starts and block tables.
#include "attention.hpp"

#include <algorithm>
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

constexpr int MANY_QUERIES = 8 * QUERY_TOKENS;
constexpr int64_t KEPT = 16 << 20;  // floats: more, which long prompts take, is given back at the next call

void add_splits(const Attention& a, int64_t queries, int64_t begin, int64_t end, PlanMemory& memory) {
  if (begin >= end) return;
  const int work = int(memory.works.size()) - 1;
  check_blocks(a, memory.works[work].sequence, begin, end);
  // Many queries are enough works for all threads, and each split costs memory for its results.
  const int64_t size = queries > MANY_QUERIES ? end : SPLIT;
  for (int64_t slot = begin; slot < end; slot = (slot / size + 1) * size)
    memory.splits.push_back({work, slot, std::min(end, (slot / size + 1) * size)});
}

}  // namespace

float* PlanMemory::floats(int64_t count) {
  count += LANES;
  if (size < count || (size > KEPT && count <= KEPT)) {
    memory.reset();  // before, so that both are never there at a time
    size = 0;
    memory.reset(new float[count]);
    size = count;
  }
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

Plan make_plan(const Attention& a, PlanMemory& memory, int team) {
  std::vector<Work>& works = memory.works;
  std::vector<Split>& splits = memory.splits;
  works.clear();
  splits.clear();
  for (int b = 0; b < a.batch; ++b) {
    const int first = a.firsts ? int(a.firsts[b]) : 0, queries = a.firsts ? int(a.firsts[b + 1]) - first : a.queries;
    const int64_t length = a.lengths ? a.lengths[b] : a.num_slots;
    int64_t start = a.starts ? a.starts[b] : 0;
    check("lengths", length, 0, a.num_slots);
    if (start < 0) throw std::out_of_range("starts holds " + std::to_string(start) + "; expected every entry >= 0");
    start = std::min(start, a.num_slots);
    for (int t = 0; t < queries; t += QUERY_TOKENS) {
      const int tokens = std::min(QUERY_TOKENS, queries - t);
      const int64_t slot = length - queries + t, end = slot + tokens;
      const Visible seen = visible(a, start, slot);  // by the first of them; the others see the next slots too
      works.push_back({b, first + t, tokens, slot, start, int(splits.size()), 0});
      add_splits(a, queries, start, std::min(seen.sinks_end, end), memory);
      add_splits(a, queries, seen.window_start, end, memory);
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
  plan.threads = int(std::max<int64_t>(team, std::min<int64_t>(a.threads, bytes / WORTH_A_THREAD)));
  while (plan.heads_together > 1 && int64_t(plan.num_splits) * (a.kv_heads / plan.heads_together) < 2 * plan.threads)
    plan.heads_together = (plan.heads_together + 1) / 2;

  const int64_t panels = (int64_t(a.group) * std::min(a.queries, QUERY_TOKENS) + PANEL - 1) / PANEL;
  const int64_t k_dim = padded(a.k.head_dim), v_dim = padded(a.v.head_dim);
  plan.state_size = panels * panel_size(a.v.head_dim);
  plan.scratch_size = plan.heads_together * panels * PANEL * k_dim  // queries
                      + MAX_TILE * (2 * k_dim + v_dim)              // decoded rows, keys also transposed
                      + SCORE_ROWS * MAX_TILE + LANES;
  const int64_t states = int64_t(plan.num_splits) * a.kv_heads * plan.state_size;
  plan.states = memory.floats(states + plan.threads * plan.scratch_size);
  plan.scratch = plan.states + states;
  return plan;
}

}  // namespace kvcache
