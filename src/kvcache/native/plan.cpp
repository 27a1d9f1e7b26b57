#include "attention.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvcache {
namespace {

constexpr int64_t PART = 512;  // slots: few enough that one sequence keeps many threads busy
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
thread_local std::vector<Part> parts;
thread_local std::vector<float> memory;

void add_parts(const Attention& a, int64_t begin, int64_t end) {
  if (begin >= end) return;
  check_blocks(a, works.back().sequence, begin, end);
  // Many queries are enough works for all threads, and each part costs memory for its results.
  const int64_t size = a.queries > QUERY_TOKENS ? end : PART;
  for (int64_t slot = begin; slot < end; slot = (slot / size + 1) * size)
    parts.push_back({int(works.size()) - 1, slot, std::min(end, (slot / size + 1) * size)});
}

float* aligned_floats(int64_t count) {
  if (int64_t(memory.size()) < count + LANES) memory.resize(count + LANES);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

}  // namespace

Plan make_plan(const Attention& a) {
  works.clear();
  parts.clear();
  for (int b = 0; b < a.batch; ++b) {
    const int64_t length = a.lengths ? a.lengths[b] : a.num_slots, start = a.starts ? a.starts[b] : 0;
    check("lengths", length, 0, a.num_slots);
    if (start < 0) throw std::out_of_range("starts holds " + std::to_string(start) + "; expected every entry >= 0");
    for (int t = 0; t < a.queries; t += QUERY_TOKENS) {
      const int tokens = std::min(QUERY_TOKENS, a.queries - t);
      const int64_t slot = length - a.queries + t, end = slot + tokens;
      const int64_t first = a.window ? std::max(start, slot - a.window + 1) : start;
      works.push_back({b, t, tokens, slot, start, int(parts.size()), 0});
      if (a.window) add_parts(a, start, std::min({start + a.sinks, first, end}));
      add_parts(a, first, end);
      works.back().parts = int(parts.size()) - works.back().first_part;
    }
  }
  Plan plan;
  plan.works = works.data();
  plan.parts = parts.data();
  plan.num_works = int(works.size());
  plan.num_parts = int(parts.size());

  // Short runs of memory are read at half the speed, so with small blocks all heads of a block are read together.
  const bool long_runs = a.block_size * a.k.row_size >= LONG_RUN;
  plan.heads_together = long_runs ? 1 : a.kv_heads;
  const int64_t block_size = std::max<int64_t>(1, std::min<int64_t>(a.block_size, MAX_TILE));
  plan.tile = int(block_size * std::max<int64_t>(1, (long_runs ? MAX_TILE : 16) / block_size));

  int64_t slots = 0;
  for (const Part& part : parts) slots += part.end - part.begin;
  const int64_t bytes = slots * a.kv_heads * (a.k.row_size + a.v.row_size);
  plan.threads = int(std::max<int64_t>(1, std::min<int64_t>(a.threads, bytes / WORTH_A_THREAD)));
  while (plan.heads_together > 1 && int64_t(plan.num_parts) * (a.kv_heads / plan.heads_together) < 2 * plan.threads)
    plan.heads_together = (plan.heads_together + 1) / 2;

  const int64_t panels = (int64_t(a.group) * std::min(a.queries, QUERY_TOKENS) + PANEL - 1) / PANEL;
  const int64_t k_dim = padded(a.k.head_dim), v_dim = padded(a.v.head_dim);
  plan.state_size = panels * panel_size(a.v.head_dim);
  plan.scratch_size = plan.heads_together * panels * PANEL * k_dim  // queries
                      + MAX_TILE * (k_dim + v_dim)                  // decoded rows
                      + MAX_TILE * PANEL + LANES;                   // scores
  const int64_t states = int64_t(plan.num_parts) * a.kv_heads * plan.state_size;
  plan.states = aligned_floats(states + plan.threads * plan.scratch_size);
  plan.scratch = plan.states + states;
  return plan;
}

}  // namespace kvcache
