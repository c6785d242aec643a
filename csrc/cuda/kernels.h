// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What csrc/core asks of the CUDA side: plain C++, no CUDA header. The core has validated the arguments; pointers to
// tensors, page tables, `first`, `sinks`, `rope` and `tail_tokens` are device memory, `inv_freq` and the structs host
// memory. Nothing here allocates, reads device memory on the host, synchronises, or keeps a host pointer beyond the
// call, so every call can be captured into a CUDA graph.
#ifndef KVSPEED_CUDA_KERNELS_H_
#define KVSPEED_CUDA_KERNELS_H_

#include <kvspeed/kvspeed.h>

namespace kvspeed::cuda {

size_t rope_concat_workspace(const kvspeed_rope_concat_args& args);
kvspeed_status rope_concat(const kvspeed_rope_concat_args& args, const kvspeed_execution& execution);

size_t segment_attention_workspace(const kvspeed_segment_attention_args& args, int32_t device_index);
// Checks the workspace itself, so that the work is laid out once.
kvspeed_status segment_attention(const kvspeed_segment_attention_args& args, const kvspeed_execution& execution);

kvspeed_status merge_states(const kvspeed_merge_states_args& args, const kvspeed_execution& execution);

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_KERNELS_H_
