// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// From the arguments of a call to the bytes it may touch. Tensors are taken row by row, by their strides, so the room
// between two rows, the spare capacity of a cache and the pages of others all are out of bounds.
#include <algorithm>

#include "simt/global_memory.h"

namespace kvspeed::gpu {
namespace {

using simt::Allow;

size_t element_bytes(kvspeed_dtype dtype) { return dtype == KVSPEED_FLOAT32 ? 4 : 2; }

void add(const void* p, size_t bytes, Allow allow, const char* name) {
  if (p != nullptr) simt::allow_memory(p, bytes, allow, name);
}

struct Dimension {
  int64_t size, stride;  // the stride in bytes
};

// Rows of row_bytes at base + the sum of index * stride.
void add_rows(const void* base, std::vector<Dimension> dimensions, size_t row_bytes, Allow allow, const char* name) {
  if (base == nullptr) return;
  for (const Dimension& d : dimensions) {
    if (d.size == 0) return;
  }
  // A dimension whose steps are as long as what lies inside makes one longer row.
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return std::abs(a.stride) < std::abs(b.stride); });
  std::vector<Dimension> rest;
  for (const Dimension& d : dimensions) {
    if (d.size == 1 || d.stride == 0) continue;
    if (rest.empty() && d.stride == static_cast<int64_t>(row_bytes)) {
      row_bytes *= static_cast<size_t>(d.size);
    } else {
      rest.push_back(d);
    }
  }
  std::vector<int64_t> index(rest.size(), 0);
  uintptr_t at = reinterpret_cast<uintptr_t>(base);
  for (;;) {
    simt::allow_memory(reinterpret_cast<const void*>(at), row_bytes, allow, name);
    size_t i = 0;
    for (; i < rest.size(); ++i) {
      at += static_cast<uintptr_t>(rest[i].stride);
      if (++index[i] < rest[i].size) break;
      at -= static_cast<uintptr_t>(rest[i].stride * rest[i].size);
      index[i] = 0;
    }
    if (i == rest.size()) return;
  }
}

void add_workspace(const kvspeed_execution& execution) {
  add(execution.workspace, execution.workspace_bytes, Allow::kReadWrite, "the workspace");
}

const void* plus(const void* p, int64_t bytes) { return static_cast<const char*>(p) + bytes; }

void add_rope_output(const kvspeed_rope_concat_args& g, void* out, const int64_t (&stride)[4], int64_t tokens,
                     const char* name) {
  if (out == nullptr) return;
  const int64_t e = static_cast<int64_t>(element_bytes(g.dtype));
  const size_t row = static_cast<size_t>(g.head_dim * e);
  if (g.page_table == nullptr) {
    add_rows(plus(out, g.start * stride[3] * e),
             {{g.layers, stride[0] * e}, {g.heads, stride[2] * e}, {tokens, stride[3] * e}}, row, Allow::kWrite, name);
    return;
  }
  for (int64_t t = g.start; t < g.start + tokens;) {
    const int64_t slot = t % g.page_size, run = std::min(g.page_size - slot, g.start + tokens - t);
    const int64_t page = g.page_table[t / g.page_size];
    if (page >= 0 && page < g.pages) {
      add_rows(plus(out, (page * stride[1] + slot * stride[3]) * e),
               {{g.layers, stride[0] * e}, {g.heads, stride[2] * e}, {run, stride[3] * e}}, row, Allow::kWrite, name);
    }
    t += run;
  }
}

void add_segment_tensor(const kvspeed_segment_attention_args& g, const kvspeed_segment& s, const void* p,
                        const int64_t (&stride)[3], const char* name) {
  const int64_t e = static_cast<int64_t>(element_bytes(g.dtype));
  const size_t row = static_cast<size_t>(g.head_dim * e);
  if (p == nullptr || s.tokens == 0) return;
  if (s.page_table == nullptr) {
    add_rows(p, {{g.batch, stride[0] * e}, {g.heads_kv, stride[1] * e}, {s.tokens, stride[2] * e}}, row, Allow::kRead,
             name);
    return;
  }
  for (int64_t b = 0; b < g.batch; ++b) {
    for (int64_t t = 0; t < s.tokens; t += s.page_size) {
      const int64_t page = s.page_table[b * s.page_table_stride + t / s.page_size];
      if (page < 0 || page >= s.pages) continue;
      add_rows(plus(p, page * stride[0] * e),
               {{g.heads_kv, stride[1] * e}, {std::min(s.page_size, s.tokens - t), stride[2] * e}}, row, Allow::kRead,
               name);
    }
  }
}

void add_segment(const kvspeed_segment_attention_args& g, const kvspeed_segment& s, bool tail) {
  add_segment_tensor(g, s, s.key, s.key_stride, tail ? "the tail's key" : "a segment's key");
  add_segment_tensor(g, s, s.value, s.value_stride, tail ? "the tail's value" : "a segment's value");
  add(s.first, static_cast<size_t>(g.batch) * 4, Allow::kRead, "a segment's first");
  if (s.tokens == 0) return;
  add(s.rope, static_cast<size_t>(g.rotary_dim) * 4, Allow::kRead, "a segment's rope row");
  if (s.page_table != nullptr && s.page_size > 0) {
    const int64_t used = (s.tokens + s.page_size - 1) / s.page_size;
    add_rows(s.page_table, {{g.batch, s.page_table_stride * 4}}, static_cast<size_t>(used) * 4, Allow::kRead,
             "a segment's page table");
  }
}

}  // namespace

void announce(const kvspeed_rope_concat_args& g, const kvspeed_execution& execution) {
  if (simt::options().hollow) return;
  simt::forget_memory();
  const int64_t e = g.storage == KVSPEED_STORED_PLAIN ? static_cast<int64_t>(element_bytes(g.dtype)) : 1;
  const size_t row = static_cast<size_t>(g.head_dim * e);
  int64_t tokens = 0;
  for (int64_t i = 0; i < g.num_packets; ++i) {
    const kvspeed_packet& p = g.packets[i];
    tokens += p.tokens;
    const auto& k = p.key_stride;
    const auto& v = p.value_stride;
    add_rows(p.key, {{g.layers, k[0] * e}, {g.heads, k[1] * e}, {p.tokens, k[2] * e}}, row, Allow::kRead,
             "a packet's key");
    add_rows(p.value, {{g.layers, v[0] * e}, {g.heads, v[1] * e}, {p.tokens, v[2] * e}}, row, Allow::kRead,
             "a packet's value");
    add_rows(p.key_scale, {{g.layers, p.key_scale_stride[0] * 4}, {g.heads, p.key_scale_stride[1] * 4}}, 4,
             Allow::kRead, "a packet's key_scale");
    add_rows(p.value_scale, {{g.layers, p.value_scale_stride[0] * 4}, {g.heads, p.value_scale_stride[1] * 4}}, 4,
             Allow::kRead, "a packet's value_scale");
  }
  add_rope_output(g, g.out_key, g.out_key_stride, tokens, "out_key");
  add_rope_output(g, g.out_value, g.out_value_stride, tokens, "out_value");
  if (g.page_table != nullptr && tokens > 0) {  // "entries of pages that are not written are never read"
    const int64_t begin = g.start / g.page_size, end = (g.start + tokens - 1) / g.page_size + 1;
    add(g.page_table + begin, static_cast<size_t>(end - begin) * 4, Allow::kRead, "the page table");
  }
  add_workspace(execution);
}

void announce(const kvspeed_segment_attention_args& g, const kvspeed_execution& execution) {
  if (simt::options().hollow) return;
  simt::forget_memory();
  const int64_t e = static_cast<int64_t>(element_bytes(g.dtype));
  const size_t row = static_cast<size_t>(g.head_dim * e);
  const auto rows = [&](const int64_t (&stride)[3]) {
    return std::vector<Dimension>{{g.batch, stride[0] * e}, {g.heads, stride[1] * e}, {g.query_tokens, stride[2] * e}};
  };
  add_rows(g.query, rows(g.query_stride), row, Allow::kRead, "the query");
  add_rows(g.out, rows(g.out_stride), row, Allow::kWrite, "out");
  add(g.lse, static_cast<size_t>(g.batch * g.heads * g.query_tokens) * 4, Allow::kWrite, "lse");
  add(g.sinks, static_cast<size_t>(g.heads) * 4, Allow::kRead, "sinks");
  add(g.tail_tokens, static_cast<size_t>(g.batch) * 4, Allow::kRead, "tail_tokens");
  for (int64_t i = 0; i < g.num_segments; ++i) add_segment(g, g.segments[i], false);
  add_segment(g, g.tail, true);
  add_workspace(execution);
}

void announce(const kvspeed_merge_states_args& g, const kvspeed_execution& execution) {
  if (simt::options().hollow) return;
  simt::forget_memory();
  const auto rows = [&](const int64_t (&stride)[3], int64_t e) {
    return std::vector<Dimension>{{g.batch, stride[0] * e}, {g.heads, stride[1] * e}, {g.tokens, stride[2] * e}};
  };
  const auto add_state = [&](const void* p, const int64_t (&stride)[3], kvspeed_dtype dtype, Allow allow,
                             const char* name) {
    const int64_t e = static_cast<int64_t>(element_bytes(dtype));
    add_rows(p, rows(stride, e), static_cast<size_t>(g.head_dim * e), allow, name);
  };
  add_state(g.out_a, g.out_a_stride, g.dtype_a, Allow::kRead, "out_a");
  add_state(g.out_b, g.out_b_stride, g.dtype_b, Allow::kRead, "out_b");
  add_rows(g.lse_a, rows(g.lse_a_stride, 4), 4, Allow::kRead, "lse_a");
  add_rows(g.lse_b, rows(g.lse_b_stride, 4), 4, Allow::kRead, "lse_b");
  add_state(g.out, g.out_stride, g.dtype_a, Allow::kWrite, "out");
  add(g.lse, static_cast<size_t>(g.batch * g.heads * g.tokens) * 4, Allow::kWrite, "lse");
  add_workspace(execution);
}

}  // namespace kvspeed::gpu
