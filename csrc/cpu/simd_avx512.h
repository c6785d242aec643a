// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The vector layer for AVX-512 (F, BW, VL, DQ): sixteen floats. See simd_baseline.h for what each name means.
#ifndef KVSPEED_CPU_SIMD_AVX512_H_
#define KVSPEED_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include "cpu/types.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
constexpr int kGemmRows = 6;
constexpr int kStreamBytes = 64;

using F32 = __m512;

KVSPEED_SIMD F32 Set1(float x) { return _mm512_set1_ps(x); }
KVSPEED_SIMD F32 Zero() { return _mm512_setzero_ps(); }
KVSPEED_SIMD F32 Load(const float* p) { return _mm512_loadu_ps(p); }
KVSPEED_SIMD void Store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
KVSPEED_SIMD F32 Add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
KVSPEED_SIMD F32 Sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
KVSPEED_SIMD F32 Mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
KVSPEED_SIMD F32 Div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
KVSPEED_SIMD F32 Fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
KVSPEED_SIMD F32 Fnma(F32 a, F32 b, F32 c) { return _mm512_fnmadd_ps(a, b, c); }
KVSPEED_SIMD F32 Max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
KVSPEED_SIMD F32 Min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
KVSPEED_SIMD F32 Select(F32 x, F32 y, F32 a, F32 b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a);
}
KVSPEED_SIMD F32 Round(F32 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KVSPEED_SIMD F32 Pow2(F32 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
KVSPEED_SIMD __m256 LowerHalf(F32 x) { return _mm512_castps512_ps256(x); }
KVSPEED_SIMD __m256 UpperHalf(F32 x) { return _mm512_extractf32x8_ps(x, 1); }
KVSPEED_SIMD float ReduceAdd(F32 x) {
  const __m256 y = _mm256_add_ps(LowerHalf(x), UpperHalf(x));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
KVSPEED_SIMD float ReduceMax(F32 x) {
  const __m256 y = _mm256_max_ps(LowerHalf(x), UpperHalf(x));
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
KVSPEED_SIMD F32 ReduceEach(const F32* x) {  // as in AVX2, one level deeper: 15 additions and 30 shuffles for 16 sums
  const auto halves = [](F32 a, F32 b) { return Add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const auto quarters = [](F32 a, F32 b) { return Add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); };
  const auto lanes = [](F32 a, F32 b) {
    return Add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  F32 q[4];
  for (int i = 0; i < 4; ++i) {
    q[i] = quarters(halves(x[4 * i], x[4 * i + 1]), halves(x[4 * i + 2], x[4 * i + 3]));
  }
  return lanes(lanes(q[0], q[1]), lanes(q[2], q[3]));
}
KVSPEED_SIMD void Transpose(F32* r) {  // 4 x 4 within the 128-bit lanes, then the lanes among themselves
  F32 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    const F32 a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    const F32 c = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd), d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}
KVSPEED_SIMD F32 SwapPairs(F32 x) { return _mm512_permute_ps(x, 0xb1); }

KVSPEED_SIMD __m512i RoundToUpperHalf(F32 x) {  // bf16 in the upper 16 bits, round to nearest even
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

KVSPEED_SIMD F32 LoadAs(const float* p) { return Load(p); }
KVSPEED_SIMD F32 LoadAs(const F16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KVSPEED_SIMD F32 LoadAs(const BF16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
KVSPEED_SIMD __m256i ToHalf(const F16*, F32 x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KVSPEED_SIMD __m256i ToHalf(const BF16*, F32 x) {  // rounding may carry out of a NaN's bits, so NaNs take another way
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(RoundToUpperHalf(x), nan, quiet), 16));
}
KVSPEED_SIMD void StoreAs(float* p, F32 x) { Store(p, x); }
KVSPEED_SIMD void StreamAs(float* p, F32 x) { _mm512_stream_ps(p, x); }
template <class T>
KVSPEED_SIMD void StoreAs(T* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), ToHalf(p, x));
}
template <class T>
KVSPEED_SIMD void StreamAs(T* p, F32 x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), ToHalf(p, x));
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
// Two converted vectors of f16 make one whole cache line, which streams best as a single store.
template <class T>
KVSPEED_SIMD void StreamPair(T* p, F32 a, F32 b) {
  if constexpr (sizeof(T) == 2) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p),
                        _mm512_inserti64x4(_mm512_castsi256_si512(ToHalf(p, a)), ToHalf(p, b), 1));
  } else {
    StreamAs(p, a);
    StreamAs(p + kLanes, b);
  }
}
KVSPEED_SIMD void SplitPair(__m512i bits, F32& a, F32& b) {
  a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
KVSPEED_SIMD __m512i JoinPair(F32 a, F32 b) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(RoundToUpperHalf(a), 16), RoundToUpperHalf(b));
}
template <>
KVSPEED_SIMD void LoadPair<BF16>(const BF16* p, F32& a, F32& b) {
  SplitPair(_mm512_loadu_si512(p), a, b);
}
template <>
KVSPEED_SIMD void StorePair<BF16>(BF16* p, F32 a, F32 b) {
  _mm512_storeu_si512(p, JoinPair(a, b));
}
template <>
KVSPEED_SIMD void StreamPair<BF16>(BF16* p, F32 a, F32 b) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), JoinPair(a, b));
}
template <class T>
KVSPEED_SIMD void LoadPairPartial(const T* p, int n, F32& a, F32& b) {
  const __mmask32 mask = (uint32_t{1} << n) - 1;
  if constexpr (sizeof(T) == 4) {
    a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
    b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + kLanes);
  } else {
    const __m512i bits = _mm512_maskz_loadu_epi16(mask, p);
    a = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
  }
}
template <>
KVSPEED_SIMD void LoadPairPartial<BF16>(const BF16* p, int n, F32& a, F32& b) {
  SplitPair(_mm512_maskz_loadu_epi16((uint32_t{1} << n) - 1, p), a, b);
}

KVSPEED_SIMD void StreamCopy64(void* to, const void* from) {
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
KVSPEED_SIMD void StreamFence() { _mm_sfence(); }
KVSPEED_SIMD void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_SIMD_AVX512_H_
