// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Tiles of keys or values into shared memory, by a block or by a warp of its own.
//
// Eight threads share a row, so each copy instruction of a warp takes four runs of 128 bytes, and a thread's addresses
// within a row are constants. A thread's rows are kThreads / 8 apart: one addition a row.
#ifndef KVSPEED_CUDA_ATTENTION_TILE_CUH_
#define KVSPEED_CUDA_ATTENTION_TILE_CUH_

#include "cuda/attention_load.cuh"

namespace kvspeed::cuda {

// A thread's first row of a tile, and its first chunk of 8 numbers in each of its rows.
KVS_DEVICE int tile_row(int thread) { return thread / 8; }
KVS_DEVICE int tile_column(int thread) { return thread % 8 * 8; }

// Calls f(c) for each chunk of 8 numbers of a row, as a constant number of chunks from the thread's first one.
template <int D, class F>
KVS_DEVICE void for_chunks(int column, F f) {
  KVS_UNROLL for (int c = 0; c < D / 8; c += 8) {
    if (c + 8 <= D / 8 || column < D - 8 * c) f(c);
  }
}

// Rows that lie one after the other and can be copied 16 bytes at a time. `from` is the thread's own first number:
// token tile_row, from tile_column on. Rows outside [low, high) become zeros.
template <class T, int D, int kRows, int kThreads>
KVS_DEVICE void copy_tile(T* tile, const T* from, int64_t token_stride, int low, int high, int thread) {
  constexpr int kStep = kThreads / 8;
  const int row = tile_row(thread), column = tile_column(thread);
  T* to = tile + row * kPitch<D> + column;
  const int64_t step = kStep * token_stride;
  if (low <= 0 && high >= kRows) {
    KVS_UNROLL for (int r = 0; r < kRows; r += kStep) {
      for_chunks<D>(column, [&](int c) { gpu::copy16_async(to + r * kPitch<D> + c * 8, from + c * 8, true); });
      from += step;
    }
  } else {
    KVS_UNROLL for (int r = 0; r < kRows; r += kStep) {
      const bool ok = row + r >= low && row + r < high;
      for_chunks<D>(column, [&](int c) { gpu::copy16_async(to + r * kPitch<D> + c * 8, from + c * 8, ok); });
      from += step;
    }
  }
}

// Rows in pages, or at any address: one search for the page a row. `start` is head_start of the segment's key or value,
// `stride` its strides; the tile begins at token0, and tokens outside [low, high) or outside the pages become zeros.
template <class T, int D, int kRows, int kThreads>
KVS_DEVICE void gather_tile(T* tile, const DeviceSegment& s, const T* start, const int64_t (&stride)[3], int batch,
                            int token0, int low, int high, int thread) {
  constexpr int kStep = kThreads / 8;
  const int row = tile_row(thread), column = tile_column(thread);
  T* to = tile + row * kPitch<D> + column;
#pragma unroll 1
  for (int token = token0 + row; token < token0 + kRows; token += kStep) {
    bool ok = token >= low && token < high;
    const T* from = start + column;
    if (ok && s.page_table != nullptr) {
      const PageSlot at = find_page(s, batch, token);
      ok = at.page >= 0;
      if (ok) from += at.page * stride[0] + at.slot * stride[2];
    } else if (ok) {
      from += token * stride[2];
    }
    for_chunks<D>(column, [&](int c) {
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
    to += kStep * kPitch<D>;
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_TILE_CUH_
