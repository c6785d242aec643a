// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// torch tensors read from C++ without a symbol of torch: through the table of C functions that torch.Tensor offers as
// __dlpack_c_exchange_api__ (DLPack 1.2 and later; torch 2.10 and later). Reading one costs some ten nanoseconds,
// where each attribute costs fifty from Python. Where the table is missing everything goes through Python.
#ifndef KVSPEED_TENSOR_READER_H_
#define KVSPEED_TENSOR_READER_H_

#include <Python.h>

#include <cstdint>

namespace kvspeed::python {

// The structs of DLPack's version 1, under their own names there: DLTensor, DLPackExchangeAPI.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlExchange {
  uint32_t major, minor;
  const DlExchange* previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
  void* current_work_stream;
};

constexpr int32_t kDlCpu = 1, kDlCuda = 2;
enum DlDtype : int { kInt32 = 0x0020, kFloat32 = 0x0220, kFloat16 = 0x0210, kBfloat16 = 0x0410 };  // code and bits

struct TensorView {
  DlTensor dl;

  int dtype() const { return dl.dtype_lanes == 1 ? dl.dtype_code << 8 | dl.dtype_bits : -1; }
  int ndim() const { return dl.ndim; }
  int64_t size(int i) const { return dl.shape[i]; }
  int64_t stride(int i) const { return dl.strides[i]; }
  const char* data() const { return dl.data == nullptr ? nullptr : static_cast<const char*>(dl.data) + dl.byte_offset; }
  // The index of a GPU, or -1 for the CPU; -2 elsewhere.
  int where() const { return dl.device_type == kDlCpu ? -1 : dl.device_type == kDlCuda ? dl.device_id : -2; }
};

class TensorReader {
 public:
  // False where the type offers no such table.
  bool start(PyObject* tensor_type) {
    PyObject* capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    const void* table = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    PyErr_Clear();
    const auto* api = static_cast<const DlExchange*>(table);
    while (api != nullptr && api->major > 1) api = api->previous;
    if (api == nullptr || api->major != 1 || api->tensor_from_object == nullptr) return false;
    Py_INCREF(tensor_type);
    type_ = reinterpret_cast<PyTypeObject*>(tensor_type);
    read_ = api->tensor_from_object;
    return true;
  }

  // False for anything but a plain tensor (not a subclass) with strides; then no Python error is set.
  bool read(PyObject* object, TensorView& view) const {
    if (Py_TYPE(object) != type_) return false;
    if (read_(object, &view.dl) != 0) {
      PyErr_Clear();
      return false;
    }
    return view.dl.ndim == 0 || (view.dl.shape != nullptr && view.dl.strides != nullptr);
  }

 private:
  PyTypeObject* type_ = nullptr;
  int (*read_)(void*, DlTensor*) = nullptr;
};

}  // namespace kvspeed::python

#endif  // KVSPEED_TENSOR_READER_H_
