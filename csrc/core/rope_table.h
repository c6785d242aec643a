// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// cos and sin of offset * inv_freq, computed in float64 and rounded once to float32.
#ifndef KVSPEED_CORE_ROPE_TABLE_H_
#define KVSPEED_CORE_ROPE_TABLE_H_

#include <cstdint>

namespace kvspeed {

// Fills cos[half] and sin[half]. An offset times a frequency is exact to 1e-16 of its size, so angles of millions of
// radians still keep more digits than float32 shows.
void fill_rope_row(int64_t offset, const float* inv_freq, int64_t half, float* cos, float* sin);

// Pairs up to the last one whose frequency is not 0: the part of a row that turns at all.
int64_t turning_pairs(const float* inv_freq, int64_t half);

}  // namespace kvspeed

#endif  // KVSPEED_CORE_ROPE_TABLE_H_
