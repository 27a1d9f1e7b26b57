// The Python module: pointers and sizes in, so that it needs no agreement with the build of torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "attention.hpp"

namespace nb = nanobind;
using namespace kvcache;

namespace {

using Kernel = void (*)(const Attention&, const Plan&);

struct InstructionSet {
  const char* name;
  Kernel attend;
};

// What this processor can run, the fastest last.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> found = {{"portable", portable::attend}};
#if defined(KVCACHE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      found.push_back({"avx2", avx2::attend});
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back({"avx512", avx512::attend});
    }
#endif
    return found;
  }();
  return sets;
}

// The fastest, but for head sizes that would leave half of the widest vectors empty.
const InstructionSet& best_for(int k_dim, int v_dim) {
  const auto& sets = instruction_sets();
  const bool fills = k_dim % PADDING == 0 && v_dim % PADDING == 0;
  return fills || sets.size() < 3 ? sets.back() : sets[sets.size() - 2];
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const InstructionSet& set : instruction_sets()) result.push_back(set.name);
  return result;
}

int64_t row_size(Format format, int64_t head_dim) {
  const int64_t parameters = 4 * ((head_dim + 31) / 32);
  switch (format) {
    case Format::Float32: return 4 * head_dim;
    case Format::BFloat16:
    case Format::Float16: return 2 * head_dim;
    case Format::Int8: return parameters + head_dim;
    case Format::Int4: return parameters + (head_dim + 1) / 2;
  }
  return 0;
}

Store make_store(uintptr_t data, int format, int head_dim, int64_t block, int64_t head, int64_t row) {
  const Format f = Format(format);
  return {reinterpret_cast<const char*>(data), f, head_dim, block, head, row, row_size(f, head_dim)};
}

void attend(int instruction_set, uintptr_t q, int q_format, int64_t q_batch, int64_t q_head, int64_t q_token,
            uintptr_t k, int k_format, int k_dim, int64_t k_block, int64_t k_head, int64_t k_row,  //
            uintptr_t v, int v_format, int v_dim, int64_t v_block, int64_t v_head, int64_t v_row,  //
            int batch, int heads, int kv_heads, int queries, int64_t block_size, int64_t num_blocks, int64_t num_slots,
            uintptr_t table, int64_t table_stride, uintptr_t lengths, uintptr_t starts, int64_t window, int64_t sinks,
            float scale, float softcap, uintptr_t sink_logits,  //
            uintptr_t out, int64_t out_batch, int64_t out_head, int64_t out_token,  //
            uintptr_t lse, int64_t lse_batch, int64_t lse_head, int64_t lse_token, int threads) {
  const Attention attention = {reinterpret_cast<const void*>(q),
                               Format(q_format),
                               {q_batch, q_head, q_token},
                               make_store(k, k_format, k_dim, k_block, k_head, k_row),
                               make_store(v, v_format, v_dim, v_block, v_head, v_row),
                               batch,
                               heads,
                               kv_heads,
                               queries,
                               heads / kv_heads,
                               block_size,
                               num_blocks,
                               num_slots,
                               reinterpret_cast<const int64_t*>(table),
                               table_stride,
                               reinterpret_cast<const int64_t*>(lengths),
                               reinterpret_cast<const int64_t*>(starts),
                               window,
                               sinks,
                               scale,
                               softcap,
                               reinterpret_cast<const float*>(sink_logits),
                               reinterpret_cast<void*>(out),
                               {out_batch, out_head, out_token},
                               reinterpret_cast<float*>(lse),
                               {lse_batch, lse_head, lse_token},
                               threads};
  const InstructionSet& set = instruction_set < 0 ? best_for(k_dim, v_dim) : instruction_sets().at(instruction_set);
  nb::gil_scoped_release released;
  set.attend(attention, make_plan(attention));
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.attr("INSTRUCTION_SETS") = names();
  m.def("attend", attend);
}
