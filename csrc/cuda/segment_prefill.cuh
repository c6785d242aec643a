// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// segment_attention for many query rows: bound by the tensor cores and by the shared memory that feeds them.
//
// A block takes a tile of packed query rows of one KV head, 16 * kRowTiles in each of its four warps, and walks through
// the key tiles of all segments, or of its split's range of them. Tiles that no row of the block sees are never loaded;
// within a tile, only those that some row does not see whole are masked. Keys and values have one buffer each: the
// values are on their way while the scores are formed, the next keys while the values are weighed. Each fragment of
// keys or values that a warp reads serves all its rows; that is what 32 rows a warp are for.
//
// Registers: the rotated query stays in registers where there is room, else its fragments come from shared memory.
// What changes once a segment lies in shared memory.
#ifndef KVSPEED_CUDA_SEGMENT_PREFILL_CUH_
#define KVSPEED_CUDA_SEGMENT_PREFILL_CUH_

#include "cuda/attention_nonfinite.cuh"
#include "cuda/attention_state.cuh"
#include "cuda/attention_tile.cuh"

namespace kvspeed::cuda {

// kRowTiles: m16 tiles in each warp. 2 halves the shared memory read for each product, but needs 255 registers.
template <int D, int kRowTiles>
struct PrefillShape {
  static constexpr int kThreads = kTileThreads;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kThreads / 32 * kWarpRows;
  static constexpr int kKeys = D > 128 ? 32 : 64;  // of a tile
  static constexpr bool kQueryInRegisters = kRowTiles * D <= 128;
  static constexpr int kBlocksPerSm = kRowTiles * D <= 64 ? 4 : kRowTiles == 1 && D <= 128 ? 3 : 2;

  // Shared memory: query rows (unless in registers), keys, values, PrefillBlock. After the last tile, sums in float32.
  static constexpr int kQueryNumbers = kQueryInRegisters ? 0 : kRows * kPitch<D>;
  static constexpr int kTileNumbers = kKeys * kPitch<D>;
  static constexpr int kTileBytes = (kQueryNumbers + 2 * kTileNumbers) * 2;
  static_assert(64 * kPitch<D> * 4 <= kTileBytes, "the sums of 16 rows a warp, in float32");
};

// What a block keeps in shared memory.
template <int kRows>
struct PrefillBlock {
  DeviceSegment segment;
  Visible seen;      // of that segment, by this batch row
  int from, to;      // keys of it that any row of the block sees
  int row0, batch, kv_head, split;
  int token[kRows];  // query token of each packed row
};

template <int D, int kRowTiles>
constexpr int kPrefillSharedBytes =
    PrefillShape<D, kRowTiles>::kTileBytes + int{sizeof(PrefillBlock<PrefillShape<D, kRowTiles>::kRows>)};

template <class T, int D, int kRowTiles>
class Prefill {
  using Shape = PrefillShape<D, kRowTiles>;
  using Block = PrefillBlock<Shape::kRows>;
  static constexpr int kKeys = Shape::kKeys;

 public:
  KVS_DEVICE Prefill(const AttentionParams& p, unsigned char* shared)
      : p_(p),
        query_(reinterpret_cast<T*>(shared)),
        keys_(query_ + Shape::kQueryNumbers),
        values_(keys_ + Shape::kTileNumbers),
        block_(*reinterpret_cast<Block*>(shared + Shape::kTileBytes)),
        thread_(gpu::thread_index()),
        lane_(thread_ % 32),
        warp_row_(thread_ / 32 * Shape::kWarpRows) {
    const int tiles = (p.rows + Shape::kRows - 1) / Shape::kRows, tile = gpu::block_index() % tiles;
    const int row0 = (tiles - 1 - tile) * Shape::kRows;  // the longest of a causal prompt first
    const int rest = gpu::block_index() / tiles, split = rest / p.batch / p.heads_kv;
    if (thread_ == 0) {
      block_.row0 = row0;
      block_.batch = rest % p.batch;
      block_.kv_head = rest / p.batch % p.heads_kv;
      block_.split = split;
    }
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int n = 0; n < D / 8; ++n) { KVS_UNROLL for (int e = 0; e < 4; ++e) sum_[m][n][e] = 0; }
      row_[m][0] = row_[m][1] = kEmptyRow;
    }
    for (int r = thread_; r < Shape::kRows; r += Shape::kThreads) {
      block_.token[r] = min_of(row0 + r, p.rows - 1) / p.group;
    }
    segment_ = (p.splits == 1 ? 0 : find_segment(p, split * p.split_units)) - 1;
    gpu::sync_block();
  }

  KVS_DEVICE void run() {
    bool pending = false;  // a tile's scores are there, its values too
#pragma unroll 1
    while (true) {
      const bool more = next_tile();
      if (more) load_keys();
      gpu::copy_commit();
      if (pending) {
        if (!weighed_) weigh_scores();
        add_values();
      }
      if (!more) break;
      pending = true;
      gpu::copy_wait<0>();
      gpu::sync_block();  // the keys are there, and nobody reads the last values any more
      if (fresh_) start_segment();
      load_values();
      gpu::copy_commit();
      form_scores();
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) cap_scores(score_[m], p_.softcap_factor);
      hide();
      gpu::copy_wait<0>();
      gpu::sync_block();  // the values are there, and nobody reads the keys any more
      weighed_ = false;
      if (uneven_) isolate_nonfinite();
    }
    write();
  }

 private:
  // ---- the walk ----------------------------------------------------------------------------------------------------

  KVS_DEVICE bool next_tile() {
    fresh_ = false;
    return ++tile_ < tile_end_ || next_segment();
  }

  // To the first tile of the next segment of which any row sees a key in the split's range.
  KVS_DEVICE bool next_segment() {
    const int begin = p_.splits == 1 ? 0 : block_.split * p_.split_units;
    const int end = p_.splits == 1 ? kMaxTokens : begin + p_.split_units;
#pragma unroll 1
    while (++segment_ < p_.num_segments) {
      if (p_.splits > 1 && unit_begin(p_, segment_) >= end) return false;
      load_segment(&block_.segment, p_, segment_, thread_);
      gpu::sync_block();
      const Visible seen = visible_keys(p_, block_.segment, block_.batch);
      const int before = p_.splits == 1 ? 0 : block_.segment.unit_begin;
      const int from = seen.low_of(block_.token[0]), to = seen.high_of(block_.token[Shape::kRows - 1]);
      tile_ = max_of(from / kKeys, begin - before);
      tile_end_ = min_of((to + kKeys - 1) / kKeys, end - before);
      const bool any = from < to && tile_ < tile_end_;
      if (any && thread_ == 0) block_.seen = seen, block_.from = from, block_.to = to;
      gpu::sync_block();
      if (!any) continue;
      fresh_ = true;
      const DeviceSegment& s = block_.segment;
      plain_ = s.aligned && s.page_table == nullptr;
      if (plain_) key_ = first_row(s, s.key, s.key_stride);
      return true;
    }
    return false;
  }

  KVS_DEVICE const T* first_row(const DeviceSegment& s, const void* data, const int64_t (&stride)[3]) {
    return head_start<T>(s, data, stride, block_.batch, block_.kv_head) + (tile_ * kKeys + thread_ / 8) * stride[2] +
           thread_ % 8 * 8;
  }

  // The query rows of this warp, turned for the segment.
  KVS_DEVICE void start_segment() {
    const DeviceSegment& s = block_.segment;
    if (plain_) value_ = first_row(s, s.value, s.value_stride);
    if constexpr (Shape::kQueryInRegisters) {
      T* stage = values_ + thread_ / 32 * 16 * kPitch<D>;
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
        load_query<T, D, 16, 32>(stage, p_, s, block_.batch, block_.kv_head, block_.row0 + warp_row_ + 16 * m, lane_);
        gpu::sync_warp();
        KVS_UNROLL for (int k = 0; k < D / 16; ++k) {
          gpu::load_matrix_x4(turned_[m][k], stage + lane_ % 16 * kPitch<D> + lane_ / 16 * 8 + k * 16);
        }
        gpu::sync_warp();
      }
      gpu::sync_block();  // the values may come
    } else {
      load_query<T, D, Shape::kWarpRows, 32>(query_ + warp_row_ * kPitch<D>, p_, s, block_.batch, block_.kv_head,
                                             block_.row0 + warp_row_, lane_);
      gpu::sync_warp();
    }
  }

  KVS_DEVICE void load_keys() {
    const DeviceSegment& s = block_.segment;
    load(keys_, key_, s.key, s.key_stride);
  }
  KVS_DEVICE void load_values() {
    const DeviceSegment& s = block_.segment;
    load(values_, value_, s.value, s.value_stride);
  }
  KVS_DEVICE void load(T* tile, const T*& from, const void* data, const int64_t (&stride)[3]) {
    const int key = tile_ * kKeys, low = block_.from, high = block_.to;
    if (plain_) {
      copy_tile<T, D, kKeys>(tile, from, stride[2], low - key, high - key, key >= low && key + kKeys <= high, thread_);
    } else {
      const DeviceSegment& s = block_.segment;
      gather_tile<T, D, kKeys>(tile, s, head_start<T>(s, data, stride, block_.batch, block_.kv_head), stride, block_.batch, key, low,
                               high, thread_);
    }
  }

  // ---- the two products --------------------------------------------------------------------------------------------

  KVS_DEVICE void form_scores() {
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int n = 0; n < kKeys / 8; ++n) { KVS_UNROLL for (int e = 0; e < 4; ++e) score_[m][n][e] = 0; }
    }
    const T* key_row = keys_ + (lane_ % 8 + lane_ / 16 * 8) * kPitch<D> + lane_ / 8 % 2 * 8;
    const T* query_row = query_ + (warp_row_ + lane_ % 16) * kPitch<D> + lane_ / 16 * 8;
    KVS_UNROLL for (int k = 0; k < D / 16; ++k) {
      uint32_t reloaded[kRowTiles][4];
      if constexpr (!Shape::kQueryInRegisters) {
        KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
          gpu::load_matrix_x4(reloaded[m], query_row + 16 * m * kPitch<D> + k * 16);
        }
      }
      KVS_UNROLL for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        gpu::load_matrix_x4(b, key_row + n * 16 * kPitch<D> + k * 16);
        KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
          const uint32_t(&a)[4] = Shape::kQueryInRegisters ? turned_[m][Shape::kQueryInRegisters ? k : 0] : reloaded[m];
          gpu::mma_m16n8k16<T>(score_[m][2 * n], a, b[0], b[1]);
          gpu::mma_m16n8k16<T>(score_[m][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // Scores to weights, and the sums so far to the new maximum.
  KVS_DEVICE void weigh_scores() {
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int r = 0; r < 2; ++r) {
        const float shrink = scores_to_weights(score_[m], r, p_.score_factor, row_[m][r]);
        KVS_UNROLL for (int n = 0; n < D / 8; ++n) sum_[m][n][2 * r] *= shrink, sum_[m][n][2 * r + 1] *= shrink;
      }
    }
  }

  KVS_DEVICE void add_values() {
    const T* value_row = values_ + lane_ % 16 * kPitch<D> + lane_ / 16 * 8;
    KVS_UNROLL for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[kRowTiles][4];
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
        KVS_UNROLL for (int i = 0; i < 4; ++i) {
          const float(&w)[4] = score_[m][2 * k + i / 2];
          a[m][i] = gpu::pack2<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
        }
      }
      KVS_UNROLL for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        gpu::load_matrix_x4_transposed(b, value_row + k * 16 * kPitch<D> + n * 16);
        KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
          gpu::mma_m16n8k16<T>(sum_[m][2 * n], a[m], b[0], b[1]);
          gpu::mma_m16n8k16<T>(sum_[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // ---- what is not seen --------------------------------------------------------------------------------------------

  KVS_DEVICE int row_token(int m, int r) { return block_.token[warp_row_ + 16 * m + 8 * r + lane_ / 4]; }

  KVS_DEVICE void hide() {
    const int key = tile_ * kKeys;
    const Visible& seen = block_.seen;
    const int first = block_.token[warp_row_], last = block_.token[warp_row_ + Shape::kWarpRows - 1];
    const int low = seen.low_of(last), high = seen.high_of(first);  // what all rows of the warp see
    if (key < low || key + kKeys > high) {
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
        KVS_UNROLL for (int r = 0; r < 2; ++r) {
          const int token = row_token(m, r);
          hide_scores(score_[m], r, key + lane_ % 4 * 2, seen.low_of(token), seen.high_of(token));
        }
      }
    }
    // Keys that only some rows of the block see.
    uneven_ = (key < seen.low_of(block_.token[Shape::kRows - 1]) && key + kKeys > block_.from) ||
              (key + kKeys > seen.high_of(block_.token[0]) && key < block_.to);
    uneven_ = uneven_ && block_.token[0] != block_.token[Shape::kRows - 1] && (block_.segment.causal || p_.window > 0);
    if (plain_ || pages_exist(block_.segment, block_.batch, max_of(key, block_.from), min_of(key + kKeys, block_.to), lane_)) {
      return;
    }
    KVS_UNROLL for (int n = 0; n < kKeys / 8; ++n) {
      KVS_UNROLL for (int e = 0; e < 2; ++e) {
        const int token = key + n * 8 + lane_ % 4 * 2 + e;
        if (token >= block_.from && token < block_.to && find_page(block_.segment, block_.batch, token).page < 0) {
          KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) score_[m][n][e] = score_[m][n][2 + e] = kMinusInfinity;
        }
      }
    }
  }

  // See attention_nonfinite.cuh. All warps read the whole tile, so they agree.
  KVS_DEVICE void isolate_nonfinite() {
    if (!any_nonfinite<T, D, kKeys>(values_, lane_)) return;
    weigh_scores();
    weighed_ = true;
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int r = 0; r < 2; ++r) {
        const int token = row_token(m, r);
        add_nonfinite<T, D, kKeys>(sum_[m], r, values_, tile_ * kKeys, block_.seen.low_of(token),
                                   block_.seen.high_of(token), lane_);
      }
    }
    gpu::sync_block();
    clear_nonfinite<T, D, kKeys, Shape::kThreads>(values_, thread_);
    gpu::sync_block();
  }

  // ---- results -----------------------------------------------------------------------------------------------------

  // Through shared memory, 16 rows a warp at a time, so that each thread writes eight neighbours.
  KVS_DEVICE void write() {
    gpu::sync_block();
    float* stage = reinterpret_cast<float*>(query_) + thread_ / 32 * 16 * kPitch<D>;
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      const int row0 = block_.row0 + warp_row_ + 16 * m;
      KVS_UNROLL for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane_ / 4;
        const RowPlace place = place_of(p_, block_.kv_head, min_of(row0 + row, p_.rows - 1));
        const RowResult result =
            row_result(p_, row_[m][r].maximum * p_.score_factor, add_lanes(row_[m][r].sum), place.head);
        if (lane_ % 4 == 0 && row0 + row < p_.rows) write_lse(p_, block_.split, block_.batch, place, result.lse);
        KVS_UNROLL for (int n = 0; n < D / 8; ++n) {
          *reinterpret_cast<float2*>(stage + row * kPitch<D> + 8 * n + lane_ % 4 * 2) =
              make_float2(sum_[m][n][2 * r] * result.factor, sum_[m][n][2 * r + 1] * result.factor);
        }
      }
      gpu::sync_warp();
#pragma unroll 1
      for (int index = lane_; index < 16 * (D / 8); index += 32) {
        const int row = index / (D / 8), column = index % (D / 8) * 8;
        if (row0 + row >= p_.rows) continue;
        float v[8];
        KVS_UNROLL for (int i = 0; i < 8; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(stage + row * kPitch<D> + column + i);
          v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
        write_values<T, D>(p_, block_.split, block_.batch, place_of(p_, block_.kv_head, row0 + row), column, v);
      }
      gpu::sync_warp();
    }
  }

  const AttentionParams& p_;
  T *query_, *keys_, *values_;
  Block& block_;
  int thread_, lane_, warp_row_;  // warp_row_: the warp's first row within the block's
  int segment_, tile_ = 0, tile_end_ = 0;
  bool fresh_ = false, plain_ = false, uneven_ = false, weighed_ = false;
  const T *key_ = nullptr, *value_ = nullptr;  // where this thread's part of the next tile lies, where plain_
  uint32_t turned_[Shape::kQueryInRegisters ? kRowTiles : 1][Shape::kQueryInRegisters ? D / 16 : 1][4];
  float score_[kRowTiles][kKeys / 8][4];
  float sum_[kRowTiles][D / 8][4];
  RowState row_[kRowTiles][2];
};

// Grid: one block for each tile of rows (the fastest, so that they meet in the L2), batch row, KV head and split.
template <class T, int D, int kRowTiles>
KVS_KERNEL(kTileThreads, (PrefillShape<D, kRowTiles>::kBlocksPerSm))
void segment_prefill_kernel(KVS_PARAM AttentionParams p) {
  KVS_SHARED(shared);
  Prefill<T, D, kRowTiles>(p, shared).run();
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_SEGMENT_PREFILL_CUH_
