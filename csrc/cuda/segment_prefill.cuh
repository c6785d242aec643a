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
#include "cuda/attention_query.cuh"
#include "cuda/attention_state.cuh"
#include "cuda/attention_tile.cuh"

namespace kvspeed::cuda {

// kRowTiles: m16 tiles in each warp. 2 halves the shared memory read for each product, but needs 255 registers.
template <int D, int kRowTiles>
struct PrefillShape {
  static constexpr int kThreads = 128;
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
  Visible seen;  // of that segment, by this batch row
  int from, to;  // keys of it that any row of the block sees
  int index;     // of that segment
  int tile_end;  // behind the last tile of it that the block takes
  int plain;     // its rows can be copied by copy_tile
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
        thread_(gpu::thread_index()) {
    const int tiles = (p.rows + Shape::kRows - 1) / Shape::kRows, tile = gpu::block_index() % tiles;
    const int row0 = (tiles - 1 - tile) * Shape::kRows;  // the longest of a causal prompt first
    const int rest = gpu::block_index() / tiles, split = rest / p.batch / p.heads_kv;
    if (thread_ == 0) {
      block_.row0 = row0;
      block_.batch = rest % p.batch;
      block_.kv_head = rest / p.batch % p.heads_kv;
      block_.split = split;
      block_.index = (p.splits == 1 ? 0 : find_segment(p, split * p.split_units)) - 1;
    }
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int n = 0; n < D / 8; ++n) { KVS_UNROLL for (int e = 0; e < 4; ++e) sum_[m][n][e] = 0; }
      row_[m][0] = row_[m][1] = kEmptyRow;
    }
    for (int r = thread_; r < Shape::kRows; r += Shape::kThreads) {
      block_.token[r] = min_of(row0 + r, p.rows - 1) / p.group;
    }
    gpu::sync_block();
  }

  KVS_DEVICE void run() {
#pragma unroll 1
    while (next_segment()) {
      load_keys();
      gpu::copy_commit();
      start_segment();
#pragma unroll 1
      for (bool more = true; more;) {
        gpu::copy_wait<0>();
        gpu::sync_block();  // the keys are there, and nobody reads the last values any more
        load_values();
        gpu::copy_commit();
        form_scores();
        KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) cap_scores(score_[m], p_.softcap_factor);
        hide();
        gpu::copy_wait<0>();
        gpu::sync_block();  // the values are there, and nobody reads the keys any more
        more = ++tile_ < block_.tile_end;
        if (more) load_keys();
        gpu::copy_commit();
        weigh_scores();
        if (is_uneven((tile_ - 1) * kKeys)) isolate_nonfinite((tile_ - 1) * kKeys);
        add_values();
      }
    }
    write();
  }

 private:
  // The thread's index, which the loops around carry along in one register; see compute_here. The mask changes nothing,
  // but from it the compiler knows that divisions are shifts.
  KVS_DEVICE int thread_here() const { return gpu::compute_here(thread_) & (Shape::kThreads - 1); }

  // ---- the walk ----------------------------------------------------------------------------------------------------

  // To the first tile of the next segment of which any row sees a key in the split's range. Behind its last barrier all
  // warps are done with the segment before.
  KVS_DEVICE bool next_segment() {
    const int begin = p_.splits == 1 ? 0 : block_.split * p_.split_units;
    const int end = p_.splits == 1 ? kMaxTokens : begin + p_.split_units;
    const int thread = thread_here();
    int index = block_.index;
#pragma unroll 1
    while (++index < p_.num_segments) {
      if (p_.splits > 1 && unit_begin(p_, index) >= end) return false;
      gpu::sync_block();
      load_segment(&block_.segment, p_, index, thread);
      gpu::sync_block();
      const DeviceSegment& s = block_.segment;
      const Visible seen = visible_keys(p_, s, block_.batch);
      const int before = p_.splits == 1 ? 0 : s.unit_begin - first_planned(p_, s) / kKeys;  // units, at its tile 0
      const int from = seen.low_of(block_.token[0]), to = seen.high_of(block_.token[Shape::kRows - 1]);
      tile_ = max_of(from / kKeys, begin - before);
      const int tile_end = min_of((to + kKeys - 1) / kKeys, end - before);
      if (from >= to || tile_ >= tile_end) continue;
      const bool plain = s.aligned && s.page_table == nullptr;
      if (thread == 0) {
        block_.seen = seen;
        block_.from = from, block_.to = to;
        block_.index = index;
        block_.tile_end = tile_end;
        block_.plain = plain;
      }
      gpu::sync_block();
      return true;
    }
    return false;
  }

  // The query rows of this warp, turned for the segment.
  KVS_DEVICE void start_segment() {
    const DeviceSegment& s = block_.segment;
    const int thread = thread_here(), lane = thread % 32, warp = thread / 32;
    const int row0 = block_.row0 + warp * Shape::kWarpRows;
    if constexpr (Shape::kQueryInRegisters) {
      // A place for each warp in the values' buffer: the last ones are done with (see next_segment), and the next ones
      // come behind the barrier that also awaits the first keys.
      T* stage = values_ + warp * 16 * kPitch<D>;
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
        load_query_rows<T, D, 16>(stage, p_, s, block_.batch, block_.kv_head, row0 + 16 * m, lane);
        gpu::sync_warp();
        KVS_UNROLL for (int k = 0; k < D / 16; ++k) {
          gpu::load_matrix_x4(turned_[m][k], stage + lane_place(lane) + k * 16);
        }
        gpu::sync_warp();
      }
    } else {
      load_query_rows<T, D, Shape::kWarpRows>(query_ + warp * Shape::kWarpRows * kPitch<D>, p_, s, block_.batch,
                                              block_.kv_head, row0, lane);
      gpu::sync_warp();
    }
  }

  KVS_DEVICE void load_keys() {
    const DeviceSegment& s = block_.segment;
    load(keys_, s.key, s.key_stride);
  }
  KVS_DEVICE void load_values() {
    const DeviceSegment& s = block_.segment;
    load(values_, s.value, s.value_stride);
  }
  KVS_DEVICE void load(T* tile, const void* data, const int64_t (&stride)[3]) {
    const DeviceSegment& s = block_.segment;
    const T* start = head_start<T>(s, data, stride, block_.batch, block_.kv_head);
    const int key = tile_ * kKeys, low = block_.from, high = block_.to, thread = thread_here();
    if (block_.plain) {
      const T* from = start + (key + tile_row(thread)) * stride[2] + tile_column(thread);
      copy_tile<T, D, kKeys, Shape::kThreads>(tile, from, stride[2], low - key, high - key, thread);
    } else {
      gather_tile<T, D, kKeys, Shape::kThreads>(tile, s, start, stride, block_.batch, key, low, high, thread);
    }
  }

  // ---- the two products --------------------------------------------------------------------------------------------

  // Where this lane's row of a 16 x 16 part of a tile begins, for matrix loads. Keys are the columns of their product:
  // theirs come in another order, so that the two registers that one product takes are neighbours.
  KVS_DEVICE static int lane_place(int thread) { return thread % 16 * kPitch<D> + thread % 32 / 16 * 8; }
  KVS_DEVICE static int key_place(int thread) {
    return (thread % 8 + thread % 32 / 16 * 8) * kPitch<D> + thread % 16 / 8 * 8;
  }

  KVS_DEVICE void form_scores() {
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int n = 0; n < kKeys / 8; ++n) { KVS_UNROLL for (int e = 0; e < 4; ++e) score_[m][n][e] = 0; }
    }
    const int thread = thread_here();
    const T* key_row = keys_ + key_place(thread);
    const T* query_row = query_ + thread / 32 * Shape::kWarpRows * kPitch<D> + lane_place(thread);
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
          const uint32_t (&a)[4] =
              Shape::kQueryInRegisters ? turned_[m][Shape::kQueryInRegisters ? k : 0] : reloaded[m];
          gpu::mma_m16n8k16<T>(score_[m][2 * n], a, b[0], b[1]);
          gpu::mma_m16n8k16<T>(score_[m][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // Scores to weights, packed at once so that they take half the registers, and the sums so far to the new maximum.
  // Most tiles of a long context bring no row a new one.
  KVS_DEVICE void weigh_scores() {
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      float shrink[2];
      KVS_UNROLL for (int r = 0; r < 2; ++r) {
        shrink[r] = scores_to_weights(score_[m], r, p_.score_factor, row_[m][r]);
        KVS_UNROLL for (int n = 0; n < kKeys / 8; ++n) {
          weight_[m][n][r] = gpu::pack2<T>(score_[m][n][2 * r], score_[m][n][2 * r + 1]);
        }
      }
      if (shrink[0] != 1 || shrink[1] != 1) {
        KVS_UNROLL for (int n = 0; n < D / 8; ++n) {
          KVS_UNROLL for (int e = 0; e < 4; ++e) sum_[m][n][e] *= shrink[e / 2];
        }
      }
    }
  }

  KVS_DEVICE void add_values() {
    const T* value_row = values_ + lane_place(thread_here());
    KVS_UNROLL for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[kRowTiles][4];
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
        KVS_UNROLL for (int i = 0; i < 4; ++i) a[m][i] = weight_[m][2 * k + i / 2][i % 2];
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

  KVS_DEVICE int row_token(int thread, int m, int r) {
    return block_.token[thread / 32 * Shape::kWarpRows + 16 * m + 8 * r + thread % 32 / 4];
  }

  // Hides keys from the rows that do not see them.
  KVS_DEVICE void hide() {
    const int key = tile_ * kKeys, thread = thread_here(), warp_row = thread / 32 * Shape::kWarpRows;
    const Visible& seen = block_.seen;
    const int first = block_.token[warp_row], last = block_.token[warp_row + Shape::kWarpRows - 1];
    const int low = seen.low_of(last), high = seen.high_of(first);  // what all rows of the warp see
    if (key < low || key + kKeys > high) {
      KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
        KVS_UNROLL for (int r = 0; r < 2; ++r) {
          const int token = row_token(thread, m, r);
          hide_scores(score_[m], r, key + thread % 4 * 2, seen.low_of(token), seen.high_of(token));
        }
      }
    }
    if (!block_.plain) hide_missing_pages(key);
  }

  // Whether the tile has keys that only some rows of the block see.
  KVS_DEVICE bool is_uneven(int key) {
    const Visible& seen = block_.seen;
    const int low = seen.low_of(block_.token[Shape::kRows - 1]), high = seen.high_of(block_.token[0]);
    return (low > block_.from && key < low) || (high < block_.to && key + kKeys > high);
  }

  KVS_DEVICE void hide_missing_pages(int key) {
    const DeviceSegment& s = block_.segment;
    const int lane = thread_here() % 32;
    const int from = max_of(key, block_.from), to = min_of(key + kKeys, block_.to);
    if (pages_exist(s, block_.batch, from, to, lane)) return;
    KVS_UNROLL for (int n = 0; n < kKeys / 8; ++n) {
      KVS_UNROLL for (int e = 0; e < 2; ++e) {
        const int token = key + n * 8 + lane % 4 * 2 + e;
        if (token >= from && token < to && find_page(s, block_.batch, token).page < 0) {
          KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) score_[m][n][e] = score_[m][n][2 + e] = kMinusInfinity;
        }
      }
    }
  }

  // See attention_nonfinite.cuh. All warps read the whole tile, so they agree.
  KVS_DEVICE void isolate_nonfinite(int key) {
    const int thread = thread_here(), lane = thread % 32;
    if (!any_nonfinite<T, D, kKeys>(values_, lane)) return;
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      KVS_UNROLL for (int r = 0; r < 2; ++r) {
        const int token = row_token(thread, m, r);
        add_nonfinite<T, D, kKeys>(sum_[m], r, values_, key, block_.seen.low_of(token), block_.seen.high_of(token),
                                   lane);
      }
    }
    gpu::sync_block();
    clear_nonfinite<T, D, kKeys, Shape::kThreads>(values_, thread);
    gpu::sync_block();
  }

  // ---- results -----------------------------------------------------------------------------------------------------

  // Through shared memory, 16 rows a warp at a time, so that each thread writes eight neighbours.
  KVS_DEVICE void write() {
    gpu::sync_block();
    const int thread = thread_here(), lane = thread % 32;
    float* stage = reinterpret_cast<float*>(query_) + thread / 32 * 16 * kPitch<D>;
    KVS_UNROLL for (int m = 0; m < kRowTiles; ++m) {
      const int row0 = block_.row0 + thread / 32 * Shape::kWarpRows + 16 * m;
      KVS_UNROLL for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        const RowPlace place = place_of(p_, block_.kv_head, min_of(row0 + row, p_.rows - 1));
        const RowResult result = row_result(p_, row_[m][r].maximum, add_lanes(row_[m][r].sum), place.head);
        if (lane % 4 == 0 && row0 + row < p_.rows) write_lse(p_, block_.split, block_.batch, place, result.lse);
        KVS_UNROLL for (int n = 0; n < D / 8; ++n) {
          *reinterpret_cast<float2*>(stage + row * kPitch<D> + 8 * n + lane % 4 * 2) =
              make_float2(sum_[m][n][2 * r] * result.factor, sum_[m][n][2 * r + 1] * result.factor);
        }
      }
      gpu::sync_warp();
#pragma unroll 1
      for (int index = lane; index < 16 * (D / 8); index += 32) {
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
  int thread_;
  int tile_ = 0;
  uint32_t turned_[Shape::kQueryInRegisters ? kRowTiles : 1][Shape::kQueryInRegisters ? D / 16 : 1][4];
  float score_[kRowTiles][kKeys / 8][4];
  uint32_t weight_[kRowTiles][kKeys / 8][2];  // of both row halves, two keys each
  float sum_[kRowTiles][D / 8][4];
  RowState row_[kRowTiles][2];
};

// Grid: one block for each tile of rows (the fastest, so that they meet in the L2), batch row, KV head and split.
template <class T, int D, int kRowTiles>
KVS_KERNEL((PrefillShape<D, kRowTiles>::kThreads), (PrefillShape<D, kRowTiles>::kBlocksPerSm))
void segment_prefill_kernel(KVS_PARAM AttentionParams p) {
  KVS_SHARED(shared);
  Prefill<T, D, kRowTiles>(p, shared).run();
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_SEGMENT_PREFILL_CUH_
