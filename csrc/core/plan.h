// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// From checked arguments to a plan: sizes, splits and the layout of the workspace, then the tables in it.
#ifndef KVSPEED_CORE_PLAN_H_
#define KVSPEED_CORE_PLAN_H_

#include "core/workspace.h"
#include "cpu/kernels.h"

namespace kvspeed {

// `lay_out` sets the sizes and takes the arrays (NULL while measuring); `fill` writes the tables. The arrays that the
// kernels see as const are filled here, through the pointers of this struct.
struct RopeConcatLayout {
  RopeConcatPlan plan;
  float* table;
  int32_t *layer_row, *row_pairs, *row_layer;  // row_layer: the first layer with this row of frequencies
  int64_t *packet_units, *packet_start;

  void lay_out(const kvspeed_rope_concat_args& args, int num_threads, Workspace& workspace);
  void fill();
};

struct AttentionLayout {
  AttentionPlan plan;
  RopeRow* rope;
  float* table;

  void lay_out(const kvspeed_segment_attention_args& args, int num_threads, Workspace& workspace);
  void fill();
};

}  // namespace kvspeed

#endif  // KVSPEED_CORE_PLAN_H_
