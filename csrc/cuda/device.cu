// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>

#include "cuda/arch.h"
#include "cuda/device.h"

#ifdef KVSPEED_SIMT
#include "simt/gpu.h"

#define KVSPEED_CUDA_ARCHS "simt"
#else
#include <cuda_runtime_api.h>

#include "cuda_archs.h"  // KVSPEED_CUDA_ARCHS, written by CMake
#endif

namespace kvspeed::cuda {
namespace {

thread_local char last_error[512] = "";

// The names of the runtime that this file uses, and what the emulator says instead: one device, which never fails.
#ifdef KVSPEED_SIMT
constexpr int kInvalidDevice = 101;

int get_device(int* index) { return *index = 0; }
int set_device(int index) { return index == 0 ? 0 : kInvalidDevice; }
int query_sm_count(int, int* count) { return *count = 4, 0; }  // few, so that small tests fill the "device"
int query_shared_per_sm(int, int* bytes) { return *bytes = 228 << 10, 0; }
void describe(int error) { std::snprintf(last_error, sizeof(last_error), "%s", gpu::error_text(error)); }
bool no_code_for_device(int) { return false; }
#else
int get_device(int* index) { return static_cast<int>(cudaGetDevice(index)); }
int set_device(int index) { return static_cast<int>(cudaSetDevice(index)); }
int query_sm_count(int index, int* count) {
  return static_cast<int>(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, index));
}
int query_shared_per_sm(int index, int* bytes) {
  return static_cast<int>(cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index));
}
void describe(int error) {
  cudaGetLastError();  // unless it is a lasting one, the next call starts without it
  std::snprintf(last_error, sizeof(last_error), "%s (%d): %s", cudaGetErrorName(static_cast<cudaError_t>(error)), error,
                cudaGetErrorString(static_cast<cudaError_t>(error)));
}
bool no_code_for_device(int error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion ||
         error == cudaErrorJitCompilationDisabled;
}
#endif

// A property of each device; 0: not asked yet.
constexpr int kRemembered = 64;
using Remembered = std::atomic<int>[kRemembered];

int ask_once(Remembered& known, int device_index, int (*query)(int, int*)) {
  const bool remember = device_index >= 0 && device_index < kRemembered;
  int value = remember ? known[device_index].load(std::memory_order_relaxed) : 0;
  if (value == 0) {
    if (query(device_index, &value) != 0 || value < 1) return 1;
    if (remember) known[device_index].store(value, std::memory_order_relaxed);
  }
  return value;
}

}  // namespace

DeviceGuard::DeviceGuard(int index) {
  int current = 0;
  error_ = get_device(&current);
  if (error_ != 0 || current == index) return;
  error_ = set_device(index);
  if (error_ == 0) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) set_device(previous_);
}

kvspeed_status report(int error) {
  if (error == 0) return KVSPEED_OK;
  describe(error);
  return no_code_for_device(error) ? KVSPEED_UNSUPPORTED : KVSPEED_DEVICE_ERROR;
}

int sm_count(int device_index) {
  static Remembered counts;
  return ask_once(counts, device_index, query_sm_count);
}

int shared_per_sm(int device_index) {
  static Remembered sizes;
  return ask_once(sizes, device_index, query_shared_per_sm);
}

}  // namespace kvspeed::cuda

using namespace kvspeed;

int kvspeed_cuda_built(void) { return 1; }
const char* kvspeed_cuda_archs(void) { return KVSPEED_CUDA_ARCHS; }
const char* kvspeed_cuda_last_error(void) { return cuda::last_error; }

#ifdef KVSPEED_SIMT

int kvspeed_cuda_device_count(const char** message) {
  if (message != nullptr) *message = "";
  return 1;
}

int kvspeed_cuda_device_supported(int32_t device_index, int32_t* capability) {
  if (capability != nullptr) *capability = device_index == 0 ? 80 : 0;
  return device_index == 0;
}

#else

namespace {

// Why the runtime sees no device. The same number stands for no driver and for one that is too old.
const char* why_no_device(cudaError_t error) {
  if (error == cudaErrorNoDevice) return "the NVIDIA driver shows no CUDA device";
  if (error != cudaErrorInsufficientDriver) return cudaGetErrorString(error);
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return "there is no NVIDIA driver";
  switch (CUDART_VERSION / 1000) {
    case 12:
      return "the NVIDIA driver is too old: kernels built with CUDA 12 need driver 525 or newer";
    case 13:
      return "the NVIDIA driver is too old: kernels built with CUDA 13 need driver 580 or newer";
    default:
      return "the NVIDIA driver is older than the CUDA version that the kernels were built with";
  }
}

}  // namespace

int kvspeed_cuda_device_count(const char** message) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    count = 0;
  }
  if (message != nullptr) *message = error != cudaSuccess ? why_no_device(error) : "";
  return count;
}

int kvspeed_cuda_device_supported(int32_t device_index, int32_t* capability) {
  int major = 0, minor = 0;
  const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index) == cudaSuccess;
  if (!known) {
    cudaGetLastError();
    major = minor = 0;
  }
  if (capability != nullptr) *capability = 10 * major + minor;
  return known && cuda::archs_serve(KVSPEED_CUDA_ARCHS, 10 * major + minor);
}

#endif
