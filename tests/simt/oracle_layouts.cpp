// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Fragment layouts as CUTLASS publishes them, evaluated on the host.
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/tensor.hpp>

#include "simt/oracle.h"

namespace kvspeed::oracle {
namespace {

using Bf16 = cute::MMA_Traits<cute::SM80_16x8x16_F32BF16BF16F32_TN>;
using F16 = cute::MMA_Traits<cute::SM80_16x8x16_F32F16F16F32_TN>;

// Both layouts are in bits, and number the same bits.
template <class Traits>
int find(int t, int e) {
  const int bit = static_cast<int>(typename Traits::DstLayout{}(t, e * 16));
  for (int row = 0; row < 32; ++row) {
    for (int i = 0; i < 8; ++i) {
      if (static_cast<int>(typename Traits::SrcLayout{}(row, i * 16)) == bit) return row * 8 + i;
    }
  }
  return -1;
}

}  // namespace

int index_a(bool bf16, int t, int v) { return static_cast<int>(bf16 ? Bf16::ALayout{}(t, v) : F16::ALayout{}(t, v)); }
int index_b(bool bf16, int t, int v) { return static_cast<int>(bf16 ? Bf16::BLayout{}(t, v) : F16::BLayout{}(t, v)); }
int index_c(bool bf16, int t, int v) { return static_cast<int>(bf16 ? Bf16::CLayout{}(t, v) : F16::CLayout{}(t, v)); }
int loaded_number(bool transposed, int t, int e) {
  return transposed ? find<cute::Copy_Traits<cute::SM75_U16x8_LDSM_T>>(t, e)
                    : find<cute::Copy_Traits<cute::SM75_U32x4_LDSM_N>>(t, e);
}

}  // namespace kvspeed::oracle
