// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The two inner loops of attention over a block of up to kTokenBlock keys.
//
//   Dot    scores of a few rows. Each key row is read once, straight from memory, and multiplied into a tile of
//          rows x tokens accumulators; vectors run along head_dim, so each tile ends in one sum across lanes.
//   Gemm   C += A B with the rows of B read as they lie and A broadcast. Used for the weighted sum of values (B = values)
//          and, where rows are many, for scores (B = keys transposed once for all rows), which saves the sums across lanes.
//
// Head dimensions are in PAIR ORDER everywhere in scratch: the order in which LoadPair hands them out. Scores do not care
// (query and keys agree), and StorePair puts the output back.
#ifndef KVSPEED_CPU_ATTENTION_MICRO_H_
#define KVSPEED_CPU_ATTENTION_MICRO_H_

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
  if (n >= kPair) {
    LoadPair(p, a, b);
  } else {
    LoadPairPartial(p, static_cast<int>(n), a, b);
  }
}

inline void PrefetchBytes(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) Prefetch(p + i);
}

// ----------------------------------------------------------------------------------------------------------- Dot ----

// scores[r][t] = query[r] . keys[t] for kRows x kTokens; query rows are `dim_stride` apart and zero beyond `dim`.
template <class T, int kRows, int kTokens>
inline void DotTile(const float* query, int64_t dim_stride, const T* keys, int64_t key_stride, int64_t dim,
                    float* scores) {
  constexpr int kSums = (kRows * kTokens + kLanes - 1) / kLanes * kLanes;
  F32 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = Zero();
  const auto step = [&](int64_t d, auto load) {
    F32 a[kTokens], b[kTokens];
    for (int t = 0; t < kTokens; ++t) load(keys + t * key_stride + d, a[t], b[t]);
    for (int r = 0; r < kRows; ++r) {
      const F32 w = Load(query + r * dim_stride + d);
      for (int t = 0; t < kTokens; ++t) sums[r * kTokens + t] = Fma(a[t], w, sums[r * kTokens + t]);
    }
    for (int r = 0; r < kRows; ++r) {
      const F32 w = Load(query + r * dim_stride + d + kLanes);
      for (int t = 0; t < kTokens; ++t) sums[r * kTokens + t] = Fma(b[t], w, sums[r * kTokens + t]);
    }
  };
  int64_t d = 0;
  for (; d + kPair <= dim; d += kPair) step(d, [](const T* p, F32& a, F32& b) { LoadPair(p, a, b); });
  if (d < dim) {
    const int rest = static_cast<int>(dim - d);
    step(d, [rest](const T* p, F32& a, F32& b) { LoadPairPartial(p, rest, a, b); });
  }
  float tile[kSums];
  for (int i = 0; i < kSums; i += kLanes) Store(tile + i, ReduceEach(sums + i));
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) scores[r * kTokenBlock + t] = tile[r * kTokens + t];
  }
}

// Tokens of a tile: as many as the registers hold next to kRows rows.
constexpr int DotTokens(int rows) { return rows == 1 ? 8 : (kMaxAccumulators >= 16 || rows == 2 ? 4 : 2); }

// Scores of kRows rows against n keys; rows of the next block are prefetched on the way.
template <class T, int kRows>
inline void DotRows(const float* query, int64_t dim_stride, const T* keys, int64_t key_stride, int64_t dim, int64_t n,
                    float* scores, const char* prefetch, int64_t prefetch_stride) {
  constexpr int kTokens = DotTokens(kRows);
  int64_t t = 0;
  for (; t + kTokens <= n; t += kTokens) {
    if (prefetch != nullptr) {
      for (int i = 0; i < kTokens; ++i) {
        PrefetchBytes(prefetch + (t + i) * prefetch_stride, dim * static_cast<int64_t>(sizeof(T)));
      }
    }
    DotTile<T, kRows, kTokens>(query, dim_stride, keys + t * key_stride, key_stride, dim, scores + t);
  }
  for (; t < n; ++t) DotTile<T, kRows, 1>(query, dim_stride, keys + t * key_stride, key_stride, dim, scores + t);
}

template <class T>
inline void Dot(const float* query, int64_t dim_stride, int64_t rows, const T* keys, int64_t key_stride, int64_t dim,
                int64_t n, float* scores, const char* prefetch, int64_t prefetch_stride) {
  for (int64_t r = 0; r < rows; r += 4) {
    const float* q = query + r * dim_stride;
    float* s = scores + r * kTokenBlock;
    switch (Min(4, rows - r)) {
      case 1: DotRows<T, 1>(q, dim_stride, keys, key_stride, dim, n, s, prefetch, prefetch_stride); break;
      case 2: DotRows<T, 2>(q, dim_stride, keys, key_stride, dim, n, s, prefetch, prefetch_stride); break;
      case 3: DotRows<T, 3>(q, dim_stride, keys, key_stride, dim, n, s, prefetch, prefetch_stride); break;
      default: DotRows<T, 4>(q, dim_stride, keys, key_stride, dim, n, s, prefetch, prefetch_stride); break;
    }
    prefetch = nullptr;
  }
}

// ---------------------------------------------------------------------------------------------------------- Gemm ----

// transposed[d][t] for d below dim rounded up to a pair, t below kTokenBlock; what does not exist is zero.
template <class T>
inline void TransposeKeys(const T* keys, int64_t key_stride, int64_t dim, int64_t n, float* transposed) {
  for (int64_t t = 0; t < kTokenBlock; t += kLanes) {
    for (int64_t d = 0; d < dim; d += kPair) {
      F32 a[kLanes], b[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        a[i] = b[i] = Zero();
        if (t + i < n) LoadPairUpTo(keys + (t + i) * key_stride + d, dim - d, a[i], b[i]);
      }
      Transpose(a);
      Transpose(b);
      for (int i = 0; i < kLanes; ++i) {
        Store(transposed + (d + i) * kTokenBlock + t, a[i]);
        Store(transposed + (d + kLanes + i) * kTokenBlock + t, b[i]);
      }
    }
  }
}

// C[kRows][kPairs pairs] (+)= A[kRows][begin..end) B[begin..end)[kPairs pairs]. Each number of C is summed in the order
// of k, one fused step at a time, whatever the tile: so a row's bits do not depend on its neighbours.
template <class T, int kRows, int kPairs, bool kAdd>
inline void GemmTile(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t begin, int64_t end,
                     float* c, int64_t c_stride, int64_t columns) {
  F32 sums[kRows][2 * kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2 * kPairs; ++j) sums[r][j] = kAdd ? Load(c + r * c_stride + j * kLanes) : Zero();
  }
  const auto step = [&](int64_t k, auto load) {
    F32 v[2 * kPairs];
    for (int j = 0; j < kPairs; ++j) load(b + k * b_stride + j * kPair, v[2 * j], v[2 * j + 1]);
    for (int r = 0; r < kRows; ++r) {
      const F32 w = Set1(a[r * a_stride + k]);
      for (int j = 0; j < 2 * kPairs; ++j) sums[r][j] = Fma(v[j], w, sums[r][j]);
    }
  };
  if (columns >= kPair * kPairs) {
    for (int64_t k = begin; k < end; ++k) step(k, [](const T* p, F32& x, F32& y) { LoadPair(p, x, y); });
  } else {  // the ragged last pair of head_dim; kPairs is 1
    const int rest = static_cast<int>(columns);
    for (int64_t k = begin; k < end; ++k) {
      step(k, [rest](const T* p, F32& x, F32& y) { LoadPairPartial(p, rest, x, y); });
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2 * kPairs; ++j) Store(c + r * c_stride + j * kLanes, sums[r][j]);
  }
}

// Pairs of columns next to kRows rows: what the registers hold, and no more than 4.
constexpr int GemmPairs(int rows) {
  const int pairs = kMaxAccumulators / (2 * rows);
  return pairs >= 4 ? 4 : pairs >= 2 ? 2 : 1;
}

template <class T, int kRows, bool kAdd>
inline void GemmRows(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t begin, int64_t end,
                     float* c, int64_t c_stride, int64_t columns) {
  constexpr int kPairs = GemmPairs(kRows);
  int64_t j = 0;
  for (; j + kPairs * kPair <= columns; j += kPairs * kPair) {
    GemmTile<T, kRows, kPairs, kAdd>(a, a_stride, b + j, b_stride, begin, end, c + j, c_stride, columns - j);
  }
  for (; j < columns; j += kPair) {
    GemmTile<T, kRows, 1, kAdd>(a, a_stride, b + j, b_stride, begin, end, c + j, c_stride, columns - j);
  }
}

// Any number of rows up to kGemmRows.
template <class T, bool kAdd>
inline void GemmBlock(int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t begin,
                      int64_t end, float* c, int64_t c_stride, int64_t columns) {
  switch (rows) {
    case 1: return GemmRows<T, 1, kAdd>(a, a_stride, b, b_stride, begin, end, c, c_stride, columns);
    case 2: return GemmRows<T, 2, kAdd>(a, a_stride, b, b_stride, begin, end, c, c_stride, columns);
    case 3: return GemmRows<T, 3, kAdd>(a, a_stride, b, b_stride, begin, end, c, c_stride, columns);
    case 4: return GemmRows<T, 4, kAdd>(a, a_stride, b, b_stride, begin, end, c, c_stride, columns);
    case 5: return GemmRows<T, 5, kAdd>(a, a_stride, b, b_stride, begin, end, c, c_stride, columns);
    default: return GemmRows<T, 6, kAdd>(a, a_stride, b, b_stride, begin, end, c, c_stride, columns);
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_ATTENTION_MICRO_H_
