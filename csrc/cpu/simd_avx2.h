// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The vector layer for AVX2 + FMA + F16C: eight floats. See simd_baseline.h for what each name means.
#ifndef KVSPEED_CPU_SIMD_AVX2_H_
#define KVSPEED_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include "cpu/types.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr int kGemmRows = 6;
constexpr int kStreamBytes = 32;

using F32 = __m256;

KVSPEED_SIMD F32 Set1(float x) { return _mm256_set1_ps(x); }
KVSPEED_SIMD F32 Zero() { return _mm256_setzero_ps(); }
KVSPEED_SIMD F32 Load(const float* p) { return _mm256_loadu_ps(p); }
KVSPEED_SIMD void Store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
KVSPEED_SIMD F32 Add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
KVSPEED_SIMD F32 Sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
KVSPEED_SIMD F32 Mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
KVSPEED_SIMD F32 Div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
KVSPEED_SIMD F32 Fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
KVSPEED_SIMD F32 Fnma(F32 a, F32 b, F32 c) { return _mm256_fnmadd_ps(a, b, c); }
KVSPEED_SIMD F32 Max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
KVSPEED_SIMD F32 Min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
KVSPEED_SIMD F32 Select(F32 x, F32 y, F32 a, F32 b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
KVSPEED_SIMD F32 Round(F32 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KVSPEED_SIMD F32 Pow2(F32 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
KVSPEED_SIMD float ReduceAdd(F32 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
KVSPEED_SIMD float ReduceMax(F32 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
KVSPEED_SIMD F32
ReduceEach(const F32* x) {  // halves, then quarters, then lanes: 7 additions and 14 shuffles for 8 sums
  const auto halves = [](F32 a, F32 b) { return Add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); };
  const auto quarters = [](F32 a, F32 b) { return Add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)); };
  const F32 a = quarters(halves(x[0], x[1]), halves(x[2], x[3]));
  const F32 b = quarters(halves(x[4], x[5]), halves(x[6], x[7]));
  return Add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
KVSPEED_SIMD void Transpose(F32* r) {
  F32 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
KVSPEED_SIMD F32 SwapPairs(F32 x) { return _mm256_permute_ps(x, 0xb1); }

KVSPEED_SIMD __m256i RoundToUpperHalf(F32 x) {  // bf16 in the upper 16 bits, round to nearest even
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

KVSPEED_SIMD F32 LoadAs(const float* p) { return Load(p); }
KVSPEED_SIMD F32 LoadAs(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
KVSPEED_SIMD F32 LoadAs(const BF16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
KVSPEED_SIMD __m128i ToHalf(const F16*, F32 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
KVSPEED_SIMD __m128i ToHalf(const BF16*, F32 x) {  // rounding may carry out of a NaN's bits, so NaNs take another way
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x400000));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(RoundToUpperHalf(x), quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
KVSPEED_SIMD void StoreAs(float* p, F32 x) { Store(p, x); }
KVSPEED_SIMD void StreamAs(float* p, F32 x) { _mm256_stream_ps(p, x); }
template <class T>
KVSPEED_SIMD void StoreAs(T* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), ToHalf(p, x));
}
template <class T>
KVSPEED_SIMD void StreamAs(T* p, F32 x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), ToHalf(p, x));
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
template <class T>
KVSPEED_SIMD void StreamPair(T* p, F32 a, F32 b) {
  StreamAs(p, a);
  StreamAs(p + kLanes, b);
}
KVSPEED_SIMD void SplitPair(__m256i bits, F32& a, F32& b) {
  a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
KVSPEED_SIMD __m256i JoinPair(F32 a, F32 b) {
  return _mm256_blend_epi16(_mm256_srli_epi32(RoundToUpperHalf(a), 16), RoundToUpperHalf(b), 0xaa);
}
template <>
KVSPEED_SIMD void LoadPair<BF16>(const BF16* p, F32& a, F32& b) {
  SplitPair(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), a, b);
}
template <>
KVSPEED_SIMD void StorePair<BF16>(BF16* p, F32 a, F32 b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), JoinPair(a, b));
}
template <>
KVSPEED_SIMD void StreamPair<BF16>(BF16* p, F32 a, F32 b) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), JoinPair(a, b));
}
template <class T>
KVSPEED_SIMD void LoadPairPartial(const T* p, int, F32& a, F32& b) {  // n is 8, the only multiple of 8 below 16
  a = LoadAs(p);
  b = Zero();
}
template <>
KVSPEED_SIMD void LoadPairPartial<BF16>(const BF16* p, int, F32& a, F32& b) {
  SplitPair(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), a, b);
}

KVSPEED_SIMD void StreamCopy64(void* to, const void* from) {
  const __m256i* source = static_cast<const __m256i*>(from);
  const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
  _mm256_stream_si256(static_cast<__m256i*>(to), a);
  _mm256_stream_si256(static_cast<__m256i*>(to) + 1, b);
}
KVSPEED_SIMD void StreamFence() { _mm_sfence(); }
KVSPEED_SIMD void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_SIMD_AVX2_H_
