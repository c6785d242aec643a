// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// rope_concat: copy many packets, all layers, keys and values, into one cache; keys turn by their packet's offset.
//
// The work is a list of units: one run of tokens of one packet, in one head of one layer. Threads take units from a
// shared counter. A unit reads its rows once and writes them once; what it writes is not read again soon, so large
// outputs go around the caches (a plain store would first read each line it is about to overwrite: 1.5x the traffic).
#ifndef KVSPEED_CPU_ROPE_CONCAT_H_
#define KVSPEED_CPU_ROPE_CONCAT_H_

#include <omp.h>

#include "cpu/kernels.h"
#include "cpu/rope_rotate.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

// Copies bytes around the caches: whole 64-byte lines stream, the ragged ends do not.
inline void StreamCopy(void* to, const void* from, size_t bytes) {
  char* d = static_cast<char*>(to);
  const char* s = static_cast<const char*>(from);
  const size_t head = Min(-reinterpret_cast<uintptr_t>(d) & 63, bytes);
  std::memcpy(d, s, head);
  size_t i = head;
  for (; i + 256 <= bytes; i += 256) {
    StreamCopy64(d + i, s + i);
    StreamCopy64(d + i + 64, s + i + 64);
    StreamCopy64(d + i + 128, s + i + 128);
    StreamCopy64(d + i + 192, s + i + 192);
  }
  for (; i + 64 <= bytes; i += 64) StreamCopy64(d + i, s + i);
  std::memcpy(d + i, s + i, bytes - i);
}

template <class T>
inline void CopyRows(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t dim,
                     bool stream) {
  if (from_stride == dim && to_stride == dim) {
    dim *= rows;
    rows = 1;
  }
  for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
    if (stream) {
      StreamCopy(to, from, static_cast<size_t>(dim) * sizeof(T));
    } else {
      std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(T));
    }
  }
}

// What turning a row needs to know.
struct Rotation {
  int64_t pairs;  // pairs that turn
  int64_t half;   // pairs of the rotary part; those from `pairs` on have frequency 0 and are copied
  int64_t dim;    // numbers in a row; those from 2 * half on are copied
  bool interleaved;
  RotateMode mode;
  const float* table;
};

template <class T, bool kStream>
inline void RotateRows(const Rotation& r, const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows) {
  const auto copy = [=](const T* source, T* target, int64_t begin, int64_t end) {
    std::memcpy(target + begin, source + begin, static_cast<size_t>(end - begin) * sizeof(T));
  };
  for (int64_t i = 0; i < rows; ++i, from += from_stride, to += to_stride) {
    RotateRow<T, kStream>(r.mode, from, to, r.pairs, r.half, r.table, r.interleaved);
    if (r.pairs < r.half && !r.interleaved) {
      copy(from, to, r.pairs, r.half);
      copy(from, to, r.half + r.pairs, 2 * r.half);
    } else if (r.pairs < r.half) {
      copy(from, to, 2 * r.pairs, 2 * r.half);
    }
    if (2 * r.half < r.dim) copy(from, to, 2 * r.half, r.dim);
  }
}

// Streaming stores need aligned addresses, and pay only when they fill whole lines.
template <class T>
inline bool CanStream(const Rotation& r, const T* to, int64_t to_stride) {
  const auto aligned = [](int64_t count, int64_t bytes) {
    return count * static_cast<int64_t>(sizeof(T)) % bytes == 0;
  };
  return reinterpret_cast<uintptr_t>(to) % 64 == 0 && aligned(to_stride, 64) && aligned(r.half, kStreamBytes) &&
         aligned(r.pairs, 64) && r.mode != RotateMode::kScalar;
}

// Rows that cannot be streamed as they come (an odd head_dim, a misaligned output) but lie together in the output: turn
// a few of them in L1, then stream the bytes.
template <class T>
inline void RotateStaged(const Rotation& r, const T* from, int64_t from_stride, T* to, int64_t rows) {
  alignas(64) char buffer[8192];
  T* stage = reinterpret_cast<T*>(buffer);
  const int64_t step = static_cast<int64_t>(sizeof(buffer) / sizeof(T)) / r.dim;
  for (int64_t i = 0; i < rows; i += step) {
    const int64_t n = Min(step, rows - i);
    RotateRows<T, false>(r, from + i * from_stride, from_stride, stage, r.dim, n);
    StreamCopy(to + i * r.dim, stage, static_cast<size_t>(n * r.dim) * sizeof(T));
  }
}

template <class T>
inline void RotateRun(const Rotation& r, const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows,
                      bool stream) {
  if (stream && CanStream(r, to, to_stride)) {
    RotateRows<T, true>(r, from, from_stride, to, to_stride, rows);
  } else if (stream && to_stride == r.dim && r.dim * static_cast<int64_t>(sizeof(T)) <= 2048) {
    RotateStaged(r, from, from_stride, to, rows);
  } else {
    RotateRows<T, false>(r, from, from_stride, to, to_stride, rows);
  }
}

// The output's rows for `tokens` tokens from `token` on, cut where pages end: run(rows, tokens before them, tokens).
template <class T, class Run>
inline void ForEachRun(const kvspeed_rope_concat_args& g, T* out, const int64_t* stride, int64_t layer, int64_t head,
                       int64_t token, int64_t tokens, Run run) {
  T* base = out + layer * stride[0] + head * stride[2];
  if (g.page_table == nullptr) return run(base + token * stride[3], int64_t{0}, tokens);
  for (int64_t done = 0; done < tokens;) {
    const int64_t page = (token + done) / g.page_size, slot = (token + done) % g.page_size;
    const int64_t n = Min(g.page_size - slot, tokens - done);
    run(base + int64_t{g.page_table[page]} * stride[1] + slot * stride[3], done, n);
    done += n;
  }
}

// ---- packets of 8-bit numbers --------------------------------------------------------------------------------------

struct Float8Values {
  float of[256];
};
// What each float8_e4m3fn number is worth: sign, 4 bits of exponent, 3 of fraction; no infinities, and one NaN a sign.
constexpr Float8Values MakeFloat8Values() {
  Float8Values values = {};
  for (int i = 0; i < 128; ++i) {
    const int exponent = i >> 3, fraction = i & 7;
    float x = static_cast<float>(exponent == 0 ? fraction : 8 + fraction) / 512;  // multiples of 2^-9 at exponent 1
    for (int e = 1; e < exponent; ++e) x *= 2;
    values.of[i] = i == 127 ? __builtin_nanf("") : x;
    values.of[128 + i] = i == 127 ? -__builtin_nanf("") : -x;
  }
  return values;
}
inline constexpr Float8Values kFloat8Values = MakeFloat8Values();

inline void Dequantise(kvspeed_storage storage, const void* from, float scale, int64_t dim, float* to) {
  if (storage == KVSPEED_STORED_INT8) {
    const int8_t* p = static_cast<const int8_t*>(from);
    for (int64_t i = 0; i < dim; ++i) to[i] = static_cast<float>(p[i]) * scale;
  } else {
    const uint8_t* p = static_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < dim; ++i) to[i] = kFloat8Values.of[p[i]] * scale;
  }
}

template <class T>
inline void RoundRow(const float* from, T* to, int64_t dim) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) StoreAs(to + i, LoadAs(from + i));
  for (; i < dim; ++i) to[i] = FromFloat<T>(from[i]);
}

// Rows of one head: a float32 row of each is made in `scratch` (2 * dim), turned there, and rounded once.
template <class T>
inline void DequantiseRows(const Rotation& r, kvspeed_storage storage, const int8_t* from, int64_t from_stride,
                           float scale, T* to, int64_t to_stride, int64_t rows, float* scratch) {
  for (int64_t i = 0; i < rows; ++i, from += from_stride, to += to_stride) {
    Dequantise(storage, from, scale, r.dim, scratch);
    if (r.pairs > 0) RotateRows<float, false>(r, scratch, r.dim, scratch + r.dim, r.dim, 1);
    RoundRow(r.pairs > 0 ? scratch + r.dim : scratch, to, r.dim);
  }
}

template <class T>
inline void RopeConcatStoredUnit(const RopeConcatPlan& plan, int64_t layer, int64_t head, int64_t index, int64_t first,
                                 int64_t tokens, int64_t out_token, float* table) {
  const kvspeed_rope_concat_args& g = *plan.args;
  const kvspeed_packet& p = g.packets[index];
  const int32_t row = plan.layer_row[layer];
  const int64_t half = g.rotary_dim / 2;
  float* scratch = table + arranged_table_floats(g.rotary_dim);
  const auto run = [&](const void* data, const int64_t* stride, const float* scales, const int64_t* scale_stride,
                       void* out, const int64_t* out_stride, int64_t pairs) {
    Rotation r = {pairs, half, g.head_dim, g.interleaved != 0, RotateMode::kScalar, table};
    if (pairs > 0) {
      const float* cos = plan.table + (index * plan.rows + row) * plan.row_stride;
      r.mode = ChooseRotateMode<float>(pairs, r.interleaved);
      ArrangeTable<float>(r.mode, cos, cos + half, pairs, table);
    }
    const int8_t* from = static_cast<const int8_t*>(data) + layer * stride[0] + head * stride[1] + first * stride[2];
    const float scale = scales[layer * scale_stride[0] + head * scale_stride[1]];
    ForEachRun(g, static_cast<T*>(out), out_stride, layer, head, out_token, tokens,
               [&](T* to, int64_t done, int64_t n) {
                 DequantiseRows(r, g.storage, from + done * stride[2], stride[2], scale, to, out_stride[3], n, scratch);
               });
  };
  run(p.key, p.key_stride, p.key_scale, p.key_scale_stride, g.out_key, g.out_key_stride,
      p.offset == 0 ? 0 : plan.row_pairs[row]);
  run(p.value, p.value_stride, p.value_scale, p.value_scale_stride, g.out_value, g.out_value_stride, 0);
}

// ---- the work ------------------------------------------------------------------------------------------------------

template <class T>
inline void RopeConcatUnit(const RopeConcatPlan& plan, int64_t layer, int64_t head, int64_t index, int64_t first,
                           int64_t tokens, int64_t out_token, float* table) {
  const kvspeed_rope_concat_args& g = *plan.args;
  const kvspeed_packet& p = g.packets[index];
  const int64_t* ks = p.key_stride;
  const int64_t* vs = p.value_stride;
  const T* key = static_cast<const T*>(p.key) + layer * ks[0] + head * ks[1] + first * ks[2];
  const T* value = static_cast<const T*>(p.value) + layer * vs[0] + head * vs[1] + first * vs[2];
  const int32_t row = plan.layer_row[layer];
  const int64_t half = g.rotary_dim / 2, pairs = p.offset == 0 ? 0 : plan.row_pairs[row];

  Rotation r = {pairs, half, g.head_dim, g.interleaved != 0, RotateMode::kScalar, table};
  if (pairs > 0) {
    const float* cos = plan.table + (index * plan.rows + row) * plan.row_stride;
    r.mode = ChooseRotateMode<T>(pairs, r.interleaved);
    ArrangeTable<T>(r.mode, cos, cos + half, pairs, table);
  }
  ForEachRun(g, static_cast<T*>(g.out_key), g.out_key_stride, layer, head, out_token, tokens,
             [&](T* to, int64_t done, int64_t n) {
               if (pairs == 0) {
                 CopyRows(key + done * ks[2], ks[2], to, g.out_key_stride[3], n, g.head_dim, plan.stream);
               } else {
                 RotateRun(r, key + done * ks[2], ks[2], to, g.out_key_stride[3], n, plan.stream);
               }
             });
  ForEachRun(g, static_cast<T*>(g.out_value), g.out_value_stride, layer, head, out_token, tokens,
             [&](T* to, int64_t done, int64_t n) {
               CopyRows(value + done * vs[2], vs[2], to, g.out_value_stride[3], n, g.head_dim, plan.stream);
             });
}

template <class T>
inline void RopeConcatTyped(const RopeConcatPlan& plan) {
  const kvspeed_rope_concat_args& g = *plan.args;
  const auto run_unit = g.storage == KVSPEED_STORED_PLAIN ? RopeConcatUnit<T> : RopeConcatStoredUnit<T>;
  const int64_t per_head = plan.packet_units[g.num_packets], units = per_head * g.layers * g.heads;
#pragma omp parallel num_threads(plan.num_threads) if (plan.num_threads > 1)
  {
    float* table = plan.thread_table + omp_get_thread_num() * plan.thread_table_floats;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t u = 0; u < units; ++u) {
      const int64_t layer = u / per_head / g.heads, head = u / per_head % g.heads, unit = u % per_head;
      int64_t low = 0, high = g.num_packets;  // the last packet with packet_units[low] <= unit
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (plan.packet_units[middle] <= unit ? low : high) = middle;
      }
      const int64_t first = (unit - plan.packet_units[low]) * plan.unit_tokens;
      const int64_t tokens = Min(plan.unit_tokens, g.packets[low].tokens - first);
      run_unit(plan, layer, head, low, first, tokens, plan.packet_start[low] + first, table);
    }
    StreamFence();
  }
}

inline void RopeConcat(const RopeConcatPlan& plan) {
  switch (plan.args->dtype) {
    case KVSPEED_FLOAT32:
      return RopeConcatTyped<float>(plan);
    case KVSPEED_BFLOAT16:
      return RopeConcatTyped<BF16>(plan);
    case KVSPEED_FLOAT16:
      return RopeConcatTyped<F16>(plan);
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_ROPE_CONCAT_H_
