// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What both attention kernels do between the two products and after them: scores to weights, and results to memory.
//
// Scores lie as m16n8k16 leaves them: s[n][e] of lane L is row L / 4 + 8 * (e / 2), key 8 * n + 2 * (L % 4) + e % 2.
// Softmax is in base 2 and float32. One fused multiply-add brings a product to its exponent: its factor is positive
// (the sign of `scale` went into the query).
#ifndef KVSPEED_CUDA_ATTENTION_STATE_CUH_
#define KVSPEED_CUDA_ATTENTION_STATE_CUH_

#include "cuda/attention.h"
#include "cuda/gpu.h"

namespace kvspeed::cuda {

constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// ---- scores --------------------------------------------------------------------------------------------------------

// Errors below 2e-7 of the result, also where x is small: large caps multiply it again.
KVS_DEVICE float tanh_accurate(float x) {
  const float size = x < 0 ? -x : x;
  const float square = x * x;
  float series = 0.016437583f;  // fitted to (tanh(x) / x - 1) / x^2 over |x| < 0.55
  series = series * square - 0.052671812f;
  series = series * square + 0.13320725f;
  series = series * square - 0.33332947f;
  const float large = 1.0f - 2.0f * gpu::reciprocal_approx(gpu::exp2_approx(2 * kLog2E * size) + 1.0f);
  return size < 0.55f ? x + x * square * series : x < 0 ? -large : size == size ? large : x;
}

// The cap, where there is one; before the mask. Afterwards score_factor brings scores to base-2 logits.
template <int kTiles>
KVS_DEVICE void cap_scores(float (&s)[kTiles][4], float softcap_factor) {
  if (softcap_factor == 0) return;
  KVS_UNROLL for (int n = 0; n < kTiles; ++n) {
    KVS_UNROLL for (int e = 0; e < 4; ++e) s[n][e] = tanh_accurate(s[n][e] * softcap_factor);
  }
}

// Hides keys outside [low, high) from row half `r` (0: row L / 4, 1: row L / 4 + 8). `key` is the index of the tile's
// first key plus 2 * (L % 4).
template <int kTiles>
KVS_DEVICE void hide_scores(float (&s)[kTiles][4], int r, int key, int low, int high) {
  KVS_UNROLL for (int n = 0; n < kTiles; ++n) {
    KVS_UNROLL for (int e = 0; e < 2; ++e) {
      const int at = key + 8 * n + e;
      if (at < low || at >= high) s[n][2 * r + e] = kMinusInfinity;
    }
  }
}

// One row's running state. `maximum` is a base-2 logit, ROUNDED: weights are relative to exactly this number, so a tile
// without a new maximum multiplies the sums by 1 to the bit, however many there are. `sum` is this lane's part;
// add_lanes joins the four lanes of a row at the end.
struct RowState {
  float maximum, sum;
};
constexpr RowState kEmptyRow = {kMinusInfinity, 0};

// Turns the scores of row half `r` into weights; returns what the row's sum of values so far is multiplied by.
template <int kTiles>
KVS_DEVICE float scores_to_weights(float (&s)[kTiles][4], int r, float score_factor, RowState& row) {
  float maximum = gpu::larger(s[0][2 * r], s[0][2 * r + 1]);
  KVS_UNROLL for (int n = 1; n < kTiles; ++n) maximum = gpu::larger(maximum, gpu::larger(s[n][2 * r], s[n][2 * r + 1]));
  maximum = gpu::larger(maximum, gpu::shuffle_xor(maximum, 1));
  maximum = gpu::larger(maximum, gpu::shuffle_xor(maximum, 2));
  maximum = gpu::larger(row.maximum, gpu::mul_rn(maximum, score_factor));
  // Nothing seen yet: subtract 0, since -inf - -inf is NaN where the weight must be 0.
  const float shift = maximum == kMinusInfinity ? 0.0f : -maximum;
  const float shrink = gpu::exp2_approx(row.maximum + shift);
  float sum = 0;
  KVS_UNROLL for (int n = 0; n < kTiles; ++n) {
    KVS_UNROLL for (int e = 2 * r; e < 2 * r + 2; ++e) {
      s[n][e] = gpu::exp2_approx(gpu::fma_rn(s[n][e], score_factor, shift));
      sum += s[n][e];
    }
  }
  row.maximum = maximum;
  row.sum = row.sum * shrink + sum;
  return shrink;
}

KVS_DEVICE float add_lanes(float sum) {
  sum += gpu::shuffle_xor(sum, 1);
  return sum + gpu::shuffle_xor(sum, 2);
}

// ---- results -------------------------------------------------------------------------------------------------------

// What a row's sum of values is multiplied by, and its LSE: natural with the sink for a final result, else base 2.
struct RowResult {
  float factor, lse;
};

// A NaN sum stays NaN; a sum of 0 has seen nothing.
KVS_DEVICE RowResult partial_result(float maximum, float sum) {
  if (sum == 0) return {0.0f, kMinusInfinity};
  return {1.0f / sum, maximum + gpu::log2_accurate(sum)};
}

KVS_DEVICE RowResult final_result(float maximum, float sum, const float* sinks, int head) {
  float shrink = 1;
  if (sinks != nullptr) {
    const float sink = gpu::load_float(sinks + head);
    if (sum == 0) return {0.0f, sink};  // to the bit
    const float logit = sink * kLog2E, larger = gpu::larger(maximum, logit);
    if (larger != kMinusInfinity) {
      shrink = gpu::exp2_approx(maximum - larger);
      sum = sum * shrink + gpu::exp2_approx(logit - larger);
      maximum = larger;
    }
  }
  if (sum == 0) return {0.0f, kMinusInfinity};
  return {shrink / sum, (maximum + gpu::log2_accurate(sum)) * kLn2};
}

// Row `row` of [batch, heads, query_tokens] for packed row `packed` of a KV head.
struct RowPlace {
  int head, token;
  KVS_DEVICE int64_t index(const AttentionParams& p, int batch) const {
    return (static_cast<int64_t>(batch) * p.heads + head) * p.query_tokens + token;
  }
};
KVS_DEVICE RowPlace place_of(const AttentionParams& p, int kv_head, int packed) {
  const int token = packed / p.group;
  return {kv_head * p.group + packed - token * p.group, token};
}

// The result of a row whose scores are done: final where this is the only split.
KVS_DEVICE RowResult row_result(const AttentionParams& p, float maximum, float sum, int head) {
  return p.splits == 1 ? final_result(maximum, sum, p.sinks, head) : partial_result(maximum, sum);
}

KVS_DEVICE void write_lse(const AttentionParams& p, int split, int batch, RowPlace place, float lse) {
  const int64_t index = place.index(p, batch);
  if (p.splits > 1) {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.heads * p.query_tokens;
    gpu::store_float(p.partial_lse + split * rows + index, lse);
  } else if (p.lse != nullptr) {
    gpu::store_float(p.lse + index, lse);
  }
}

template <class T>
KVS_DEVICE void write_final(const AttentionParams& p, int batch, RowPlace place, int column, const float (&v)[8]) {
  T* out = static_cast<T*>(p.out) + batch * p.out_stride[0] + place.head * p.out_stride[1] +
           place.token * p.out_stride[2] + column;
  if (p.out_aligned) {
    gpu::store16(out, make_uint4(gpu::pack2<T>(v[0], v[1]), gpu::pack2<T>(v[2], v[3]), gpu::pack2<T>(v[4], v[5]),
                                 gpu::pack2<T>(v[6], v[7])));
  } else {
    KVS_UNROLL for (int i = 0; i < 8; ++i) gpu::store_number(out + i, gpu::from_float<T>(v[i]));
  }
}

// Eight columns of a row's finished values, from `column` (a multiple of 8) on, to the output or to the split's state.
template <class T, int D>
KVS_DEVICE void write_values(const AttentionParams& p, int split, int batch, RowPlace place, int column,
                             const float (&v)[8]) {
  if (p.splits == 1) return write_final<T>(p, batch, place, column, v);
  const int64_t rows = static_cast<int64_t>(p.batch) * p.heads * p.query_tokens;
  float* to = p.partial_out + (split * rows + place.index(p, batch)) * D + column;
  KVS_UNROLL for (int i = 0; i < 8; i += 4) {
    gpu::store16(to + i, make_uint4(gpu::float_bits(v[i]), gpu::float_bits(v[i + 1]), gpu::float_bits(v[i + 2]),
                                    gpu::float_bits(v[i + 3])));
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_STATE_CUH_
