// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The vector layer for any processor: GCC vector extensions of four floats, no intrinsics. On x86-64 it is SSE2.
// simd_avx2.h, simd_avx512.h and simd_neon.h offer the same names; docs/cpu-kernels.md lists and explains them.
#ifndef KVSPEED_CPU_SIMD_BASELINE_H_
#define KVSPEED_CPU_SIMD_BASELINE_H_

#include <cmath>

#include "cpu/types.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

constexpr int kLanes = 4;  // floats in a vector
constexpr int kRegisters = 16;
constexpr int kGemmRows = 4;      // rows of a block in Gemm
constexpr int kStreamBytes = 64;  // alignment that streaming stores want

using F32 = float __attribute__((vector_size(16)));
using U32 = uint32_t __attribute__((vector_size(16)));

KVSPEED_SIMD F32 Set1(float x) { return F32{x, x, x, x}; }
KVSPEED_SIMD F32 Zero() { return Set1(0.0f); }
KVSPEED_SIMD F32 Load(const float* p) { return LoadBytes<F32>(p); }
KVSPEED_SIMD void Store(float* p, F32 x) { std::memcpy(p, &x, sizeof(x)); }
KVSPEED_SIMD F32 Add(F32 a, F32 b) { return a + b; }
KVSPEED_SIMD F32 Sub(F32 a, F32 b) { return a - b; }
KVSPEED_SIMD F32 Mul(F32 a, F32 b) { return a * b; }
KVSPEED_SIMD F32 Div(F32 a, F32 b) { return a / b; }
KVSPEED_SIMD F32 Fma(F32 a, F32 b, F32 c) { return a * b + c; }  // rounds twice here
KVSPEED_SIMD F32 Fnma(F32 a, F32 b, F32 c) { return c - a * b; }
KVSPEED_SIMD F32 Max(F32 a, F32 b) { return a > b ? a : b; }  // a NaN in b survives
KVSPEED_SIMD F32 Min(F32 a, F32 b) { return a < b ? a : b; }
KVSPEED_SIMD F32 Select(F32 x, F32 y, F32 a, F32 b) { return x < y ? a : b; }  // x < y ? a : b
KVSPEED_SIMD F32 Round(F32 x) {                                                // to nearest even, for |x| < 2^22
  const F32 magic = Set1(12582912.0f);
  return (x + magic) - magic;
}
KVSPEED_SIMD F32 Pow2(F32 n) {  // 2^n for whole n in [-126, 127]
  return BitCast<F32>((BitCast<U32>(n + Set1(12582912.0f + 127.0f)) << 23));
}
KVSPEED_SIMD float ReduceAdd(F32 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
KVSPEED_SIMD float ReduceMax(F32 x) {
  float m = x[0];
  for (int i = 1; i < 4; ++i) m = m > x[i] ? m : x[i];
  return m;
}

KVSPEED_SIMD void Transpose(F32* r) {
  const F32 a = r[0], b = r[1], c = r[2], d = r[3];
  for (int i = 0; i < 4; ++i) r[i] = F32{a[i], b[i], c[i], d[i]};
}
KVSPEED_SIMD F32 ReduceEach(const F32* x) {  // lane i: the sum of x[i]
  F32 r[4] = {x[0], x[1], x[2], x[3]};
  Transpose(r);
  return (r[0] + r[2]) + (r[1] + r[3]);
}
KVSPEED_SIMD F32 SwapPairs(F32 x) { return F32{x[1], x[0], x[3], x[2]}; }

// kLanes numbers in memory order.
KVSPEED_SIMD F32 LoadAs(const float* p) { return Load(p); }
KVSPEED_SIMD void StoreAs(float* p, F32 x) { Store(p, x); }
template <class T>
KVSPEED_SIMD F32 LoadAs(const T* p) {
  return F32{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
template <class T>
KVSPEED_SIMD void StoreAs(T* p, F32 x) {
  for (int i = 0; i < 4; ++i) p[i] = FromFloat<T>(x[i]);
}
template <class T>
KVSPEED_SIMD void StreamAs(T* p, F32 x) {
  StoreAs(p, x);
}

// 2 * kLanes numbers in pair order: for bf16 the even ones, then the odd ones, because a shift and a mask are all that
// takes; for the others memory order. StorePair is the inverse of LoadPair.
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
KVSPEED_SIMD U32 RoundToUpperHalf(F32 x) {
  const U32 bits = BitCast<U32>(x);
  return bits + (bits >> 16 & 1) + 0x7fff;
}
template <>
KVSPEED_SIMD void LoadPair<BF16>(const BF16* p, F32& a, F32& b) {
  const U32 bits = LoadBytes<U32>(p);
  a = BitCast<F32>(bits << 16);
  b = BitCast<F32>(bits & 0xffff0000u);
}
template <>
KVSPEED_SIMD void StorePair<BF16>(BF16* p, F32 a, F32 b) {
  const U32 bits = (RoundToUpperHalf(a) >> 16) | (RoundToUpperHalf(b) & 0xffff0000u);
  std::memcpy(p, &bits, sizeof(bits));
}
template <class T>
KVSPEED_SIMD void StreamPair(T* p, F32 a, F32 b) {
  StorePair(p, a, b);
}
// The first n (a multiple of 8 below 2 * kLanes) of a pair, the rest zero; never needed where 2 * kLanes is 8.
template <class T>
KVSPEED_SIMD void LoadPairPartial(const T*, int, F32& a, F32& b) {
  a = b = Zero();
}

KVSPEED_SIMD void StreamCopy64(void* to, const void* from) { std::memcpy(to, from, 64); }
KVSPEED_SIMD void StreamFence() {}
KVSPEED_SIMD void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_SIMD_BASELINE_H_
