// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// One tile of query rows against one block of keys: scores, mask, online softmax, weighted sum of values.
//
// Whatever the mask (causal, window, padding), the keys that a row sees within a block are an interval, so a mask is
// two numbers a row. Keys outside it are never multiplied into the output, not even by 0: they may hold NaN.
#ifndef KVSPEED_CPU_ATTENTION_BLOCK_H_
#define KVSPEED_CPU_ATTENTION_BLOCK_H_

#include <cmath>

#include "cpu/attention_micro.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

// This many rows or fewer go through Dot and AddRange, more through Gemm.
constexpr int64_t kDotRows = 8;
// Rows that are added to together; neighbours in time, so what they see differs little.
constexpr int64_t kValueRows = 12;

// A thread's scratch: the state of one tile of rows.
struct Tile {
  int64_t rows;          // up to kMaxRowTile
  int64_t dim;           // padded_dim(head_dim)
  float* query;          // [rows][dim], rotated for the current segment and scaled, pair order, zero beyond head_dim
  float* sum;            // [rows][dim], pair order: the weighted values so far
  float* scores;         // [rows][kTokenBlock]
  float* transposed;     // [dim][kTokenBlock]
  float* maximum;        // [rows]: largest score so far, base 2
  float* denominator;    // [rows]
  int32_t *begin, *end;  // [rows]: the interval that each row sees in the current block

  Tile(char* scratch, int64_t row_count, int64_t row_tile, int64_t padded) : rows(row_count), dim(padded) {
    float* p = reinterpret_cast<float*>(scratch);
    const auto take = [&p](int64_t n) { return p += n, p - n; };
    query = take(row_tile * dim);
    sum = take(row_tile * dim);
    scores = take(row_tile * kTokenBlock);
    transposed = take(dim * kTokenBlock);
    maximum = take(row_tile);
    denominator = take(row_tile);
    begin = reinterpret_cast<int32_t*>(take(row_tile));
    end = reinterpret_cast<int32_t*>(take(row_tile));
  }

  void Reset() {
    std::memset(sum, 0, static_cast<size_t>(rows * dim) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) maximum[r] = -INFINITY, denominator[r] = 0;
  }
};

// scores = softcap * tanh(score / softcap), in base 2 for what follows.
inline void CapScores(float* scores, float softcap) {
  const F32 inverse = Set1(1.0f / softcap), cap = Set1(softcap * 1.44269504088896341f);
  for (int i = 0; i < kTokenBlock; i += kLanes) Store(scores + i, Mul(cap, Tanh(Mul(Load(scores + i), inverse))));
}

// Turns one row of scores into weights, and rescales what the row has summed so far when its maximum grows.
inline void SoftmaxRow(Tile& tile, int64_t row, float softcap) {
  float* scores = tile.scores + row * kTokenBlock;
  const int32_t begin = tile.begin[row], end = tile.end[row];
  if (softcap > 0) CapScores(scores, softcap);
  for (int32_t t = 0; t < begin; ++t) scores[t] = -INFINITY;
  for (int32_t t = end; t < kTokenBlock; ++t) scores[t] = -INFINITY;

  F32 largest = Load(scores);
  for (int i = kLanes; i < kTokenBlock; i += kLanes) largest = Max(largest, Load(scores + i));
  const float previous = tile.maximum[row], here = ReduceMax(largest);
  const float maximum = here > previous ? here : previous;
  if (maximum > previous) {
    const float shrink = Exp2(previous - maximum);
    tile.maximum[row] = maximum;
    tile.denominator[row] *= shrink;
    float* sum = tile.sum + row * tile.dim;
    for (int64_t d = 0; d < tile.dim; d += kLanes) Store(sum + d, Mul(Load(sum + d), Set1(shrink)));
  }
  // All scores -infinity: subtract 0 instead, so that the weights are 0 and not NaN.
  const F32 shift = Set1(maximum == -INFINITY ? 0.0f : maximum);
  F32 total = Zero();
  for (int i = 0; i < kTokenBlock; i += kLanes) {
    const F32 weight = Exp2(Sub(Load(scores + i), shift));
    Store(scores + i, weight);
    total = Add(total, weight);
  }
  tile.denominator[row] += ReduceAdd(total);
}

// sum[row] += weights[row] values for `rows` rows from `first` on. The keys that all of them see go together; what only
// some see, before and after, goes row by row, so that each row still adds its keys in order.
template <class T>
inline void AddValues(Tile& tile, int64_t first, int64_t rows, const T* values, int64_t stride, int64_t dim) {
  int64_t common_begin = 0, common_end = kTokenBlock;
  for (int64_t r = first; r < first + rows; ++r) {
    common_begin = Max(common_begin, tile.begin[r]);
    common_end = Min(common_end, tile.end[r]);
  }
  const auto add = [&](int64_t r, int64_t n, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const float* weights = tile.scores + r * kTokenBlock;
    float* sum = tile.sum + r * tile.dim;
    if (tile.rows <= kDotRows) {
      AddRange(weights, n, values, stride, dim, begin, end, sum, tile.dim);
    } else {
      RunGemm<T, true>({weights, kTokenBlock, values, stride, sum, tile.dim, dim}, n, begin, end);
    }
  };
  if (common_begin >= common_end) {
    for (int64_t r = first; r < first + rows; ++r) add(r, 1, tile.begin[r], tile.end[r]);
    return;
  }
  for (int64_t r = first; r < first + rows; ++r) add(r, 1, tile.begin[r], common_begin);
  add(first, rows, common_begin, common_end);
  for (int64_t r = first; r < first + rows; ++r) add(r, 1, common_end, tile.end[r]);
}

// The whole step. tile.begin and tile.end say which of the n keys each row sees.
template <class T>
inline void AttendBlock(Tile& tile, const T* keys, int64_t key_stride, const T* values, int64_t value_stride,
                        int64_t dim, int64_t n, float softcap) {
  if (tile.rows <= kDotRows) {
    Dot(tile.query, tile.dim, tile.rows, keys, key_stride, dim, n, tile.scores);
  } else {
    TransposeKeys(keys, key_stride, dim, n, tile.transposed);
    RunGemm<float, false>({tile.query, tile.dim, tile.transposed, kTokenBlock, tile.scores, kTokenBlock, kTokenBlock},
                          tile.rows, 0, RoundUp(dim, kPair));
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (tile.begin[r] < tile.end[r]) SoftmaxRow(tile, r, softcap);
  }
  for (int64_t r = 0; r < tile.rows; r += kValueRows) {
    AddValues(tile, r, Min(kValueRows, tile.rows - r), values, value_stride, dim);
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_ATTENTION_BLOCK_H_
