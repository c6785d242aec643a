// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Joins the states that the splits of an attention call left: sinks, output and LSE are made here, and only here.
//
// A block serves one row. Its threads are lanes of four columns each, in as many groups as fit; each group adds every
// so-manieth split, so that many loads are on their way at once, and the groups' sums are joined in their order.
#ifndef KVSPEED_CUDA_MERGE_SPLITS_CUH_
#define KVSPEED_CUDA_MERGE_SPLITS_CUH_

#include "cuda/attention_state.cuh"

namespace kvspeed::cuda {

struct MergeSplitsParams {
  const float* partial_out;  // [splits, rows, head_dim]
  const float* partial_lse;  // [splits, rows], base 2
  const float* sinks;
  void* out;
  float* lse;
  int64_t out_stride[3];
  int64_t rows;  // batch * heads * query_tokens
  int32_t heads, query_tokens, head_dim, splits;
};

constexpr int kMergeSplitsThreads = 128;
constexpr int kMergeSplitsShared = (2 * kMergeSplitsThreads + 4 * kMergeSplitsThreads) * 4;

template <class T>
KVS_KERNEL(kMergeSplitsThreads, 8)
void merge_splits_kernel(KVS_PARAM MergeSplitsParams p) {
  KVS_SHARED(shared);
  float* weights = reinterpret_cast<float*>(shared);
  float* sums = weights + kMergeSplitsThreads;  // one a thread
  float4* parts = reinterpret_cast<float4*>(sums + kMergeSplitsThreads);
  const int thread = gpu::thread_index(), lanes = p.head_dim / 4, groups = kMergeSplitsThreads / lanes;
  const int group = thread / lanes, lane = thread - group * lanes;
  const int64_t row = gpu::block_index();

  // The largest LSE, by all threads: the same in each of them.
  float maximum = kMinusInfinity;
  for (int s = thread; s < p.splits; s += kMergeSplitsThreads) {
    maximum = gpu::larger(maximum, gpu::load_float(p.partial_lse + s * p.rows + row));
  }
  KVS_UNROLL for (int mask = 16; mask > 0; mask /= 2) maximum = gpu::larger(maximum, gpu::shuffle_xor(maximum, mask));
  if (thread % 32 == 0) sums[thread / 32] = maximum;
  gpu::sync_block();
  KVS_UNROLL for (int w = 0; w < kMergeSplitsThreads / 32; ++w) maximum = gpu::larger(maximum, sums[w]);
  const float shift = maximum == kMinusInfinity ? 0.0f : maximum;
  gpu::sync_block();

  float denominator = 0;
  float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int begin = 0; begin < p.splits; begin += kMergeSplitsThreads) {
    const int count = p.splits - begin < kMergeSplitsThreads ? p.splits - begin : kMergeSplitsThreads;
    if (thread < count) {
      const float weight = gpu::exp2_approx(gpu::load_float(p.partial_lse + (begin + thread) * p.rows + row) - shift);
      weights[thread] = weight;
      denominator += weight;
    }
    gpu::sync_block();
    if (group < groups) {
#pragma unroll 4
      for (int s = group; s < count; s += groups) {
        const float weight = weights[s];
        const uint4 bits = gpu::load16(p.partial_out + ((begin + s) * p.rows + row) * p.head_dim + 4 * lane);
        v.x += weight * gpu::bits_float(bits.x), v.y += weight * gpu::bits_float(bits.y);
        v.z += weight * gpu::bits_float(bits.z), v.w += weight * gpu::bits_float(bits.w);
      }
    }
    gpu::sync_block();
  }
  sums[thread] = denominator;
  parts[thread] = v;
  gpu::sync_block();
  if (group > 0) return;
  denominator = 0;
  for (int i = 0; i < kMergeSplitsThreads; ++i) denominator += sums[i];
  for (int g = 1; g < groups; ++g) {
    const float4 other = parts[g * lanes + lane];
    v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
  }
  const int token = static_cast<int>(row % p.query_tokens), head = static_cast<int>(row / p.query_tokens % p.heads);
  const int64_t batch = row / p.query_tokens / p.heads;
  const RowResult result = final_result(maximum, denominator, p.sinks, head);
  T* out =
      static_cast<T*>(p.out) + batch * p.out_stride[0] + head * p.out_stride[1] + token * p.out_stride[2] + 4 * lane;
  gpu::store_number(out, gpu::from_float<T>(v.x * result.factor));
  gpu::store_number(out + 1, gpu::from_float<T>(v.y * result.factor));
  gpu::store_number(out + 2, gpu::from_float<T>(v.z * result.factor));
  gpu::store_number(out + 3, gpu::from_float<T>(v.w * result.factor));
  if (lane == 0 && p.lse != nullptr) gpu::store_float(p.lse + row, result.lse);
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_MERGE_SPLITS_CUH_
