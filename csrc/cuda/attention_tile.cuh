// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Tiles of keys or values into shared memory for a block that walks through a segment.
//
// Eight threads share a row, so each copy instruction of a warp takes four runs of 128 bytes, and a thread's addresses
// within a row are constants. Rows are 16 apart for a thread: one addition a row, and after a tile the pointer stands
// at the next one.
#ifndef KVSPEED_CUDA_ATTENTION_TILE_CUH_
#define KVSPEED_CUDA_ATTENTION_TILE_CUH_

#include "cuda/attention_load.cuh"

namespace kvspeed::cuda {

constexpr int kTileThreads = 128, kTileStep = kTileThreads / 8;  // rows from one of a thread's to its next

// Calls f(c) for each chunk c of 8 numbers, as a constant offset from the thread's first one.
template <int D, class F>
KVS_DEVICE void for_chunks(int chunk, F f) {
  KVS_UNROLL for (int c = 0; c < D / 8; c += 8) {
    if (c + 8 <= D / 8 || chunk < D / 8 - c) f(c);
  }
}

// Rows that lie one after the other, the first at `from`, and that can be copied 16 bytes at a time. Rows outside
// [low, high) become zeros.
template <class T, int D, int kRows>
KVS_DEVICE void copy_tile(T* tile, const T* from, int64_t token_stride, int low, int high, int thread) {
  const int row = thread / 8, chunk = thread % 8;
  T* to = tile + row * kPitch<D> + chunk * 8;
  from += row * token_stride + chunk * 8;
  const int64_t step = kTileStep * token_stride;
  if (low <= 0 && high >= kRows) {
    KVS_UNROLL for (int r = 0; r < kRows; r += kTileStep) {
      for_chunks<D>(chunk, [&](int c) { gpu::copy16_async(to + r * kPitch<D> + c * 8, from + c * 8, true); });
      from += step;
    }
  } else {
    KVS_UNROLL for (int r = 0; r < kRows; r += kTileStep) {
      const bool ok = row + r >= low && row + r < high;
      for_chunks<D>(chunk, [&](int c) { gpu::copy16_async(to + r * kPitch<D> + c * 8, from + c * 8, ok); });
      from += step;
    }
  }
}

// Rows in pages, or at any address. `start` is head_start of the segment's key or value, `stride` its strides; the
// tile begins at token0, and tokens outside [low, high) or outside the pages become zeros.
template <class T, int D, int kRows>
KVS_DEVICE void gather_tile(T* tile, const DeviceSegment& s, const T* start, const int64_t (&stride)[3], int batch,
                            int token0, int low, int high, int thread) {
  const int row = thread / 8, chunk = thread % 8;
  T* to = tile + row * kPitch<D> + chunk * 8;
#pragma unroll 1
  for (int token = token0 + row; token < token0 + kRows; token += kTileStep) {
    bool ok = token >= low && token < high;
    const T* from = start + chunk * 8;
    if (ok && s.page_table != nullptr) {
      const PageSlot at = find_page(s, batch, token);
      ok = at.page >= 0;
      if (ok) from += at.page * stride[0] + at.slot * stride[2];
    } else if (ok) {
      from += token * stride[2];
    }
    for_chunks<D>(chunk, [&](int c) {
      if (s.aligned) {
        gpu::copy16_async(to + c * 8, from + c * 8, ok);
      } else {
        uint32_t word[4] = {0, 0, 0, 0};
        if (ok) {
          KVS_UNROLL for (int k = 0; k < 4; ++k) {
            const T* at = from + c * 8 + 2 * k;
            word[k] = gpu::load_u16(at) | static_cast<uint32_t>(gpu::load_u16(at + 1)) << 16;
          }
        }
        *reinterpret_cast<uint4*>(to + c * 8) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    });
    to += kTileStep * kPitch<D>;
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_TILE_CUH_
