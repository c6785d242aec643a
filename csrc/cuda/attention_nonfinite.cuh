// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Infinite and NaN values at keys that only some rows of a tile see. The matrix product gives the other rows
// 0 * NaN = NaN, so a tile that holds any takes these three steps before its product. Keys that no row sees are zeros
// already (see load_rows), and where all rows see the same keys nothing can leak.
#ifndef KVSPEED_CUDA_ATTENTION_NONFINITE_CUH_
#define KVSPEED_CUDA_ATTENTION_NONFINITE_CUH_

#include <type_traits>

#include "cuda/attention_load.cuh"

namespace kvspeed::cuda {

template <class T>
constexpr uint32_t kExponent = sizeof(T) == 2 && std::is_same_v<T, gpu::bf16> ? 0x7f80u : 0x7c00u;

// Bits of the halves of a word that are infinite or NaN.
template <class T>
KVS_DEVICE uint32_t nonfinite_halves(uint32_t word) {
  const uint32_t low = (word & kExponent<T>) == kExponent<T> ? 0xffffu : 0u;
  const uint32_t high = (word >> 16 & kExponent<T>) == kExponent<T> ? 0xffff0000u : 0u;
  return low | high;
}

// 1. Whether a shared tile of kKeys rows holds any; the same answer in all lanes of the warp, which reads all of it.
template <class T, int D, int kKeys>
KVS_DEVICE bool any_nonfinite(const T* tile, int lane) {
  float found = 0;
#pragma unroll 2
  for (int index = lane; index < kKeys * D / 8; index += 32) {
    const uint4 v = *reinterpret_cast<const uint4*>(tile + index / (D / 8) * kPitch<D> + index % (D / 8) * 8);
    if (nonfinite_halves<T>(v.x) | nonfinite_halves<T>(v.y) | nonfinite_halves<T>(v.z) | nonfinite_halves<T>(v.w)) {
      found = 1;
    }
  }
  KVS_UNROLL for (int mask = 16; mask > 0; mask /= 2) found += gpu::shuffle_xor(found, mask);
  return found != 0;
}

// 2. Adds them to the sums of row half `r` (columns as m16n8k16 has them) if it sees their keys. `key` is the index of
// the tile's first key.
template <class T, int D, int kKeys>
KVS_DEVICE void add_nonfinite(float (&o)[D / 8][4], int r, const T* tile, int key, int low, int high, int lane) {
#pragma unroll 1
  for (int k = max_of(low - key, 0); k < min_of(high - key, kKeys); ++k) {
    KVS_UNROLL for (int n = 0; n < D / 8; ++n) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(tile + k * kPitch<D> + 8 * n + 2 * (lane % 4));
      const uint32_t bad = nonfinite_halves<T>(word);
      const float2 v = gpu::unpack2<T>(word & bad);
      o[n][2 * r] += v.x, o[n][2 * r + 1] += v.y;
    }
  }
}

// 3. Makes them zeros in the tile, by kThreads threads. Barriers before and after are the caller's.
template <class T, int D, int kKeys, int kThreads>
KVS_DEVICE void clear_nonfinite(T* tile, int thread) {
#pragma unroll 1
  for (int index = thread; index < kKeys * D / 8; index += kThreads) {
    uint4* at = reinterpret_cast<uint4*>(tile + index / (D / 8) * kPitch<D> + index % (D / 8) * 8);
    const uint4 v = *at;
    *at = make_uint4(v.x & ~nonfinite_halves<T>(v.x), v.y & ~nonfinite_halves<T>(v.y), v.z & ~nonfinite_halves<T>(v.z),
                     v.w & ~nonfinite_halves<T>(v.w));
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_NONFINITE_CUH_
