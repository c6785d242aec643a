// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// From checked arguments to launches: one kernel, a second where splits are merged, and one more only where rotation
// rows or a list of more than kInlineSegments segments must be brought to the device.
#include <cmath>

#include "core/rope_table.h"
#include "core/workspace.h"
#include "cuda/attention_launch.h"
#include "cuda/attention_plan.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/merge_splits.cuh"
#include "cuda/upload.cuh"

namespace kvspeed::cuda {
namespace {

using Args = kvspeed_segment_attention_args;

bool is_head_dim(int64_t d) { return d == 64 || d == 80 || d == 96 || d == 128 || d == 256; }

const kvspeed_segment& segment_of(const Args& g, int64_t i) { return i == g.num_segments ? g.tail : g.segments[i]; }

// Whether the call must turn the query for this segment without having been given the row to do it.
bool lacks_rope(const kvspeed_segment& s, const Args& g) {
  return s.offset != 0 && s.tokens > 0 && g.rotary_dim > 0 && s.rope == nullptr;
}

// Floats of a rotation row in the workspace: whole 16-byte words.
int64_t rope_row_floats(const Args& g) { return divide_up(g.rotary_dim, 4) * 4; }

struct Layout {
  AttentionPlan plan;
  Reach reach;       // of the window
  int64_t rows;      // of the partial states
  int64_t segments;  // that hold tokens, and the tail
  int64_t rope_rows;
  float* rope;
  DeviceSegment* table;  // null: the list travels in the parameters
  float *partial_out, *partial_lse;

  void lay_out(const Args& g, int32_t device_index, Workspace& workspace) {
    segments = 1, rope_rows = 0;
    for (int64_t i = 0; i < g.num_segments; ++i) {
      segments += g.segments[i].tokens > 0;
      rope_rows += lacks_rope(g.segments[i], g);
    }
    rows = g.batch * g.heads * g.query_tokens;
    const int64_t packed = g.heads_kv > 0 ? g.heads / g.heads_kv * g.query_tokens : 0;
    const AttentionWork work = {packed,         g.batch * g.heads_kv,   g.head_dim,
                                g.split_tokens, sm_count(device_index), shared_per_sm(device_index)};
    const int64_t shortest = g.tail_tokens == nullptr ? g.tail.tokens : 0;
    reach = window_reach(g.window, g.tail.start, shortest, g.tail.tokens, g.query_tokens);
    plan = plan_attention(work, [&](int64_t i) { return range_of(segment_of(g, i)); }, g.num_segments + 1);
    rope = workspace.take<float>(rope_rows * rope_row_floats(g));
    table = workspace.take<DeviceSegment>(segments > kInlineSegments ? segments : 0);
    partial_out = workspace.take<float>(plan.splits > 1 ? plan.splits * rows * g.head_dim : 0);
    partial_lse = workspace.take<float>(plan.splits > 1 ? plan.splits * rows : 0);
  }

  TokenRange range_of(const kvspeed_segment& s) const { return reached(reach, s.start + s.offset, s.tokens); }
  int64_t units_of(const kvspeed_segment& s) const {
    return cuda::units_of(range_of(s), plan.decode ? plan.split_units : plan.unit_tokens);
  }
};

bool in_vectors(const void* data, const int64_t (&stride)[3]) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (stride[0] | stride[1] | stride[2]) % 8 == 0;
}

int32_t at_most(int64_t x, int64_t limit) { return static_cast<int32_t>(x < limit ? x : limit); }

DeviceSegment device_segment(const kvspeed_segment& s, const float* rope, bool causal) {
  DeviceSegment d = {};
  d.key = s.key, d.value = s.value;
  for (int i = 0; i < 3; ++i) d.key_stride[i] = s.key_stride[i], d.value_stride[i] = s.value_stride[i];
  d.rope = rope;
  d.first = s.first;
  d.position = s.start + s.offset;
  d.tokens = static_cast<int32_t>(s.tokens);
  if (s.page_table != nullptr) {
    d.page_table = s.page_table;
    d.page_table_stride = s.page_table_stride;
    d.page_size = at_most(s.page_size, kMaxTokens);  // longer pages hold every token in the first
    d.pages = at_most(s.pages, INT32_MAX);
    const Divider by = divider(d.page_size);
    d.page_magic = by.magic, d.page_shift = by.shift;
  }
  d.aligned = in_vectors(s.key, s.key_stride) && in_vectors(s.value, s.value_stride);
  d.causal = causal;
  return d;
}

// The list of segments in order, with the rotation rows that are missing; calls add(DeviceSegment) for each.
template <class Add>
void list_segments(const Args& g, const Layout& layout, const Add& add) {
  int64_t units = 0, row = 0;
  for (int64_t i = 0; i <= g.num_segments; ++i) {
    const kvspeed_segment& s = segment_of(g, i);
    const bool tail = i == g.num_segments;
    if (s.tokens == 0 && !tail) continue;
    const float* rope = s.offset != 0 && g.rotary_dim > 0 ? s.rope : nullptr;
    if (lacks_rope(s, g)) rope = layout.rope + row++ * rope_row_floats(g);
    DeviceSegment d = device_segment(s, rope, tail);
    d.unit_begin = static_cast<int32_t>(units);
    units += layout.units_of(s);
    add(d);
  }
}

int upload_rope_rows(const Args& g, const Layout& layout, gpu::Stream stream) {
  constexpr int64_t kFloats = kUploadBytes / sizeof(float);
  float rows[kFloats];
  const int64_t size = rope_row_floats(g), half = g.rotary_dim / 2;
  int64_t filled = 0;
  float* to = layout.rope;
  const auto flush = [&] {
    const int error = upload(to, rows, static_cast<size_t>(filled) * sizeof(float), stream);
    to += filled, filled = 0;
    return error;
  };
  for (int64_t i = 0; i < g.num_segments; ++i) {
    if (!lacks_rope(g.segments[i], g)) continue;
    if (filled + size > kFloats) {
      const int error = flush();
      if (error != 0) return error;
    }
    float* row = rows + filled;
    fill_rope_row(g.segments[i].offset, g.inv_freq, half, row, row + half);
    for (int64_t j = 2 * half; j < size; ++j) row[j] = 0;
    filled += size;
  }
  return flush();
}

int upload_table(const Args& g, const Layout& layout, gpu::Stream stream) {
  constexpr int64_t kMost = kUploadBytes / sizeof(DeviceSegment);
  DeviceSegment part[kMost];
  int64_t filled = 0, done = 0;
  int error = 0;
  const auto flush = [&] {
    if (error == 0)
      error = upload(layout.table + done, part, static_cast<size_t>(filled) * sizeof(DeviceSegment), stream);
    done += filled, filled = 0;
  };
  list_segments(g, layout, [&](const DeviceSegment& d) {
    part[filled++] = d;
    if (filled == kMost) flush();
  });
  flush();
  return error;
}

// All but the list of segments.
AttentionParams attention_params(const Args& g, const Layout& layout) {
  AttentionParams p;
  p.query = g.query, p.out = g.out, p.lse = g.lse, p.sinks = g.sinks;
  p.partial_out = layout.partial_out, p.partial_lse = layout.partial_lse;
  p.tail_tokens = g.tail_tokens;
  p.segment_table = nullptr;
  for (int i = 0; i < 3; ++i) p.query_stride[i] = g.query_stride[i], p.out_stride[i] = g.out_stride[i];
  p.batch = static_cast<int32_t>(g.batch), p.heads = static_cast<int32_t>(g.heads);
  p.heads_kv = static_cast<int32_t>(g.heads_kv), p.group = p.heads / p.heads_kv;
  p.query_tokens = static_cast<int32_t>(g.query_tokens), p.rows = p.group * p.query_tokens;
  p.rotary_half = static_cast<int32_t>(g.rotary_dim / 2), p.interleaved = g.interleaved != 0;
  p.num_segments = static_cast<int32_t>(layout.segments);
  p.splits = static_cast<int32_t>(layout.plan.splits);
  p.split_units = at_most(layout.plan.split_units, kMaxTokens);
  p.out_aligned = in_vectors(g.out, g.out_stride);
  p.tail_length = static_cast<int32_t>(g.tail.tokens), p.tail_position = g.tail.start;
  p.window = g.window, p.window_start = layout.reach.from;
  // A scale of 0 makes the query 0, so that every factor stays positive.
  const float size = g.scale == 0 ? 1.0f : std::fabs(g.scale);
  p.query_factor = g.scale > 0 ? 1.0f : g.scale < 0 ? -1.0f : g.scale;
  p.score_factor = (g.softcap > 0 ? g.softcap : size) * kLog2E;
  p.softcap_factor = g.softcap > 0 ? size / g.softcap : 0.0f;
  return p;
}

int launch_by_head_dim(AttentionKernel kernel, const Args& g, const AttentionParams& p, gpu::Stream stream) {
  switch (g.head_dim) {
    case 64:
      return launch_attention<64>(kernel, g.dtype, p, stream);
    case 80:
      return launch_attention<80>(kernel, g.dtype, p, stream);
    case 96:
      return launch_attention<96>(kernel, g.dtype, p, stream);
    case 128:
      return launch_attention<128>(kernel, g.dtype, p, stream);
    default:
      return launch_attention<256>(kernel, g.dtype, p, stream);
  }
}

int launch_merge(const Args& g, const Layout& layout, gpu::Stream stream) {
  MergeSplitsParams p = {};
  p.partial_out = layout.partial_out, p.partial_lse = layout.partial_lse;
  p.sinks = g.sinks, p.out = g.out, p.lse = g.lse;
  for (int i = 0; i < 3; ++i) p.out_stride[i] = g.out_stride[i];
  p.rows = layout.rows;
  p.heads = static_cast<int32_t>(g.heads), p.query_tokens = static_cast<int32_t>(g.query_tokens);
  p.head_dim = static_cast<int32_t>(g.head_dim), p.splits = static_cast<int32_t>(layout.plan.splits);
  const gpu::Grid grid = {static_cast<unsigned>(layout.rows), 1, 1};
  return g.dtype == KVSPEED_BFLOAT16
             ? gpu::launch(merge_splits_kernel<gpu::bf16>, grid, kMergeSplitsThreads, kMergeSplitsShared, stream, p)
             : gpu::launch(merge_splits_kernel<gpu::f16>, grid, kMergeSplitsThreads, kMergeSplitsShared, stream, p);
}

// What 32-bit indices in the kernels hold.
bool fits(const Args& g, const Layout& layout) {
  constexpr int64_t kMaxBlocks = INT32_MAX;
  const int64_t packed = g.heads / g.heads_kv * g.query_tokens;
  if (packed > kMaxTokens || layout.rows > kMaxBlocks || layout.segments > kMaxTokens) return false;
  int64_t tokens = 0;
  for (int64_t i = 0; i <= g.num_segments; ++i) tokens += segment_of(g, i).tokens;
  if (tokens > kMaxTokens) return false;
  const int64_t tiles = layout.plan.decode ? 1 : divide_up(packed, 64);
  return tiles * g.batch * g.heads_kv <= kMaxBlocks / layout.plan.splits;
}

AttentionKernel kernel_of(const AttentionPlan& plan) {
  if (plan.decode) return AttentionKernel::kDecode;
  return plan.wide ? AttentionKernel::kPrefill128 : AttentionKernel::kPrefill64;
}

}  // namespace

size_t segment_attention_workspace(const Args& g, int32_t device_index) {
  Workspace workspace(nullptr);
  Layout layout;
  layout.lay_out(g, device_index, workspace);
  return workspace.used();
}

kvspeed_status segment_attention(const Args& g, const kvspeed_execution& execution) {
  gpu::announce(g, execution);
  if (g.dtype == KVSPEED_FLOAT32 || !is_head_dim(g.head_dim)) return KVSPEED_UNSUPPORTED;
  if (g.batch == 0 || g.heads == 0 || g.query_tokens == 0) return KVSPEED_OK;
  Workspace workspace(execution.workspace);
  Layout layout;
  layout.lay_out(g, execution.device_index, workspace);
  if (!fits(g, layout)) return KVSPEED_UNSUPPORTED;
  const kvspeed_status status = check_workspace(execution, workspace.used());
  if (status != KVSPEED_OK) return status;

  const DeviceGuard guard(execution.device_index);
  if (guard.error() != 0) return report(guard.error());
  const gpu::Stream stream = static_cast<gpu::Stream>(execution.stream);
  AttentionParams p = attention_params(g, layout);
  int error = layout.rope_rows > 0 ? upload_rope_rows(g, layout, stream) : 0;
  if (error != 0) return report(error);
  if (layout.segments > kInlineSegments) {
    p.segment_table = layout.table;
    error = upload_table(g, layout, stream);
  } else {
    int64_t filled = 0;
    list_segments(g, layout, [&](const DeviceSegment& d) { p.segments[filled++] = d; });
  }
  if (error == 0) {
    error = launch_by_head_dim(kernel_of(layout.plan), g, p, stream);
  }
  if (error == 0 && layout.plan.splits > 1) error = launch_merge(g, layout, stream);
  return report(error);
}

}  // namespace kvspeed::cuda
