// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// kvspeed._C: registrations only. Tensors arrive as addresses and element strides, already checked by kvspeed.ops.
#include <kvspeed/kvspeed.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

using Stride3 = std::array<int64_t, 3>;
using Stride4 = std::array<int64_t, 4>;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <size_t N>
void assign(int64_t (&to)[N], const std::array<int64_t, N>& from) {
  for (size_t i = 0; i < N; ++i) to[i] = from[i];
}

// Scratch that grows and stays, one a thread: no allocation once a model is warm, and no sharing.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }
  void* at_least(size_t bytes) {
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      data_ = std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};
thread_local Scratch scratch;

void check(kvspeed_status status, const char* name) {
  if (status != KVSPEED_OK) {
    throw std::runtime_error(std::string("kvspeed ") + name + ": " + kvspeed_status_string(status));
  }
}

kvspeed_execution execution(int num_threads, int isa) {
  kvspeed_execution e = {};
  e.device = KVSPEED_CPU;
  e.isa = static_cast<kvspeed_isa>(isa);
  e.num_threads = num_threads;
  return e;
}

void give_scratch(kvspeed_execution& e, size_t bytes) {
  e.workspace = bytes > 0 ? scratch.at_least(bytes) : nullptr;
  e.workspace_bytes = bytes;
}

int64_t number(const py::tuple& t, size_t i) { return t[i].cast<int64_t>(); }
const void* address(const py::tuple& t, size_t i) { return pointer<const void>(t[i].cast<uintptr_t>()); }

void check_size(const py::tuple& t, size_t size, const char* what) {
  if (t.size() != size) throw std::invalid_argument(std::string(what) + " needs " + std::to_string(size) + " numbers");
}

// (key, value, k_layer, k_head, k_token, v_layer, v_head, v_token, tokens, offset)
kvspeed_packet to_packet(const py::tuple& t) {
  check_size(t, 10, "a packet");
  kvspeed_packet p = {};
  p.key = address(t, 0);
  p.value = address(t, 1);
  for (size_t i = 0; i < 3; ++i) p.key_stride[i] = number(t, 2 + i), p.value_stride[i] = number(t, 5 + i);
  p.tokens = number(t, 8);
  p.offset = number(t, 9);
  return p;
}

// (key, value, k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, offset, start, first)
kvspeed_segment to_segment(const py::tuple& t) {
  check_size(t, 12, "a segment");
  kvspeed_segment s = {};
  s.key = address(t, 0);
  s.value = address(t, 1);
  for (size_t i = 0; i < 3; ++i) s.key_stride[i] = number(t, 2 + i), s.value_stride[i] = number(t, 5 + i);
  s.tokens = number(t, 8);
  s.offset = number(t, 9);
  s.start = number(t, 10);
  s.first = static_cast<const int32_t*>(address(t, 11));
  return s;
}

void rope_concat(int dtype, int64_t layers, int64_t heads, int64_t head_dim, int64_t rotary_dim, bool interleaved,
                 const std::vector<py::tuple>& packets, uintptr_t inv_freq, int64_t inv_freq_layer_stride,
                 uintptr_t out_key, uintptr_t out_value, const Stride4& out_key_stride, const Stride4& out_value_stride,
                 int64_t start, int64_t capacity, uintptr_t page_table, int64_t page_table_length, int64_t page_size,
                 int64_t pages, int num_threads, int isa) {
  std::vector<kvspeed_packet> list;
  list.reserve(packets.size());
  for (const py::tuple& t : packets) list.push_back(to_packet(t));
  kvspeed_rope_concat_args g = {};
  g.dtype = static_cast<kvspeed_dtype>(dtype);
  g.layers = layers;
  g.heads = heads;
  g.head_dim = head_dim;
  g.rotary_dim = rotary_dim;
  g.interleaved = interleaved;
  g.packets = list.data();
  g.num_packets = static_cast<int64_t>(list.size());
  g.inv_freq = pointer<const float>(inv_freq);
  g.inv_freq_layer_stride = inv_freq_layer_stride;
  g.out_key = pointer<void>(out_key);
  g.out_value = pointer<void>(out_value);
  assign(g.out_key_stride, out_key_stride);
  assign(g.out_value_stride, out_value_stride);
  g.start = start;
  g.capacity = capacity;
  g.page_table = pointer<const int32_t>(page_table);
  g.page_table_length = page_table_length;
  g.page_size = page_size;
  g.pages = pages;
  py::gil_scoped_release release;
  size_t bytes = 0;
  kvspeed_execution e = execution(num_threads, isa);
  check(kvspeed_rope_concat_workspace(&g, &e, &bytes), "rope_concat");
  give_scratch(e, bytes);
  check(kvspeed_rope_concat(&g, &e), "rope_concat");
}

void segment_attention(int dtype, int64_t batch, int64_t heads, int64_t heads_kv, int64_t query_tokens,
                       int64_t head_dim, int64_t rotary_dim, bool interleaved, uintptr_t inv_freq, uintptr_t query,
                       const Stride3& query_stride, const std::vector<py::tuple>& segments, const py::tuple& tail,
                       float scale, float softcap, int64_t window, uintptr_t sinks, uintptr_t out,
                       const Stride3& out_stride, uintptr_t lse, int64_t split_tokens, int num_threads, int isa) {
  std::vector<kvspeed_segment> list;
  list.reserve(segments.size());
  for (const py::tuple& t : segments) list.push_back(to_segment(t));
  kvspeed_segment_attention_args g = {};
  g.dtype = static_cast<kvspeed_dtype>(dtype);
  g.batch = batch;
  g.heads = heads;
  g.heads_kv = heads_kv;
  g.query_tokens = query_tokens;
  g.head_dim = head_dim;
  g.rotary_dim = rotary_dim;
  g.interleaved = interleaved;
  g.inv_freq = pointer<const float>(inv_freq);
  g.query = pointer<const void>(query);
  assign(g.query_stride, query_stride);
  g.segments = list.data();
  g.num_segments = static_cast<int64_t>(list.size());
  g.tail = to_segment(tail);
  g.scale = scale;
  g.softcap = softcap;
  g.window = window;
  g.sinks = pointer<const float>(sinks);
  g.out = pointer<void>(out);
  assign(g.out_stride, out_stride);
  g.lse = pointer<float>(lse);
  g.split_tokens = split_tokens;
  py::gil_scoped_release release;
  size_t bytes = 0;
  kvspeed_execution e = execution(num_threads, isa);
  check(kvspeed_segment_attention_workspace(&g, &e, &bytes), "segment_attention");
  give_scratch(e, bytes);
  check(kvspeed_segment_attention(&g, &e), "segment_attention");
}

void merge_states(int dtype_a, int dtype_b, int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                  uintptr_t out_a, const Stride3& out_a_stride, uintptr_t lse_a, const Stride3& lse_a_stride,
                  uintptr_t out_b, const Stride3& out_b_stride, uintptr_t lse_b, const Stride3& lse_b_stride,
                  uintptr_t out, const Stride3& out_stride, uintptr_t lse, int num_threads, int isa) {
  kvspeed_merge_states_args g = {};
  g.dtype_a = static_cast<kvspeed_dtype>(dtype_a);
  g.dtype_b = static_cast<kvspeed_dtype>(dtype_b);
  g.batch = batch;
  g.heads = heads;
  g.tokens = tokens;
  g.head_dim = head_dim;
  g.out_a = pointer<const void>(out_a);
  g.out_b = pointer<const void>(out_b);
  assign(g.out_a_stride, out_a_stride);
  assign(g.out_b_stride, out_b_stride);
  g.lse_a = pointer<const float>(lse_a);
  g.lse_b = pointer<const float>(lse_b);
  assign(g.lse_a_stride, lse_a_stride);
  assign(g.lse_b_stride, lse_b_stride);
  g.out = pointer<void>(out);
  assign(g.out_stride, out_stride);
  g.lse = pointer<float>(lse);
  py::gil_scoped_release release;
  const kvspeed_execution e = execution(num_threads, isa);
  check(kvspeed_merge_states(&g, &e), "merge_states");
}

py::dict build_info() {
  py::list isas;
#if KVSPEED_HAVE_BASELINE
  isas.append("baseline");
#endif
#if KVSPEED_HAVE_AVX2
  isas.append("avx2");
#endif
#if KVSPEED_HAVE_AVX512
  isas.append("avx512");
#endif
#if KVSPEED_HAVE_NEON
  isas.append("neon");
#endif
  py::dict info;
  info["version"] = KVSPEED_VERSION;
  info["compiler"] = __VERSION__;
  info["isas"] = isas;
  info["cuda"] = false;
  info["cuda_archs"] = py::list();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "kvspeed kernels; use kvspeed.ops, which checks its arguments";
  m.def("rope_concat", &rope_concat);
  m.def("segment_attention", &segment_attention);
  m.def("merge_states", &merge_states);
  m.def("isa_available", [](int isa) { return kvspeed_isa_available(static_cast<kvspeed_isa>(isa)) != 0; });
  m.def("isa_best", [] { return static_cast<int>(kvspeed_isa_best()); });
  m.def("isa_name", [](int isa) { return std::string(kvspeed_isa_name(static_cast<kvspeed_isa>(isa))); });
  m.def("advise_huge_pages",
        [](uintptr_t data, size_t bytes) { kvspeed_advise_huge_pages(pointer<void>(data), bytes); });
  m.def("build_info", &build_info);
}
