// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What both attention kernels read: segments, the keys that a query may see, rotated queries, tiles of keys or values.
//
// Shared tiles have rows of D + 8 numbers. A row then is an odd number of 16-byte chunks, so the eight rows that one
// matrix load touches lie in different banks, and addresses are a base plus constants.
#ifndef KVSPEED_CUDA_ATTENTION_LOAD_CUH_
#define KVSPEED_CUDA_ATTENTION_LOAD_CUH_

#include "cuda/attention.h"
#include "cuda/gpu.h"

namespace kvspeed::cuda {

template <int D>
constexpr int kPitch = D + 8;  // numbers from one row of a shared tile to the next

KVS_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
KVS_DEVICE int max_of(int a, int b) { return a > b ? a : b; }
KVS_DEVICE int clamp_to(int64_t x, int low, int high) { return x < low ? low : x > high ? high : static_cast<int>(x); }

// ---- segments ------------------------------------------------------------------------------------------------------

// Copies segment `index` of the call into shared memory, where its rarely used parts cost no registers. The caller
// synchronises the block before it reads it, and before it calls this again.
KVS_DEVICE void load_segment(DeviceSegment* shared, const AttentionParams& p, int index, int thread) {
  if (thread >= static_cast<int>(sizeof(DeviceSegment) / sizeof(uint4))) return;
  reinterpret_cast<uint4*>(shared)[thread] =
      p.segment_table != nullptr ? gpu::load16(reinterpret_cast<const uint4*>(p.segment_table + index) + thread)
                                 : reinterpret_cast<const uint4*>(p.segments + index)[thread];
}

// Units (splits or key tiles) before segment `index`.
KVS_DEVICE int unit_begin(const AttentionParams& p, int index) {
  return p.segment_table != nullptr ? gpu::load_int(&p.segment_table[index].unit_begin) : p.segments[index].unit_begin;
}

// The last segment that begins at or before `unit`: the one it belongs to, since empty ones take no units.
KVS_DEVICE int find_segment(const AttentionParams& p, int unit) {
  int low = 0, high = p.num_segments;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (unit_begin(p, middle) <= unit) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// ---- who sees what -------------------------------------------------------------------------------------------------

// The keys of one segment that query token i of one batch row sees: [low_of(i), high_of(i)), empty where high <= low.
// Both ends never fall as i grows, so a run of tokens i to j sees nothing outside [low_of(i), high_of(j)), and all of
// it sees [low_of(j), high_of(i)).
struct Visible {
  int low, high;              // by padding and length
  int low_shift, high_shift;  // by window and causality, for query token 0
  KVS_DEVICE int low_of(int token) const { return max_of(low, low_shift + token); }
  KVS_DEVICE int high_of(int token) const { return min_of(high, high_shift + token); }
};

KVS_DEVICE Visible visible_keys(const AttentionParams& p, const DeviceSegment& s, int batch) {
  const int tail =
      p.tail_tokens == nullptr ? p.tail_length : clamp_to(gpu::load_int(p.tail_tokens + batch), 0, p.tail_length);
  const int first = s.first == nullptr ? 0 : gpu::load_int(s.first + batch);
  Visible v;
  v.high = s.causal ? tail : s.tokens;
  v.low = clamp_to(first, 0, v.high);
  v.low_shift = -kMaxTokens;
  v.high_shift = kMaxTokens;
  if (s.causal || p.window > 0) {  // the place of query token 0 as an index of this segment
    const int64_t at = p.tail_position + tail - p.query_tokens - s.position;
    v.high_shift = clamp_to(at + 1, -kMaxTokens, kMaxTokens);
    if (p.window > 0) v.low_shift = clamp_to(at - p.window + 1, -kMaxTokens, kMaxTokens);
  }
  return v;
}

// The first token of a segment that the plan counts on, see attention_plan.h: units are counted from the one it is in.
KVS_DEVICE int first_planned(const AttentionParams& p, const DeviceSegment& s) {
  return clamp_to(p.window_start - s.position, 0, s.tokens);
}

// ---- queries -------------------------------------------------------------------------------------------------------

// Packed rows row0 to row0 + kRows - 1 of the query, turned by minus the segment's offset (in float32, rounded once),
// into a shared tile. Rows from p.rows on become zeros.
template <class T, int D, int kRows, int kThreads>
KVS_DEVICE void load_query(T* shared, const AttentionParams& p, const DeviceSegment& s, int batch, int kv_head,
                           int row0, int thread) {
  constexpr int kPairs = D / 2;
  static_assert(kRows * kPairs % kThreads == 0);
  const T* query = static_cast<const T*>(p.query) + batch * p.query_stride[0];
  const float* rope = s.rope;
  const int half = p.rotary_half;
#pragma unroll 4
  for (int index = thread; index < kRows * kPairs; index += kThreads) {
    const int r = index / kPairs, pair = index % kPairs, row = row0 + r;
    const bool turned = pair < half;
    const int at_x = turned && !p.interleaved ? pair : 2 * pair;
    const int at_y = turned && !p.interleaved ? pair + half : 2 * pair + 1;
    float x = 0, y = 0;
    if (row < p.rows) {
      const int token = row / p.group, head = kv_head * p.group + row % p.group;
      const T* from = query + head * p.query_stride[1] + token * p.query_stride[2];
      x = p.query_factor * gpu::to_float(gpu::load_number(from + at_x));
      y = p.query_factor * gpu::to_float(gpu::load_number(from + at_y));
      if (turned && rope != nullptr) {
        const float cos = gpu::load_float(rope + pair), sin = gpu::load_float(rope + half + pair), before = x;
        x = before * cos + y * sin;
        y = y * cos - before * sin;
      }
    }
    shared[r * kPitch<D> + at_x] = gpu::from_float<T>(x);
    shared[r * kPitch<D> + at_y] = gpu::from_float<T>(y);
  }
}

// ---- keys and values -----------------------------------------------------------------------------------------------

// Where the tokens of one head of one batch row lie, page tables aside.
template <class T>
KVS_DEVICE const T* head_start(const DeviceSegment& s, const void* data, const int64_t (&stride)[3], int batch,
                               int kv_head) {
  return static_cast<const T*>(data) + (s.page_table == nullptr ? batch * stride[0] : 0) + kv_head * stride[1];
}

struct PageSlot {
  int page;  // -1: the token lies in no page
  int slot;  // within the page
};
KVS_DEVICE PageSlot find_page(const DeviceSegment& s, int batch, int token) {
  const int entry =
      static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(token)) * s.page_magic >> s.page_shift);
  const int page = gpu::load_int(s.page_table + batch * s.page_table_stride + entry);
  return {page >= 0 && page < s.pages ? page : -1, token - entry * s.page_size};
}

// Whether all tokens [from, to) lie in pages; the same answer in all lanes. True where there is no page table.
KVS_DEVICE bool pages_exist(const DeviceSegment& s, int batch, int from, int to, int lane) {
  if (s.page_table == nullptr) return true;
  float missing = 0;
  for (int token = from + lane; token < to; token += 32) {
    if (find_page(s, batch, token).page < 0) missing = 1;
  }
  KVS_UNROLL for (int mask = 16; mask > 0; mask /= 2) missing += gpu::shuffle_xor(missing, mask);
  return missing == 0;
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_LOAD_CUH_
