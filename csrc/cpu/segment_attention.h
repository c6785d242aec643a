// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// segment_attention: attention over a list of segments where they lie.
//
// Because R(p) q . R(d) k = (R(p - d) q) . k, a segment used d positions away from where its keys were rotated needs no
// new keys: its query is turned by -d instead, once a segment, in float32. All heads of a group and all query tokens
// are rows of one small matrix, so each key is read once for all of them.
//
// The visible keys of a batch row (padding left out) are one sequence, cut into splits of plan.split_tokens. A unit of
// work is (batch row, kv head, split, tile of query rows); it leaves sums, maximum and denominator, and the last unit
// of a kv head to finish joins them. So there is no second pass, and no thread waits for another before the end. With
// one split a unit writes the output itself.
#ifndef KVSPEED_CPU_SEGMENT_ATTENTION_H_
#define KVSPEED_CPU_SEGMENT_ATTENTION_H_

#include <omp.h>

#include "cpu/attention_block.h"

namespace kvspeed::cpu::KVSPEED_ISA_NAME {

constexpr double kLn2 = 0.69314718055994530942;
constexpr float kLog2E = 1.44269504088896341f;

// Row r of a kv head is query token r / group of head (r % group) in the group: rows of a tile are neighbours in time.
struct RowMap {
  int64_t group;
  int64_t Token(int64_t row) const { return row / group; }
  int64_t Head(int64_t kv_head, int64_t row) const { return kv_head * group + row % group; }
};

template <class T>
class AttentionUnit {
 public:
  AttentionUnit(const AttentionPlan& plan, char* scratch, int64_t batch, int64_t kv_head, int64_t first_row,
                int64_t rows)
      : plan_(plan),
        g_(*plan.args),
        map_{g_.heads / g_.heads_kv},
        batch_(batch),
        kv_head_(kv_head),
        first_row_(first_row),
        tile_(scratch, rows, plan.row_tile, padded_dim(g_.head_dim)) {}

  // Attends to visible keys [begin, end) of this batch row.
  void Run(int64_t begin, int64_t end) {
    tile_.Reset();
    bool loaded = false;
    const float* loaded_for = nullptr;
    int64_t before = 0;
    for (int64_t i = 0; i <= g_.num_segments && before < end; ++i) {
      const bool is_tail = i == g_.num_segments;
      const kvspeed_segment& s = is_tail ? g_.tail : g_.segments[i];
      const int64_t first = s.first == nullptr ? 0 : Min(Max(s.first[batch_], 0), s.tokens);
      const int64_t visible = s.tokens - first;
      const int64_t from = Max(begin - before, 0), to = Min(end - before, visible);
      before += visible;
      if (from >= to) continue;
      const RopeRow rope = is_tail ? RopeRow{nullptr, nullptr} : plan_.rope[i];
      if (!loaded || rope.cos != loaded_for) LoadQuery(rope);
      loaded = true;
      loaded_for = rope.cos;
      Attend(s, is_tail, first + from, first + to);
    }
  }

  // One row's result, for the caller to keep or to write.
  const Tile& tile() const { return tile_; }

 private:
  // The query rows of the tile, turned by minus the segment's offset, scaled, in pair order.
  void LoadQuery(RopeRow rope) {
    const int64_t half = rope.cos == nullptr ? 0 : g_.rotary_dim / 2;
    const float scale = g_.softcap > 0 ? g_.scale : g_.scale * kLog2E;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      const int64_t row = first_row_ + r;
      const T* q = static_cast<const T*>(g_.query) + batch_ * g_.query_stride[0] +
                   map_.Head(kv_head_, row) * g_.query_stride[1] + map_.Token(row) * g_.query_stride[2];
      float* to = tile_.query + r * tile_.dim;
      std::memset(to, 0, static_cast<size_t>(tile_.dim) * sizeof(float));
      for (int64_t i = 0; i < half; ++i) {
        const int64_t at_x = g_.interleaved ? 2 * i : i, at_y = g_.interleaved ? 2 * i + 1 : i + half;
        const float x = ToFloat(q[at_x]), y = ToFloat(q[at_y]), c = rope.cos[i], s = rope.sin[i];
        to[PairSlot<T>(at_x)] = (x * c + y * s) * scale;
        to[PairSlot<T>(at_y)] = (y * c - x * s) * scale;
      }
      for (int64_t i = 2 * half; i < g_.head_dim; ++i) to[PairSlot<T>(i)] = ToFloat(q[i]) * scale;
    }
  }

  // Keys [from, to) of a segment that query token i may see, by causality (tail) and window.
  void Interval(const kvspeed_segment& s, bool is_tail, int64_t token, int64_t& from, int64_t& to) const {
    const int64_t last = g_.tail.tokens - g_.query_tokens + token;  // the query's own index in the tail
    if (is_tail) to = Min(to, last + 1);
    if (g_.window > 0) {
      const int64_t at = g_.tail.start + last - (s.start + s.offset);  // its position as an index in this segment
      from = Max(from, at - g_.window + 1);
      to = Min(to, at + 1);
    }
  }

  void Attend(const kvspeed_segment& s, bool is_tail, int64_t from, int64_t to) {
    const T* keys = static_cast<const T*>(s.key) + batch_ * s.key_stride[0] + kv_head_ * s.key_stride[1];
    const T* values = static_cast<const T*>(s.value) + batch_ * s.value_stride[0] + kv_head_ * s.value_stride[1];
    const bool masked = is_tail || g_.window > 0;
    if (masked) {  // leave out the keys that no row sees: the first row has the first start, the last row the last end
      int64_t unused_from = from, unused_to = to;
      Interval(s, is_tail, map_.Token(first_row_), from, unused_to);
      Interval(s, is_tail, map_.Token(first_row_ + tile_.rows - 1), unused_from, to);
    }
    for (int64_t t = from; t < to; t += kTokenBlock) {
      const int64_t n = Min(kTokenBlock, to - t);
      for (int64_t r = 0; r < tile_.rows; ++r) {
        int64_t row_from = t, row_to = t + n;
        if (masked) Interval(s, is_tail, map_.Token(first_row_ + r), row_from, row_to);
        tile_.begin[r] = static_cast<int32_t>(row_from - t);
        tile_.end[r] = static_cast<int32_t>(Max(row_to, row_from) - t);
      }
      AttendBlock(tile_, keys + t * s.key_stride[2], s.key_stride[2], values + t * s.value_stride[2], s.value_stride[2],
                  g_.head_dim, n, g_.softcap);
    }
  }

  const AttentionPlan& plan_;
  const kvspeed_segment_attention_args& g_;
  const RowMap map_;
  const int64_t batch_, kv_head_, first_row_;
  Tile tile_;
};

// Divides a row by its denominator, adds the sink, and writes output and LSE.
template <class T>
inline void WriteRow(const kvspeed_segment_attention_args& g, int64_t batch, int64_t kv_head, int64_t row, float* sum,
                     float maximum, float denominator) {
  const RowMap map = {g.heads / g.heads_kv};
  const int64_t head = map.Head(kv_head, row), token = map.Token(row);
  T* out = static_cast<T*>(g.out) + batch * g.out_stride[0] + head * g.out_stride[1] + token * g.out_stride[2];
  const bool nothing_seen = denominator == 0;
  float shrink = 1;
  if (g.sinks != nullptr) {
    const float sink = g.sinks[head] * kLog2E, larger = sink > maximum ? sink : maximum;
    if (larger != -INFINITY) {
      shrink = Exp2(maximum - larger);
      denominator = denominator * shrink + Exp2(sink - larger);
      maximum = larger;
    }
  }
  const bool empty = denominator == 0;
  const F32 divisor = Set1(empty ? 1.0f : denominator), factor = Set1(empty ? 0.0f : shrink);
  for (int64_t d = 0; d < g.head_dim; d += kPair) {
    const F32 a = Div(Mul(Load(sum + d), factor), divisor), b = Div(Mul(Load(sum + d + kLanes), factor), divisor);
    if (d + kPair <= g.head_dim) {
      StorePair(out + d, a, b);
    } else {
      T rest[kPair];
      StorePair(rest, a, b);
      std::memcpy(out + d, rest, static_cast<size_t>(g.head_dim - d) * sizeof(T));
    }
  }
  if (g.lse != nullptr) {
    double lse = empty ? -INFINITY : (double{maximum} + std::log2(double{denominator})) * kLn2;
    if (nothing_seen && g.sinks != nullptr) lse = g.sinks[head];  // itself, to the bit
    g.lse[(batch * g.heads + head) * g.query_tokens + token] = static_cast<float>(lse);
  }
}

// Joins a row's splits in their order, and writes it. `sum` is scratch of one row.
template <class T>
inline void MergeSplits(const AttentionPlan& plan, int64_t batch, int64_t kv_head, int64_t row, float* sum) {
  const kvspeed_segment_attention_args& g = *plan.args;
  const int64_t rows = g.heads / g.heads_kv * g.query_tokens, dim = padded_dim(g.head_dim);
  const float* first = plan.partial + (batch * g.heads_kv + kv_head) * plan.splits * rows * (dim + 2);
  float maximum = -INFINITY, denominator = 0;
  for (int64_t s = 0; s < plan.splits; ++s) {
    const float m = first[s * rows * (dim + 2) + rows * dim + row];
    maximum = m > maximum ? m : maximum;
  }
  std::memset(sum, 0, static_cast<size_t>(dim) * sizeof(float));
  for (int64_t s = 0; s < plan.splits; ++s) {
    const float* part = first + s * rows * (dim + 2);
    const float part_denominator = part[rows * dim + rows + row];
    if (part_denominator == 0) continue;  // nothing seen there
    const float weight = Exp2(part[rows * dim + row] - maximum);
    denominator += weight * part_denominator;
    for (int64_t d = 0; d < dim; d += kLanes) {
      Store(sum + d, Fma(Load(part + row * dim + d), Set1(weight), Load(sum + d)));
    }
  }
  WriteRow<T>(g, batch, kv_head, row, sum, maximum, denominator);
}

template <class T>
inline void RunUnit(const AttentionPlan& plan, char* scratch, int64_t unit) {
  const kvspeed_segment_attention_args& g = *plan.args;
  const int64_t rows = g.heads / g.heads_kv * g.query_tokens, dim = padded_dim(g.head_dim);
  const int64_t tile = unit % plan.row_tiles, split = unit / plan.row_tiles % plan.splits;
  const int64_t kv_head = unit / plan.row_tiles / plan.splits % g.heads_kv;
  const int64_t batch = unit / plan.row_tiles / plan.splits / g.heads_kv;
  const int64_t first = tile * plan.row_tile, count = Min(plan.row_tile, rows - first);

  AttentionUnit<T> work(plan, scratch, batch, kv_head, first, count);
  const bool whole = plan.splits == 1;
  work.Run(split * plan.split_tokens, whole ? INT64_MAX / 2 : (split + 1) * plan.split_tokens);
  const Tile& t = work.tile();
  if (whole) {
    for (int64_t r = 0; r < count; ++r) {
      WriteRow<T>(g, batch, kv_head, first + r, t.sum + r * dim, t.maximum[r], t.denominator[r]);
    }
    return;
  }
  float* part = plan.partial + ((batch * g.heads_kv + kv_head) * plan.splits + split) * rows * (dim + 2);
  std::memcpy(part + first * dim, t.sum, static_cast<size_t>(count * dim) * sizeof(float));
  std::memcpy(part + rows * dim + first, t.maximum, static_cast<size_t>(count) * sizeof(float));
  std::memcpy(part + rows * dim + rows + first, t.denominator, static_cast<size_t>(count) * sizeof(float));
  int64_t* done = plan.done + batch * g.heads_kv + kv_head;
  if (__atomic_add_fetch(done, int64_t{1}, __ATOMIC_ACQ_REL) < plan.splits * plan.row_tiles) return;
  for (int64_t r = 0; r < rows; ++r) MergeSplits<T>(plan, batch, kv_head, r, reinterpret_cast<float*>(scratch));
}

template <class T>
inline void SegmentAttentionTyped(const AttentionPlan& plan) {
  const kvspeed_segment_attention_args& g = *plan.args;
  const int64_t units = g.batch * g.heads_kv * plan.splits * plan.row_tiles;
#pragma omp parallel num_threads(plan.num_threads) if (plan.num_threads > 1 && units > 1)
  {
    char* scratch = plan.scratch + static_cast<size_t>(omp_get_thread_num()) * plan.scratch_bytes;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t u = 0; u < units; ++u) RunUnit<T>(plan, scratch, u);
  }
}

inline void SegmentAttention(const AttentionPlan& plan) {
  const kvspeed_segment_attention_args& g = *plan.args;
  if (g.batch == 0 || g.heads == 0 || g.query_tokens == 0) return;
  switch (g.dtype) {
    case KVSPEED_FLOAT32:
      return SegmentAttentionTyped<float>(plan);
    case KVSPEED_BFLOAT16:
      return SegmentAttentionTyped<BF16>(plan);
    case KVSPEED_FLOAT16:
      return SegmentAttentionTyped<F16>(plan);
  }
}

}  // namespace kvspeed::cpu::KVSPEED_ISA_NAME

#endif  // KVSPEED_CPU_SEGMENT_ATTENTION_H_
