// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Compiled once per instruction set, with -DKVSPEED_ISA_NAME and -DKVSPEED_SIMD_HEADER from CMakeLists.txt.
#include KVSPEED_SIMD_HEADER
#include "cpu/kernels.h"

#include "cpu/merge_states.h"
#include "cpu/rope_concat.h"
#include "cpu/segment_attention.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

extern const CpuKernels kKernels;
const CpuKernels kKernels = {RopeConcat, SegmentAttention, MergeStates};

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME
