// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Functions over vectors, written once on top of the vector layer.
#ifndef KVSPEED_CPU_SIMD_MATH_H_
#define KVSPEED_CPU_SIMD_MATH_H_

#include KVSPEED_SIMD_HEADER

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

// 2^x for x <= 127. Below -126 (-infinity included) exactly 0; NaN stays NaN. x = n + f with |f| <= 1/2, and a
// polynomial of degree 6 for 2^f whose own error is 5e-9.
KVSPEED_SIMD F32 Exp2(F32 x) {
  const F32 bounded = Max(Set1(-126.0f), x);
  const F32 n = Round(bounded), f = Sub(bounded, n);
  F32 p = Set1(1.545316294512069e-04f);
  p = Fma(p, f, Set1(1.3390863364671234e-03f));
  p = Fma(p, f, Set1(9.618082557277852e-03f));
  p = Fma(p, f, Set1(5.550357114219078e-02f));
  p = Fma(p, f, Set1(2.4022650760568126e-01f));
  p = Fma(p, f, Set1(6.931471880262288e-01f));
  p = Fma(p, f, Set1(1.0f));
  return Select(x, Set1(-126.0f), Zero(), Mul(p, Pow2(n)));
}

KVSPEED_SIMD float Exp2(float x) {
  float lanes[kLanes];
  Store(lanes, Exp2(Set1(x)));
  return lanes[0];
}

// tanh x = x P(x^2) / Q(x^2) for |x| < 7.9, the rational function that Eigen uses; beyond, +-1 is the nearest float.
KVSPEED_SIMD F32 Tanh(F32 x) {
  const F32 bounded = Max(Set1(-7.9053111f), Min(Set1(7.9053111f), x)), y = Mul(bounded, bounded);
  F32 p = Set1(-2.76076847742355e-16f);
  p = Fma(p, y, Set1(2.00018790482477e-13f));
  p = Fma(p, y, Set1(-8.60467152213735e-11f));
  p = Fma(p, y, Set1(5.12229709037114e-08f));
  p = Fma(p, y, Set1(1.48572235717979e-05f));
  p = Fma(p, y, Set1(6.37261928875436e-04f));
  p = Fma(p, y, Set1(4.89352455891786e-03f));
  F32 q = Set1(1.19825839466702e-06f);
  q = Fma(q, y, Set1(1.18534705686654e-04f));
  q = Fma(q, y, Set1(2.26843463243900e-03f));
  q = Fma(q, y, Set1(4.89352518554385e-03f));
  return Div(Mul(bounded, p), q);
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_SIMD_MATH_H_
