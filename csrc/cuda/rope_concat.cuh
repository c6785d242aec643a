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
#include "cuda/rope_concat_plan.h"
#include "cuda/upload.cuh"

namespace kvspeed::cuda {

constexpr int kConcatThreads = 256;
constexpr int kConcatBlocks = 3;  // resident on an SM: 80 registers a thread

// Rows that a thread has in flight. Memory answers after about 700 ns; at the 4.8 TB/s of an H200's 132 SMs that makes
// 25 KiB that each SM must have asked for (and less on A100 and H100).
template <class T, bool kPlain>
constexpr int kConcatRows = !kPlain && sizeof(T) == 4 ? 8 : 4;
template <class T, bool kPlain>
constexpr int kConcatBytesInFlight = kConcatBlocks * kConcatThreads * kConcatRows<T, kPlain> * 2 * 16 /
                                     static_cast<int>(kPlain ? 1 : sizeof(T));
static_assert(kConcatBytesInFlight<float, true> == 96 << 10 && kConcatBytesInFlight<gpu::bf16, true> == 96 << 10);
static_assert(kConcatBytesInFlight<float, false> == 48 << 10 && kConcatBytesInFlight<gpu::bf16, false> == 48 << 10);

// ---- the table -----------------------------------------------------------------------------------------------------

// Among the parameters, or (kBytes 0) in device memory.
template <int kBytes>
struct ConcatParams {
  static constexpr int kTableWords = (kBytes - static_cast<int>(sizeof(ConcatHeader))) / 16 * 4;
  ConcatHeader header;
  alignas(16) uint32_t table[kTableWords];

  KVS_DEVICE uint32_t word(int index) const { return table[index]; }
  KVS_DEVICE float number(int index) const { return gpu::bits_float(table[index]); }
  KVS_DEVICE uint4 vector(int index) const {
    return make_uint4(table[index], table[index + 1], table[index + 2], table[index + 3]);
  }
};
template <>
struct ConcatParams<0> {
  ConcatHeader header;

  KVS_DEVICE uint32_t word(int index) const { return gpu::load_u32(header.device_table + index); }
  KVS_DEVICE float number(int index) const { return gpu::bits_float(word(index)); }
  KVS_DEVICE uint4 vector(int index) const { return gpu::load16(header.device_table + index); }
};
static_assert(sizeof(ConcatParams<kSmallParams>) <= kSmallParams && sizeof(ConcatParams<kLargeParams>) <= kLargeParams);

KVS_DEVICE int64_t join(uint32_t low, uint32_t high) { return static_cast<int64_t>(uint64_t{high} << 32 | low); }

KVS_DEVICE uint32_t divide(uint32_t n, const FastDivide& d) {
  return static_cast<uint32_t>(uint64_t{n} * d.multiplier >> d.shift);
}

// The packet that has the unit: the last one with first_unit <= unit, not before `packet`.
template <class Params>
KVS_DEVICE int find_packet(const Params& p, uint32_t unit, int packet) {
  const auto begins = [&](int i) { return p.word(i * p.header.entry_words); };  // PacketEntry::first_unit
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
  const char* from;  // of this layer, head 0, token 0
  int64_t from_head, from_token;
  char* to;  // of this layer, head 0 and token 0, or slot 0 of page 0
  int64_t to_page, to_head, to_token;
  const char* scale;  // of this layer, head 0
  int64_t scale_head;
  uint32_t first_row, end_row;
  uint32_t tokens;
  FastDivide inner;  // by the length of the inner of the two directions in which rows are counted
  uint32_t out_page, out_slot;
  int rotation;  // the word where its row of cosines and sines begins; -1: nothing turns
  bool heads_inside;
  bool vector;
};

template <bool kPlain, class Params>
KVS_DEVICE ConcatUnit read_unit(const Params& p, int packet, uint32_t unit) {
  const ConcatHeader& h = p.header;
  const int base = packet * h.entry_words;
  const uint4 a = p.vector(base), b = p.vector(base + 4);  // PacketEntry, four words at a time
  const uint32_t units = a.y;
  const uint32_t index = unit - a.x, tensor = index / units, part = index - tensor * units;
  const uint32_t layer = tensor >> 1, is_value = tensor & 1;
  const uint4 c = p.vector(base + 8 + 8 * static_cast<int>(is_value));
  const uint4 d = p.vector(base + 12 + 8 * static_cast<int>(is_value));
  const int64_t* out_stride = h.out_stride[is_value];

  ConcatUnit u = {};
  u.tokens = a.z;
  u.from = reinterpret_cast<const char*>(join(c.x, c.y)) + layer * join(c.z, c.w);
  u.from_head = join(d.x, d.y), u.from_token = join(d.z, d.w);
  u.to = h.out[is_value] + layer * out_stride[0];
  u.to_page = out_stride[1], u.to_head = out_stride[2], u.to_token = out_stride[3];
  u.out_page = b.z, u.out_slot = b.w;
  if (h.page_table == nullptr) {
    u.to += join(b.z, b.w) * u.to_token;
    u.out_page = u.out_slot = 0;
  }
  u.heads_inside = h.heads_inside[is_value] != 0;
  u.inner.multiplier = u.heads_inside ? h.head_divide.multiplier : b.x;
  u.inner.shift = u.heads_inside ? h.head_divide.shift : b.y & 0xff;
  u.vector = (b.y >> (8 + 8 * is_value) & 0xff) != 0;
  const uint32_t rows = h.heads * u.tokens;
  u.first_row = part * h.unit_rows;
  u.end_row = rows - u.first_row < h.unit_rows ? rows : u.first_row + h.unit_rows;

  u.rotation = is_value ? -1 : static_cast<int>(a.w);
  if (u.rotation >= 0) {
    uint32_t row = h.layer_rows == LayerRows::kOwn ? layer : 0;
    if (h.layer_rows == LayerRows::kMapped) {
      row = p.word(h.layer_map + static_cast<int>(layer / 4)) >> (layer % 4 * 8) & 0xff;
    }
    const bool turns = h.layer_rows != LayerRows::kMapped || row != kNoRow;
    u.rotation = turns ? u.rotation + static_cast<int>(row) * h.row_words : -1;
  }
  if constexpr (!kPlain) {  // ScaleEntry
    const uint4 s = p.vector(base + 24), t = p.vector(base + 28 + 4 * static_cast<int>(is_value));
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

template <class T, bool kPlain, int kNumbers, int kBytes>
KVS_DEVICE void widen(const Chunk<kBytes>& c, bool float8, float scale, float (&x)[kNumbers]) {
  if constexpr (!kPlain) {
    KVS_UNROLL for (int i = 0; i < kNumbers; ++i) {
      const uint32_t byte = c.word[i / 4] >> (i % 4 * 8) & 0xff;
      x[i] = gpu::mul_rn(float8 ? float8_value(byte) : int8_value(byte), scale);
    }
  } else if constexpr (sizeof(T) == 4) {
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
// (b[0], b[1]), ... Pairs that do not turn have exactly 1 and 0.
template <int kNumbers>
struct Angles {
  float cos[kNumbers], sin[kNumbers];
  bool turns;  // any of them does
  bool mixed;  // and another does not, which must keep its bits
};

KVS_DEVICE bool is_still(float cos, float sin) { return cos == 1.0f && sin == 0.0f; }

// As the CPU kernels do with fused multiply-add: the same bits.
KVS_DEVICE void turn(float& x, float& y, float cos, float sin) {
  const float u = gpu::fma_rn(-y, sin, gpu::mul_rn(x, cos));
  y = gpu::fma_rn(x, sin, gpu::mul_rn(y, cos));
  x = u;
}

template <int kNumbers>
KVS_DEVICE void turn_chunks(float (&a)[kNumbers], float (&b)[kNumbers], const Angles<kNumbers>& angles, bool within) {
  if constexpr (kNumbers > 1) {
    if (within) {
      constexpr int kHalf = kNumbers / 2;
      KVS_UNROLL for (int i = 0; i < kHalf; ++i) {
        turn(a[2 * i], a[2 * i + 1], angles.cos[i], angles.sin[i]);
        turn(b[2 * i], b[2 * i + 1], angles.cos[kHalf + i], angles.sin[kHalf + i]);
      }
      return;
    }
  }
  KVS_UNROLL for (int i = 0; i < kNumbers; ++i) turn(a[i], b[i], angles.cos[i], angles.sin[i]);
}

// Whether number i of chunk a (or b) belongs to a pair that does not turn.
template <int kNumbers>
KVS_DEVICE bool still(const Angles<kNumbers>& angles, bool within, bool in_b, int i) {
  if constexpr (kNumbers == 1) return is_still(angles.cos[0], angles.sin[0]);
  const bool across = is_still(angles.cos[i], angles.sin[i]);
  const int j = i / 2 + (in_b ? kNumbers / 2 : 0);
  return within ? is_still(angles.cos[j], angles.sin[j]) : across;
}

// Puts the given bits back where nothing turned: of packets in the output's type only.
template <int kNumbers, int kBytes>
KVS_DEVICE void keep_still(Chunk<kBytes>& c, const Chunk<kBytes>& given, const Angles<kNumbers>& angles, bool within,
                           bool in_b) {
  constexpr int kEach = kBytes / kNumbers;
  KVS_UNROLL for (int i = 0; i < kNumbers; ++i) {
    constexpr uint32_t kOne = kEach == 4 ? 0xffffffffu : 0xffffu;
    const uint32_t mask = still(angles, within, in_b, i) ? kOne << (i * kEach % 4 * 8) : 0u;
    uint32_t& word = c.word[i * kEach / 4];
    word = (given.word[i * kEach / 4] & mask) | (word & ~mask);
  }
}

// ---- the unit's rows -----------------------------------------------------------------------------------------------

// kNumbers: of a chunk; 16 bytes of the output, or 1 where the layout does not allow that.
template <class T, bool kPlain, int kNumbers, class Params>
KVS_DEVICE void move_unit(const Params& p, const ConcatUnit& u, uint64_t policy) {
  constexpr int kRows = kConcatRows<T, kPlain>;
  constexpr int kIn = kNumbers * static_cast<int>(kPlain ? sizeof(T) : 1);
  constexpr int kOut = kNumbers * static_cast<int>(sizeof(T));
  const ConcatHeader& h = p.header;
  const int chunks = h.head_dim / kNumbers, items = (chunks + 1) / 2;
  const int width = items < kConcatThreads ? items : kConcatThreads;  // threads side by side in a row
  const int lane = gpu::thread_index() / width;
  const uint32_t step = static_cast<uint32_t>(kConcatThreads / width);
  const bool rotates = u.rotation >= 0;
  const bool within = kNumbers > 1 && h.interleaved && rotates;  // pairs lie within chunks
  const int pairs = rotates && !within ? h.half / kNumbers : 0;  // of chunks that turn into each other
  const bool neighbours = kNumbers == 1 && h.interleaved;        // such pairs are side by side

  for (int item = gpu::thread_index() - lane * width; item < items; item += kConcatThreads) {
    // What does not turn across chunks is taken two chunks at a time all the same.
    const int rest = chunks - 2 * pairs, other = item - pairs;
    const int a = item >= pairs ? 2 * pairs + other : neighbours ? 2 * item : item;
    const int b = item >= pairs ? a + (rest + 1) / 2 : neighbours ? a + 1 : a + pairs;
    const bool has_b = b < chunks;

    Angles<kNumbers> angles;
    angles.turns = angles.mixed = false;
    if (rotates) {
      bool all = true;
      KVS_UNROLL for (int i = 0; i < kNumbers; ++i) {
        const int pair = within ? (i < kNumbers / 2 ? a : b) * (kNumbers / 2) + i % (kNumbers > 1 ? kNumbers / 2 : 1)
                                : item * kNumbers + i;
        const bool known = pair < h.row_pairs && (within || item < pairs);
        angles.cos[i] = known ? p.number(u.rotation + 2 * pair) : 1.0f;
        angles.sin[i] = known ? p.number(u.rotation + 2 * pair + 1) : 0.0f;
        const bool turning = !is_still(angles.cos[i], angles.sin[i]);
        angles.turns = angles.turns || turning;
        all = all && turning;
      }
      angles.mixed = angles.turns && !all;
    }

    for (uint32_t base = u.first_row + static_cast<uint32_t>(lane); base < u.end_row; base += kRows * step) {
      if (static_cast<uint32_t>(lane) >= step) break;  // threads left over beside the last whole row
      Chunk<kIn> in_a[kRows], in_b[kRows];
      char* to[kRows];
      float scale[kRows];
      KVS_UNROLL for (int r = 0; r < kRows; ++r) {
        const uint32_t row = base + static_cast<uint32_t>(r) * step;
        to[r] = nullptr;
        in_b[r] = {};
        if (row < u.end_row) {
          const uint32_t outer = divide(row, u.inner);
          const uint32_t inner = row - outer * (u.heads_inside ? h.heads : u.tokens);
          const uint32_t head = u.heads_inside ? inner : outer, token = u.heads_inside ? outer : inner;
          const char* from = u.from + head * u.from_head + token * u.from_token;
          in_a[r] = load_chunk<kIn>(from + int64_t{a} * kIn, policy);
          if (has_b) in_b[r] = load_chunk<kIn>(from + int64_t{b} * kIn, policy);
          if constexpr (!kPlain) {
            scale[r] = gpu::load_float(reinterpret_cast<const float*>(u.scale + head * u.scale_head));
          }
          if (h.page_table == nullptr) {
            to[r] = u.to + head * u.to_head + token * u.to_token;
          } else {
            const uint32_t slot = u.out_slot + token, skip = divide(slot, h.page_divide);
            const int page = gpu::load_int(h.page_table + u.out_page + skip);
            if (page >= 0 && page < h.pages) {
              to[r] = u.to + page * u.to_page + head * u.to_head + int64_t{slot - skip * h.page_size} * u.to_token;
            }
          }
        }
      }
      KVS_UNROLL for (int r = 0; r < kRows; ++r) {
        if (to[r] == nullptr) continue;
        Chunk<kOut> out_a, out_b;
        if (!kPlain || angles.turns) {
          float x[kNumbers], y[kNumbers];
          widen<T, kPlain>(in_a[r], h.float8 != 0, scale[r], x);
          widen<T, kPlain>(in_b[r], h.float8 != 0, scale[r], y);
          if (angles.turns) turn_chunks(x, y, angles, within);
          out_a = narrow<T>(x), out_b = narrow<T>(y);
        }
        if constexpr (kPlain) {
          if (!angles.turns) {
            out_a = in_a[r], out_b = in_b[r];
          } else if (angles.mixed) {
            keep_still(out_a, in_a[r], angles, within, false);
            keep_still(out_b, in_b[r], angles, within, true);
          }
        }
        store_chunk<kOut>(to[r] + int64_t{a} * kOut, out_a);
        if (has_b) store_chunk<kOut>(to[r] + int64_t{b} * kOut, out_b);
      }
    }
  }
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
