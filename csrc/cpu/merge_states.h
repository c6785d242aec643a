// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// merge_states: join two partial attention results by their log-sum-exp. One row at a time; all scalar work of a row
// is two exponentials, in double so that the weights add nothing to the rounding of the output.
#ifndef KVSPEED_CPU_MERGE_STATES_H_
#define KVSPEED_CPU_MERGE_STATES_H_

#include <cmath>

#include KVSPEED_SIMD_HEADER
#include "cpu/kernels.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

template <class A, class B>
inline void MergeRow(const A* a, const B* b, A* out, int64_t dim, float weight_a, float weight_b) {
  // A state of weight 0 must not be read: 0 * NaN would poison the row.
  const F32 wa = Set1(weight_a), wb = Set1(weight_b);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const F32 x = weight_a != 0 ? Mul(LoadAs(a + i), wa) : Zero();
    StoreAs(out + i, weight_b != 0 ? Fma(LoadAs(b + i), wb, x) : x);
  }
  for (; i < dim; ++i) {
    const float x = weight_a != 0 ? ToFloat(a[i]) * weight_a : 0.0f;
    out[i] = FromFloat<A>(weight_b != 0 ? x + ToFloat(b[i]) * weight_b : x);
  }
}

template <class A, class B>
inline void MergeTyped(const kvspeed_merge_states_args& g, int num_threads) {
  const int64_t rows = g.batch * g.heads * g.tokens;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows * g.head_dim > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t t = row % g.tokens, h = row / g.tokens % g.heads, b = row / g.tokens / g.heads;
    const auto at = [=](const int64_t* stride) { return b * stride[0] + h * stride[1] + t * stride[2]; };
    const double lse_a = g.lse_a[at(g.lse_a_stride)], lse_b = g.lse_b[at(g.lse_b_stride)];
    double weight_a = 0, weight_b = 0, lse = -INFINITY;
    if (lse_a != lse_a || lse_b != lse_b) {
      weight_a = weight_b = lse = NAN;
    } else if (lse_a != lse_b) {
      const double d = lse_a > lse_b ? lse_b - lse_a : lse_a - lse_b, small = std::exp(d);
      lse = (lse_a > lse_b ? lse_a : lse_b) + std::log1p(small);
      weight_a = (lse_a > lse_b ? 1 : small) / (1 + small);
      weight_b = (lse_a > lse_b ? small : 1) / (1 + small);
    } else if (lse_a != -INFINITY) {
      lse = lse_a + 0.69314718055994530942;
      weight_a = weight_b = 0.5;
    }
    MergeRow(static_cast<const A*>(g.out_a) + at(g.out_a_stride), static_cast<const B*>(g.out_b) + at(g.out_b_stride),
             static_cast<A*>(g.out) + at(g.out_stride), g.head_dim, static_cast<float>(weight_a),
             static_cast<float>(weight_b));
    g.lse[row] = static_cast<float>(lse);
  }
}

inline void MergeStates(const kvspeed_merge_states_args& args, int num_threads) {
  const auto with_b = [&]<class A>(const A*) {
    switch (args.dtype_b) {
      case KVSPEED_FLOAT32:
        return MergeTyped<A, float>(args, num_threads);
      case KVSPEED_BFLOAT16:
        return MergeTyped<A, BF16>(args, num_threads);
      case KVSPEED_FLOAT16:
        return MergeTyped<A, F16>(args, num_threads);
    }
  };
  switch (args.dtype_a) {
    case KVSPEED_FLOAT32:
      return with_b(static_cast<const float*>(nullptr));
    case KVSPEED_BFLOAT16:
      return with_b(static_cast<const BF16*>(nullptr));
    case KVSPEED_FLOAT16:
      return with_b(static_cast<const F16*>(nullptr));
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_MERGE_STATES_H_
