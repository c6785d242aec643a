// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The vector and 16-bit types that CUDA's headers give a kernel, for a build without any toolkit.
#ifndef KVSPEED_SIMT_TYPES_H_
#define KVSPEED_SIMT_TYPES_H_

#include <bit>
#include <cmath>
#include <cstdint>

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace kvspeed::gpu {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(f16 x) {
  // The exponent moves into place with the rest, off by 112; subnormal numbers come out right too.
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  uint32_t u = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if ((x.bits & 0x7c00u) == 0x7c00u) u = magnitude | 0x7f800000u;  // infinities and NaN
  return std::bit_cast<float>(u | uint32_t{x.bits & 0x8000u} << 16);
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {  // to nearest even; any NaN becomes 0x7fff, as cvt.rn.bf16 has it
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
template <>
inline f16 from_float<f16>(float x) {  // to nearest even; any NaN becomes 0x7fff, as cvt.rn.f16 has it
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above: infinity
  if (magnitude < 0x38800000u) {  // subnormal as f16: adding 0.5 leaves multiples of 2^-24, rounded, in the low bits
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13))};
}

}  // namespace kvspeed::gpu

#endif  // KVSPEED_SIMT_TYPES_H_
