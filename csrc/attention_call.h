// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// segment_attention straight from Python's arguments, for the calls that a model makes at every layer and step: plain
// tensors in their plain form. What this does not take, for whatever reason, it leaves to kvspeed/ops/attention.py,
// which finds out slowly what is wrong; so no message is made here, and nothing is computed before all is checked.
#ifndef KVSPEED_ATTENTION_CALL_H_
#define KVSPEED_ATTENTION_CALL_H_

#include <kvspeed/kvspeed.h>

#include <cmath>
#include <vector>

#include "tensor_reader.h"

namespace kvspeed::python {

// What Python gives once: the types, and the functions that make the results.
struct AttentionTypes {
  TensorReader reader;
  PyTypeObject* segment = nullptr;
  PyObject *empty_like = nullptr, *make_lse = nullptr;
  PyObject *key, *value, *offset, *start, *first, *page_table, *length, *requires_grad, *rows;  // names
};

// The positions of the arguments: those of kvspeed.ops.attention.run, then where and with what.
enum AttentionArgument {
  kQuery,
  kSegments,
  kTailKey,
  kTailValue,
  kInvFreq,
  kScale,
  kSoftcap,
  kWindow,
  kTailStart,
  kTailFirst,
  kSinks,
  kInterleaved,
  kReturnLse,
  kSplitTokens,
  kTailLength,
  kTracked,      // bool: autograd is on
  kNumThreads,   // CPU
  kIsa,          // CPU
  kDevice,       // None, or (kind, index, stream, workspace, bytes)
  kFrequencies,  // None, or a dict: the bytes of frequencies -> what is known of them on that GPU
  kArguments
};

class AttentionCall {
 public:
  kvspeed_segment_attention_args g = {};
  kvspeed_execution e = {};
  PyObject *out = nullptr, *lse = nullptr;  // owned

  AttentionCall(const AttentionTypes& types, PyObject* const* arguments) : types_(types), a_(arguments) {}
  ~AttentionCall() {
    Py_XDECREF(out);
    Py_XDECREF(lse);
    Py_XDECREF(known_);
  }
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  // Fills the structs and makes the results; false where an argument is not plain. A Python error may be set.
  bool prepare() {
    return execution() && query() && numbers() && vectors() && tail() && segments() && rotation() && results();
  }

 private:
  static constexpr int64_t kLimit = int64_t{1} << 31;

  static bool integer(PyObject* o, int64_t low, int64_t high, int64_t& to) {
    if (!PyLong_CheckExact(o)) return false;
    int overflow = 0;
    to = PyLong_AsLongLongAndOverflow(o, &overflow);
    return overflow == 0 && to >= low && to <= high;
  }
  static bool boolean(PyObject* o, bool& to) {
    to = o == Py_True;
    return to || o == Py_False;
  }
  static bool number(PyObject* o, double low, float& to) {
    if (!PyFloat_CheckExact(o)) return false;
    const double v = PyFloat_AS_DOUBLE(o);
    to = static_cast<float>(v);
    return v >= low && v <= 3.4028234663852886e38;
  }
  static bool address(PyObject* o, uintptr_t& to) {
    to = PyLong_Check(o) ? static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(o)) : 0;
    return PyLong_Check(o) && PyErr_Occurred() == nullptr;
  }

  bool read(PyObject* o, TensorView& view) const {
    if (!types_.reader.read(o, view)) return false;
    if (!tracked_) return true;
    PyObject* wants = PyObject_GetAttr(o, types_.requires_grad);
    Py_XDECREF(wants);
    return wants == Py_False;
  }

  bool execution() {
    int64_t threads, isa, kind, index;
    if (!boolean(a_[kTracked], tracked_) || !integer(a_[kNumThreads], 1, 1 << 20, threads) ||
        !integer(a_[kIsa], 0, 100, isa)) {
      return false;
    }
    e.num_threads = static_cast<int32_t>(threads);
    e.isa = static_cast<kvspeed_isa>(isa);
    if (a_[kDevice] == Py_None) return true;
    if (!PyTuple_CheckExact(a_[kDevice]) || PyTuple_GET_SIZE(a_[kDevice]) != 5) return false;
    const auto item = [this](Py_ssize_t i) { return PyTuple_GET_ITEM(a_[kDevice], i); };
    uintptr_t stream, workspace, bytes;
    if (!integer(item(0), 1, 1, kind) || !integer(item(1), 0, 1 << 20, index) || !address(item(2), stream) ||
        !address(item(3), workspace) || !address(item(4), bytes)) {
      return false;
    }
    e.device = static_cast<kvspeed_device>(kind);
    e.device_index = static_cast<int32_t>(index);
    e.stream = reinterpret_cast<void*>(stream);
    e.workspace = reinterpret_cast<void*>(workspace);
    e.workspace_bytes = bytes;
    return true;
  }

  bool query() {
    TensorView q;
    if (!read(a_[kQuery], q) || q.ndim() != 4 || q.stride(3) != 1) return false;
    dtype_ = q.dtype();
    where_ = q.where();
    g.batch = q.size(0);
    g.heads = q.size(1);
    g.query_tokens = q.size(2);
    g.head_dim = q.size(3);
    for (int i = 0; i < 3; ++i) g.query_stride[i] = q.stride(i);
    g.query = q.data();
    const bool on_gpu = e.device == KVSPEED_CUDA;
    g.dtype = dtype_ == kFloat32 ? KVSPEED_FLOAT32 : dtype_ == kBfloat16 ? KVSPEED_BFLOAT16 : KVSPEED_FLOAT16;
    if (dtype_ != kBfloat16 && dtype_ != kFloat16 && (dtype_ != kFloat32 || on_gpu)) return false;
    if (where_ < -1 || (where_ >= 0 && !on_gpu)) return false;
    if (g.query == nullptr || g.batch == 0 || g.heads == 0 || g.query_tokens == 0) return false;  // nothing to do
    const int64_t d = g.head_dim;
    return on_gpu ? d == 64 || d == 80 || d == 96 || d == 128 || d == 256 : d % 8 == 0 && d >= 8 && d <= 256;
  }

  bool numbers() {
    bool interleaved;
    if (!boolean(a_[kInterleaved], interleaved) || !boolean(a_[kReturnLse], return_lse_)) return false;
    g.interleaved = interleaved;
    if (a_[kScale] == Py_None) {
      g.scale = static_cast<float>(std::pow(static_cast<double>(g.head_dim), -0.5));
    } else if (!number(a_[kScale], -3.4028234663852886e38, g.scale)) {
      return false;
    }
    const bool windowed = a_[kWindow] != Py_None;
    if (windowed && (!integer(a_[kWindow], 1, kLimit, g.window) || a_[kTailStart] == Py_None)) return false;
    if (a_[kTailStart] != Py_None && !integer(a_[kTailStart], -kLimit, kLimit, g.tail.start)) return false;
    if (a_[kSplitTokens] != Py_None && !integer(a_[kSplitTokens], 1, kLimit, g.split_tokens)) return false;
    return number(a_[kSoftcap], 0.0, g.softcap);
  }

  // None, or a plain contiguous vector of that size (or of any, for -1).
  bool vector(PyObject* o, int dtype, int64_t size, int where, const void*& to, int64_t* length = nullptr) const {
    if (o == Py_None) return true;
    TensorView v;
    if (!read(o, v) || v.dtype() != dtype || v.ndim() != 1 || v.where() != where) return false;
    if ((size >= 0 && v.size(0) != size) || (v.size(0) > 1 && v.stride(0) != 1)) return false;
    to = v.data();
    if (length != nullptr) *length = v.size(0);
    return to != nullptr || v.size(0) == 0;
  }

  bool vectors() {
    const void *sinks = nullptr, *inv_freq = nullptr, *length = nullptr, *first = nullptr;
    int64_t half = 0;
    if (!vector(a_[kSinks], kFloat32, g.heads, where_, sinks) ||
        !vector(a_[kInvFreq], kFloat32, -1, -1, inv_freq, &half) || 2 * half > g.head_dim ||
        !vector(a_[kTailLength], kInt32, g.batch, where_, length) ||
        !vector(a_[kTailFirst], kInt32, g.batch, where_, first)) {
      return false;
    }
    g.sinks = static_cast<const float*>(sinks);
    g.inv_freq = static_cast<const float*>(inv_freq);
    g.rotary_dim = 2 * half;
    g.tail_tokens = static_cast<const int32_t*>(length);
    g.tail.first = static_cast<const int32_t*>(first);
    return g.tail_tokens == nullptr || e.device == KVSPEED_CUDA;
  }

  // Keys and values [B, H, T, D] or [H, T, D]; with pages [pages, page_size, H, D].
  bool describe(PyObject* key, PyObject* value, bool paged, kvspeed_segment& s) const {
    TensorView k, v;
    if (!read(key, k) || !read(value, v) || k.dtype() != dtype_ || v.dtype() != dtype_ || k.where() != where_ ||
        v.where() != where_ || k.ndim() != v.ndim() || k.ndim() < 3 || k.ndim() > 4) {
      return false;
    }
    const int n = k.ndim();
    for (int i = 0; i < n; ++i) {
      if (k.size(i) != v.size(i)) return false;
    }
    if (paged && n != 4) return false;
    const int head = paged ? n - 2 : n - 3, token = paged ? n - 3 : n - 2;
    if (k.size(n - 1) != g.head_dim || k.stride(n - 1) != 1 || v.stride(n - 1) != 1) return false;
    if (g.heads_kv != 0 && k.size(head) != g.heads_kv) return false;
    if (!paged && n == 4 && k.size(0) != g.batch) return false;
    s.key = k.data();
    s.value = v.data();
    if (n == 4) s.key_stride[0] = k.stride(0), s.value_stride[0] = v.stride(0);
    s.key_stride[1] = k.stride(head), s.value_stride[1] = v.stride(head);
    s.key_stride[2] = k.stride(token), s.value_stride[2] = v.stride(token);
    s.tokens = k.size(token);
    if (paged) s.page_size = s.tokens, s.pages = k.size(0);
    return (s.key != nullptr && s.value != nullptr) || s.tokens == 0;
  }

  bool tail() {
    TensorView k;
    if (!read(a_[kTailKey], k) || k.ndim() != 4 || k.size(1) == 0 || g.heads % k.size(1) != 0) return false;
    g.heads_kv = k.size(1);
    return describe(a_[kTailKey], a_[kTailValue], false, g.tail);
  }

  // Owned for the time of the call by the segment, which the caller holds; so borrowed here.
  PyObject* field(PyObject* segment, PyObject* name) const {
    PyObject* o = PyObject_GetAttr(segment, name);
    Py_XDECREF(o);
    return o;
  }

  bool segments() {
    PyObject* given = a_[kSegments];
    const bool is_list = PyList_CheckExact(given);
    if (!is_list && !PyTuple_CheckExact(given)) return false;
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(given) : PyTuple_GET_SIZE(given);
    list_.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (is_list && i >= PyList_GET_SIZE(given)) return false;
      PyObject* o = is_list ? PyList_GET_ITEM(given, i) : PyTuple_GET_ITEM(given, i);
      if (Py_TYPE(o) != types_.segment || !segment(o, list_[static_cast<size_t>(i)])) return false;
    }
    g.segments = list_.data();
    g.num_segments = count;
    return true;
  }

  bool segment(PyObject* o, kvspeed_segment& s) {
    PyObject* table = field(o, types_.page_table);
    PyObject* length = field(o, types_.length);
    PyObject *key = field(o, types_.key), *value = field(o, types_.value), *first = field(o, types_.first);
    PyObject *offset = field(o, types_.offset), *start = field(o, types_.start);
    if (!table || !length || !key || !value || !first || !offset || !start) return false;
    const bool paged = table != Py_None;
    const void* padding = nullptr;
    if (!describe(key, value, paged, s) || !integer(offset, -kLimit, kLimit, s.offset) ||
        !integer(start, -kLimit, kLimit, s.start) || !vector(first, kInt32, g.batch, where_, padding)) {
      return false;
    }
    s.first = static_cast<const int32_t*>(padding);
    turns_ = turns_ || s.offset != 0;
    return paged ? e.device == KVSPEED_CUDA && pages(table, length, s) : length == Py_None;
  }

  bool pages(PyObject* table, PyObject* length, kvspeed_segment& s) const {
    TensorView t;
    if (!read(table, t) || t.dtype() != kInt32 || t.where() != where_ || t.ndim() < 1 || t.ndim() > 2) return false;
    const int64_t entries = t.size(t.ndim() - 1);
    if ((t.ndim() == 2 && t.size(0) != g.batch) || (entries > 1 && t.stride(t.ndim() - 1) != 1)) return false;
    int64_t capacity;
    if (__builtin_mul_overflow(entries, s.page_size, &capacity)) return false;
    s.tokens = capacity;
    if (length != Py_None && !integer(length, 0, capacity, s.tokens)) return false;
    if (s.tokens == 0) {  // nothing to read: an ordinary empty segment
      s.page_size = s.pages = 0;
      return true;
    }
    s.page_table = reinterpret_cast<const int32_t*>(t.data());
    s.page_table_stride = t.ndim() == 2 ? t.stride(0) : 0;
    return s.page_table != nullptr;
  }

  // On a GPU: the rotation rows that lie there, found by the content of the frequencies.
  bool rotation() {
    if (!turns_) return true;
    if (a_[kInvFreq] == Py_None) return false;
    if (e.device != KVSPEED_CUDA || g.rotary_dim == 0) return true;
    if (!PyDict_CheckExact(a_[kFrequencies])) return false;
    PyObject* content = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(g.inv_freq), 2 * g.rotary_dim);
    if (content == nullptr) return false;
    known_ = PyDict_GetItemWithError(a_[kFrequencies], content);
    Py_XINCREF(known_);
    Py_DECREF(content);
    if (known_ == nullptr) return false;
    PyObject* rows = PyObject_GetAttr(known_, types_.rows);
    bool found = rows != nullptr && PyDict_CheckExact(rows);
    for (kvspeed_segment& s : list_) {
      if (!found || s.offset == 0) continue;
      PyObject* offset = PyLong_FromLongLong(s.offset);
      PyObject* row = offset == nullptr ? nullptr : PyDict_GetItemWithError(rows, offset);
      uintptr_t at = 0;
      found = row != nullptr && address(row, at);
      s.rope = reinterpret_cast<const float*>(at);
      Py_XDECREF(offset);
    }
    Py_XDECREF(rows);
    return found;
  }

  bool results() {
    out = PyObject_CallOneArg(types_.empty_like, a_[kQuery]);
    TensorView o;
    if (out == nullptr || !types_.reader.read(out, o) || o.ndim() != 4 || o.stride(3) != 1) return false;
    g.out = const_cast<char*>(o.data());
    for (int i = 0; i < 3; ++i) g.out_stride[i] = o.stride(i);
    if (!return_lse_) return true;
    lse = PyObject_CallOneArg(types_.make_lse, a_[kQuery]);
    TensorView l;
    if (lse == nullptr || !types_.reader.read(lse, l)) return false;
    g.lse = reinterpret_cast<float*>(const_cast<char*>(l.data()));
    return true;
  }

  const AttentionTypes& types_;
  PyObject* const* a_;
  std::vector<kvspeed_segment> list_;
  PyObject* known_ = nullptr;  // owned: keeps the rotation rows where they are
  int dtype_ = -1, where_ = -1;
  bool tracked_ = false, return_lse_ = false, turns_ = false;
};

}  // namespace kvspeed::python

#endif  // KVSPEED_ATTENTION_CALL_H_
