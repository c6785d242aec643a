// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// segment_attention for few query rows: bound by the bytes of keys and values, each of which is read once.
//
// A block serves one KV head of one batch row, and one split: a range of tokens of one segment (with a single split,
// all segments one after the other). The query heads of the group and the query tokens, up to 16 packed rows, are one
// matrix operand. Each warp takes every kWarps-th run of 16 keys through a ring of its own in shared memory: keys and
// values of the next runs are on their way while it works, and no warp waits for another until the end, where the
// warps' sums are joined. The query is turned by minus the segment's offset, once a segment.
#ifndef KVSPEED_CUDA_SEGMENT_DECODE_CUH_
#define KVSPEED_CUDA_SEGMENT_DECODE_CUH_

#include "cuda/attention_nonfinite.cuh"
#include "cuda/attention_query.cuh"
#include "cuda/attention_state.cuh"
#include "cuda/attention_tile.cuh"

namespace kvspeed::cuda {

constexpr int kDecodeRows = 16;  // packed rows that one block takes

template <int D>
struct DecodeShape {
  static constexpr int kKeys = 16;  // of a run
  static constexpr int kWarps = D <= 128 ? 4 : 2;
  static constexpr int kThreads = 32 * kWarps;
  // Runs on their way in each warp, keys and values apart: all but one of 2 * kRuns transfers are in flight while a
  // warp works. Chosen so that a block fits into the 99 KB of the smallest GPUs, 2 into 164 and 3 into 228 KB.
  static constexpr int kRuns = D <= 80 ? 3 : 2;
  static constexpr int kBlocksPerSm = 3;
  static constexpr int kTileNumbers = kKeys * kPitch<D>;
  static constexpr int kRingBytes = kWarps * kRuns * 2 * kTileNumbers * 2;
  static constexpr int kQueryBytes = kDecodeRows * kPitch<D> * 2;
  static constexpr int kSharedBytes = sizeof(DeviceSegment) + kQueryBytes + kRingBytes;
  // The ring's memory afterwards: each warp's sums, maxima and denominators, float32.
  static constexpr int kSumPitch = D + 8;
  static constexpr int kSumNumbers = kDecodeRows * kSumPitch;
  static_assert(kWarps * (kSumNumbers + 2 * kDecodeRows) * 4 <= kRingBytes);
};

// One warp's state: sums of values for rows lane / 4 and lane / 4 + 8, and what their softmax needs.
template <int D>
struct DecodeState {
  float sum[D / 8][4];
  RowState row[2];
};

// The part of one segment that this block reads, and what each of the lane's two rows sees of it.
struct DecodeRange {
  int from, to;              // keys that any row sees
  int inner_from, inner_to;  // keys that all rows see
  int low[2], high[2];
};

KVS_DEVICE DecodeRange decode_range(const AttentionParams& p, const DeviceSegment& s, int split, int batch, int lane) {
  const Visible v = visible_keys(p, s, batch);
  int begin = 0, end = kMaxTokens;
  if (p.splits > 1) {
    begin = (first_planned(p, s) / p.split_units + split - s.unit_begin) * p.split_units;
    end = begin + p.split_units;
  }
  const int last = p.query_tokens - 1;
  DecodeRange range;
  range.from = max_of(v.low_of(0), begin), range.to = min_of(v.high_of(last), end);
  range.inner_from = max_of(v.low_of(last), begin), range.inner_to = min_of(v.high_of(0), end);
  KVS_UNROLL for (int r = 0; r < 2; ++r) {
    const int token = min_of(lane / 4 + 8 * r, p.rows - 1) / p.group;
    range.low[r] = max_of(v.low_of(token), begin), range.high[r] = min_of(v.high_of(token), end);
  }
  return range;
}

// One warp's runs of keys of one segment: warp w takes runs w, w + kWarps, ...
template <class T, int D>
class DecodeRuns {
  using Shape = DecodeShape<D>;

 public:
  KVS_DEVICE DecodeRuns(const DeviceSegment& s, const DecodeRange& range, T* ring, int batch, int kv_head, int warp,
                        int lane)
      : s_(s),
        range_(range),
        ring_(ring + warp * Shape::kRuns * 2 * Shape::kTileNumbers),
        plain_(s.aligned && s.page_table == nullptr),
        batch_(batch),
        kv_head_(kv_head),
        lane_(lane),
        token_(range.from + warp * Shape::kKeys) {
    const int row = token_ + tile_row(lane), column = tile_column(lane);
    key_ = head_start<T>(s, s.key, s.key_stride, batch, kv_head) + row * s.key_stride[2] + column;
    value_ = head_start<T>(s, s.value, s.value_stride, batch, kv_head) + row * s.value_stride[2] + column;
  }

  // Starts the first runs. Empty ones count too, so that the number of transfers to wait for is a constant.
  KVS_DEVICE void start() {
    KVS_UNROLL for (int i = 0; i < Shape::kRuns; ++i) {
      load_keys(i, token_ + i * kStep);
      load_values(i, token_ + i * kStep);
    }
  }

  KVS_DEVICE void attend(const AttentionParams& p, const T* query, DecodeState<D>& state) {
    constexpr bool kQueryInRegisters = D <= 128;
    uint32_t kept[kQueryInRegisters ? D / 16 : 1][4];
    if constexpr (kQueryInRegisters) {
      KVS_UNROLL for (int k = 0; k < D / 16; ++k) gpu::load_matrix_x4(kept[k], query_row(query, k));
    }
    int slot = 0;
#pragma unroll 1
    for (int token = token_; token < range_.to; token += kStep) {
      gpu::copy_wait<2 * Shape::kRuns - 1>();
      gpu::sync_warp();
      float s[2][4] = {};
      KVS_UNROLL for (int k = 0; k < D / 16; ++k) {
        uint32_t b[4];
        gpu::load_matrix_x4(b, keys(slot) + (lane_ % 8 + lane_ / 16 * 8) * kPitch<D> + k * 16 + lane_ / 8 % 2 * 8);
        if constexpr (kQueryInRegisters) {
          gpu::mma_m16n8k16<T>(s[0], kept[k], b[0], b[1]);
          gpu::mma_m16n8k16<T>(s[1], kept[k], b[2], b[3]);
        } else {
          uint32_t a[4];
          gpu::load_matrix_x4(a, query_row(query, k));
          gpu::mma_m16n8k16<T>(s[0], a, b[0], b[1]);
          gpu::mma_m16n8k16<T>(s[1], a, b[2], b[3]);
        }
      }
      gpu::sync_warp();
      load_keys(slot, token + Shape::kRuns * kStep);

      cap_scores(s, p.softcap_factor);
      const bool same_for_all = token >= range_.inner_from && token + Shape::kKeys <= range_.inner_to;
      if (!same_for_all) {
        KVS_UNROLL for (int r = 0; r < 2; ++r) {
          hide_scores(s, r, token + 2 * (lane_ % 4), range_.low[r], range_.high[r]);
        }
      }
      if (!plain_ && !pages_exist(s_, batch_, token, min_of(token + Shape::kKeys, range_.to), lane_)) {
        hide_missing(s, token + 2 * (lane_ % 4));
      }
      float shrink[2];
      KVS_UNROLL for (int r = 0; r < 2; ++r) { shrink[r] = scores_to_weights(s, r, p.score_factor, state.row[r]); }
      if (shrink[0] != 1 || shrink[1] != 1) {
        KVS_UNROLL for (int n = 0; n < D / 8; ++n) {
          state.sum[n][0] *= shrink[0], state.sum[n][1] *= shrink[0];
          state.sum[n][2] *= shrink[1], state.sum[n][3] *= shrink[1];
        }
      }
      const uint32_t a[4] = {gpu::pack2<T>(s[0][0], s[0][1]), gpu::pack2<T>(s[0][2], s[0][3]),
                             gpu::pack2<T>(s[1][0], s[1][1]), gpu::pack2<T>(s[1][2], s[1][3])};

      gpu::copy_wait<2 * Shape::kRuns - 1>();
      gpu::sync_warp();
      if (!same_for_all && p.query_tokens > 1) isolate_nonfinite(values(slot), token, state);
      KVS_UNROLL for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        gpu::load_matrix_x4_transposed(b, values(slot) + lane_ % 16 * kPitch<D> + n * 16 + lane_ / 16 * 8);
        gpu::mma_m16n8k16<T>(state.sum[2 * n], a, b[0], b[1]);
        gpu::mma_m16n8k16<T>(state.sum[2 * n + 1], a, b[2], b[3]);
      }
      gpu::sync_warp();
      load_values(slot, token + Shape::kRuns * kStep);
      slot = slot + 1 == Shape::kRuns ? 0 : slot + 1;
    }
    gpu::copy_wait<0>();  // only empty transfers are left
  }

 private:
  static constexpr int kStep = Shape::kWarps * Shape::kKeys;  // tokens from one run of a warp to its next

  KVS_DEVICE T* keys(int slot) { return ring_ + slot * 2 * Shape::kTileNumbers; }
  KVS_DEVICE T* values(int slot) { return keys(slot) + Shape::kTileNumbers; }
  KVS_DEVICE const T* query_row(const T* query, int k) {
    return query + lane_ % 16 * kPitch<D> + k * 16 + lane_ / 16 * 8;
  }

  KVS_DEVICE void load_keys(int slot, int token) { load(keys(slot), s_.key, s_.key_stride, key_, token); }
  KVS_DEVICE void load_values(int slot, int token) { load(values(slot), s_.value, s_.value_stride, value_, token); }

  // `next` is where this lane's part of the run lies, and afterwards of the warp's next one; see copy_tile.
  KVS_DEVICE void load(T* tile, const void* data, const int64_t (&stride)[3], const T*& next, int token) {
    if (token < range_.to) {
      if (plain_) {
        const int64_t token_stride = stride[2];
        copy_tile<T, D, Shape::kKeys, 32>(tile, next, token_stride, 0, range_.to - token, lane_);
        next += kStep * token_stride;
      } else {
        const T* start = head_start<T>(s_, data, stride, batch_, kv_head_);
        gather_tile<T, D, Shape::kKeys, 32>(tile, s_, start, stride, batch_, token, range_.from, range_.to, lane_);
      }
    }
    gpu::copy_commit();
  }

  // Keys whose page does not exist.
  KVS_DEVICE void hide_missing(float (&s)[2][4], int key) {
    KVS_UNROLL for (int n = 0; n < 2; ++n) {
      KVS_UNROLL for (int e = 0; e < 2; ++e) {
        const int token = key + 8 * n + e;
        if (token < range_.to && find_page(s_, batch_, token).page < 0) s[n][e] = s[n][2 + e] = kMinusInfinity;
      }
    }
  }

  KVS_DEVICE void isolate_nonfinite(T* tile, int token, DecodeState<D>& state) {
    if (!any_nonfinite<T, D, Shape::kKeys>(tile, lane_)) return;
    KVS_UNROLL for (int r = 0; r < 2; ++r) {
      add_nonfinite<T, D, Shape::kKeys>(state.sum, r, tile, token, range_.low[r], range_.high[r], lane_);
    }
    gpu::sync_warp();
    clear_nonfinite<T, D, Shape::kKeys, 32>(tile, lane_);
    gpu::sync_warp();
  }

  const DeviceSegment& s_;  // in shared memory
  const DecodeRange& range_;
  T* ring_;
  bool plain_;  // its rows can be copied by copy_tile
  int batch_, kv_head_, lane_, token_;
  const T *key_, *value_;  // where this lane's part of the next run lies
};

// The warps' sums through shared memory, joined and written: each thread takes eight columns of a row at a time.
template <class T, int D>
KVS_DEVICE void write_decoded(const AttentionParams& p, float* shared, DecodeState<D>& state, int split, int batch,
                              int kv_head, int thread) {
  using Shape = DecodeShape<D>;
  const int warp = thread / 32, lane = thread % 32;
  float* maxima = shared + Shape::kWarps * Shape::kSumNumbers;
  float* denominators = maxima + Shape::kWarps * kDecodeRows;
  KVS_UNROLL for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const float denominator = add_lanes(state.row[r].sum);
    if (row < p.rows) {
      float* sums = shared + warp * Shape::kSumNumbers + row * Shape::kSumPitch + 2 * (lane % 4);
      KVS_UNROLL for (int n = 0; n < D / 8; ++n) {
        *reinterpret_cast<float2*>(sums + 8 * n) = make_float2(state.sum[n][2 * r], state.sum[n][2 * r + 1]);
      }
      if (lane % 4 == 0) {
        maxima[warp * kDecodeRows + row] = state.row[r].maximum;
        denominators[warp * kDecodeRows + row] = denominator;
      }
    }
  }
  gpu::sync_block();
#pragma unroll 1
  for (int index = thread; index < p.rows * (D / 8); index += Shape::kThreads) {
    const int row = index / (D / 8), column = index % (D / 8) * 8;
    float maximum = kMinusInfinity;
    KVS_UNROLL for (int w = 0; w < Shape::kWarps; ++w) maximum = gpu::larger(maximum, maxima[w * kDecodeRows + row]);
    const float shift = maximum == kMinusInfinity ? 0.0f : -maximum;
    float denominator = 0, v[8] = {};
    KVS_UNROLL for (int w = 0; w < Shape::kWarps; ++w) {
      const float weight = gpu::exp2_approx(maxima[w * kDecodeRows + row] + shift);
      denominator += weight * denominators[w * kDecodeRows + row];
      const float* sums = shared + w * Shape::kSumNumbers + row * Shape::kSumPitch + column;
      KVS_UNROLL for (int i = 0; i < 8; ++i) v[i] += weight * sums[i];
    }
    const RowPlace place = place_of(p, kv_head, row);
    const RowResult result = row_result(p, maximum, denominator, place.head);
    KVS_UNROLL for (int i = 0; i < 8; ++i) v[i] *= result.factor;
    write_values<T, D>(p, split, batch, place, column, v);
    if (column == 0) write_lse(p, split, batch, place, result.lse);
  }
}

// Grid: one block for each KV head, split and batch row, the latter fastest: rows that share a segment meet in the L2.
template <class T, int D>
KVS_KERNEL(DecodeShape<D>::kThreads, DecodeShape<D>::kBlocksPerSm)
void segment_decode_kernel(KVS_PARAM AttentionParams p) {
  using Shape = DecodeShape<D>;
  constexpr int kRows = kDecodeRows / Shape::kWarps;  // of the query, that a warp loads
  KVS_SHARED(shared);
  DeviceSegment* segment = reinterpret_cast<DeviceSegment*>(shared);
  T* query = reinterpret_cast<T*>(shared + sizeof(DeviceSegment));
  T* ring = query + kDecodeRows * kPitch<D>;
  const int thread = gpu::thread_index(), warp = thread / 32, lane = thread % 32;
  const int batch = gpu::block_index() % p.batch, rest = gpu::block_index() / p.batch;
  const int split = rest % p.splits, kv_head = rest / p.splits;

  DecodeState<D> state;
  KVS_UNROLL for (int n = 0; n < D / 8; ++n) { KVS_UNROLL for (int e = 0; e < 4; ++e) state.sum[n][e] = 0; }
  state.row[0] = state.row[1] = kEmptyRow;

  const int first = p.splits == 1 ? 0 : find_segment(p, split);
  const int end = p.splits == 1 ? p.num_segments : first + 1;
#pragma unroll 1
  for (int index = first; index < end; ++index) {
    load_segment(segment, p, index, thread);
    gpu::sync_block();
    const DecodeRange range = decode_range(p, *segment, split, batch, lane);
    if (range.from < range.to) {
      DecodeRuns<T, D> runs(*segment, range, ring, batch, kv_head, warp, lane);
      runs.start();
      load_query_rows<T, D, kRows>(query + warp * kRows * kPitch<D>, p, *segment, batch, kv_head, warp * kRows, lane);
      gpu::sync_block();
      runs.attend(p, query, state);
    }
    gpu::sync_block();  // all are done with the segment, the query and the ring
  }
  write_decoded<T, D>(p, reinterpret_cast<float*>(ring), state, split, batch, kv_head, thread);
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_SEGMENT_DECODE_CUH_
