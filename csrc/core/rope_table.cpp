// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "core/rope_table.h"

#include <cmath>

namespace kvspeed {

void fill_rope_row(int64_t offset, const float* inv_freq, int64_t half, float* cos, float* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(offset) * static_cast<double>(inv_freq[i]);
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
}

int64_t turning_pairs(const float* inv_freq, int64_t half) {
  while (half > 0 && inv_freq[half - 1] == 0.0f) --half;
  return half;
}

}  // namespace kvspeed
