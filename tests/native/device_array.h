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
#include <string>
#include <vector>

#include "cuda/gpu.h"

#ifdef KVSPEED_SIMT
#include <map>

#include "simt/options.h"
#endif

namespace kvspeed::native {

#ifdef KVSPEED_SIMT

// What kernels that are launched without the C API may touch: all arrays that are alive.
struct LiveArray {
  size_t bytes;
  bool input;
};
inline std::map<void*, LiveArray>& live_arrays() {
  static std::map<void*, LiveArray> arrays;
  return arrays;
}
inline void show_arrays() {
  simt::forget_memory();
  for (const auto& [p, array] : live_arrays()) {
    simt::allow_memory(p, array.bytes, array.input ? simt::Allow::kRead : simt::Allow::kReadWrite, "an array");
  }
}
inline std::string error_text(int) { return simt::take_error(); }
inline void finish(const char*) {}  // a launch has run to its end when it returns
inline void* device_allocate(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
inline void device_free(void* p) { std::free(p); }
inline void device_copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#else

inline void show_arrays() {}
inline std::string error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
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

// Numbers in device memory, 256-byte aligned: made from host numbers to be read by kernels, or empty for them to fill.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count), data_(static_cast<T*>(device_allocate(count * sizeof(T) + 1))) {
#ifdef KVSPEED_SIMT
    live_arrays()[data_] = {bytes(), false};
#endif
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    if (count_ > 0) device_copy(data_, host.data(), count_ * sizeof(T));
#ifdef KVSPEED_SIMT
    live_arrays()[data_].input = true;
#endif
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() {
#ifdef KVSPEED_SIMT
    live_arrays().erase(data_);
#endif
    device_free(data_);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void fill(T x) {
    const std::vector<T> host(count_, x);
    device_copy(data_, host.data(), bytes());
  }
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
