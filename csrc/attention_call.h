// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// segment_attention straight from Python's arguments, for the calls that a model makes at every layer and step: plain
// tensors in their plain form. What this does not take, for whatever reason, it leaves to kvspeed/ops/attention.py,
// which finds out slowly what is wrong; so no message is made here, and nothing is computed before all is checked.
#ifndef KVSPEED_ATTENTION_CALL_H_
#define KVSPEED_ATTENTION_CALL_H_

#include <cmath>
#include <optional>

#include "segment_list.h"

namespace kvspeed::python {

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
    Py_XDECREF(table_owner_);
  }
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  // Fills the structs and makes the results; false where an argument is not plain. A Python error may be set.
  bool prepare() { return execution() && query() && numbers() && vectors() && tail() && segments() && results(); }

 private:
  bool execution() {
    int64_t threads, isa, kind, index;
    if (!read_boolean(a_[kTracked], demand_.tracked) || !read_integer(a_[kNumThreads], 1, 1 << 20, threads) ||
        !read_integer(a_[kIsa], 0, 100, isa)) {
      return false;
    }
    e.num_threads = static_cast<int32_t>(threads);
    e.isa = static_cast<kvspeed_isa>(isa);
    if (a_[kDevice] == Py_None) return true;
    if (!PyTuple_CheckExact(a_[kDevice]) || PyTuple_GET_SIZE(a_[kDevice]) != 5) return false;
    const auto item = [this](Py_ssize_t i) { return PyTuple_GET_ITEM(a_[kDevice], i); };
    uintptr_t stream, workspace, bytes;
    if (!read_integer(item(0), 1, 1, kind) || !read_integer(item(1), 0, 1 << 20, index) ||
        !read_address(item(2), stream) || !read_address(item(3), workspace) || !read_address(item(4), bytes)) {
      return false;
    }
    e.device = static_cast<kvspeed_device>(kind);
    e.device_index = static_cast<int32_t>(index);
    e.stream = reinterpret_cast<void*>(stream);
    e.workspace = reinterpret_cast<void*>(workspace);
    e.workspace_bytes = bytes;
    return true;
  }

  bool read(AttentionArgument i, TensorView& view) const { return read_tensor(types_, demand_.tracked, a_[i], view); }

  template <class T>
  bool vector(AttentionArgument i, int dtype, int64_t size, int where, const T*& to, int64_t* length = nullptr) const {
    const void* data = nullptr;
    if (!read_vector(types_, demand_.tracked, a_[i], dtype, size, where, data, length)) return false;
    to = static_cast<const T*>(data);
    return true;
  }

  bool query() {
    TensorView q;
    if (!read(kQuery, q) || q.ndim() != 4 || q.stride(3) != 1) return false;
    const int dtype = demand_.dtype = q.dtype(), where = demand_.where = q.where();
    const bool on_gpu = demand_.on_gpu = e.device == KVSPEED_CUDA;
    g.batch = demand_.batch = q.size(0);
    g.heads = q.size(1);
    g.query_tokens = q.size(2);
    g.head_dim = demand_.head_dim = q.size(3);
    for (int i = 0; i < 3; ++i) g.query_stride[i] = q.stride(i);
    g.query = q.data();
    g.dtype = dtype == kFloat32 ? KVSPEED_FLOAT32 : dtype == kBfloat16 ? KVSPEED_BFLOAT16 : KVSPEED_FLOAT16;
    if (dtype != kBfloat16 && dtype != kFloat16 && (dtype != kFloat32 || on_gpu)) return false;
    if (where < -1 || (where >= 0 && !on_gpu)) return false;
    if (g.query == nullptr || g.batch == 0 || g.heads == 0 || g.query_tokens == 0) return false;  // nothing to do
    const int64_t d = g.head_dim;
    return on_gpu ? d == 64 || d == 80 || d == 96 || d == 128 || d == 256 : d % 8 == 0 && d >= 8 && d <= 256;
  }

  bool numbers() {
    bool interleaved;
    if (!read_boolean(a_[kInterleaved], interleaved) || !read_boolean(a_[kReturnLse], return_lse_)) return false;
    g.interleaved = interleaved;
    if (a_[kScale] == Py_None) {
      g.scale = static_cast<float>(std::pow(static_cast<double>(g.head_dim), -0.5));
    } else if (!read_number(a_[kScale], -kFactorLimit, g.scale)) {
      return false;
    }
    const auto optional = [this](AttentionArgument i, int64_t low, int64_t& to) {
      return a_[i] == Py_None || read_integer(a_[i], low, kIntegerLimit, to);
    };
    if (a_[kWindow] != Py_None && a_[kTailStart] == Py_None) return false;
    return optional(kWindow, 1, g.window) && optional(kTailStart, -kIntegerLimit, g.tail.start) &&
           optional(kSplitTokens, 1, g.split_tokens) && read_number(a_[kSoftcap], 0.0, g.softcap);
  }

  bool vectors() {
    if (!vector(kSinks, kFloat32, g.heads, demand_.where, g.sinks) ||
        !vector(kInvFreq, kFloat32, -1, -1, g.inv_freq, &frequencies_.half) ||
        !vector(kTailLength, kInt32, g.batch, demand_.where, g.tail_tokens) ||
        !vector(kTailFirst, kInt32, g.batch, demand_.where, g.tail.first)) {
      return false;
    }
    frequencies_.given = a_[kInvFreq] != Py_None;
    frequencies_.data = g.inv_freq;
    frequencies_.on_gpu = a_[kFrequencies];
    g.rotary_dim = 2 * frequencies_.half;
    return g.rotary_dim <= g.head_dim && (g.tail_tokens == nullptr || demand_.on_gpu);
  }

  bool tail() {
    TensorView k, v;
    if (!read(kTailKey, k) || !read(kTailValue, v) || k.ndim() != 4) return false;
    g.heads_kv = demand_.heads_kv = k.size(1);
    return g.heads_kv > 0 && g.heads % g.heads_kv == 0 && SegmentTable::describe(demand_, k, v, false, g.tail);
  }

  bool segments() {
    const SegmentTable* table = nullptr;
    if (Py_TYPE(a_[kSegments]) == types_.segment_list) {
      table = kept_table(types_, a_[kSegments], demand_, frequencies_, table_owner_);
    } else {
      own_table_.emplace(demand_);
      const bool plain =
          own_table_->read(types_, a_[kSegments], false) && own_table_->find_rows(types_, frequencies_, false);
      table = plain ? &*own_table_ : nullptr;
    }
    if (table == nullptr) return false;
    g.segments = table->list().data();
    g.num_segments = static_cast<int64_t>(table->list().size());
    return true;
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
  SegmentDemand demand_;
  Frequencies frequencies_;
  std::optional<SegmentTable> own_table_;
  PyObject* table_owner_ = nullptr;  // owned: keeps a table that is shared
  bool return_lse_ = false;
};

}  // namespace kvspeed::python

#endif  // KVSPEED_ATTENTION_CALL_H_
