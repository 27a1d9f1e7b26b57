// The Python module: pointers and sizes in, so that it needs no agreement with the build of torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "append.hpp"
#include "attention.hpp"
#include "decoder.hpp"

namespace nb = nanobind;
using namespace kvcache;

namespace {

struct InstructionSet {
  const char* name;
  int width;  // floats in a vector
  void (*attend)(const Attention&, const Plan&);
  void (*append)(const Append&);
  void (*run)(const Decoder&, const DecoderStep&);
};

// What this processor can run, the fastest last.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> found = {{"portable", 4, portable::attend, portable::append, portable::run}};
#if defined(KVCACHE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      found.push_back({"avx2", 8, avx2::attend, avx2::append, avx2::run});
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back({"avx512", 16, avx512::attend, avx512::append, avx512::run});
    }
#endif
    return found;
  }();
  return sets;
}

// The fastest, but for head sizes of which two vectors of it, which are read at a time, would leave some empty.
const InstructionSet& best_for(int k_dim, int v_dim) {
  const auto& sets = instruction_sets();
  size_t best = sets.size() - 1;
  while (best > 1 && (k_dim % (2 * sets[best].width) || v_dim % (2 * sets[best].width))) --best;
  return sets[best];
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const InstructionSet& set : instruction_sets()) result.push_back(set.name);
  return result;
}

// Sizes and strides come as torch gives them, tuples in elements.
int64_t at(const nb::tuple& sizes, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i)); }

int64_t element_size(Format format) {
  return format == Format::Float32 ? 4 : format == Format::BFloat16 || format == Format::Float16 ? 2 : 1;
}

// `width` is how many elements a row takes.
Store make_store(uintptr_t data, int format, int64_t head_dim, int64_t width, const nb::tuple& strides) {
  const int64_t size = element_size(Format(format));
  return {reinterpret_cast<char*>(data), Format(format),        int(head_dim),          at(strides, 0) * size,
          at(strides, 1) * size,         at(strides, 2) * size, width * size};
}

// The output (B, H, T, Dv) and the log-sum-exp (B, H, T) are contiguous; addresses may be 0 where a thing is not given.
void attend(int instruction_set, uintptr_t q, int q_format, const nb::tuple& q_shape, const nb::tuple& q_strides,
            uintptr_t k, int k_format, const nb::tuple& k_shape, const nb::tuple& k_strides,  //
            uintptr_t v, int v_format, const nb::tuple& v_shape, const nb::tuple& v_strides, int v_dim,  //
            uintptr_t table, int64_t table_stride, int64_t num_slots, uintptr_t lengths, uintptr_t starts,
            int64_t window, int64_t sinks, float scale, float softcap, uintptr_t sink_logits,  //
            uintptr_t out, uintptr_t lse, int threads) {
  const int64_t heads = at(q_shape, 1), queries = at(q_shape, 2), kv_heads = at(k_shape, 1);
  const int k_dim = int(at(q_shape, 3));
  const Attention attention = {reinterpret_cast<const void*>(q),
                               Format(q_format),
                               {at(q_strides, 0), at(q_strides, 1), at(q_strides, 2)},
                               make_store(k, k_format, k_dim, at(k_shape, 3), k_strides),
                               make_store(v, v_format, v_dim, at(v_shape, 3), v_strides),
                               int(at(q_shape, 0)),
                               int(heads),
                               int(kv_heads),
                               int(queries),
                               int(heads / kv_heads),
                               at(k_shape, 2),
                               at(k_shape, 0),
                               num_slots,
                               reinterpret_cast<const int64_t*>(table),
                               table_stride,
                               reinterpret_cast<const int64_t*>(lengths),
                               reinterpret_cast<const int64_t*>(starts),
                               nullptr,
                               window,
                               sinks,
                               scale,
                               softcap,
                               reinterpret_cast<const float*>(sink_logits),
                               reinterpret_cast<void*>(out),
                               {heads * queries * v_dim, queries * v_dim, v_dim},
                               reinterpret_cast<float*>(lse),
                               {heads * queries, queries, 1},
                               threads};
  const InstructionSet& set = instruction_set < 0 ? best_for(k_dim, v_dim) : instruction_sets().at(instruction_set);
  thread_local PlanMemory memory;
  nb::gil_scoped_release released;
  set.attend(attention, make_plan(attention, memory));
}

Rows make_rows(uintptr_t data, int format, const nb::tuple& strides) {
  return {reinterpret_cast<const char*>(data), Format(format), {at(strides, 0), at(strides, 1), at(strides, 2)}};
}

// Nothing is checked; addresses of blocks and rows may be 0.
void append(int instruction_set, uintptr_t k, int k_format, const nb::tuple& k_shape, const nb::tuple& k_strides,
            uintptr_t v, int v_format, const nb::tuple& v_shape, const nb::tuple& v_strides,  //
            uintptr_t k_target, int k_target_format, const nb::tuple& k_target_strides,       //
            uintptr_t v_target, int v_target_format, const nb::tuple& v_target_strides,       //
            uintptr_t blocks, uintptr_t rows, int64_t start, int threads) {
  const Append append = {make_rows(k, k_format, k_strides),
                         make_rows(v, v_format, v_strides),
                         make_store(k_target, k_target_format, at(k_shape, 3), 0, k_target_strides),
                         make_store(v_target, v_target_format, at(v_shape, 3), 0, v_target_strides),
                         at(k_shape, 0),
                         at(k_shape, 1),
                         at(k_shape, 2),
                         reinterpret_cast<const int64_t*>(blocks),
                         reinterpret_cast<const int64_t*>(rows),
                         start,
                         threads};
  const auto& sets = instruction_sets();
  const InstructionSet& set = instruction_set < 0 ? sets.back() : sets.at(instruction_set);
  nb::gil_scoped_release released;
  set.append(append);
}

// Parts of a decoder come as tuples, in the order of the fields.
template <class T>
T field(const nb::handle& fields, size_t i) {
  return nb::cast<T>(fields[i]);
}

template <class T>
T* pointer(const nb::handle& fields, size_t i) {
  return reinterpret_cast<T*>(field<uintptr_t>(fields, i));
}

Numbers1D numbers_of(const nb::handle& f, size_t i) {
  return {pointer<const char>(f, i), Format(field<int>(f, i + 1))};
}

Matrix matrix_of(const nb::handle& f) {
  return {pointer<const char>(f, 0),     Format(field<int>(f, 1)),  field<int64_t>(f, 2), field<int64_t>(f, 3),
          field<int64_t>(f, 4), pointer<const uint16_t>(f, 5), numbers_of(f, 6)};
}

Norm norm_of(const nb::handle& f) {
  if (f.is_none()) return {};
  return {numbers_of(f, 0), field<float>(f, 2), field<float>(f, 3)};
}

DecoderLayer layer_of(const nb::handle& layer) {
  const auto norm = [&](const char* name) { return norm_of(layer[name]); };
  const auto matrix = [&](const char* name) { return matrix_of(layer[name]); };
  const auto number = [&](const char* name) { return nb::cast<int>(layer[name]); };
  DecoderLayer l;
  l.input = norm("input_norm"), l.query = norm("query_norm"), l.key = norm("key_norm");
  l.attended = norm("attended_norm"), l.mlp = norm("mlp_norm"), l.computed = norm("computed_norm");
  l.q = matrix("query"), l.k = matrix("key"), l.v = matrix("value"), l.out = matrix("out");
  l.gate = matrix("gate"), l.up = matrix("up"), l.down = matrix("down");
  l.heads = number("num_heads"), l.kv_heads = number("num_kv_heads");
  l.k_dim = number("head_dim"), l.v_dim = number("v_head_dim");
  l.scale = nb::cast<float>(layer["scale"]), l.softcap = nb::cast<float>(layer["softcap"]);
  l.activation = Activation(number("activation"));
  l.kind = number("kind"), l.plan = number("plan"), l.rotary = number("rotary");
  return l;
}

Decoder make_decoder(int64_t hidden, const nb::handle& embedding, const nb::list& layers, const nb::handle& norm, const nb::handle& head,
                     float head_softcap) {
  Decoder decoder;
  decoder.hidden = hidden;
  decoder.embedding = {pointer<const char>(embedding, 0), Format(field<int>(embedding, 1)),
                       field<int64_t>(embedding, 2), field<float>(embedding, 3)};
  for (const nb::handle layer : layers) decoder.layers.push_back(layer_of(layer));
  decoder.norm = norm_of(norm);
  decoder.head = matrix_of(head);
  decoder.head_softcap = head_softcap;
  return decoder;
}

Store store_of(const nb::handle& f) {
  return make_store(field<uintptr_t>(f, 0), field<int>(f, 1), field<int64_t>(f, 2), field<int64_t>(f, 3),
                    nb::borrow<nb::tuple>(f[4]));
}

// What a pool's layers are stored in, made once for many steps.
struct Blocks {
  std::vector<LayerBlocks> layers;
};

Blocks make_blocks(const nb::list& layers) {
  Blocks blocks;
  for (const nb::handle f : layers)
    blocks.layers.push_back({store_of(f[0]), store_of(f[1]), field<int64_t>(f, 2), field<int64_t>(f, 3)});
  return blocks;
}

using Integers = std::vector<int64_t>;

// The tables of all sequences have one width, -1 where they are shorter.
KindRows kind_of(const nb::handle& f) {
  const auto tables = field<std::vector<Integers>>(f, 2);
  KindRows kind = {field<Integers>(f, 0), field<Integers>(f, 1), {}, 0, field<Integers>(f, 3), field<int64_t>(f, 4),
                   field<int64_t>(f, 5)};
  for (const Integers& table : tables) kind.table_stride = max(kind.table_stride, int64_t(table.size()));
  for (const Integers& table : tables) {
    kind.table.insert(kind.table.end(), table.begin(), table.end());
    kind.table.insert(kind.table.end(), kind.table_stride - table.size(), -1);
  }
  return kind;
}

void run_decoder(const Decoder& decoder, int instruction_set, const Integers& ids, const Integers& positions,
                 const Integers& firsts, const nb::list& kinds, const Blocks& blocks, const nb::list& rotary,
                 const Integers& places, uintptr_t logits, int threads) {
  DecoderStep step = {int64_t(firsts.size()) - 1, ids, positions, firsts, {}, blocks.layers, {}, places,
                      reinterpret_cast<float*>(logits), threads};
  for (const nb::handle f : kinds) step.kinds.push_back(kind_of(f));
  for (const nb::handle f : rotary) step.rotary.push_back({pointer<const float>(f, 0), pointer<const float>(f, 1)});
  const auto& sets = instruction_sets();
  const InstructionSet& set = instruction_set < 0 ? sets.back() : sets.at(instruction_set);
  nb::gil_scoped_release released;
  set.run(decoder, step);
}

// Whether each dictionary still has its part under its name, and none of the others has a key.
bool are_in_place(const nb::list& holders, const nb::list& names, const nb::list& parts, const nb::list& others,
                  const nb::str& key) {
  for (size_t i = 0; i < parts.size(); ++i)
    if (PyDict_GetItem(holders[i].ptr(), names[i].ptr()) != parts[i].ptr()) return false;
  for (const nb::handle other : others)
    if (PyDict_Contains(other.ptr(), key.ptr())) return false;
  return true;
}

// Lets the threads go that wait for this one's next parallel region: GNU's runtime ends them, LLVM's lets them sleep.
void release_threads() {
#if defined(_OPENMP)
  nb::gil_scoped_release released;
  omp_pause_resource_all(omp_pause_soft);
#endif
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::set_leak_warnings(false);  // what lives as long as the process may be found at its end
  m.attr("INSTRUCTION_SETS") = names();
  m.attr("QUERY_TOKENS") = QUERY_TOKENS;
  m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
#if defined(_OPENMP)
  m.attr("HAS_OPENMP") = true;
#else
  m.attr("HAS_OPENMP") = false;
#endif
  nb::dict formats;
  formats["float32"] = int(Format::Float32);
  formats["bfloat16"] = int(Format::BFloat16);
  formats["float16"] = int(Format::Float16);
  formats["int8"] = int(Format::Int8);
  formats["int4"] = int(Format::Int4);
  m.attr("FORMATS") = formats;
  m.def("attend", attend);
  m.def("append", append);
  m.def("release_threads", release_threads);
  m.def("are_in_place", are_in_place);
  nb::class_<Decoder>(m, "Decoder").def("run", run_decoder);
  m.def("make_decoder", make_decoder);
  nb::class_<Blocks>(m, "Blocks");
  m.def("make_blocks", make_blocks);
  nb::dict activations;
  activations["silu"] = int(Activation::Silu);
  activations["gelu_tanh"] = int(Activation::GeluTanh);
  m.attr("ACTIVATIONS") = activations;
}
