// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/merge_states.cuh"

namespace kvspeed::cuda {
namespace {

// 16 bytes of numbers of that type can be moved at once, wherever a row begins.
bool in_vectors(const void* data, const int64_t (&stride)[3], kvspeed_dtype dtype) {
  const int64_t numbers = dtype == KVSPEED_FLOAT32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride[0] % numbers == 0 && stride[1] % numbers == 0 &&
         stride[2] % numbers == 0;
}

template <class A>
int launch_merge(kvspeed_dtype dtype_b, gpu::Grid grid, gpu::Stream stream, const MergeParams& p) {
  switch (dtype_b) {
    case KVSPEED_FLOAT32:
      return gpu::launch(merge_states_kernel<A, float>, grid, kMergeThreads, 0, stream, p);
    case KVSPEED_BFLOAT16:
      return gpu::launch(merge_states_kernel<A, gpu::bf16>, grid, kMergeThreads, 0, stream, p);
    default:
      return gpu::launch(merge_states_kernel<A, gpu::f16>, grid, kMergeThreads, 0, stream, p);
  }
}

}  // namespace

kvspeed_status merge_states(const kvspeed_merge_states_args& g, const kvspeed_execution& execution) {
  gpu::announce(g, execution);
  const int64_t rows = g.batch * g.heads * g.tokens;
  if (rows == 0) return KVSPEED_OK;
  MergeParams p = {};
  p.vector = g.head_dim > 0 && g.head_dim % kMergeNumbers == 0 && in_vectors(g.out_a, g.out_a_stride, g.dtype_a) &&
             in_vectors(g.out_b, g.out_b_stride, g.dtype_b) && in_vectors(g.out, g.out_stride, g.dtype_a);
  const int64_t parts = g.head_dim == 0 ? 1 : p.vector ? g.head_dim / kMergeNumbers : g.head_dim;
  // Threads count in 32 bits; a step beyond the end must not wrap either.
  constexpr int64_t kMaxParts = int64_t{1} << 31;
  if (rows > kMaxParts || parts > kMaxParts || rows * parts > kMaxParts) return KVSPEED_UNSUPPORTED;
  p.out_a = g.out_a, p.out_b = g.out_b, p.out = g.out;
  p.lse_a = g.lse_a, p.lse_b = g.lse_b, p.lse = g.lse;
  for (int i = 0; i < 3; ++i) {
    p.out_a_stride[i] = g.out_a_stride[i], p.out_b_stride[i] = g.out_b_stride[i], p.out_stride[i] = g.out_stride[i];
    p.lse_a_stride[i] = g.lse_a_stride[i], p.lse_b_stride[i] = g.lse_b_stride[i];
  }
  p.heads = static_cast<uint32_t>(g.heads);
  p.tokens = static_cast<uint32_t>(g.tokens);
  p.parts = static_cast<uint32_t>(parts);
  p.total = static_cast<uint32_t>(rows * parts);
  p.head_dim = static_cast<int32_t>(g.head_dim);

  const DeviceGuard guard(execution.device_index);
  if (guard.error() != 0) return report(guard.error());
  const int64_t wanted = (rows * parts + kMergeThreads - 1) / kMergeThreads;
  const int64_t most = int64_t{sm_count(execution.device_index)} * kMergeBlocks;
  const gpu::Grid grid = {static_cast<unsigned>(wanted < most ? wanted : most), 1, 1};
  const gpu::Stream stream = static_cast<gpu::Stream>(execution.stream);
  switch (g.dtype_a) {
    case KVSPEED_FLOAT32:
      return report(launch_merge<float>(g.dtype_b, grid, stream, p));
    case KVSPEED_BFLOAT16:
      return report(launch_merge<gpu::bf16>(g.dtype_b, grid, stream, p));
    default:
      return report(launch_merge<gpu::f16>(g.dtype_b, grid, stream, p));
  }
}

}  // namespace kvspeed::cuda
