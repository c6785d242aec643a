// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// How an attention call is cut into blocks: which kernel, how many splits, how long. Plain C++, tested without a
// device.
#ifndef KVSPEED_CUDA_ATTENTION_PLAN_H_
#define KVSPEED_CUDA_ATTENTION_PLAN_H_

#include <cstdint>

namespace kvspeed::cuda {

constexpr int64_t kMaxDecodeRows = 16;    // packed rows of one matrix operand; more go to prefill
constexpr int64_t kBlocksWanted = 2;      // a streaming multiprocessor
constexpr int64_t kDecodeRun = 64;        // tokens that a decode block takes at a time
constexpr int64_t kDecodeSplitMin = 128;  // below, starting a block costs more than its tokens
constexpr int64_t kDecodeWholeMax = 256;  // up to here a second kernel costs more than what splits save
constexpr int64_t kPrefillSplitMin = 4;   // key tiles

// What the plan depends on, lengths aside.
struct AttentionWork {
  int64_t rows;         // packed rows of a KV head: group * query tokens
  int64_t batch_heads;  // batch rows times KV heads
  int64_t head_dim;
  int64_t split_tokens;  // the caller's; 0: choose
  int64_t sm_count;
};

struct AttentionPlan {
  bool decode;
  int64_t unit_tokens;  // decode: 1; prefill: keys of a tile
  int64_t split_units;  // units of a split
  int64_t splits;       // with 1 a block walks all segments, and there is nothing to merge
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t prefill_keys(int64_t head_dim) { return head_dim > 128 ? 32 : 64; }

// Decode splits end where segments end; prefill splits are ranges of the list of all segments' key tiles.
template <class Length>
int64_t count_units(const Length& length, int64_t segments, int64_t size) {
  int64_t units = 0;
  for (int64_t i = 0; i < segments; ++i) units += divide_up(length(i), size);
  return units;
}

// Tokens of a split so that the blocks fill the device once, or a few times evenly. The caller's number is kept as it
// is, and then splits depend on the lengths alone: a row's bits do not depend on its batch.
template <class Length>
AttentionPlan plan_decode(const AttentionWork& work, const Length& length, int64_t segments) {
  int64_t tokens = 0, used = 0;
  for (int64_t i = 0; i < segments; ++i) tokens += length(i), used += length(i) > 0;
  AttentionPlan plan = {true, 1, tokens > 0 ? tokens : 1, 1};
  if (work.split_tokens > 0) {
    if (work.split_tokens >= tokens) return plan;
    plan.split_units = work.split_tokens;
    plan.splits = count_units(length, segments, plan.split_units);
    return plan;
  }
  if (tokens <= kDecodeWholeMax) return plan;

  // Costs in tokens that one block reads: to start a block, and to write and read a state of `rows` float32 rows.
  const int64_t start = 64, state = 2 * work.rows, slots = kBlocksWanted * work.sm_count;
  const int64_t merge = 128;  // the second kernel
  int64_t best = divide_up(work.batch_heads, slots) * (tokens + start * used);
  for (int64_t waves = 1; waves <= 4; ++waves) {
    const int64_t ideal = divide_up(tokens * work.batch_heads, waves * slots);
    const int64_t size = divide_up(ideal > kDecodeSplitMin ? ideal : kDecodeSplitMin, kDecodeRun) * kDecodeRun;
    const int64_t splits = count_units(length, segments, size), blocks = splits * work.batch_heads;
    const int64_t mean = divide_up(tokens, splits) + start + state;
    const int64_t longest = (size < tokens ? size : tokens) + start + state;
    const int64_t together = divide_up(blocks, slots) * mean;
    const int64_t cost = merge + (together > longest ? together : longest);
    if (splits > 1 && cost < best) best = cost, plan.split_units = size, plan.splits = splits;
    if (size == kDecodeSplitMin) break;
  }
  return plan;
}

template <class Length>
AttentionPlan plan_prefill(const AttentionWork& work, const Length& length, int64_t segments) {
  const int64_t keys = prefill_keys(work.head_dim), tiles = count_units(length, segments, keys);
  AttentionPlan plan = {false, keys, tiles > 0 ? tiles : 1, 1};
  if (work.split_tokens > 0) {
    plan.split_units = divide_up(work.split_tokens, keys);
  } else {
    const int64_t blocks = divide_up(work.rows, 64) * work.batch_heads, slots = kBlocksWanted * work.sm_count;
    int64_t wanted = divide_up(slots, blocks > 0 ? blocks : 1);
    if (wanted > tiles / kPrefillSplitMin) wanted = tiles / kPrefillSplitMin;
    if (wanted > 1) plan.split_units = divide_up(tiles, wanted);
  }
  if (tiles > 0) plan.splits = divide_up(tiles, plan.split_units);
  return plan;
}

// `length(i)`: tokens of segment i, the tail among them.
template <class Length>
AttentionPlan plan_attention(const AttentionWork& work, const Length& length, int64_t segments) {
  return work.rows <= kMaxDecodeRows ? plan_decode(work, length, segments) : plan_prefill(work, length, segments);
}

// n / d == (n * magic) >> shift for every n below 2^31, and d from 1 to 2^30.
struct Divider {
  uint32_t magic;
  uint8_t shift;
};
constexpr Divider divider(int64_t d) {
  int bits = 0;
  while ((int64_t{1} << bits) < d) ++bits;
  const uint64_t power = uint64_t{1} << (31 + bits);
  return {static_cast<uint32_t>((power + static_cast<uint64_t>(d) - 1) / static_cast<uint64_t>(d)),
          static_cast<uint8_t>(31 + bits)};
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ATTENTION_PLAN_H_
