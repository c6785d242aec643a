// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What csrc/core hands to the CPU kernels, and the table of entry points that each instruction set fills. The core has
// checked every argument, chosen the splits, built the RoPE tables and carved up the workspace; kernels only compute.
#ifndef KVSPEED_CPU_KERNELS_H_
#define KVSPEED_CPU_KERNELS_H_

#include <kvspeed/kvspeed.h>

namespace kvspeed {

// Cosines and sines of one offset: cos[half] and sin[half], natural order, rounded once from float64.
struct RopeRow {
  const float* cos;
  const float* sin;
};

struct RopeConcatPlan {
  const kvspeed_rope_concat_args* args;
  // Row of packet p and layer l: table + (p * rows + layer_row[l]) * row_stride; cosines, then sines half further on.
  const float* table;
  int64_t rows, row_stride;
  const int32_t* layer_row;     // [layers]
  const int32_t* row_pairs;     // [rows]: pairs that turn; frequencies from there on are 0, and their pairs are copied
  const int64_t* packet_units;  // [num_packets + 1]: units of work before each packet, in one head of one layer
  const int64_t* packet_start;  // [num_packets]: where in the output its first token goes
  int64_t unit_tokens;          // tokens of a unit
  float* thread_table;          // num_threads tables in the order in which the kernel reads them, then its scratch
  int64_t thread_table_floats;  // of each
  bool stream;                  // write around the caches
  int num_threads;
};

struct AttentionPlan {
  const kvspeed_segment_attention_args* args;
  const RopeRow* rope;  // [num_segments]; cos is null where the offset is 0
  int64_t splits;       // parts of the key sequence, merged at the end when there are several
  int64_t split_tokens;
  int64_t row_tile;   // query rows of a unit; a row is one (query token, head of the group)
  int64_t row_tiles;  // units in the row direction
  float* partial;     // [batch, heads_kv, splits, rows, head_dim rounded up + 2]: sums, then maximum and denominator
  int64_t* done;      // [batch * heads_kv], zeros: units of each that have left their part
  char* scratch;      // num_threads * scratch_bytes
  size_t scratch_bytes;
  int num_threads;
};

constexpr int64_t kTokenBlock = 64;  // keys that a thread works on at a time
constexpr int64_t kMaxRowTile = 96;  // a multiple of every kGemmRows
constexpr int64_t kDimPad = 32;      // head_dim is rounded up to this in scratch: a pair of the widest vectors

// A rotation table as a kernel arranges it: up to one group more than the pairs, for the widest vectors.
inline int64_t arranged_table_floats(int64_t rotary_dim) { return (4 * (rotary_dim / 2 + 32) + 15) / 16 * 16; }

inline int64_t padded_dim(int64_t head_dim) { return (head_dim + kDimPad - 1) / kDimPad * kDimPad; }
// Scratch of one thread: rotated query, sums, scores, transposed keys, maxima, denominators, visible intervals.
inline size_t attention_scratch_bytes(int64_t head_dim, int64_t row_tile) {
  const int64_t dim = padded_dim(head_dim);
  const int64_t floats = row_tile * (2 * dim + kTokenBlock + 4) + dim * kTokenBlock;
  return (static_cast<size_t>(floats) * 4 + 64 + 63) / 64 * 64;
}

struct CpuKernels {
  void (*rope_concat)(const RopeConcatPlan& plan);
  void (*segment_attention)(const AttentionPlan& plan);
  void (*merge_states)(const kvspeed_merge_states_args& args, int num_threads);
};

// One for each instruction set in the build, defined by csrc/cpu/kernels.cpp.
namespace cpu {
namespace baseline {
extern const CpuKernels kKernels;
}
namespace avx2 {
extern const CpuKernels kKernels;
}
namespace avx512 {
extern const CpuKernels kKernels;
}
namespace neon {
extern const CpuKernels kKernels;
}
}  // namespace cpu

}  // namespace kvspeed

#endif  // KVSPEED_CPU_KERNELS_H_
