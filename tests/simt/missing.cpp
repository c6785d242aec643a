// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Stands in for operations whose .cu files are left out (SIMT_KERNELS).
#include "cuda/attention_launch.h"
#include "cuda/kernels.h"

namespace kvspeed::cuda {

[[gnu::weak]] size_t rope_concat_workspace(const kvspeed_rope_concat_args&) { return 0; }
[[gnu::weak]] kvspeed_status rope_concat(const kvspeed_rope_concat_args&, const kvspeed_execution&) {
  return KVSPEED_UNSUPPORTED;
}
[[gnu::weak]] size_t segment_attention_workspace(const kvspeed_segment_attention_args&, int32_t) { return 0; }
[[gnu::weak]] kvspeed_status segment_attention(const kvspeed_segment_attention_args&, const kvspeed_execution&) {
  return KVSPEED_UNSUPPORTED;
}
[[gnu::weak]] kvspeed_status merge_states(const kvspeed_merge_states_args&, const kvspeed_execution&) {
  return KVSPEED_UNSUPPORTED;
}

// Head dimensions that are left out, X(64) X(80) ...
#define X(d)                                                                                     \
  template <>                                                                                    \
  int launch_attention<d>(AttentionKernel, kvspeed_dtype, const AttentionParams&, gpu::Stream) { \
    return 1;                                                                                    \
  }
KVSPEED_SIMT_LEFT_OUT
#undef X

}  // namespace kvspeed::cuda
