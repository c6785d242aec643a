// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What a warp does together, and what a thread asks about itself. Fragment layouts are those of the PTX manual,
// "Matrix fragments for mma.m16n8k16" and "ldmatrix"; tests/simt/oracle.cpp holds them against CUTLASS.
#include <algorithm>
#include <cstring>

#include "simt/runtime.h"

namespace kvspeed::simt {
namespace {

struct MmaLane {
  float d[4];
  uint32_t a[4], b[2];
};

template <class T>
float half_of(uint32_t pair, int which) {
  return gpu::to_float(T{static_cast<uint16_t>(pair >> (16 * which))});
}

template <class T>
void mma(Block& block, Fiber* const*, void* const* arguments) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const MmaLane& x = *static_cast<const MmaLane*>(arguments[lane]);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      a[row][column + i] = half_of<T>(x.a[0], i);
      a[row + 8][column + i] = half_of<T>(x.a[1], i);
      a[row][column + 8 + i] = half_of<T>(x.a[2], i);
      a[row + 8][column + 8 + i] = half_of<T>(x.a[3], i);
      b[column + i][row] = half_of<T>(x.b[0], i);
      b[column + 8 + i][row] = half_of<T>(x.b[1], i);
      d[row][column + i] = x.d[i];
      d[row + 8][column + i] = x.d[2 + i];
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    MmaLane& x = *static_cast<MmaLane*>(arguments[lane]);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      x.d[i] = d[row][column + i];
      x.d[2 + i] = d[row + 8][column + i];
    }
  }
  ++block.stats.mma;
}

template <class T>
float4 run_mma(const char* name, float4 d, uint4 a, uint2 b) {
  Quiet quiet;
  MmaLane lane = {{d.x, d.y, d.z, d.w}, {a.x, a.y, a.z, a.w}, {b.x, b.y}};
  collective(mma<T>, name, &lane);
  return {lane.d[0], lane.d[1], lane.d[2], lane.d[3]};
}

struct MatrixLane {
  const unsigned char* row;
  uint32_t r[4];
  const void* pc;
};

// Conflicts: how often a phase (one 8x8 matrix, eight rows of 16 bytes) has to go to a group of four banks once more.
int bank_conflicts(const size_t (&offsets)[8]) {
  int uses[8] = {};
  for (int i = 0; i < 8; ++i) {
    bool same = false;  // rows at one address are read once
    for (int j = 0; j < i; ++j) same = same || offsets[i] == offsets[j];
    if (!same) ++uses[offsets[i] / 16 % 8];
  }
  return std::max(0, *std::max_element(uses, uses + 8) - 1);
}

template <bool kTransposed>
void load_matrices(Block& block, Fiber* const* lanes, void* const* arguments) {
  MatrixLane* x[kWarpSize];
  size_t offsets[4][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    x[lane] = static_cast<MatrixLane*>(arguments[lane]);
    const size_t offset = shared_offset(*lanes[lane], x[lane]->row);
    offsets[lane / 8][lane % 8] = offset;
    if (offset >= block.shared.bytes || offset % 16 != 0) {
      self = lanes[lane];
      fail(offset % 16 != 0 ? "ldmatrix from an address that is no multiple of 16"
                            : "ldmatrix from an address that is not shared memory",
           x[lane]->pc);
    }
    check_shared(*lanes[lane], offset, 16, Access::kReadByWarp, x[lane]->pc);
  }
  ++block.stats.ldmatrix;
  for (int matrix = 0; matrix < 4; ++matrix) {
    block.stats.ldmatrix_conflicts += static_cast<uint64_t>(bank_conflicts(offsets[matrix]));
    uint16_t m[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(m[row], x[matrix * 8 + row]->row, 16);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int i = lane / 4, j = lane % 4 * 2;
      x[lane]->r[matrix] = kTransposed ? m[j][i] | uint32_t{m[j + 1][i]} << 16 : m[i][j] | uint32_t{m[i][j + 1]} << 16;
    }
  }
}

uint4 run_load_matrix(Collective function, const char* name, const void* row, const void* pc) {
  Quiet quiet;
  MatrixLane lane = {static_cast<const unsigned char*>(row), {}, pc};
  collective(function, name, &lane);
  return {lane.r[0], lane.r[1], lane.r[2], lane.r[3]};
}

struct ShuffleLane {
  float value, result;
  int mask;
};

void shuffle(Block&, Fiber* const*, void* const* arguments) {
  const int mask = static_cast<const ShuffleLane*>(arguments[0])->mask;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    ShuffleLane& x = *static_cast<ShuffleLane*>(arguments[lane]);
    if (x.mask != mask || mask < 0 || mask >= kWarpSize) fail("lanes of one shuffle give different or wild masks");
    x.result = static_cast<const ShuffleLane*>(arguments[lane ^ mask])->value;
  }
}

void warp_barrier(Block&, Fiber* const* lanes, void* const*) {
  const Time time = lanes[0]->time + 1;
  if (!same_block_phase(time, lanes[0]->time)) fail("more warp barriers than the emulator's clocks can count");
  for (int lane = 0; lane < kWarpSize; ++lane) lanes[lane]->time = time;
}

}  // namespace
}  // namespace kvspeed::simt

namespace kvspeed::gpu {

using namespace kvspeed::simt;

int thread_index() { return self->thread; }
int block_index() { return static_cast<int>(self->block->index[0]); }
int block_index_y() { return static_cast<int>(self->block->index[1]); }
int block_index_z() { return static_cast<int>(self->block->index[2]); }
int block_count() { return static_cast<int>(self->block->launch->grid.x); }
unsigned char* shared_memory() { return self->block->shared.data; }

float exp2_approx(float x) {  // ftz: subnormal arguments and results are zeros
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
float reciprocal_approx(float x) { return 1.0f / (std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x); }
float log2_accurate(float x) { return std::log2(x); }
float larger(float a, float b) { return std::fmax(a, b); }
float mul_rn(float a, float b) { return a * b; }
float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }

float4 mma_bf16(float4 d, uint4 a, uint2 b) { return run_mma<bf16>("mma.m16n8k16.bf16", d, a, b); }
float4 mma_f16(float4 d, uint4 a, uint2 b) { return run_mma<f16>("mma.m16n8k16.f16", d, a, b); }
uint4 load_matrix(const void* shared_row) {
  return run_load_matrix(load_matrices<false>, "ldmatrix.x4", shared_row, KVS_CALLER);
}
uint4 load_matrix_transposed(const void* shared_row) {
  return run_load_matrix(load_matrices<true>, "ldmatrix.x4.trans", shared_row, KVS_CALLER);
}

float shuffle_xor(float v, int mask) {
  Quiet quiet;
  ShuffleLane lane = {v, 0.0f, mask};
  collective(shuffle, "shuffle_xor", &lane);
  return lane.result;
}
void sync_warp() {
  Quiet quiet;
  collective(warp_barrier, "sync_warp", nullptr);
}
void sync_block() {
  Quiet quiet;
  pass_block_barrier();
}

}  // namespace kvspeed::gpu
