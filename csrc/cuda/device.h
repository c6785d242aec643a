// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Devices and errors, for the launchers: plain C++, no CUDA header. Error numbers are the runtime's (cudaError_t), 0
// being success. Under KVSPEED_SIMT there is one device, index 0, which is the emulator.
#ifndef KVSPEED_CUDA_DEVICE_H_
#define KVSPEED_CUDA_DEVICE_H_

#include <kvspeed/kvspeed.h>

namespace kvspeed::cuda {

// Makes `index` the current device, and the one before current again at the end. Where they are the same, nothing but
// one query happens. A launcher asks error() first and launches nothing unless it is 0.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  int error() const { return error_; }

 private:
  int previous_ = -1;  // -1: nothing to restore
  int error_ = 0;
};

// The status that a launcher returns for an error number: KVSPEED_UNSUPPORTED where this build has no code that the
// device can run, KVSPEED_DEVICE_ERROR else. Keeps the runtime's text for kvspeed_cuda_last_error().
kvspeed_status report(int error);

// Streaming multiprocessors of a device, and bytes of shared memory of each. At least 1 even where the runtime refuses
// to say. Asked once, then remembered.
int sm_count(int device_index);
int shared_per_sm(int device_index);

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_DEVICE_H_
