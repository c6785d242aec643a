// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The inner loops of attention over a block of up to kTokenBlock keys.
//
//   Dot        scores of a few rows. Vectors run along head_dim; a tile of rows x tokens sums ends in one sum across
//   lanes. AddValues  sum += weights . values for a few rows: a few tokens at a time, so that each sum is loaded and
//   stored once
//              for all of them.
//   Gemm       C += A B with a register tile, where rows are many: both scores (B = keys transposed once for all rows,
//              which saves the sums across lanes) and values.
//
// Few rows means waiting for memory, and then the order of addresses is all: the hardware's prefetcher, which has more
// requests in flight than a core may have itself, follows lines that go strictly upwards, and gives up on four rows
// read side by side. So while a tile computes, the next one is fetched line by line in address order; the tile then
// finds its rows in the first cache, in whatever order it likes. docs/cpu-kernels.md has the numbers: a factor of two.
//
// Head dimensions are in PAIR ORDER everywhere in scratch: the order in which LoadPair hands them out. Scores do not
// care (query and keys agree), and StorePair puts the output back.
#ifndef KVSPEED_CPU_ATTENTION_MICRO_H_
#define KVSPEED_CPU_ATTENTION_MICRO_H_

#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/simd_math.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

constexpr int kPair = 2 * kLanes;

// Place of dimension i in pair order.
template <class T>
inline int64_t PairSlot(int64_t i) {
  if constexpr (std::is_same_v<T, BF16>) {
    const int64_t in_pair = i % kPair;
    return i - in_pair + (in_pair & 1) * kLanes + in_pair / 2;
  }
  return i;
}

// A pair of which only the first n numbers exist; n >= kPair is a whole one.
template <class T>
inline void LoadPairUpTo(const T* p, int64_t n, F32& a, F32& b) {
  if (kPair == 8 || n >= kPair) {  // head_dim is a multiple of 8
    LoadPair(p, a, b);
  } else {
    LoadPairPartial(p, static_cast<int>(n), a, b);
  }
}

// Fetches the lines some way ahead in memory, in address order, a few at every step of the tile's loop. Rows that do
// not lie together get no help. (A prefetch never faults, so it does not matter where the rows end.)
constexpr int64_t kAheadBytes = 8192;  // tried: 2, 4, 6, 8, 12, 16 KiB
template <class T, int kTokens>
struct LinesAhead {
  static constexpr int kLines =
      kTokens * kPair * static_cast<int>(sizeof(T)) / 64;  // of one step: a pair of each token
  const char* next;

  LinesAhead(const T* rows, int64_t stride, int64_t dim)
      : next(stride == dim ? reinterpret_cast<const char*>(rows) + kAheadBytes : nullptr) {}
  KVSPEED_INLINE void Fetch() {
    if (next == nullptr) return;
    KVSPEED_UNROLL
    for (int i = 0; i < kLines; ++i) Prefetch(next + 64 * i);
    next += 64 * kLines;
  }
};

// ----------------------------------------------------------------------------------------------------------- Dot ----

// scores[r][t] = query[r] . keys[t] for kRows x kTokens; query rows are `dim_stride` apart and zero beyond `dim`.
template <class T, int kRows, int kTokens>
inline void DotTile(const float* query, int64_t dim_stride, const T* keys, int64_t key_stride, int64_t dim,
                    float* scores) {
  constexpr int kSums = (kRows * kTokens + kLanes - 1) / kLanes * kLanes;
  LinesAhead<T, kTokens> ahead(keys, key_stride, dim);
  F32 sums[kSums];
  KVSPEED_UNROLL
  for (int i = 0; i < kSums; ++i) sums[i] = Zero();
  const auto step = [&](int64_t d, auto load) KVSPEED_INLINE {
    ahead.Fetch();
    F32 a[kTokens], b[kTokens];
    KVSPEED_UNROLL
    for (int t = 0; t < kTokens; ++t) load(keys + t * key_stride + d, a[t], b[t]);
    KVSPEED_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F32 w = Load(query + r * dim_stride + d);
      KVSPEED_UNROLL
      for (int t = 0; t < kTokens; ++t) sums[r * kTokens + t] = Fma(a[t], w, sums[r * kTokens + t]);
    }
    KVSPEED_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F32 w = Load(query + r * dim_stride + d + kLanes);
      KVSPEED_UNROLL
      for (int t = 0; t < kTokens; ++t) sums[r * kTokens + t] = Fma(b[t], w, sums[r * kTokens + t]);
    }
  };
  int64_t d = 0;
  for (; d + kPair <= dim; d += kPair) step(d, [](const T* p, F32& a, F32& b) KVSPEED_INLINE { LoadPair(p, a, b); });
  if (kPair > 8 && d < dim) {
    const int rest = static_cast<int>(dim - d);
    step(d, [rest](const T* p, F32& a, F32& b) KVSPEED_INLINE { LoadPairPartial(p, rest, a, b); });
  }
  float tile[kSums];
  KVSPEED_UNROLL
  for (int i = 0; i < kSums; i += kLanes) Store(tile + i, ReduceEach(sums + i));
  KVSPEED_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVSPEED_UNROLL
    for (int t = 0; t < kTokens; ++t) scores[r * kTokenBlock + t] = tile[r * kTokens + t];
  }
}

// Tokens of a tile: enough sums for one ReduceEach, and no more than the registers hold.
constexpr int DotTokens(int rows) { return rows == 1 ? 8 : (kRegisters == 32 || rows == 2 ? 4 : 2); }

template <class T, int kRows>
inline void DotRows(const float* query, int64_t dim_stride, const T* keys, int64_t key_stride, int64_t dim, int64_t n,
                    float* scores) {
  constexpr int kTokens = DotTokens(kRows);
  int64_t t = 0;
  for (; t + kTokens <= n; t += kTokens) {
    DotTile<T, kRows, kTokens>(query, dim_stride, keys + t * key_stride, key_stride, dim, scores + t);
  }
  for (; t < n; ++t) DotTile<T, kRows, 1>(query, dim_stride, keys + t * key_stride, key_stride, dim, scores + t);
}

// Scores of `rows` rows against n keys; scores have kTokenBlock columns.
template <class T>
inline void Dot(const float* query, int64_t dim_stride, int64_t rows, const T* keys, int64_t key_stride, int64_t dim,
                int64_t n, float* scores) {
  for (int64_t r = 0; r < rows; r += 4) {
    const float* q = query + r * dim_stride;
    float* s = scores + r * kTokenBlock;
    switch (Min(4, rows - r)) {
      case 1:
        DotRows<T, 1>(q, dim_stride, keys, key_stride, dim, n, s);
        break;
      case 2:
        DotRows<T, 2>(q, dim_stride, keys, key_stride, dim, n, s);
        break;
      case 3:
        DotRows<T, 3>(q, dim_stride, keys, key_stride, dim, n, s);
        break;
      default:
        DotRows<T, 4>(q, dim_stride, keys, key_stride, dim, n, s);
        break;
    }
  }
}

// ----------------------------------------------------------------------------------------------------- AddValues ----

// sum[r] += weights[r][t] values[t] over kTokens tokens; weights have kTokenBlock columns, sums `dim_stride`. Each sum
// takes the tokens in order, one fused step at a time: its bits do not depend on the tile.
template <class T, int kTokens>
inline void AddTile(const float* weights, int64_t rows, const T* values, int64_t stride, int64_t dim, float* sum,
                    int64_t dim_stride) {
  LinesAhead<T, kTokens> ahead(values, stride, dim);
  for (int64_t d = 0; d < dim; d += kPair) {
    ahead.Fetch();
    F32 x[kTokens], y[kTokens];
    KVSPEED_UNROLL
    for (int t = 0; t < kTokens; ++t) LoadPairUpTo(values + t * stride + d, dim - d, x[t], y[t]);
    for (int64_t r = 0; r < rows; ++r) {
      float* s = sum + r * dim_stride + d;
      const float* w = weights + r * kTokenBlock;
      F32 a = Load(s), b = Load(s + kLanes);
      KVSPEED_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const F32 weight = Set1(w[t]);
        a = Fma(x[t], weight, a);
        b = Fma(y[t], weight, b);
      }
      Store(s, a);
      Store(s + kLanes, b);
    }
  }
}

// The same over tokens [begin, end).
template <class T>
inline void AddRange(const float* weights, int64_t rows, const T* values, int64_t stride, int64_t dim, int64_t begin,
                     int64_t end, float* sum, int64_t dim_stride) {
  int64_t t = begin;
  for (; t + 4 <= end; t += 4) AddTile<T, 4>(weights + t, rows, values + t * stride, stride, dim, sum, dim_stride);
  for (; t < end; ++t) AddTile<T, 1>(weights + t, rows, values + t * stride, stride, dim, sum, dim_stride);
}

// ---------------------------------------------------------------------------------------------------------- Gemm ----

// transposed[d][t] for d below dim rounded up to a pair, t below kTokenBlock; what does not exist is zero.
template <class T>
inline void TransposeKeys(const T* keys, int64_t key_stride, int64_t dim, int64_t n, float* transposed) {
  for (int64_t t = 0; t < kTokenBlock; t += kLanes) {
    for (int64_t d = 0; d < dim; d += kPair) {
      F32 a[kLanes], b[kLanes];
      KVSPEED_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        a[i] = b[i] = Zero();
        if (t + i < n) LoadPairUpTo(keys + (t + i) * key_stride + d, dim - d, a[i], b[i]);
      }
      Transpose(a);
      Transpose(b);
      KVSPEED_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        Store(transposed + (d + i) * kTokenBlock + t, a[i]);
        Store(transposed + (d + kLanes + i) * kTokenBlock + t, b[i]);
      }
    }
  }
}

// What Gemm works on: C (+)= A B, A [rows][inner], B [inner][columns], C [rows][columns]. B has its own type; `columns`
// is a multiple of 8, and C has room for whole pairs.
template <class T>
struct Gemm {
  const float* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t columns;
};

// kRows x kPairs pairs of columns, inner steps [begin, end), in order and fused like AddTile. kAdd: onto what C holds.
template <class T, int kRows, int kPairs, bool kAdd>
inline void GemmTile(const Gemm<T>& g, int64_t row, int64_t column, int64_t begin, int64_t end) {
  float* c = g.c + row * g.c_stride + column;
  const float* a = g.a + row * g.a_stride;
  F32 sums[kRows][2 * kPairs];
  KVSPEED_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVSPEED_UNROLL
    for (int j = 0; j < 2 * kPairs; ++j) sums[r][j] = kAdd ? Load(c + r * g.c_stride + j * kLanes) : Zero();
  }
  const T* b = g.b + column + begin * g.b_stride;
  for (int64_t k = begin; k < end; ++k, b += g.b_stride) {
    F32 v[2 * kPairs];
    KVSPEED_UNROLL
    for (int j = 0; j < kPairs; ++j) {  // only a tile of one pair may be ragged
      if constexpr (kPairs > 1) {
        LoadPair(b + j * kPair, v[2 * j], v[2 * j + 1]);
      } else {
        LoadPairUpTo(b, g.columns - column, v[0], v[1]);
      }
    }
    KVSPEED_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F32 w = Set1(a[r * g.a_stride + k]);
      KVSPEED_UNROLL
      for (int j = 0; j < 2 * kPairs; ++j) sums[r][j] = Fma(v[j], w, sums[r][j]);
    }
  }
  KVSPEED_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVSPEED_UNROLL
    for (int j = 0; j < 2 * kPairs; ++j) Store(c + r * g.c_stride + j * kLanes, sums[r][j]);
  }
}

constexpr int kGemmPairs = kRegisters == 32 ? 2 : 1;  // with kGemmRows rows: 24 or 12 sums

template <class T, int kRows, bool kAdd>
inline void GemmRows(const Gemm<T>& g, int64_t row, int64_t begin, int64_t end) {
  int64_t column = 0;
  for (; column + kGemmPairs * kPair <= g.columns; column += kGemmPairs * kPair) {
    GemmTile<T, kRows, kGemmPairs, kAdd>(g, row, column, begin, end);
  }
  for (; column < g.columns; column += kPair) GemmTile<T, kRows, 1, kAdd>(g, row, column, begin, end);
}

// C[rows] (+)= A[rows][begin..end) B[begin..end).
template <class T, bool kAdd>
inline void RunGemm(const Gemm<T>& g, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < rows; row += kGemmRows) {
    switch (Min(kGemmRows, rows - row)) {
      case 1:
        GemmRows<T, 1, kAdd>(g, row, begin, end);
        break;
      case 2:
        GemmRows<T, 2, kAdd>(g, row, begin, end);
        break;
      case 3:
        GemmRows<T, 3, kAdd>(g, row, begin, end);
        break;
      case 4:
        GemmRows<T, 4, kAdd>(g, row, begin, end);
        break;
      case 5:
        GemmRows<T, 5, kAdd>(g, row, begin, end);
        break;
      default:
        GemmRows<T, kGemmRows, kAdd>(g, row, begin, end);
        break;
    }
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_ATTENTION_MICRO_H_
