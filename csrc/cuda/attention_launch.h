// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The attention kernels by head dimension: each is compiled in a file of its own, attention_d<D>.cu.
#ifndef KVSPEED_CUDA_ATTENTION_LAUNCH_H_
#define KVSPEED_CUDA_ATTENTION_LAUNCH_H_

#include <kvspeed/kvspeed.h>

#include "cuda/attention.h"
#include "cuda/gpu.h"

namespace kvspeed::cuda {

enum class AttentionKernel { kDecode, kPrefill64, kPrefill128 };  // the number: packed rows of a block

// 0 or the runtime's error number; `dtype` is bfloat16 or float16.
template <int D>
int launch_attention(AttentionKernel kernel, kvspeed_dtype dtype, const AttentionParams& p, gpu::Stream stream);

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_LAUNCH_H_
