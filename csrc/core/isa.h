// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Which CPU kernels are built, which this processor runs, and which a call gets.
#ifndef KVSPEED_CORE_ISA_H_
#define KVSPEED_CORE_ISA_H_

#include "cpu/kernels.h"

namespace kvspeed {

// The kernels of `isa`, AUTO being the best; NULL when they are not built or the processor lacks the instructions.
const CpuKernels* cpu_kernels(kvspeed_isa isa);

}  // namespace kvspeed

#endif  // KVSPEED_CORE_ISA_H_
