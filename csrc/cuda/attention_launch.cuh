// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#ifndef KVSPEED_CUDA_ATTENTION_LAUNCH_CUH_
#define KVSPEED_CUDA_ATTENTION_LAUNCH_CUH_

#include "cuda/attention_launch.h"
#include "cuda/attention_plan.h"
#include "cuda/segment_decode.cuh"
#include "cuda/segment_prefill.cuh"

namespace kvspeed::cuda {

template <class T, int D, int kRowTiles>
int launch_prefill(const AttentionParams& p, gpu::Stream stream) {
  using Shape = PrefillShape<D, kRowTiles>;
  static_assert(prefill_shared(D, kRowTiles) == kPrefillSharedBytes<D, kRowTiles> && prefill_keys(D) == Shape::kKeys);
  const unsigned tiles = static_cast<unsigned>((p.rows + Shape::kRows - 1) / Shape::kRows);
  const gpu::Grid grid = {tiles * static_cast<unsigned>(p.batch * p.heads_kv * p.splits), 1, 1};
  return gpu::launch(segment_prefill_kernel<T, D, kRowTiles>, grid, Shape::kThreads, kPrefillSharedBytes<D, kRowTiles>,
                     stream, p);
}

template <class T, int D>
int launch_typed(AttentionKernel kernel, const AttentionParams& p, gpu::Stream stream) {
  if (kernel == AttentionKernel::kDecode) {
    using Shape = DecodeShape<D>;
    const gpu::Grid grid = {static_cast<unsigned>(p.batch * p.heads_kv * p.splits), 1, 1};
    return gpu::launch(segment_decode_kernel<T, D>, grid, Shape::kThreads, Shape::kSharedBytes, stream, p);
  }
  if constexpr (D <= 128) {
    if (kernel == AttentionKernel::kPrefill128) return launch_prefill<T, D, 2>(p, stream);
  }
  return launch_prefill<T, D, 1>(p, stream);
}

template <int D>
int launch_attention(AttentionKernel kernel, kvspeed_dtype dtype, const AttentionParams& p, gpu::Stream stream) {
  return dtype == KVSPEED_BFLOAT16 ? launch_typed<gpu::bf16, D>(kernel, p, stream)
                                   : launch_typed<gpu::f16, D>(kernel, p, stream);
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_LAUNCH_CUH_
