// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Included before everything else in kernels with planted faults (tests/test_simt_faults.py): which of them is on.
#ifndef KVSPEED_SIMT_PLANTED_H_
#define KVSPEED_SIMT_PLANTED_H_

namespace kvspeed::simt {

bool planted(int fault);  // KVSPEED_PLANTED is this number

}  // namespace kvspeed::simt

#endif  // KVSPEED_SIMT_PLANTED_H_
