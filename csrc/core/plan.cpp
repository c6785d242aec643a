// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <cstring>

#include "core/rope_table.h"

namespace kvspeed {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t element_bytes(kvspeed_dtype dtype) { return dtype == KVSPEED_FLOAT32 ? 4 : 2; }

// Bytes of keys that one unit of rope_concat moves: small enough to share the work out evenly, large enough that
// taking a unit from the shared counter costs nothing.
constexpr int64_t kUnitBytes = 64 << 10;
// Outputs larger than this are written around the caches, which would not hold them anyway.
constexpr int64_t kStreamBytesMin = 4 << 20;
// Below this a second thread costs more than it brings (a parallel region is 1 to 10 us, and memory gives 30 KB a us).
constexpr int64_t kParallelBytesMin = 128 << 10;

}  // namespace

void RopeConcatLayout::lay_out(const kvspeed_rope_concat_args& args, int num_threads, Workspace& workspace) {
  const int64_t half = args.rotary_dim / 2;
  const int64_t row_bytes = args.head_dim > 0 ? args.head_dim * element_bytes(args.dtype) : 1;
  const int64_t max_rows = args.inv_freq_layer_stride == 0 ? 1 : args.layers;
  int64_t tokens = 0;
  for (int64_t i = 0; i < args.num_packets; ++i) tokens += args.packets[i].tokens;
  const int64_t key_bytes = tokens * args.layers * args.heads * row_bytes;  // measured by the checks: no overflow

  plan = {};
  plan.args = &args;
  plan.unit_tokens = kUnitBytes / row_bytes > 0 ? kUnitBytes / row_bytes : 1;
  plan.stream = 2 * key_bytes >= kStreamBytesMin;
  plan.num_threads = 2 * key_bytes < kParallelBytesMin ? 1 : num_threads;
  plan.row_stride = 2 * half;
  plan.thread_table_floats = arranged_table_floats(args.rotary_dim);
  // Two rows in float32 for packets of 8-bit numbers.
  if (args.storage != KVSPEED_STORED_PLAIN) plan.thread_table_floats += (2 * args.head_dim + 15) / 16 * 16;

  plan.packet_units = packet_units = workspace.take<int64_t>(args.num_packets + 1);
  plan.packet_start = packet_start = workspace.take<int64_t>(args.num_packets);
  plan.layer_row = layer_row = workspace.take<int32_t>(args.layers);
  plan.row_pairs = row_pairs = workspace.take<int32_t>(max_rows);
  row_layer = workspace.take<int32_t>(max_rows);
  plan.table = table = workspace.take<float>(args.num_packets * max_rows * plan.row_stride);
  plan.thread_table = workspace.take<float>(num_threads * plan.thread_table_floats);
}

void RopeConcatLayout::fill() {
  const kvspeed_rope_concat_args& args = *plan.args;
  const int64_t half = args.rotary_dim / 2;

  int64_t units = 0, start = args.start;
  for (int64_t i = 0; i < args.num_packets; ++i) {
    packet_units[i] = units;
    packet_start[i] = start;
    units += ceil_div(args.packets[i].tokens, plan.unit_tokens);
    start += args.packets[i].tokens;
  }
  packet_units[args.num_packets] = units;

  // Most models have one row of frequencies for all layers, some have two: build each once.
  plan.rows = 0;
  for (int64_t l = 0; l < args.layers; ++l) {
    int64_t row = 0;
    if (args.inv_freq != nullptr && half > 0) {
      const float* f = args.inv_freq + l * args.inv_freq_layer_stride;
      const auto same = [&](int64_t r) {
        const float* other = args.inv_freq + row_layer[r] * args.inv_freq_layer_stride;
        return f == other || std::memcmp(f, other, static_cast<size_t>(half) * sizeof(float)) == 0;
      };
      while (row < plan.rows && !same(row)) ++row;
    }
    if (row == plan.rows) {
      row_layer[row] = static_cast<int32_t>(l);
      row_pairs[row] = args.inv_freq == nullptr
                           ? 0
                           : static_cast<int32_t>(turning_pairs(args.inv_freq + l * args.inv_freq_layer_stride, half));
      ++plan.rows;
    }
    layer_row[l] = static_cast<int32_t>(row);
  }
  for (int64_t i = 0; i < args.num_packets; ++i) {
    if (args.packets[i].offset == 0 || args.packets[i].tokens == 0) continue;
    for (int64_t r = 0; r < plan.rows; ++r) {
      float* cos = table + (i * plan.rows + r) * plan.row_stride;
      fill_rope_row(args.packets[i].offset, args.inv_freq + row_layer[r] * args.inv_freq_layer_stride, row_pairs[r],
                    cos, cos + half);
    }
  }
}

void AttentionLayout::lay_out(const kvspeed_segment_attention_args& args, int num_threads, Workspace& workspace) {
  const int64_t rows = args.heads_kv > 0 ? args.heads / args.heads_kv * args.query_tokens : 0;
  int64_t tokens = args.tail.tokens;
  for (int64_t i = 0; i < args.num_segments; ++i) tokens += args.segments[i].tokens;

  plan = {};
  plan.args = &args;
  const double key_bytes = 2.0 * static_cast<double>(tokens) * static_cast<double>(args.batch * args.heads_kv) *
                           static_cast<double>(args.head_dim * element_bytes(args.dtype));
  plan.num_threads = key_bytes * static_cast<double>(1 + rows / 8) < kParallelBytesMin ? 1 : num_threads;

  // Splits give every thread work where batch and heads are few. They depend on lengths alone (never on the batch or
  // on the thread count), so a row's bits do not depend on its neighbours or on the machine. A split is long enough
  // that merging it is noise, and longer where rows are many, so that the partial sums stay about as big as the keys.
  plan.split_tokens = args.split_tokens > 0 ? args.split_tokens : 512 * (rows > 512 ? ceil_div(rows, 512) : 1);
  plan.splits = tokens > plan.split_tokens ? ceil_div(tokens, plan.split_tokens) : 1;

  // Rows are cut into tiles of equal size, a multiple of the blocks in which the kernels take them.
  const int64_t tiles = rows > 0 ? ceil_div(rows, kMaxRowTile) : 1;
  const int64_t tile = ceil_div(rows, tiles);
  plan.row_tile = tile <= 24 ? tile : ceil_div(tile, 12) * 12;
  plan.row_tiles = rows > 0 ? ceil_div(rows, plan.row_tile) : 0;

  const int64_t dim = padded_dim(args.head_dim);
  plan.rope = rope = workspace.take<RopeRow>(args.num_segments);
  table = workspace.take<float>(args.num_segments * args.rotary_dim);
  plan.partial =
      workspace.take<float>(plan.splits > 1 ? args.batch * args.heads_kv * plan.splits * rows * (dim + 2) : 0);
  plan.done = workspace.take<int64_t>(plan.splits > 1 ? args.batch * args.heads_kv : 0);
  plan.scratch_bytes = attention_scratch_bytes(args.head_dim, plan.row_tile);
  plan.scratch = workspace.take<char>(num_threads * static_cast<int64_t>(plan.scratch_bytes));
}

void AttentionLayout::fill() {
  const kvspeed_segment_attention_args& args = *plan.args;
  const int64_t half = args.rotary_dim / 2;
  if (plan.splits > 1) {
    std::memset(plan.done, 0, static_cast<size_t>(args.batch * args.heads_kv) * sizeof(int64_t));
  }
  for (int64_t i = 0; i < args.num_segments; ++i) {
    rope[i] = {nullptr, nullptr};
    if (args.segments[i].offset == 0 || args.segments[i].tokens == 0 || half == 0) continue;
    if (args.segments[i].rope != nullptr) {
      rope[i] = {args.segments[i].rope, args.segments[i].rope + half};
      continue;
    }
    if (i > 0 && rope[i - 1].cos != nullptr && args.segments[i].offset == args.segments[i - 1].offset) {
      rope[i] = rope[i - 1];
      continue;
    }
    float* cos = table + i * args.rotary_dim;
    fill_rope_row(args.segments[i].offset, args.inv_freq, half, cos, cos + half);
    rope[i] = {cos, cos + half};
  }
}

}  // namespace kvspeed
