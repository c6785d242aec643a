// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Host memory to device memory inside the parameters of a launch: no copy engine, no pinned buffer, nothing that must
// stay alive after the call. A captured CUDA graph keeps the parameters, so a replay writes the same bytes again.
#ifndef KVSPEED_CUDA_UPLOAD_CUH_
#define KVSPEED_CUDA_UPLOAD_CUH_

#include <cstddef>
#include <cstring>

#include "cuda/gpu.h"
#include "cuda/launch_params.h"

namespace kvspeed::cuda {

constexpr int kUploadThreads = 256;

template <int kBytes>
struct UploadParams {
  uint4* to;
  int32_t vectors;
  int32_t unused;
  uint4 data[kBytes / 16 - 1];
};
static_assert(sizeof(UploadParams<kSmallParams>) == kSmallParams && sizeof(UploadParams<kLargeParams>) == kLargeParams);

template <int kBytes>
KVS_KERNEL(kUploadThreads, 1)
void upload_kernel(KVS_PARAM UploadParams<kBytes> p) {
  const int i = gpu::block_index() * kUploadThreads + gpu::thread_index();
  if (i < p.vectors) gpu::store16(p.to + i, p.data[i]);
}

template <int kBytes>
int upload_part(void* to, const void* from, size_t bytes, gpu::Stream stream) {
  UploadParams<kBytes> p;
  p.to = static_cast<uint4*>(to);
  p.vectors = static_cast<int32_t>((bytes + 15) / 16);
  p.unused = 0;
  std::memset(reinterpret_cast<char*>(p.data) + (bytes & ~size_t{15}), 0, bytes % 16 == 0 ? 0 : 16);
  std::memcpy(p.data, from, bytes);
  const unsigned blocks = static_cast<unsigned>((p.vectors + kUploadThreads - 1) / kUploadThreads);
  return gpu::launch(upload_kernel<kBytes>, gpu::Grid{blocks, 1, 1}, kUploadThreads, 0, stream, p);
}

// How many bytes one launch brings over.
constexpr size_t kUploadBytes = kLargeParams - 16;

// Writes `bytes` of host memory to `to`, which is 16-byte aligned; up to 15 zeros follow the last byte. One launch for
// each kUploadBytes. Returns 0 or the runtime's error number.
inline int upload(void* to, const void* from, size_t bytes, gpu::Stream stream) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  while (bytes > 0) {
    const size_t part = bytes < kUploadBytes ? bytes : kUploadBytes;
    const int error = part <= kSmallParams - 16 ? upload_part<kSmallParams>(target, source, part, stream)
                                                : upload_part<kLargeParams>(target, source, part, stream);
    if (error != 0) return error;
    target += part, source += part, bytes -= part;
  }
  return 0;
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_UPLOAD_CUH_
