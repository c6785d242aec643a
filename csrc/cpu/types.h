// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The three storage types and their scalar conversions. Arithmetic is always float32.
#ifndef KVSPEED_CPU_TYPES_H_
#define KVSPEED_CPU_TYPES_H_

#include <cstdint>
#include <cstring>

#ifndef KVSPEED_ISA_NAME
#error "compile csrc/cpu/kernels.cpp with -DKVSPEED_ISA_NAME=<namespace>"
#endif

// For functions and lambdas whose arrays of vectors must stay in registers, and for the loops over such arrays.
#define KVSPEED_INLINE __attribute__((always_inline))
#define KVSPEED_SIMD inline __attribute__((always_inline))
#define KVSPEED_UNROLL _Pragma("GCC unroll 32")

// Everything in csrc/cpu lives in a namespace of its instruction set. Without that, the linker would be free to keep
// one copy of an inline function for all of them: the AVX-512 one, say, on a machine that has none.
namespace kvspeed::cpu::KVSPEED_ISA_NAME {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class To, class From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class To>
inline To LoadBytes(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof(to));
  return to;
}

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

inline float ToFloat(float x) { return x; }
inline float ToFloat(BF16 x) { return BitCast<float>(uint32_t{x.bits} << 16); }
inline float ToFloat(F16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
  uint32_t bits = magnitude + (112u << 23);
  if (exponent == 0x0f800000u) bits += 112u << 23;                                            // infinity, NaN
  if (exponent == 0) bits = BitCast<uint32_t>(BitCast<float>(bits + (1u << 23)) - 0x1p-14f);  // zero, denormals
  return BitCast<float>(bits | (uint32_t{x.bits} & 0x8000u) << 16);
}

template <class T>
inline T FromFloat(float x);
template <>
inline float FromFloat<float>(float x) {
  return x;
}
template <>
inline BF16 FromFloat<BF16>(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
inline F16 FromFloat<F16>(float x) {
  const uint32_t bits = BitCast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: let the adder round to a multiple of 2^-24
    half = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_TYPES_H_
