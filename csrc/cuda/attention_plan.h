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
constexpr int64_t kNoWindow = -(int64_t{1} << 62);

// What the plan depends on, lengths aside.
struct AttentionWork {
  int64_t rows;         // packed rows of a KV head: group * query tokens
  int64_t batch_heads;  // batch rows times KV heads
  int64_t head_dim;
  int64_t split_tokens;  // the caller's; 0: choose
  int64_t sm_count;
  int64_t shared_per_sm;  // bytes of shared memory
};

struct AttentionPlan {
  bool decode;
  int64_t unit_tokens;  // decode: 1; prefill: keys of a tile
  int64_t split_units;  // units of a split
  int64_t splits;       // with 1 a block walks all segments, and there is nothing to merge
  bool wide;            // prefill: blocks of 128 packed rows, not 64
};

// 32-bit division is several times as fast on many processors, and this stands in the way of every launch.
constexpr int64_t divide_down(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}
constexpr int64_t divide_up(int64_t a, int64_t b) { return divide_down(a + b - 1, b); }

constexpr int64_t prefill_keys(int64_t head_dim) { return head_dim > 128 ? 32 : 64; }
// Bytes of shared memory that a block of 64 * row_tiles packed rows takes; the kernel's own sum must agree.
constexpr int64_t prefill_shared(int64_t head_dim, int64_t row_tiles) {
  const int64_t pitch = head_dim + 8, rows = 64 * row_tiles, query = row_tiles * head_dim <= 128 ? 0 : rows * pitch;
  return (query + 2 * prefill_keys(head_dim) * pitch) * 2 + (180 + 4 * rows + 15) / 16 * 16;
}

// Positions [from, to) that any query row's window reaches. `shortest` and `longest` are what the tail's length may be:
// they differ where it lies in device memory. Without a window `from` is kNoWindow, and `to` says nothing.
struct Reach {
  int64_t from, to;
};
constexpr Reach window_reach(int64_t window, int64_t tail_position, int64_t shortest, int64_t longest,
                             int64_t query_tokens) {
  if (window == 0) return {kNoWindow, 0};
  return {tail_position + shortest - query_tokens - window + 1, tail_position + longest};
}

// The tokens [from, to) of a segment that are worth planning for: all, or those within reach.
struct TokenRange {
  int64_t from, to;
};
constexpr TokenRange reached(const Reach& reach, int64_t position, int64_t tokens) {
  if (reach.from == kNoWindow) return {0, tokens};
  const int64_t from = reach.from - position, to = reach.to - position;
  return {from < 0 ? 0 : from, to < tokens ? to : tokens};
}

// Units that a segment takes: they begin at multiples of their size, so that neither a window nor what it hides moves
// them. The kernels find the first one in the same way.
constexpr int64_t units_of(const TokenRange& range, int64_t size) {
  return range.from < range.to ? divide_up(range.to, size) - divide_down(range.from, size) : 0;
}

// Decode splits end where segments end; prefill splits are ranges of the list of all segments' key tiles.
template <class Ranges>
int64_t count_units(const Ranges& ranges, int64_t segments, int64_t size) {
  int64_t units = 0;
  for (int64_t i = 0; i < segments; ++i) units += units_of(ranges(i), size);
  return units;
}

// Tokens of a split so that the blocks fill the device once, or a few times evenly. The caller's number is kept as it
// is, and then splits depend on the lengths alone: a row's bits do not depend on its batch.
template <class Ranges>
AttentionPlan plan_decode(const AttentionWork& work, const Ranges& ranges, int64_t segments) {
  int64_t tokens = 0, used = 0;
  for (int64_t i = 0; i < segments; ++i) {
    const TokenRange range = ranges(i);
    if (range.from < range.to) tokens += range.to - range.from, ++used;
  }
  AttentionPlan plan = {true, 1, tokens > 0 ? tokens : 1, 1, false};
  if (work.split_tokens > 0) {
    if (work.split_tokens >= tokens) return plan;
    plan.split_units = work.split_tokens;
    plan.splits = count_units(ranges, segments, plan.split_units);
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
    const int64_t splits = count_units(ranges, segments, size), blocks = splits * work.batch_heads;
    const int64_t mean = divide_up(tokens, splits) + start + state;
    const int64_t longest = (size < tokens ? size : tokens) + start + state;
    const int64_t together = divide_up(blocks, slots) * mean;
    const int64_t cost = merge + (together > longest ? together : longest);
    if (splits > 1 && cost < best) best = cost, plan.split_units = size, plan.splits = splits;
    if (size == kDecodeSplitMin) break;
  }
  return plan;
}

template <class Ranges>
AttentionPlan plan_prefill(const AttentionWork& work, const Ranges& ranges, int64_t segments) {
  const int64_t keys = prefill_keys(work.head_dim), tiles = count_units(ranges, segments, keys);
  AttentionPlan plan = {false, keys, tiles > 0 ? tiles : 1, 1, false};
  if (work.split_tokens > 0) {
    plan.split_units =
        work.split_tokens < plan.split_units * keys ? divide_up(work.split_tokens, keys) : plan.split_units;
  } else {
    const int64_t blocks = divide_up(work.rows, 64) * work.batch_heads, slots = kBlocksWanted * work.sm_count;
    int64_t wanted = divide_up(slots, blocks > 0 ? blocks : 1);
    if (wanted > tiles / kPrefillSplitMin) wanted = tiles / kPrefillSplitMin;
    if (wanted > 1) plan.split_units = divide_up(tiles, wanted);
  }
  if (tiles > 0) plan.splits = divide_up(tiles, plan.split_units);
  // 128 rows a block read the keys half as often, where two of them fit on a multiprocessor, and there are two for
  // each.
  const int64_t wide_blocks = divide_up(work.rows, 128) * work.batch_heads * plan.splits;
  const bool two_fit = work.head_dim <= 128 && 2 * (prefill_shared(work.head_dim, 2) + 1024) <= work.shared_per_sm;
  plan.wide = work.rows > 64 && two_fit && wide_blocks >= kBlocksWanted * work.sm_count;
  return plan;
}

// `ranges(i)`: the TokenRange of segment i, the tail among them.
template <class Ranges>
AttentionPlan plan_attention(const AttentionWork& work, const Ranges& ranges, int64_t segments) {
  return work.rows <= kMaxDecodeRows ? plan_decode(work, ranges, segments) : plan_prefill(work, ranges, segments);
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
