// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Arrays in device memory for the programs here, which nvcc builds for a GPU and a plain C++ compiler for the emulator.
// A failing runtime call ends the program with the runtime's words: nothing after it could be believed.
#ifndef KVSPEED_TESTS_NATIVE_DEVICE_ARRAY_H_
#define KVSPEED_TESTS_NATIVE_DEVICE_ARRAY_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/gpu.h"

namespace kvspeed::native {

#ifdef KVSPEED_SIMT

inline void finish(const char*) {}  // a launch has run to its end when it returns
inline void* device_allocate(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
inline void device_free(void* p) { std::free(p); }
inline void device_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#else

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAIL %s: %s (%s)\n", what, cudaGetErrorString(error), cudaGetErrorName(error));
  std::exit(1);
}
inline void finish(const char* what) {
  check(cudaGetLastError(), what);
  check(cudaDeviceSynchronize(), what);
}
inline void* device_allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes), "cudaMalloc");
  return p;
}
inline void device_free(void* p) { cudaFree(p); }
inline void device_copy(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

#endif

// `count` numbers in device memory; 256-byte aligned.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count), data_(static_cast<T*>(device_allocate(count * sizeof(T) + 1))) {}
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    if (count_ > 0) device_copy(data_, host.data(), count_ * sizeof(T));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { device_free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  std::vector<T> host() const {
    std::vector<T> result(count_);
    if (count_ > 0) device_copy(result.data(), data_, count_ * sizeof(T));
    return result;
  }

 private:
  size_t count_;
  T* data_;
};

}  // namespace kvspeed::native

#endif  // KVSPEED_TESTS_NATIVE_DEVICE_ARRAY_H_
