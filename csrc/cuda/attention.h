// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What the attention kernels are told: the segments as they lie in device memory, and how the work is cut.
//
// Packed rows. The query tokens and the heads of one group share a KV head, so they are rows of one matrix: packed row
// r is query token r / group of head kv_head * group + r % group. All rows of a tile read the same keys once.
#ifndef KVSPEED_CUDA_ATTENTION_H_
#define KVSPEED_CUDA_ATTENTION_H_

#include <cstdint>

namespace kvspeed::cuda {

// One run of keys and values; the tail is the last one in the list.
struct alignas(16) DeviceSegment {
  const void* key;
  const void* value;
  int64_t key_stride[3];      // batch (page, where there is a page table), head, token
  int64_t value_stride[3];    // the same
  const float* rope;          // cos[R/2], then sin[R/2] of the offset; null: nothing to rotate
  const int32_t* first;       // [batch] or null: tokens before it are padding in that row
  const int32_t* page_table;  // null, or [batch, pages] by page_table_stride: token t lies in page [t / page_size]
  int64_t page_table_stride;  // between batch rows; 0 shares the table
  int64_t position;           // of token 0 where it is used: start + offset
  int32_t tokens;
  int32_t page_size, pages;  // pages: entries of the table that are valid numbers are 0 .. pages - 1
  int32_t unit_begin;        // decode: splits before this segment; prefill: key tiles before it
  uint32_t page_magic;       // n / page_size == (n * page_magic) >> page_shift for every n below 2^31
  uint8_t page_shift;
  uint8_t aligned;  // 16-byte loads are possible: addresses and strides are multiples of 8 numbers
  uint8_t causal;   // 1 for the tail
};
static_assert(sizeof(DeviceSegment) == 128, "copied as eight 16-byte words");

constexpr int kInlineSegments = 30;  // beyond them the list lies in the workspace, written there by a copy kernel

constexpr int kMaxTokens = 1 << 30;  // of a segment, and packed rows of a KV head: sums of two stay below 2^31

// One attention call. Passed to the kernels by value.
struct AttentionParams {
  const void* query;
  void* out;
  float* lse;                          // [batch, heads, query_tokens], natural log, or null
  const float* sinks;                  // [heads] or null
  float* partial_out;                  // [splits, batch, heads, query_tokens, head_dim]; null with one split
  float* partial_lse;                  // [splits, batch, heads, query_tokens], base 2
  const int32_t* tail_tokens;          // [batch] or null: the tail's length in that row, at most the tail's `tokens`
  const DeviceSegment* segment_table;  // null: the list is `segments`
  int64_t query_stride[3];             // batch, head, token
  int64_t out_stride[3];
  int32_t batch, heads, heads_kv, group, query_tokens;
  int32_t rows;         // group * query_tokens: packed rows of one KV head
  int32_t rotary_half;  // R/2
  int32_t interleaved;
  int32_t num_segments;   // with the tail, which is the last
  int32_t splits;         // with one split the kernel writes the results itself, and walks all segments
  int32_t split_units;    // decode: tokens of a split; prefill: key tiles of a split
  int32_t out_aligned;    // 16-byte stores to `out` are possible
  int32_t tail_length;    // the tail's `tokens`
  float query_factor;     // 1, -1 or 0: the sign of `scale`, so that the factors below are positive
  float score_factor;     // from a product of query and key to base-2 logits: |scale| * log2(e), or softcap * log2(e)
  float softcap_factor;   // 0: none, else |scale| / softcap: logits are score_factor * tanh(product * softcap_factor)
  int64_t window;         // 0: none
  int64_t window_start;   // no row sees a position below; kNoWindow: there is no window
  int64_t tail_position;  // of the tail's token 0
  DeviceSegment segments[kInlineSegments];
};
static_assert(sizeof(AttentionParams) <= 4096, "parameters above 4 KB cost every launch, and old drivers refuse them");

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_H_
