// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// merge_states: join two partial attention results by their log-sum-exp. A thread takes eight neighbouring numbers of a
// row (one, where they do not lie so that 16 bytes can be moved at once) and forms the row's weights for itself.
#ifndef KVSPEED_CUDA_MERGE_STATES_CUH_
#define KVSPEED_CUDA_MERGE_STATES_CUH_

#include "cuda/gpu.h"

namespace kvspeed::cuda {

constexpr int kMergeThreads = 128;  // few rows are the rule: small blocks spread them over more of the device
constexpr int kMergeBlocks = 8;     // of an SM
constexpr int kMergeNumbers = 8;

struct MergeParams {
  const void* out_a;
  const void* out_b;
  const float* lse_a;
  const float* lse_b;
  void* out;
  float* lse;
  int64_t out_a_stride[3], out_b_stride[3], out_stride[3];  // batch, head, token; in numbers, as all strides here
  int64_t lse_a_stride[3], lse_b_stride[3];
  uint32_t heads, tokens;
  uint32_t parts;  // of a row, each the work of one thread
  uint32_t total;  // parts of all rows
  int32_t head_dim;
  int32_t vector;  // parts are kMergeNumbers numbers that can be moved 16 bytes at a time; else one number
};

struct MergeWeights {
  float a, b, lse;
};

KVS_DEVICE MergeWeights merge_weights(float lse_a, float lse_b) {
  const float low = lse_a < lse_b ? lse_a : lse_b, high = lse_a < lse_b ? lse_b : lse_a;
  const float nan = gpu::bits_float(0x7fc00000u), minus_infinity = gpu::bits_float(0xff800000u);
  if (lse_a != lse_a || lse_b != lse_b) return {nan, nan, nan};
  if (high == minus_infinity) return {0.0f, 0.0f, high};  // both are empty
  // Equal ones may be infinite, whose difference is NaN.
  const float small = low == high ? 1.0f : gpu::exp2_approx((low - high) * 1.44269504f);
  const float large_weight = gpu::reciprocal_approx(1.0f + small), small_weight = small * large_weight;
  const float lse = high + gpu::log2_accurate(1.0f + small) * 0.693147181f;
  return {lse_a < lse_b ? small_weight : large_weight, lse_a < lse_b ? large_weight : small_weight, lse};
}

template <class T>
KVS_DEVICE void load_numbers(const T* p, float (&x)[kMergeNumbers]) {
  if constexpr (sizeof(T) == 4) {
    const uint4 v = gpu::load16(p), w = gpu::load16(p + 4);
    const uint32_t words[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
    KVS_UNROLL for (int i = 0; i < 8; ++i) x[i] = gpu::bits_float(words[i]);
  } else {
    const uint4 v = gpu::load16(p);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    KVS_UNROLL for (int i = 0; i < 4; ++i) {
      const float2 pair = gpu::unpack2<T>(words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
KVS_DEVICE void store_numbers(T* p, const float (&x)[kMergeNumbers]) {
  if constexpr (sizeof(T) == 4) {
    const auto bits = [&](int i) { return gpu::float_bits(x[i]); };
    gpu::store16(p, make_uint4(bits(0), bits(1), bits(2), bits(3)));
    gpu::store16(p + 4, make_uint4(bits(4), bits(5), bits(6), bits(7)));
  } else {
    const auto pair = [&](int i) { return gpu::pack2<T>(x[i], x[i + 1]); };
    gpu::store16(p, make_uint4(pair(0), pair(2), pair(4), pair(6)));
  }
}

// A state of weight 0 is not looked at: 0 * NaN would poison the row.
KVS_DEVICE float merge_number(float a, float b, const MergeWeights& w) {
  const float x = w.a != 0.0f ? a * w.a : 0.0f;
  return w.b != 0.0f ? gpu::fma_rn(b, w.b, x) : x;
}

template <class A, class B>
KVS_KERNEL(kMergeThreads, kMergeBlocks)
void merge_states_kernel(KVS_PARAM MergeParams p) {
  const uint32_t first = static_cast<uint32_t>(gpu::block_index() * kMergeThreads + gpu::thread_index());
  const uint32_t step = static_cast<uint32_t>(gpu::block_count() * kMergeThreads);
  for (uint32_t index = first; index < p.total; index += step) {
    const uint32_t row = index / p.parts, part = index - row * p.parts;
    const uint32_t bh = row / p.tokens, t = row - bh * p.tokens, b = bh / p.heads, h = bh - b * p.heads;
    const auto at = [=](const int64_t (&stride)[3]) { return b * stride[0] + h * stride[1] + t * stride[2]; };
    const MergeWeights w =
        merge_weights(gpu::load_float(p.lse_a + at(p.lse_a_stride)), gpu::load_float(p.lse_b + at(p.lse_b_stride)));
    if (part == 0) gpu::store_float(p.lse + row, w.lse);
    const A* out_a = static_cast<const A*>(p.out_a) + at(p.out_a_stride);
    const B* out_b = static_cast<const B*>(p.out_b) + at(p.out_b_stride);
    A* out = static_cast<A*>(p.out) + at(p.out_stride);
    if (p.vector) {
      float x[kMergeNumbers], y[kMergeNumbers];
      load_numbers(out_a + part * kMergeNumbers, x);
      load_numbers(out_b + part * kMergeNumbers, y);
      KVS_UNROLL for (int i = 0; i < kMergeNumbers; ++i) x[i] = merge_number(x[i], y[i], w);
      store_numbers(out + part * kMergeNumbers, x);
    } else if (p.head_dim > 0) {
      const float x = gpu::to_float(gpu::load_number(out_a + part)), y = gpu::to_float(gpu::load_number(out_b + part));
      gpu::store_number(out + part, gpu::from_float<A>(merge_number(x, y, w)));
    }
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_MERGE_STATES_CUH_
