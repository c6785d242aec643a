// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// kvspeed._C: registrations only. Tensors arrive as addresses and element strides, already checked by kvspeed.ops.
//
// Every op ends with `device`: None for the CPU, or (kind, index, stream, workspace, workspace bytes). It returns 0,
// or, where that workspace is too small and so nothing was done, the bytes that it needs: one call finds out and runs.
#include <kvspeed/kvspeed.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_call.h"

#ifdef KVSPEED_SIMT
#include <map>
#include <utility>

#include "simt/options.h"
#endif

#ifndef KVSPEED_MODULE_NAME
#define KVSPEED_MODULE_NAME _C  // the tests build a second one, whose device is emulated
#endif
#define KVSPEED_TEXT_OF(x) #x
#define KVSPEED_TEXT(x) KVSPEED_TEXT_OF(x)

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
  void* data() const { return data_; }
  size_t size() const { return bytes_; }
  void grow(size_t bytes) {
    std::free(data_);
    bytes_ = 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    data_ = std::aligned_alloc(64, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = bytes;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};
thread_local Scratch scratch;

void check(kvspeed_status status, const char* name) {
  if (status == KVSPEED_OK) return;
  std::string text = std::string("kvspeed ") + name + ": " + kvspeed_status_string(status);
  if (status == KVSPEED_DEVICE_ERROR) {
#ifdef KVSPEED_SIMT
    text += ": " + kvspeed::simt::take_error();
#else
    text += std::string(": ") + kvspeed_cuda_last_error();
#endif
  }
  throw std::runtime_error(text);
}

int64_t number(const py::tuple& t, size_t i) { return t[i].cast<int64_t>(); }
const void* address(const py::tuple& t, size_t i) { return pointer<const void>(t[i].cast<uintptr_t>()); }

void check_size(const py::tuple& t, size_t size, const char* what) {
  if (t.size() != size) throw std::invalid_argument(std::string(what) + " needs " + std::to_string(size) + " numbers");
}

kvspeed_execution execution(int num_threads, int isa, const py::object& device) {
  kvspeed_execution e = {};
  e.isa = static_cast<kvspeed_isa>(isa);
  e.num_threads = num_threads;
  if (device.is_none()) return e;
  const py::tuple t = device.cast<py::tuple>();
  check_size(t, 5, "a device");
  e.device = static_cast<kvspeed_device>(number(t, 0));
  e.device_index = static_cast<int32_t>(number(t, 1));
  e.stream = pointer<void>(t[2].cast<uintptr_t>());
  e.workspace = pointer<void>(t[3].cast<uintptr_t>());
  e.workspace_bytes = t[4].cast<size_t>();
  return e;
}

template <class Args>
struct Op;
template <>
struct Op<kvspeed_rope_concat_args> {
  static constexpr const char* name = "rope_concat";
  static constexpr auto run = &kvspeed_rope_concat;
  static constexpr auto workspace = &kvspeed_rope_concat_workspace;
};
template <>
struct Op<kvspeed_segment_attention_args> {
  static constexpr const char* name = "segment_attention";
  static constexpr auto run = &kvspeed_segment_attention;
  static constexpr auto workspace = &kvspeed_segment_attention_workspace;
};

// Runs an op over the workspace that there is, on the CPU the scratch memory of this thread. Only where it does not
// suffice the op is asked for what it needs.
template <class Args>
size_t run_op(const Args& args, kvspeed_execution& e) {
  const bool on_cpu = e.device == KVSPEED_CPU;
  if (on_cpu) e.workspace = scratch.data(), e.workspace_bytes = scratch.size();
  kvspeed_status status = Op<Args>::run(&args, &e);
  size_t bytes = 0;
  if (status == KVSPEED_WORKSPACE_TOO_SMALL) {
    check(Op<Args>::workspace(&args, &e, &bytes), Op<Args>::name);
    if (!on_cpu) return bytes;
    scratch.grow(bytes);
    e.workspace = scratch.data(), e.workspace_bytes = scratch.size();
    status = Op<Args>::run(&args, &e);
  }
  check(status, Op<Args>::name);
  return 0;
}

// (key, value, k_layer, k_head, k_token, v_layer, v_head, v_token, tokens, offset), and for 8-bit packets
// (..., key_scale, value_scale, ks_layer, ks_head, vs_layer, vs_head).
kvspeed_packet to_packet(const py::tuple& t) {
  if (t.size() != 10) check_size(t, 16, "a packet");
  kvspeed_packet p = {};
  p.key = address(t, 0);
  p.value = address(t, 1);
  for (size_t i = 0; i < 3; ++i) p.key_stride[i] = number(t, 2 + i), p.value_stride[i] = number(t, 5 + i);
  p.tokens = number(t, 8);
  p.offset = number(t, 9);
  if (t.size() == 16) {
    p.key_scale = static_cast<const float*>(address(t, 10));
    p.value_scale = static_cast<const float*>(address(t, 11));
    for (size_t i = 0; i < 2; ++i) {
      p.key_scale_stride[i] = number(t, 12 + i);
      p.value_scale_stride[i] = number(t, 14 + i);
    }
  }
  return p;
}

// (key, value, k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, offset, start, first), and on a device
// (..., rope, page_table, page_table_stride, page_size, pages).
kvspeed_segment to_segment(const py::tuple& t) {
  if (t.size() != 12) check_size(t, 17, "a segment");
  kvspeed_segment s = {};
  s.key = address(t, 0);
  s.value = address(t, 1);
  for (size_t i = 0; i < 3; ++i) s.key_stride[i] = number(t, 2 + i), s.value_stride[i] = number(t, 5 + i);
  s.tokens = number(t, 8);
  s.offset = number(t, 9);
  s.start = number(t, 10);
  s.first = static_cast<const int32_t*>(address(t, 11));
  if (t.size() == 17) {
    s.rope = static_cast<const float*>(address(t, 12));
    s.page_table = static_cast<const int32_t*>(address(t, 13));
    s.page_table_stride = number(t, 14);
    s.page_size = number(t, 15);
    s.pages = number(t, 16);
  }
  return s;
}

template <class Item>
std::vector<Item> read_all(const std::vector<py::tuple>& tuples, Item (*read)(const py::tuple&)) {
  std::vector<Item> list;
  list.reserve(tuples.size());
  for (const py::tuple& t : tuples) list.push_back(read(t));
  return list;
}

size_t rope_concat(int dtype, int64_t layers, int64_t heads, int64_t head_dim, int64_t rotary_dim, bool interleaved,
                   const std::vector<py::tuple>& packets, uintptr_t inv_freq, int64_t inv_freq_layer_stride,
                   uintptr_t out_key, uintptr_t out_value, const Stride4& out_key_stride,
                   const Stride4& out_value_stride, int64_t start, int64_t capacity, uintptr_t page_table,
                   int64_t page_table_length, int64_t page_size, int64_t pages, int storage, int num_threads, int isa,
                   const py::object& device) {
  kvspeed_execution e = execution(num_threads, isa, device);
  const std::vector<kvspeed_packet> list = read_all(packets, &to_packet);
  kvspeed_rope_concat_args g = {};
  g.dtype = static_cast<kvspeed_dtype>(dtype);
  g.storage = static_cast<kvspeed_storage>(storage);
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
  return run_op(g, e);
}

size_t segment_attention(int dtype, int64_t batch, int64_t heads, int64_t heads_kv, int64_t query_tokens,
                         int64_t head_dim, int64_t rotary_dim, bool interleaved, uintptr_t inv_freq, uintptr_t query,
                         const Stride3& query_stride, const std::vector<py::tuple>& segments, const py::tuple& tail,
                         uintptr_t tail_tokens, float scale, float softcap, int64_t window, uintptr_t sinks,
                         uintptr_t out, const Stride3& out_stride, uintptr_t lse, int64_t split_tokens, int num_threads,
                         int isa, const py::object& device) {
  kvspeed_execution e = execution(num_threads, isa, device);
  const std::vector<kvspeed_segment> list = read_all(segments, &to_segment);
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
  g.tail_tokens = pointer<const int32_t>(tail_tokens);
  g.scale = scale;
  g.softcap = softcap;
  g.window = window;
  g.sinks = pointer<const float>(sinks);
  g.out = pointer<void>(out);
  assign(g.out_stride, out_stride);
  g.lse = pointer<float>(lse);
  g.split_tokens = split_tokens;
  py::gil_scoped_release release;
  return run_op(g, e);
}

size_t merge_states(int dtype_a, int dtype_b, int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                    uintptr_t out_a, const Stride3& out_a_stride, uintptr_t lse_a, const Stride3& lse_a_stride,
                    uintptr_t out_b, const Stride3& out_b_stride, uintptr_t lse_b, const Stride3& lse_b_stride,
                    uintptr_t out, const Stride3& out_stride, uintptr_t lse, int num_threads, int isa,
                    const py::object& device) {
  const kvspeed_execution e = execution(num_threads, isa, device);
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
  check(kvspeed_merge_states(&g, &e), "merge_states");
  return 0;
}

kvspeed::python::AttentionTypes attention_types;

// What `attend` needs to know once; False where torch lets nobody read tensors from C++, and then it must not be
// called.
bool use_tensors(const py::object& tensor, const py::object& segment, const py::object& segment_list,
                 const py::object& empty_like, const py::object& make_lse) {
  kvspeed::python::AttentionTypes& t = attention_types;
  if (!t.reader.start(tensor.ptr())) return false;
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  t.segment = reinterpret_cast<PyTypeObject*>(segment.inc_ref().ptr());  // kept for good, as all of this
  t.segment_list = reinterpret_cast<PyTypeObject*>(segment_list.inc_ref().ptr());
  t.empty_like = empty_like.inc_ref().ptr();
  t.make_lse = make_lse.inc_ref().ptr();
  t.key = name("key"), t.value = name("value"), t.offset = name("offset"), t.start = name("start");
  t.first = name("first"), t.page_table = name("page_table"), t.length = name("_length");
  t.requires_grad = name("requires_grad"), t.rows = name("rows");
  t.segments = name("_segments"), t.read = name("_read"), t.is_neg = name("is_neg");
  t.capsule = KVSPEED_TEXT(KVSPEED_MODULE_NAME) " segments";
  return true;
}

// segment_attention from its plain arguments: the output, or (output, LSE); None where they are not plain, and the
// bytes of workspace where more is needed. In both of these cases nothing was done.
PyObject* attend(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != kvspeed::python::kArguments) {
    PyErr_SetString(PyExc_TypeError, "attend takes the arguments of kvspeed.ops.attention, and no others");
    return nullptr;
  }
  kvspeed::python::AttentionCall call(attention_types, arguments);
  if (!call.prepare()) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  size_t needed = 0;
  try {
    py::gil_scoped_release release;
    needed = run_op(call.g, call.e);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  if (needed > 0) return PyLong_FromSize_t(needed);
  if (call.lse != nullptr) return PyTuple_Pack(2, call.out, call.lse);
  Py_INCREF(call.out);
  return call.out;
}

// Not through pybind11, whose way of taking twenty arguments costs as much as the rest of the call.
PyMethodDef fast_functions[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&attend)), METH_FASTCALL,
     "segment_attention from its plain arguments"},
    {nullptr, nullptr, 0, nullptr},
};

void rope_row(int64_t offset, uintptr_t inv_freq, int64_t half, uintptr_t row) {
  check(kvspeed_rope_row(offset, pointer<const float>(inv_freq), half, pointer<float>(row)), "rope_row");
}

py::tuple cuda_device_count() {
  const char* message = "";
  const int count = kvspeed_cuda_device_count(&message);
  return py::make_tuple(count, std::string(message == nullptr ? "" : message));
}

py::tuple cuda_device_supported(int index) {
  int32_t capability = 0;
  const bool supported = kvspeed_cuda_device_supported(index, &capability) != 0;
  return py::make_tuple(supported, capability);
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
  info["cuda"] = kvspeed_cuda_built() != 0;
  py::list archs;
  std::istringstream text(kvspeed_cuda_archs());
  for (std::string arch; std::getline(text, arch, ';');) archs.append(arch);
  info["cuda_archs"] = archs;
  return info;
}

}  // namespace

PYBIND11_MODULE(KVSPEED_MODULE_NAME, m) {
  m.doc() = "kvspeed kernels; use kvspeed.ops, which checks its arguments";
  m.def("rope_concat", &rope_concat);
  m.def("segment_attention", &segment_attention);
  m.def("merge_states", &merge_states);
  m.def("use_tensors", &use_tensors);
  if (PyModule_AddFunctions(m.ptr(), fast_functions) != 0) throw py::error_already_set();
  m.def("rope_row", &rope_row);
  m.def("cuda_device_count", &cuda_device_count);
  m.def("cuda_device_supported", &cuda_device_supported);
  m.def("cuda_archs", [] { return std::string(kvspeed_cuda_archs()); });
  m.def("cuda_last_error", [] { return std::string(kvspeed_cuda_last_error()); });
  m.def("isa_available", [](int isa) { return kvspeed_isa_available(static_cast<kvspeed_isa>(isa)) != 0; });
  m.def("isa_best", [] { return static_cast<int>(kvspeed_isa_best()); });
  m.def("isa_name", [](int isa) { return std::string(kvspeed_isa_name(static_cast<kvspeed_isa>(isa))); });
  m.def("advise_huge_pages",
        [](uintptr_t data, size_t bytes) { kvspeed_advise_huge_pages(pointer<void>(data), bytes); });
  m.def("build_info", &build_info);
#ifdef KVSPEED_SIMT
  m.def("simt_schedule", [](int schedule, uint64_t seed) {
    kvspeed::simt::options().schedule = static_cast<kvspeed::simt::Schedule>(schedule);
    kvspeed::simt::options().seed = seed;
  });
  m.def("simt_launches", [] { return kvspeed::simt::stats().launches; });
  m.def("simt_hollow", [](bool hollow) { kvspeed::simt::options().hollow = hollow; });
  m.def("simt_threads", [](int threads) { kvspeed::simt::options().threads = threads; });
  m.def("simt_take_error", [] { return kvspeed::simt::take_error(); });
  m.def("simt_stats", [] {  // counts since the last call
    const kvspeed::simt::Stats s = std::exchange(kvspeed::simt::stats(), {});
    return std::map<std::string, uint64_t>{{"launches", s.launches},
                                           {"blocks", s.blocks},
                                           {"mma", s.mma},
                                           {"ldmatrix", s.ldmatrix},
                                           {"ldmatrix_conflicts", s.ldmatrix_conflicts},
                                           {"async_copies", s.async_copies},
                                           {"shared_accesses", s.shared_accesses},
                                           {"global_accesses", s.global_accesses},
                                           {"switches", s.switches}};
  });
#endif
}
