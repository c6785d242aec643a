// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Rotating rows of keys by one fixed offset. A pair (x, y) becomes (x cos - y sin, y cos + x sin), in float32 and
// rounded once. All rows of a packet turn by the same angles, so the table is a few cache lines that stay in L1, and
// the loop is one load, four multiplications and one store per pair of vectors.
#ifndef KVSPEED_CPU_ROPE_ROTATE_H_
#define KVSPEED_CPU_ROPE_ROTATE_H_

#include <type_traits>

#include KVSPEED_SIMD_HEADER

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

// How a run of pairs is cut into vectors.
enum class RotateMode {
  kScalar,       // fewer pairs than a vector holds
  kVector,       // groups of kLanes pairs; half-split reads x and y from the two halves of the rotary part
  kPairs,        // bf16, half-split: groups of 2 * kLanes pairs in pair order (see LoadPair)
  kInterleaved,  // groups of kLanes numbers, which are kLanes / 2 pairs side by side
};

template <class T>
inline RotateMode ChooseRotateMode(int64_t pairs, bool interleaved) {
  if (interleaved) return 2 * pairs >= kLanes ? RotateMode::kInterleaved : RotateMode::kScalar;
  if (sizeof(T) == 2 && pairs >= 2 * kLanes) return RotateMode::kPairs;
  return pairs >= kLanes ? RotateMode::kVector : RotateMode::kScalar;
}

// Where group g of `width` starts. The last group is moved back so that it ends with the data: it then computes some
// numbers a second time, from the untouched source and with the same operations, so it writes the same bits.
inline int64_t GroupStart(int64_t g, int64_t width, int64_t count) { return Min(g * width, count - width); }

// The table in the order in which the kernel reads it: cosines and sines of group 0, of group 1, ... `to` has room for
// 4 * (pairs + 2 * kLanes) floats.
template <class T>
inline void ArrangeTable(RotateMode mode, const float* cos, const float* sin, int64_t pairs, float* to) {
  switch (mode) {
    case RotateMode::kScalar:
      for (int64_t i = 0; i < pairs; ++i) to[2 * i] = cos[i], to[2 * i + 1] = sin[i];
      break;
    case RotateMode::kVector:
      for (int64_t g = 0; g * kLanes < pairs; ++g, to += 2 * kLanes) {
        const int64_t start = GroupStart(g, kLanes, pairs);
        for (int i = 0; i < kLanes; ++i) to[i] = cos[start + i], to[kLanes + i] = sin[start + i];
      }
      break;
    case RotateMode::kPairs:
      for (int64_t g = 0; g * 2 * kLanes < pairs; ++g, to += 4 * kLanes) {
        const int64_t start = GroupStart(g, 2 * kLanes, pairs);
        for (int i = 0; i < 2 * kLanes; ++i) {
          const int slot = std::is_same_v<T, BF16> ? (i & 1) * kLanes + i / 2 : i;
          to[slot] = cos[start + i], to[2 * kLanes + slot] = sin[start + i];
        }
      }
      break;
    case RotateMode::kInterleaved:
      for (int64_t g = 0; g * kLanes < 2 * pairs; ++g, to += 2 * kLanes) {
        const int64_t start = GroupStart(g, kLanes, 2 * pairs);  // even, as both arguments are
        for (int i = 0; i < kLanes; ++i) {
          to[i] = cos[(start + i) / 2];
          to[kLanes + i] = i & 1 ? sin[(start + i) / 2] : -sin[(start + i) / 2];
        }
      }
      break;
  }
}

// x and y of a pair: half-split at i and i + distance, interleaved at 2i and 2i + 1.
template <class T>
inline void RotateScalar(const T* from, T* to, int64_t pairs, int64_t step, int64_t distance, const float* table) {
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t at = i * step;
    const float x = ToFloat(from[at]), y = ToFloat(from[at + distance]), c = table[2 * i], s = table[2 * i + 1];
    to[at] = FromFloat<T>(x * c - y * s);
    to[at + distance] = FromFloat<T>(y * c + x * s);
  }
}

template <class T, bool kStream>
inline void RotateRow(RotateMode mode, const T* from, T* to, int64_t pairs, int64_t half, const float* table,
                      bool interleaved) {
  const auto put = [](T* p, F32 x) { kStream ? StreamAs(p, x) : StoreAs(p, x); };
  const auto put_pair = [](T* p, F32 a, F32 b) { kStream ? StreamPair(p, a, b) : StorePair(p, a, b); };
  switch (mode) {
    case RotateMode::kScalar:
      RotateScalar(from, to, pairs, interleaved ? 2 : 1, interleaved ? 1 : half, table);
      break;
    case RotateMode::kVector:
      for (int64_t i = 0; i < pairs; i += kLanes, table += 2 * kLanes) {
        const int64_t at = Min(i, pairs - kLanes);
        const F32 x = LoadAs(from + at), y = LoadAs(from + half + at), c = Load(table), s = Load(table + kLanes);
        put(to + at, Fnma(y, s, Mul(x, c)));
        put(to + half + at, Fma(x, s, Mul(y, c)));
      }
      break;
    case RotateMode::kPairs:
      for (int64_t i = 0; i < pairs; i += 2 * kLanes, table += 4 * kLanes) {
        const int64_t at = Min(i, pairs - 2 * kLanes);
        F32 x0, x1, y0, y1;
        LoadPair(from + at, x0, x1);
        LoadPair(from + half + at, y0, y1);
        const F32 c0 = Load(table), c1 = Load(table + kLanes);
        const F32 s0 = Load(table + 2 * kLanes), s1 = Load(table + 3 * kLanes);
        put_pair(to + at, Fnma(y0, s0, Mul(x0, c0)), Fnma(y1, s1, Mul(x1, c1)));
        put_pair(to + half + at, Fma(x0, s0, Mul(y0, c0)), Fma(x1, s1, Mul(y1, c1)));
      }
      break;
    case RotateMode::kInterleaved:
      for (int64_t i = 0; i < 2 * pairs; i += kLanes, table += 2 * kLanes) {
        const int64_t at = Min(i, 2 * pairs - kLanes);
        const F32 x = LoadAs(from + at);
        put(to + at, Fma(SwapPairs(x), Load(table + kLanes), Mul(x, Load(table))));
      }
      break;
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_ROPE_ROTATE_H_
