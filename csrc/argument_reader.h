// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Python's arguments in their plain forms, read from C++. Nothing here makes a message: what is not plain is left to
// kvspeed/ops/attention_checks.py.
#ifndef KVSPEED_ARGUMENT_READER_H_
#define KVSPEED_ARGUMENT_READER_H_

#include "tensor_reader.h"

namespace kvspeed::python {

constexpr int64_t kIntegerLimit = int64_t{1} << 31;
constexpr double kFactorLimit = 1e38;

// What Python gives once: the types, and the functions that make the results.
struct AttentionTypes {
  TensorReader reader;
  PyTypeObject *segment = nullptr, *segment_list = nullptr;
  PyObject *empty_like = nullptr, *make_lse = nullptr;
  const char* capsule = nullptr;  // the name of this module's capsules
  PyObject *key, *value, *offset, *start, *first, *page_table, *length, *requires_grad, *rows, *segments, *read,
      *is_neg;  // names
};

inline bool read_integer(PyObject* o, int64_t low, int64_t high, int64_t& to) {
  if (!PyLong_CheckExact(o)) return false;
  int overflow = 0;
  to = PyLong_AsLongLongAndOverflow(o, &overflow);
  return overflow == 0 && to >= low && to <= high;
}

inline bool read_boolean(PyObject* o, bool& to) {
  to = o == Py_True;
  return to || o == Py_False;
}

inline bool read_number(PyObject* o, double low, float& to) {
  if (!PyFloat_CheckExact(o)) return false;
  const double v = PyFloat_AS_DOUBLE(o);
  to = static_cast<float>(v);
  return v >= low && v <= kFactorLimit;
}

inline bool read_address(PyObject* o, uintptr_t& to) {
  to = PyLong_Check(o) ? static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(o)) : 0;
  return PyLong_Check(o) && PyErr_Occurred() == nullptr;
}

// A plain tensor; where autograd is on (`tracked`), one that does not require grad.
inline bool read_tensor(const AttentionTypes& types, bool tracked, PyObject* o, TensorView& view) {
  if (!types.reader.read(o, view)) return false;
  if (!tracked) return true;
  PyObject* wants = PyObject_GetAttr(o, types.requires_grad);
  Py_XDECREF(wants);
  return wants == Py_False;
}

// Whether a tensor is a lazily negated view, whose memory holds the negatives of its numbers. Asking costs as much as
// reading ten tensors, so it is asked where there is time. A view that torch makes of its own accord, `z.conj().imag`,
// is never plain otherwise: its numbers do not lie side by side, unless it has one only.
inline bool is_negated(const AttentionTypes& types, PyObject* o) {
  PyObject* negated = PyObject_CallMethodNoArgs(o, types.is_neg);
  Py_XDECREF(negated);
  return negated != Py_False;
}

// None, or a plain contiguous vector of that size (or of any, for -1).
inline bool read_vector(const AttentionTypes& types, bool tracked, PyObject* o, int dtype, int64_t size, int where,
                        const void*& to, int64_t* length = nullptr) {
  if (o == Py_None) return true;
  TensorView v;
  if (!read_tensor(types, tracked, o, v) || v.dtype() != dtype || v.ndim() != 1 || v.where() != where) return false;
  if ((size >= 0 && v.size(0) != size) || (v.size(0) > 1 && v.stride(0) != 1)) return false;
  if (v.size(0) == 1 && dtype == kFloat32 && is_negated(types, o)) return false;
  to = v.data();
  if (length != nullptr) *length = v.size(0);
  return to != nullptr || v.size(0) == 0;
}

}  // namespace kvspeed::python

#endif  // KVSPEED_ARGUMENT_READER_H_
