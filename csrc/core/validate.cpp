// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "core/validate.h"

#include <cmath>

namespace kvspeed {
namespace {

// Positions beyond this are not meant: float64 angles stay exact up to here, and sums of a few cannot overflow.
constexpr int64_t kMaxPosition = int64_t{1} << 52;
constexpr int64_t kMaxSize = int64_t{1} << 40;
constexpr float kMaxFactor = 1e38f;  // of scores, which are kept in base 2: a little more overflows float32

bool is_dtype(kvspeed_dtype d) { return d == KVSPEED_FLOAT32 || d == KVSPEED_BFLOAT16 || d == KVSPEED_FLOAT16; }
bool is_storage(kvspeed_storage s) {
  return s == KVSPEED_STORED_PLAIN || s == KVSPEED_STORED_INT8 || s == KVSPEED_STORED_FLOAT8_E4M3FN;
}
bool is_size(int64_t n) { return n >= 0 && n <= kMaxSize; }
bool is_position(int64_t p) { return p >= -kMaxPosition && p <= kMaxPosition; }

// rotary_dim is even, and no larger than the head.
bool is_rotary(int64_t rotary_dim, int64_t head_dim) {
  return rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0;
}

// Pages that are about to be written exist.
kvspeed_status check_pages(const kvspeed_rope_concat_args& g, int64_t end, kvspeed_device device) {
  if (g.page_size <= 0 || !is_size(g.page_size) || !is_size(g.pages) || !is_size(g.page_table_length)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  int64_t room;
  if (__builtin_mul_overflow(g.page_table_length, g.page_size, &room)) return KVSPEED_INVALID_ARGUMENT;
  if (end > room) return KVSPEED_OUT_OF_RANGE;
  if (end == g.start || device != KVSPEED_CPU) return KVSPEED_OK;
  for (int64_t page = g.start / g.page_size; page <= (end - 1) / g.page_size; ++page) {
    if (g.page_table[page] < 0 || g.page_table[page] >= g.pages) return KVSPEED_OUT_OF_RANGE;
  }
  return KVSPEED_OK;
}

kvspeed_status check_segment(const kvspeed_segment& s, const kvspeed_segment_attention_args& g, kvspeed_device device) {
  if (!is_size(s.tokens) || !is_position(s.offset) || !is_position(s.start)) return KVSPEED_INVALID_ARGUMENT;
  const bool readable = s.tokens > 0 && g.batch > 0 && g.heads > 0 && (s.page_table == nullptr || s.pages != 0);
  if (readable && (s.key == nullptr || s.value == nullptr)) return KVSPEED_INVALID_ARGUMENT;
  if (s.offset != 0 && g.rotary_dim > 0 && g.inv_freq == nullptr && !s.rope) return KVSPEED_INVALID_ARGUMENT;
  if (s.page_table == nullptr) return KVSPEED_OK;
  if (device == KVSPEED_CPU) return KVSPEED_UNSUPPORTED;  // the CPU kernels would take a page for a row of the batch
  return s.page_size > 0 && is_size(s.page_size) && is_size(s.pages) ? KVSPEED_OK : KVSPEED_INVALID_ARGUMENT;
}

}  // namespace

kvspeed_status validate(const kvspeed_rope_concat_args* args, kvspeed_device device) {
  if (args == nullptr) return KVSPEED_INVALID_ARGUMENT;
  const kvspeed_rope_concat_args& g = *args;
  if (!is_dtype(g.dtype) || !is_storage(g.storage)) return KVSPEED_UNSUPPORTED;
  if (!is_size(g.layers) || !is_size(g.heads) || !is_size(g.head_dim) || !is_rotary(g.rotary_dim, g.head_dim) ||
      !is_size(g.num_packets) || !is_size(g.start) || !is_size(g.capacity)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  if (g.num_packets > 0 && g.packets == nullptr) return KVSPEED_INVALID_ARGUMENT;
  const bool empty = g.layers == 0 || g.heads == 0 || g.head_dim == 0;  // tensors without numbers have no address
  int64_t end = g.start, heads, numbers;
  bool turns = false;
  for (int64_t i = 0; i < g.num_packets; ++i) {
    const kvspeed_packet& p = g.packets[i];
    if (!is_size(p.tokens) || !is_position(p.offset)) return KVSPEED_INVALID_ARGUMENT;
    if (!empty && p.tokens > 0 && (p.key == nullptr || p.value == nullptr)) return KVSPEED_INVALID_ARGUMENT;
    if (g.storage != KVSPEED_STORED_PLAIN && !empty && p.tokens > 0 && (!p.key_scale || !p.value_scale)) {
      return KVSPEED_INVALID_ARGUMENT;
    }
    if (__builtin_add_overflow(end, p.tokens, &end)) return KVSPEED_OUT_OF_RANGE;
    turns = turns || p.offset != 0;
  }
  if (__builtin_mul_overflow(g.layers, g.heads, &heads) || __builtin_mul_overflow(heads, g.head_dim, &numbers) ||
      __builtin_mul_overflow(heads, end, &numbers)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  if (turns && g.rotary_dim > 0 && g.inv_freq == nullptr) return KVSPEED_INVALID_ARGUMENT;
  if (end > g.capacity) return KVSPEED_OUT_OF_RANGE;
  if (!empty && end > g.start && (g.out_key == nullptr || g.out_value == nullptr)) return KVSPEED_INVALID_ARGUMENT;
  return g.page_table != nullptr ? check_pages(g, end, device) : KVSPEED_OK;
}

kvspeed_status validate(const kvspeed_segment_attention_args* args, kvspeed_device device) {
  if (args == nullptr) return KVSPEED_INVALID_ARGUMENT;
  const kvspeed_segment_attention_args& g = *args;
  if (device == KVSPEED_CPU && g.tail_tokens != nullptr) return KVSPEED_UNSUPPORTED;
  if (!is_dtype(g.dtype)) return KVSPEED_UNSUPPORTED;
  if (!is_size(g.batch) || !is_size(g.heads) || !is_size(g.heads_kv) || !is_size(g.query_tokens) ||
      !is_size(g.num_segments) || g.window < 0 || g.window > kMaxPosition || !is_size(g.split_tokens)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  if (g.head_dim <= 0 || g.head_dim > 256 || g.head_dim % 8 != 0) return KVSPEED_UNSUPPORTED;
  if (!is_rotary(g.rotary_dim, g.head_dim)) return KVSPEED_INVALID_ARGUMENT;
  if (g.heads > 0 && (g.heads_kv == 0 || g.heads % g.heads_kv != 0)) return KVSPEED_INVALID_ARGUMENT;
  if (!(std::fabs(g.scale) <= kMaxFactor) || !(g.softcap >= 0 && g.softcap <= kMaxFactor)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  if (g.num_segments > 0 && g.segments == nullptr) return KVSPEED_INVALID_ARGUMENT;
  int64_t rows, tokens = g.tail.tokens;
  if (__builtin_mul_overflow(g.batch, g.heads, &rows) || __builtin_mul_overflow(rows, g.query_tokens, &rows) ||
      rows > kMaxSize) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  for (int64_t i = 0; i < g.num_segments; ++i) {
    const kvspeed_status status = check_segment(g.segments[i], g, device);
    if (status != KVSPEED_OK) return status;
    if (__builtin_add_overflow(tokens, g.segments[i].tokens, &tokens)) return KVSPEED_INVALID_ARGUMENT;
  }
  if (g.tail.offset != 0) return KVSPEED_INVALID_ARGUMENT;
  const kvspeed_status status = check_segment(g.tail, g, device);
  if (status != KVSPEED_OK) return status;
  if (rows > 0 && (g.query == nullptr || g.out == nullptr)) return KVSPEED_INVALID_ARGUMENT;
  return KVSPEED_OK;
}

kvspeed_status validate(const kvspeed_merge_states_args* args) {
  if (args == nullptr) return KVSPEED_INVALID_ARGUMENT;
  const kvspeed_merge_states_args& g = *args;
  if (!is_dtype(g.dtype_a) || !is_dtype(g.dtype_b)) return KVSPEED_UNSUPPORTED;
  if (!is_size(g.batch) || !is_size(g.heads) || !is_size(g.tokens) || !is_size(g.head_dim)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  int64_t rows;
  if (__builtin_mul_overflow(g.batch, g.heads, &rows) || __builtin_mul_overflow(rows, g.tokens, &rows)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  if (rows > 0 && (g.lse_a == nullptr || g.lse_b == nullptr || g.lse == nullptr)) return KVSPEED_INVALID_ARGUMENT;
  if (rows > 0 && g.head_dim > 0 && (g.out_a == nullptr || g.out_b == nullptr || g.out == nullptr)) {
    return KVSPEED_INVALID_ARGUMENT;
  }
  return KVSPEED_OK;
}

}  // namespace kvspeed
