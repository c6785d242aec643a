// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The vector layer for aarch64 NEON: four floats, 32 registers. See simd_baseline.h for what each name means.
#ifndef KVSPEED_CPU_SIMD_NEON_H_
#define KVSPEED_CPU_SIMD_NEON_H_

#include <arm_neon.h>

#include "cpu/types.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

constexpr int kLanes = 4;
constexpr int kRegisters = 32;
constexpr int kGemmRows = 6;
constexpr int kStreamBytes = 16;

using F32 = float32x4_t;

KVSPEED_SIMD F32 Set1(float x) { return vdupq_n_f32(x); }
KVSPEED_SIMD F32 Zero() { return vdupq_n_f32(0.0f); }
KVSPEED_SIMD F32 Load(const float* p) { return vld1q_f32(p); }
KVSPEED_SIMD void Store(float* p, F32 x) { vst1q_f32(p, x); }
KVSPEED_SIMD F32 Add(F32 a, F32 b) { return vaddq_f32(a, b); }
KVSPEED_SIMD F32 Sub(F32 a, F32 b) { return vsubq_f32(a, b); }
KVSPEED_SIMD F32 Mul(F32 a, F32 b) { return vmulq_f32(a, b); }
KVSPEED_SIMD F32 Div(F32 a, F32 b) { return vdivq_f32(a, b); }
KVSPEED_SIMD F32 Fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
KVSPEED_SIMD F32 Fnma(F32 a, F32 b, F32 c) { return vfmsq_f32(c, a, b); }
KVSPEED_SIMD F32 Max(F32 a, F32 b) { return vmaxq_f32(a, b); }
KVSPEED_SIMD F32 Min(F32 a, F32 b) { return vminq_f32(a, b); }
KVSPEED_SIMD F32 Select(F32 x, F32 y, F32 a, F32 b) { return vbslq_f32(vcltq_f32(x, y), a, b); }
KVSPEED_SIMD F32 Round(F32 x) { return vrndnq_f32(x); }
KVSPEED_SIMD F32 Pow2(F32 n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
KVSPEED_SIMD float ReduceAdd(F32 x) { return vaddvq_f32(x); }
KVSPEED_SIMD float ReduceMax(F32 x) { return vmaxvq_f32(x); }
KVSPEED_SIMD F32 ReduceEach(const F32* x) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }
KVSPEED_SIMD void Transpose(F32* r) {
  const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
KVSPEED_SIMD F32 SwapPairs(F32 x) { return vrev64q_f32(x); }

KVSPEED_SIMD uint32x4_t RoundToUpperHalf(F32 x) {  // bf16 in the upper 16 bits, round to nearest even
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
KVSPEED_SIMD const uint16_t* Bits(const void* p) { return static_cast<const uint16_t*>(p); }
KVSPEED_SIMD uint16_t* Bits(void* p) { return static_cast<uint16_t*>(p); }

KVSPEED_SIMD F32 LoadAs(const float* p) { return Load(p); }
KVSPEED_SIMD F32 LoadAs(const F16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(Bits(p)))); }
KVSPEED_SIMD F32 LoadAs(const BF16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(Bits(p)), 16)); }
KVSPEED_SIMD void StoreAs(float* p, F32 x) { Store(p, x); }
KVSPEED_SIMD void StoreAs(F16* p, F32 x) { vst1_u16(Bits(p), vreinterpret_u16_f16(vcvt_f16_f32(x))); }
KVSPEED_SIMD void StoreAs(BF16* p, F32 x) {  // rounding may carry out of a NaN's bits, so NaNs take another way
  const uint32x4_t quiet = vorrq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x400000));
  vst1_u16(Bits(p), vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), RoundToUpperHalf(x), quiet), 16));
}
template <class T>
KVSPEED_SIMD void StreamAs(T* p, F32 x) {  // no streaming store that pays is known here
  StoreAs(p, x);
}

template <class T>
KVSPEED_SIMD void LoadPair(const T* p, F32& a, F32& b) {
  a = LoadAs(p);
  b = LoadAs(p + kLanes);
}
template <class T>
KVSPEED_SIMD void StorePair(T* p, F32 a, F32 b) {
  StoreAs(p, a);
  StoreAs(p + kLanes, b);
}
template <>
KVSPEED_SIMD void LoadPair<BF16>(const BF16* p, F32& a, F32& b) {
  const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(Bits(p)));
  a = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
  b = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
}
template <>
KVSPEED_SIMD void StorePair<BF16>(BF16* p, F32 a, F32 b) {
  const uint32x4_t low = vshrq_n_u32(RoundToUpperHalf(a), 16);
  vst1q_u16(Bits(p), vreinterpretq_u16_u32(vbslq_u32(vdupq_n_u32(0xffffu), low, RoundToUpperHalf(b))));
}
template <class T>
KVSPEED_SIMD void StreamPair(T* p, F32 a, F32 b) {
  StorePair(p, a, b);
}
template <class T>
KVSPEED_SIMD void LoadPairPartial(const T*, int, F32& a, F32& b) {  // never needed: a pair is 8 numbers
  a = b = Zero();
}

KVSPEED_SIMD void StreamCopy64(void* to, const void* from) { std::memcpy(to, from, 64); }
KVSPEED_SIMD void StreamFence() {}
KVSPEED_SIMD void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_SIMD_NEON_H_
