// One attention call as the kernels take it, and the plan of its work, which is the same for every instruction set.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "format.hpp"
#include "numbers.hpp"

namespace kvcache {

struct Attention {
  const void* q;
  Format q_format;  // a float format, the output's too
  Strides q_strides;
  Store k, v;
  int batch, heads, kv_heads;
  int queries;  // of a sequence; with `firsts`, of the one that has most
  int group;    // query heads of a key/value head
  int64_t block_size, num_blocks, num_slots;
  const int64_t* table;    // (B, M) block ids, or null: sequence b is block b
  int64_t table_stride;    // in entries
  const int64_t* lengths;  // (B,) or null: num_slots
  const int64_t* starts;   // (B,) or null: 0
  const int64_t* firsts;   // (B + 1,) or null: each sequence's first token among those of all, in one row of them
  int64_t window;          // 0: all
  int64_t sinks;
  float scale, softcap;      // softcap 0: none
  const float* sink_logits;  // (H,) or null
  void* out;
  Strides out_strides;
  float* lse;  // or null
  Strides lse_strides;
  int threads;
};

// Some queries of one sequence: those of the tokens [first_token, first_token + tokens) and of all heads. With `firsts`
// tokens are counted over all sequences, and strides.batch is 0.
struct Work {
  int sequence, first_token, tokens;
  int64_t slot;   // where the first of these tokens sits; the next ones follow
  int64_t start;  // the first slot that may be seen
  int first_split, splits;
};

// Slots [begin, end) that some query of a work sees.
struct Split {
  int work;
  int64_t begin, end;
};

// Each split is attended for itself, and the results of a work's splits are merged by their log-sum-exp (Flash-Decoding).
// Splits depend on the sequence's slots and queries alone, so a result depends neither on the number of threads nor on the rest of
// the batch.
struct Plan {
  const Work* works;
  const Split* splits;
  int num_works, num_splits;
  int tile;              // slots whose scores are computed together
  int heads_together;    // key/value heads that one thread takes through a split side by side
  int threads;           // that are worth starting, or those of a team that is there
  int64_t state_size;    // floats that a split keeps for each key/value head
  int64_t scratch_size;  // floats that a thread needs
  float* states;         // num_splits x kv_heads x state_size
  float* scratch;        // threads x scratch_size
};

// What a plan points to. It is kept from one plan to the next, so that a step allocates nothing.
class PlanMemory {
 public:
  std::vector<Work> works;
  std::vector<Split> splits;
  float* floats(int64_t count);  // the last ones are gone then

 private:
  std::unique_ptr<float[]> memory;
  int64_t size = 0;
};

// The plan stays until the next one in the same memory, and has scratch memory for `team` threads at least. Throws
// std::out_of_range where lengths, starts or the table name slots or blocks that do not exist.
Plan make_plan(const Attention&, PlanMemory&, int team = 1);

constexpr int QUERY_TOKENS = 32;  // tokens whose queries share one reading of the keys and values
constexpr int PANEL = 4;          // query rows whose results stand together; up to so many are worked on as they are stored
constexpr int MAX_TILE = 32;
constexpr int SCORE_ROWS = 6;     // that have scores at a time, at most
constexpr int PADDING = 32;       // head sizes are padded to a multiple of this in scratch memory
constexpr int LANES = 16;         // at least as many as a vector has

namespace {  // each instruction set has a copy of its own

// What the query at `slot` sees, of a sequence whose first `start` slots are padding: [start, sinks_end) and
// [window_start, slot].
struct Visible {
  int64_t sinks_end, window_start;
};
inline Visible visible(const Attention& a, int64_t start, int64_t slot) {
  if (!a.window) return {start, start};
  const int64_t window_start = max(start, slot - a.window + 1);
  return {min(start + a.sinks, window_start), window_start};
}

constexpr int padded(int head_dim) { return (head_dim + PADDING - 1) / PADDING * PADDING; }
constexpr int64_t panel_size(int v_head_dim) { return PANEL * padded(v_head_dim) + 2 * LANES; }
}  // namespace

// The kernel, compiled for each instruction set: in threads of its own, and as the part of one of a team's threads, which
// all of them call.
#define KVCACHE_ATTENTION(isa)                        \
  namespace isa {                                     \
  void attend(const Attention&, const Plan&);         \
  void attend_in_team(const Attention&, const Plan&); \
  }
KVCACHE_ATTENTION(portable)
KVCACHE_ATTENTION(avx2)
KVCACHE_ATTENTION(avx512)
#undef KVCACHE_ATTENTION

}  // namespace kvcache
