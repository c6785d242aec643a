// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// One warp's query rows, eight numbers at a time. A lane keeps its cosines and sines for all its rows.
#ifndef KVSPEED_CUDA_ATTENTION_QUERY_CUH_
#define KVSPEED_CUDA_ATTENTION_QUERY_CUH_

#include "cuda/attention_load.cuh"
#include "cuda/attention_state.cuh"

namespace kvspeed::cuda {

// Whether the query and the segment's cosines and sines can be read in 16-byte words.
KVS_DEVICE bool is_query_aligned(const AttentionParams& p, const DeviceSegment& s) {
  const uint64_t strides = static_cast<uint64_t>(p.query_stride[0] | p.query_stride[1] | p.query_stride[2]);
  return (reinterpret_cast<uintptr_t>(p.query) | reinterpret_cast<uintptr_t>(s.rope)) % 16 == 0 && strides % 8 == 0;
}

KVS_DEVICE void load_floats(float (&v)[8], const float* from) {
  KVS_UNROLL for (int i = 0; i < 8; i += 4) {
    const uint4 four = gpu::load16(from + i);
    v[i] = gpu::bits_float(four.x), v[i + 1] = gpu::bits_float(four.y);
    v[i + 2] = gpu::bits_float(four.z), v[i + 3] = gpu::bits_float(four.w);
  }
}

// A pair of words of the two halves, turned by minus the angle and rounded once.
template <class T>
KVS_DEVICE void turn_words(uint32_t& x, uint32_t& y, float factor, const float* cos, const float* sin) {
  float2 a = gpu::unpack2<T>(x), b = gpu::unpack2<T>(y);
  a.x *= factor, a.y *= factor, b.x *= factor, b.y *= factor;
  x = gpu::pack2<T>(a.x * cos[0] + b.x * sin[0], a.y * cos[1] + b.y * sin[1]);
  y = gpu::pack2<T>(b.x * cos[0] - a.x * sin[0], b.y * cos[1] - a.y * sin[1]);
}
template <class T>
KVS_DEVICE uint32_t scale_word(uint32_t x, float factor) {
  const float2 a = gpu::unpack2<T>(x);
  return gpu::pack2<T>(a.x * factor, a.y * factor);
}

// As load_query, by one warp. The caller synchronises the warp.
template <class T, int D, int kRows>
KVS_DEVICE void load_query_rows(T* shared, const AttentionParams& p, const DeviceSegment& s, int batch, int kv_head,
                                int row0, int lane) {
  const int pairs = s.rope == nullptr ? 0 : p.rotary_half / 8;  // of chunks, one in each half
  if (!is_query_aligned(p, s) || (s.rope != nullptr && (p.interleaved || p.rotary_half % 8 != 0))) {
    return load_query<T, D, kRows, 32>(shared, p, s, batch, kv_head, row0, lane);
  }
  const T* query = static_cast<const T*>(p.query) + batch * p.query_stride[0];
  const auto row_start = [&](int row) {
    const RowPlace place = place_of(p, kv_head, row);
    return query + place.head * p.query_stride[1] + place.token * p.query_stride[2];
  };
  if (pairs > 0 && lane < 32 / pairs * pairs) {
    const int column = lane % pairs * 8, half = p.rotary_half;
    float cos[8], sin[8];
    load_floats(cos, s.rope + column);
    load_floats(sin, s.rope + half + column);
#pragma unroll 1
    for (int r = lane / pairs; r < kRows; r += 32 / pairs) {
      uint4 x = make_uint4(0, 0, 0, 0), y = x;
      if (row0 + r < p.rows) {
        const T* from = row_start(row0 + r) + column;
        x = gpu::load16(from), y = gpu::load16(from + half);
      }
      turn_words<T>(x.x, y.x, p.query_factor, cos, sin);
      turn_words<T>(x.y, y.y, p.query_factor, cos + 2, sin + 2);
      turn_words<T>(x.z, y.z, p.query_factor, cos + 4, sin + 4);
      turn_words<T>(x.w, y.w, p.query_factor, cos + 6, sin + 6);
      *reinterpret_cast<uint4*>(shared + r * kPitch<D> + column) = x;
      *reinterpret_cast<uint4*>(shared + r * kPitch<D> + column + half) = y;
    }
  }
  const int rest = D / 8 - 2 * pairs;  // chunks that are not turned
#pragma unroll 1
  for (int index = lane; index < kRows * rest; index += 32) {
    const int r = index / rest, column = (2 * pairs + index % rest) * 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row0 + r < p.rows) x = gpu::load16(row_start(row0 + r) + column);
    *reinterpret_cast<uint4*>(shared + r * kPitch<D> + column) =
        make_uint4(scale_word<T>(x.x, p.query_factor), scale_word<T>(x.y, p.query_factor),
                   scale_word<T>(x.z, p.query_factor), scale_word<T>(x.w, p.query_factor));
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_QUERY_CUH_
