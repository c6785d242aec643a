// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// rope_concat: copy many packets, all layers, keys and values, into one cache; keys turn by their packet's offset. One
// launch does it all, and each byte is read once and written once: what counts is how many bytes are on their way.
//
// Blocks take units of rows (rope_concat_plan.h) in turn. Within a unit a thread keeps to one item of a row, a chunk
// and its partner, so it loads its cosines and sines once, and walks down the rows with several of them in flight.
#ifndef KVSPEED_CUDA_ROPE_CONCAT_CUH_
#define KVSPEED_CUDA_ROPE_CONCAT_CUH_

#include <type_traits>

#include "cuda/gpu.h"
#include "cuda/launch_params.h"
#include "cuda/rope_concat_plan.h"

namespace kvspeed::cuda {

constexpr int kConcatBlocks = 2;  // resident on an SM: up to 128 registers a thread
constexpr int kConcatRows = 4;    // that a thread has in flight

// Memory answers after about 700 ns; at the 4.8 TB/s of an H200's 132 SMs that makes 25 KiB, read and written, that
// each SM must have on its way (less on A100 and H100). Of plain packets' bytes half are reads, of 8-bit packets' a
// third or a fifth, and only reads are waited for.
template <class T, bool kPlain>
constexpr int kConcatReads =
    kConcatBlocks * kConcatThreads * kConcatRows * 2 * static_cast<int>(kPlain ? 16 : 16 / sizeof(T));
static_assert(kConcatReads<float, true> >= 25 << 10 && kConcatReads<gpu::bf16, true> >= 25 << 10);
static_assert(kConcatReads<gpu::bf16, false> >= (25 << 10) / 3 && kConcatReads<float, false> >= (25 << 10) / 5);

// ---- the table -----------------------------------------------------------------------------------------------------

// The parameters of a launch, kBytes of them with the table.
template <int kBytes>
struct ConcatParams {
  static constexpr int kTableWords = (kBytes - static_cast<int>(sizeof(ConcatHeader))) / 16 * 4;
  ConcatHeader header;
  alignas(16) uint32_t table[kTableWords];
};
static_assert(sizeof(ConcatParams<kSmallParams>) <= kSmallParams && sizeof(ConcatParams<kLargeParams>) <= kLargeParams);

KVS_DEVICE int64_t join(uint32_t low, uint32_t high) { return static_cast<int64_t>(uint64_t{high} << 32 | low); }
KVS_DEVICE uint4 four_words(const uint32_t* p) { return make_uint4(p[0], p[1], p[2], p[3]); }

KVS_DEVICE uint32_t divide(uint32_t n, const FastDivide& d) {
  return static_cast<uint32_t>(uint64_t{n} * d.multiplier >> d.shift);
}

// The packet that has the unit: the last one with first_unit <= unit, not before `packet`.
template <class Params>
KVS_DEVICE int find_packet(const Params& p, uint32_t unit, int packet) {
  const auto begins = [&](int i) { return p.table[i * p.header.entry_words]; };  // PacketEntry::first_unit
  int low = packet, high = p.header.packets;
  if (low + 1 < high && begins(low + 1) > unit) return low;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (begins(middle) <= unit) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// ---- what a unit is ------------------------------------------------------------------------------------------------

struct ConcatUnit {
  const char* from;   // of this layer, head 0, token 0
  char* to;           // of this layer, head 0 and token 0, or slot 0 of page 0
  const char* scale;  // of this layer, head 0
  int64_t scale_head;
  uint32_t first_row, end_row;
  uint32_t inner_rows;  // rows are counted in two directions, heads and tokens; the length of the inner one
  FastDivide inner;     // by that length
  uint32_t out_page, out_slot;
  int tensor;    // 0 keys, 1 values
  int entry;     // the word where the packet's entry begins
  int rotation;  // the word where its row of cosines and sines begins; -1: nothing turns
  bool heads_inside;
  bool vector;
};

template <bool kPlain, class Params>
KVS_DEVICE ConcatUnit read_unit(const Params& p, int packet, uint32_t unit) {
  const ConcatHeader& h = p.header;
  ConcatUnit u = {};
  u.entry = packet * h.entry_words;
  const uint32_t* entry = p.table + u.entry;
  const uint4 a = four_words(entry), b = four_words(entry + 4);  // PacketEntry, four words at a time
  const uint32_t units = a.y;
  const uint32_t index = unit - a.x, tensor = index / units, part = index - tensor * units;
  const uint32_t layer = tensor >> 1, is_value = tensor & 1;
  const uint4 c = four_words(entry + 8 + 8 * is_value);
  const int64_t* out_stride = h.out_stride[is_value];

  u.tensor = static_cast<int>(is_value);
  u.from = reinterpret_cast<const char*>(join(c.x, c.y)) + layer * join(c.z, c.w);
  u.to = h.out[is_value] + layer * out_stride[0];
  u.out_page = b.z, u.out_slot = b.w;
  if (h.page_table == nullptr) {
    u.to += join(b.z, b.w) * out_stride[3];
    u.out_page = u.out_slot = 0;
  }
  u.heads_inside = h.heads_inside[is_value] != 0;
  u.inner_rows = u.heads_inside ? h.heads : a.z;
  u.inner.multiplier = u.heads_inside ? h.head_divide.multiplier : b.x;
  u.inner.shift = u.heads_inside ? h.head_divide.shift : b.y & 0xff;
  u.vector = (b.y >> (8 + 8 * is_value) & 0xff) != 0;
  const uint32_t rows = h.heads * a.z;
  u.first_row = part * h.unit_rows;
  u.end_row = rows - u.first_row < h.unit_rows ? rows : u.first_row + h.unit_rows;

  u.rotation = is_value ? -1 : static_cast<int>(a.w);
  if (u.rotation >= 0) {
    uint32_t row = h.layer_rows == LayerRows::kOwn ? layer : 0;
    if (h.layer_rows == LayerRows::kMapped) {
      row = p.table[h.layer_map + static_cast<int>(layer / 4)] >> (layer % 4 * 8) & 0xff;
    }
    const bool turns = h.layer_rows != LayerRows::kMapped || row != kNoRow;
    u.rotation = turns ? u.rotation + static_cast<int>(row) * h.row_words : -1;
  }
  if constexpr (!kPlain) {  // ScaleEntry
    const uint4 s = four_words(entry + 24), t = four_words(entry + 28 + 4 * is_value);
    u.scale = reinterpret_cast<const char*>(is_value ? join(s.z, s.w) : join(s.x, s.y)) + layer * join(t.x, t.y);
    u.scale_head = join(t.z, t.w);
  }
  return u;
}

// ---- chunks --------------------------------------------------------------------------------------------------------

// kBytes of a row as they lie in memory; 1 or 2 of them in the low end of one word.
template <int kBytes>
struct Chunk {
  uint32_t word[kBytes < 4 ? 1 : kBytes / 4];
};

template <int kBytes>
KVS_DEVICE Chunk<kBytes> load_chunk(const char* p, uint64_t policy) {
  if constexpr (kBytes == 16) {
    const uint4 v = gpu::load16_stream(p, policy);
    return {{v.x, v.y, v.z, v.w}};
  } else if constexpr (kBytes == 8) {
    const uint2 v = gpu::load8_stream(p, policy);
    return {{v.x, v.y}};
  } else if constexpr (kBytes == 4) {
    return {{gpu::load_u32(p)}};
  } else if constexpr (kBytes == 2) {
    return {{gpu::load_u16(p)}};
  } else {
    return {{gpu::load_u8(p)}};
  }
}

template <int kBytes>
KVS_DEVICE void store_chunk(char* p, const Chunk<kBytes>& c) {
  if constexpr (kBytes == 16) {
    gpu::store16(p, make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]));
  } else if constexpr (kBytes == 4) {
    gpu::store_u32(p, c.word[0]);
  } else {
    gpu::store_u16(p, static_cast<uint16_t>(c.word[0]));
  }
}

// Exact: every 8-bit number is a float32 number.
KVS_DEVICE float int8_value(uint32_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }
KVS_DEVICE float float8_value(uint32_t byte) {  // e4m3fn: its exponent and fraction in float32's places, off by 2^120
  const uint32_t magnitude = byte & 0x7f;
  const float value = gpu::mul_rn(gpu::bits_float(magnitude << 20), 0x1p120f);
  const uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : gpu::float_bits(value);
  return gpu::bits_float(bits | (byte & 0x80) << 24);
}

template <int kNumbers, int kBytes>
KVS_DEVICE void widen_stored(const Chunk<kBytes>& c, bool float8, float scale, float (&x)[kNumbers]) {
  KVS_UNROLL for (int i = 0; i < kNumbers; ++i) {
    const uint32_t byte = c.word[i / 4] >> (i % 4 * 8) & 0xff;
    x[i] = gpu::mul_rn(float8 ? float8_value(byte) : int8_value(byte), scale);
  }
}

template <class T, int kNumbers, int kBytes>
KVS_DEVICE void widen(const Chunk<kBytes>& c, float (&x)[kNumbers]) {
  if constexpr (sizeof(T) == 4) {
    KVS_UNROLL for (int i = 0; i < kNumbers; ++i) x[i] = gpu::bits_float(c.word[i]);
  } else if constexpr (kNumbers == 1) {
    x[0] = gpu::unpack2<T>(c.word[0]).x;
  } else {
    KVS_UNROLL for (int i = 0; i < kNumbers; i += 2) {
      const float2 pair = gpu::unpack2<T>(c.word[i / 2]);
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  }
}

template <class T, int kNumbers>
KVS_DEVICE Chunk<kNumbers * sizeof(T)> narrow(const float (&x)[kNumbers]) {
  Chunk<kNumbers * sizeof(T)> c;
  if constexpr (sizeof(T) == 4) {
    KVS_UNROLL for (int i = 0; i < kNumbers; ++i) c.word[i] = gpu::float_bits(x[i]);
  } else if constexpr (kNumbers == 1) {
    c.word[0] = gpu::pack2<T>(x[0], 0.0f);
  } else {
    KVS_UNROLL for (int i = 0; i < kNumbers; i += 2) c.word[i / 2] = gpu::pack2<T>(x[i], x[i + 1]);
  }
  return c;
}

// ---- turning -------------------------------------------------------------------------------------------------------

// The angles of a thread's item: of its chunks' pairs, half-split (a[i], b[i]), or side by side (a[0], a[1]), ...,
// (b[0], b[1]), ...
template <int kNumbers>
struct Angles {
  float cos[kNumbers], sin[kNumbers];
  bool turns_a, turns_b;  // any of the chunk's numbers does; else it keeps its bits
};

// As the CPU kernels do with fused multiply-add: the same bits.
KVS_DEVICE void turn(float& x, float& y, float cos, float sin) {
  const float u = gpu::fma_rn(-y, sin, gpu::mul_rn(x, cos));
  y = gpu::fma_rn(x, sin, gpu::mul_rn(y, cos));
  x = u;
}

template <int kNumbers>
KVS_DEVICE void turn_across(float (&a)[kNumbers], float (&b)[kNumbers], const Angles<kNumbers>& angles) {
  KVS_UNROLL for (int i = 0; i < kNumbers; ++i) turn(a[i], b[i], angles.cos[i], angles.sin[i]);
}

template <int kFirst, int kNumbers>
KVS_DEVICE void turn_within(float (&x)[kNumbers], const Angles<kNumbers>& angles) {
  KVS_UNROLL for (int i = 0; i < kNumbers / 2; ++i) {
    turn(x[2 * i], x[2 * i + 1], angles.cos[kFirst + i], angles.sin[kFirst + i]);
  }
}

template <class T, int kNumbers, int kBytes>
KVS_DEVICE void turn_chunks(Chunk<kBytes>& a, Chunk<kBytes>& b, const Angles<kNumbers>& angles, bool within) {
  float x[kNumbers], y[kNumbers];
  if (!within) {
    widen<T>(a, x), widen<T>(b, y);
    turn_across(x, y, angles);
    a = narrow<T>(x), b = narrow<T>(y);
    return;
  }
  // Each for itself: beyond the rotary part a chunk keeps its bits, whatever the other one does.
  if (angles.turns_a) {
    widen<T>(a, x);
    turn_within<0>(x, angles);
    a = narrow<T>(x);
  }
  if (angles.turns_b) {
    widen<T>(b, y);
    turn_within<kNumbers / 2>(y, angles);
    b = narrow<T>(y);
  }
}

// ---- the unit's rows -----------------------------------------------------------------------------------------------

// kNumbers: of a chunk; 16 bytes of the output, or 1 where the layout does not allow that.
template <class T, bool kPlain, int kNumbers, class Params>
KVS_DEVICE void move_unit(const Params& p, const ConcatUnit& u, uint64_t policy) {
  constexpr int kRows = kConcatRows;
  constexpr int kIn = kNumbers * static_cast<int>(kPlain ? sizeof(T) : 1);
  constexpr int kOut = kNumbers * static_cast<int>(sizeof(T));
  const ConcatHeader& h = p.header;
  const int chunks = h.head_dim / kNumbers, items = (chunks + 1) / 2;
  const int width = items < kConcatThreads ? items : kConcatThreads;  // threads side by side in a row
  const int lane = gpu::thread_index() / width;
  const uint32_t step = static_cast<uint32_t>(kConcatThreads / width);
  const bool paged = h.page_table != nullptr;
  const uint32_t pages = paged ? static_cast<uint32_t>(h.pages) : 1;
  const bool rotates = u.rotation >= 0;
  const bool within = kNumbers > 1 && h.interleaved && rotates;  // pairs lie within chunks
  const int pairs = rotates && !within ? h.half / kNumbers : 0;  // of chunks that turn into each other
  const bool neighbours = kNumbers == 1 && h.interleaved;        // such pairs are side by side

  if (static_cast<uint32_t>(lane) >= step) return;  // threads left over beside the last whole row
  int item = gpu::thread_index() - lane * width;
  do {
    // What does not turn across chunks is taken two chunks at a time all the same.
    const int rest = chunks - 2 * pairs, other = item - pairs;
    const int a = item >= pairs ? 2 * pairs + other : neighbours ? 2 * item : item;
    const int b = item >= pairs ? a + (rest + 1) / 2 : neighbours ? a + 1 : a + pairs;
    const bool has_b = b < chunks;
    const char* from_a = u.from + int64_t{a} * kIn;
    char* to_a = u.to + int64_t{a} * kOut;

    Angles<kNumbers> angles;
    angles.turns_a = angles.turns_b = false;
    KVS_UNROLL for (int i = 0; i < kNumbers; ++i) {
      constexpr int kHalf = kNumbers > 1 ? kNumbers / 2 : 1;
      const int pair = within ? (i < kHalf ? a : b) * kHalf + i % kHalf : item * kNumbers + i;
      const bool known = rotates && pair < h.row_pairs && (within || item < pairs);
      angles.cos[i] = known ? gpu::bits_float(p.table[u.rotation + 2 * pair]) : 1.0f;
      angles.sin[i] = known ? gpu::bits_float(p.table[u.rotation + 2 * pair + 1]) : 0.0f;
      const bool turning = angles.cos[i] != 1.0f || angles.sin[i] != 0.0f;
      angles.turns_a = angles.turns_a || (turning && (!within || i < kHalf));
      angles.turns_b = angles.turns_b || (turning && (!within || i >= kHalf));
    }
    const bool turns = angles.turns_a || angles.turns_b;

    for (uint32_t base = u.first_row + static_cast<uint32_t>(lane); base < u.end_row; base += kRows * step) {
      // Strides are read from the parameters each time round: registers are for what comes from memory.
      const int tensor = gpu::compute_here(u.tensor);
      const int64_t to_page = h.out_stride[tensor][1], to_head = h.out_stride[tensor][2];
      const int64_t to_token = h.out_stride[tensor][3];
      const uint4 strides = four_words(p.table + u.entry + 12 + 8 * tensor);  // SourceEntry::stride
      const int64_t from_head = join(strides.x, strides.y), from_token = join(strides.z, strides.w);
      // All loads first, and nothing that waits for one of them.
      const uint32_t first = static_cast<uint32_t>(gpu::compute_here(static_cast<int>(base)));
      Chunk<kIn> in_a[kRows], in_b[kRows];
      char* to[kRows];
      int page[kRows];
      float scale[kRows];
      KVS_UNROLL for (int r = 0; r < kRows; ++r) {
        const uint32_t row = first + static_cast<uint32_t>(r) * step;
        const bool exists = row < u.end_row;
        const uint32_t outer = divide(row, u.inner), inner = row - outer * u.inner_rows;
        const uint32_t head = u.heads_inside ? inner : outer, token = u.heads_inside ? outer : inner;
        const char* from = from_a + head * from_head + token * from_token;
        const uint32_t slot = u.out_slot + token, skip = paged ? divide(slot, h.page_divide) : 0;
        to[r] = to_a + head * to_head + int64_t{slot - skip * h.page_size} * to_token;
        in_a[r] = in_b[r] = {};
        scale[r] = 0.0f;
        page[r] = exists ? 0 : -1;
        if (exists) in_a[r] = load_chunk<kIn>(from, policy);
        if (exists && has_b) in_b[r] = load_chunk<kIn>(from + (b - a) * kIn, policy);
        if (exists && paged) page[r] = gpu::load_int(h.page_table + u.out_page + skip);
        if constexpr (!kPlain) {
          if (exists) scale[r] = gpu::load_float(reinterpret_cast<const float*>(u.scale + head * u.scale_head));
        }
      }
      KVS_UNROLL for (int r = 0; r < kRows; ++r) {
        if (static_cast<uint32_t>(page[r]) >= pages) continue;  // also rows beyond the last one
        Chunk<kOut> out_a, out_b;
        if constexpr (kPlain) {
          out_a = in_a[r], out_b = in_b[r];
          if (turns) turn_chunks<T>(out_a, out_b, angles, within);
        } else {
          float x[kNumbers], y[kNumbers];
          widen_stored(in_a[r], h.float8 != 0, scale[r], x);
          widen_stored(in_b[r], h.float8 != 0, scale[r], y);
          if (within) {
            if (angles.turns_a) turn_within<0>(x, angles);
            if (angles.turns_b) turn_within<kNumbers / 2>(y, angles);
          } else if (turns) {
            turn_across(x, y, angles);
          }
          out_a = narrow<T>(x), out_b = narrow<T>(y);
        }
        char* target = to[r] + page[r] * to_page;
        store_chunk<kOut>(target, out_a);
        if (has_b) store_chunk<kOut>(target + (b - a) * kOut, out_b);
      }
    }
    item += kConcatThreads;
  } while (kNumbers == 1 && item < items);  // in vectors a row has no more items than a block has threads
}

template <class T, bool kPlain, int kBytes>
KVS_KERNEL(kConcatThreads, kConcatBlocks)
void rope_concat_kernel(KVS_PARAM ConcatParams<kBytes> p) {
  const uint64_t policy = gpu::stream_policy();
  int packet = 0;
  for (uint32_t unit = static_cast<uint32_t>(gpu::block_index()); unit < p.header.units;
       unit += static_cast<uint32_t>(gpu::block_count())) {
    packet = find_packet(p, unit, packet);
    const ConcatUnit u = read_unit<kPlain>(p, packet, unit);
    if (u.vector) {
      move_unit<T, kPlain, 16 / static_cast<int>(sizeof(T))>(p, u, policy);
    } else {
      move_unit<T, kPlain, 1>(p, u, policy);
    }
  }
}

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ROPE_CONCAT_CUH_
