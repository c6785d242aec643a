// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_launch.cuh"

namespace kvspeed::cuda {

template int launch_attention<96>(AttentionKernel, kvspeed_dtype, const AttentionParams&, gpu::Stream);

}  // namespace kvspeed::cuda
