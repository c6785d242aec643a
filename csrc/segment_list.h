// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Segments as the kernels take them, read from Python's. Those of a list are read at every call. Those of a
// kvspeed.SegmentList, which cannot change, are read at the first call; what was found is kept with it in a capsule and
// serves every later call of the same kind, whatever their number.
#ifndef KVSPEED_SEGMENT_LIST_H_
#define KVSPEED_SEGMENT_LIST_H_

#include <kvspeed/kvspeed.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "argument_reader.h"

namespace kvspeed::python {

// What the call asks of its segments.
struct SegmentDemand {
  int dtype = -1, where = -1;  // DLPack's; the index of a GPU, or -1
  bool on_gpu = false, tracked = false;
  int64_t batch = 0, heads_kv = 0, head_dim = 0;

  // Whether segments that were read for `o` are good for this.
  bool met_by(const SegmentDemand& o) const {
    return dtype == o.dtype && where == o.where && on_gpu == o.on_gpu && batch == o.batch && heads_kv == o.heads_kv &&
           head_dim == o.head_dim && (o.tracked || !tracked);
  }
};

// The frequencies of a call: on the host, and on a GPU what is known of them there (a dict by their bytes).
struct Frequencies {
  bool given = false;
  const float* data = nullptr;  // [half]
  int64_t half = 0;
  PyObject* on_gpu = nullptr;
};

// What was read. Not changed once it is complete, so that calls of several threads may share it.
class SegmentTable {
 public:
  explicit SegmentTable(const SegmentDemand& demand) : demand_(demand) {}
  ~SegmentTable() {
    Py_XDECREF(known_);
    Py_XDECREF(rows_on_gpu_);
  }
  SegmentTable(const SegmentTable&) = delete;
  SegmentTable& operator=(const SegmentTable&) = delete;

  const std::vector<kvspeed_segment>& list() const { return list_; }

  // False where a segment is not plain or does not fit; a Python error may be set. `kept`: for more than one call.
  bool read(const AttentionTypes& types, PyObject* given, bool kept) {
    const bool is_list = PyList_CheckExact(given);
    if (!is_list && !PyTuple_CheckExact(given)) return false;
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(given) : PyTuple_GET_SIZE(given);
    list_.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (is_list && i >= PyList_GET_SIZE(given)) return false;
      PyObject* o = is_list ? PyList_GET_ITEM(given, i) : PyTuple_GET_ITEM(given, i);
      if (Py_TYPE(o) != types.segment || !read_segment(types, o, list_[static_cast<size_t>(i)])) return false;
      if (kept && (is_negated(types, field(o, types.key)) || is_negated(types, field(o, types.value)))) return false;
    }
    return true;
  }

  // Rotation rows for the segments that turn: on a GPU those that lie there; on the CPU, whose kernels can do without,
  // only for a table that is kept. False where a row is not there.
  bool find_rows(const AttentionTypes& types, const Frequencies& f, bool kept) {
    if (!turns_) return true;
    if (!f.given) return false;
    if (kept) content_.assign(f.data, f.data + f.half);
    if (f.half == 0) return true;
    return demand_.on_gpu ? find_rows_on_gpu(types, f) : !kept || compute_rows(f);
  }

  // Whether a table that was kept is right for a call.
  bool serves(const AttentionTypes& types, const SegmentDemand& demand, const Frequencies& f) const {
    if (!demand.met_by(demand_)) return false;
    if (!turns_) return true;
    const size_t half = static_cast<size_t>(f.half);
    if (!f.given || content_.size() != half) return false;
    if (half > 0 && std::memcmp(content_.data(), f.data, 4 * half) != 0) return false;
    if (known_ == nullptr) return true;
    PyObject* rows = PyObject_GetAttr(known_, types.rows);  // another dict, once they have been forgotten
    Py_XDECREF(rows);
    return rows == rows_on_gpu_;
  }

  // Keys and values [B, H, T, D] or [H, T, D]; with pages [pages, page_size, H, D].
  static bool describe(const SegmentDemand& d, const TensorView& k, const TensorView& v, bool paged,
                       kvspeed_segment& s) {
    if (k.dtype() != d.dtype || v.dtype() != d.dtype || k.where() != d.where || v.where() != d.where ||
        k.ndim() != v.ndim() || k.ndim() < 3 || k.ndim() > 4) {
      return false;
    }
    const int n = k.ndim();
    for (int i = 0; i < n; ++i) {
      if (k.size(i) != v.size(i)) return false;
    }
    if (paged && n != 4) return false;
    const int head = paged ? n - 2 : n - 3, token = paged ? n - 3 : n - 2;
    if (k.size(n - 1) != d.head_dim || k.stride(n - 1) != 1 || v.stride(n - 1) != 1) return false;
    if (k.size(head) != d.heads_kv) return false;
    if (!paged && n == 4 && k.size(0) != d.batch) return false;
    s.key = k.data();
    s.value = v.data();
    if (n == 4) s.key_stride[0] = k.stride(0), s.value_stride[0] = v.stride(0);
    s.key_stride[1] = k.stride(head), s.value_stride[1] = v.stride(head);
    s.key_stride[2] = k.stride(token), s.value_stride[2] = v.stride(token);
    s.tokens = k.size(token);
    if (paged) s.page_size = s.tokens, s.pages = k.size(0);
    return (s.key != nullptr && s.value != nullptr) || s.tokens == 0;
  }

 private:
  // Owned for the time of the call by the segment, which the caller holds; so borrowed here.
  static PyObject* field(PyObject* segment, PyObject* name) {
    PyObject* o = PyObject_GetAttr(segment, name);
    Py_XDECREF(o);
    return o;
  }

  bool read_segment(const AttentionTypes& types, PyObject* o, kvspeed_segment& s) {
    PyObject *table = field(o, types.page_table), *length = field(o, types.length);
    PyObject *key = field(o, types.key), *value = field(o, types.value), *first = field(o, types.first);
    PyObject *offset = field(o, types.offset), *start = field(o, types.start);
    if (!table || !length || !key || !value || !first || !offset || !start) return false;
    const bool paged = table != Py_None;
    const void* padding = nullptr;
    TensorView k, v;
    if (!read_tensor(types, demand_.tracked, key, k) || !read_tensor(types, demand_.tracked, value, v) ||
        !describe(demand_, k, v, paged, s) || !read_integer(offset, -kIntegerLimit, kIntegerLimit, s.offset) ||
        !read_integer(start, -kIntegerLimit, kIntegerLimit, s.start) ||
        !read_vector(types, demand_.tracked, first, kInt32, demand_.batch, demand_.where, padding)) {
      return false;
    }
    s.first = static_cast<const int32_t*>(padding);
    turns_ = turns_ || s.offset != 0;
    return paged ? demand_.on_gpu && read_pages(types, table, length, s) : length == Py_None;
  }

  bool read_pages(const AttentionTypes& types, PyObject* table, PyObject* length, kvspeed_segment& s) const {
    TensorView t;
    if (!read_tensor(types, demand_.tracked, table, t) || t.dtype() != kInt32 || t.where() != demand_.where ||
        t.ndim() < 1 || t.ndim() > 2) {
      return false;
    }
    const int64_t entries = t.size(t.ndim() - 1);
    if ((t.ndim() == 2 && t.size(0) != demand_.batch) || (entries > 1 && t.stride(t.ndim() - 1) != 1)) return false;
    int64_t capacity;
    if (__builtin_mul_overflow(entries, s.page_size, &capacity)) return false;
    s.tokens = capacity;
    if (length != Py_None && !read_integer(length, 0, capacity, s.tokens)) return false;
    if (s.tokens == 0) {  // nothing to read: an ordinary empty segment
      s.page_size = s.pages = 0;
      return true;
    }
    s.page_table = reinterpret_cast<const int32_t*>(t.data());
    s.page_table_stride = t.ndim() == 2 ? t.stride(0) : 0;
    return s.page_table != nullptr;
  }

  // Found by the content of the frequencies.
  bool find_rows_on_gpu(const AttentionTypes& types, const Frequencies& f) {
    if (!PyDict_CheckExact(f.on_gpu)) return false;
    PyObject* content = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(f.data), 4 * f.half);
    if (content == nullptr) return false;
    known_ = PyDict_GetItemWithError(f.on_gpu, content);
    Py_XINCREF(known_);
    Py_DECREF(content);
    if (known_ == nullptr) return false;
    rows_on_gpu_ = PyObject_GetAttr(known_, types.rows);
    bool found = rows_on_gpu_ != nullptr && PyDict_CheckExact(rows_on_gpu_);
    for (kvspeed_segment& s : list_) {
      if (!found || s.offset == 0) continue;
      PyObject* offset = PyLong_FromLongLong(s.offset);
      PyObject* row = offset == nullptr ? nullptr : PyDict_GetItemWithError(rows_on_gpu_, offset);
      uintptr_t at = 0;
      found = row != nullptr && read_address(row, at);
      s.rope = reinterpret_cast<const float*>(at);
      Py_XDECREF(offset);
    }
    return found;
  }

  bool compute_rows(const Frequencies& f) {
    std::map<int64_t, size_t> place;
    for (const kvspeed_segment& s : list_) {
      if (s.offset != 0) place.try_emplace(s.offset, place.size());
    }
    const size_t row = 2 * static_cast<size_t>(f.half);
    rows_.resize(place.size() * row);
    for (const auto& [offset, i] : place) {
      if (kvspeed_rope_row(offset, f.data, f.half, rows_.data() + i * row) != KVSPEED_OK) return false;
    }
    for (kvspeed_segment& s : list_) {
      if (s.offset != 0) s.rope = rows_.data() + place[s.offset] * row;
    }
    return true;
  }

  const SegmentDemand demand_;
  std::vector<kvspeed_segment> list_;
  bool turns_ = false;
  std::vector<float> content_, rows_;                   // of the frequencies; the CPU's rotation rows
  PyObject *known_ = nullptr, *rows_on_gpu_ = nullptr;  // owned: they keep the GPU's rotation rows where they are
};

// The table that serves a call, whose `given` is a SegmentList: the one that it keeps, or else a new one, which it
// keeps from now on. Null where its segments are not plain. `owner` keeps the table alive and is the caller's to drop.
inline const SegmentTable* kept_table(const AttentionTypes& types, PyObject* given, const SegmentDemand& demand,
                                      const Frequencies& f, PyObject*& owner) {
  const char* kind = types.capsule;
  owner = PyObject_GetAttr(given, types.read);
  if (owner != nullptr && PyCapsule_IsValid(owner, kind)) {
    const auto* kept = static_cast<const SegmentTable*>(PyCapsule_GetPointer(owner, kind));
    if (kept->serves(types, demand, f)) return kept;
  }
  Py_XDECREF(owner);
  owner = nullptr;
  PyObject* segments = PyObject_GetAttr(given, types.segments);
  auto table = std::make_unique<SegmentTable>(demand);
  const bool plain = segments != nullptr && table->read(types, segments, true) && table->find_rows(types, f, true);
  Py_XDECREF(segments);
  if (!plain) return nullptr;
  owner = PyCapsule_New(table.get(), kind, [](PyObject* capsule) {
    delete static_cast<SegmentTable*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  });
  if (owner == nullptr) return nullptr;
  const SegmentTable* found = table.release();
  return PyObject_SetAttr(given, types.read, owner) == 0 ? found : nullptr;
}

}  // namespace kvspeed::python

#endif  // KVSPEED_SEGMENT_LIST_H_
