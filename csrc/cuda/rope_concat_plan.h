// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// rope_concat on a device: what the kernel is told, and how a call is brought into that form. Plain C++.
//
// The work is cut into units: rows (one token of one head) of the keys or the values of one packet in one layer. All
// rows of a unit turn by the same angles. What the kernel knows of the packets is a table of 32-bit words:
//
//   PacketEntry of packet 0, 1, ...         each followed by a ScaleEntry in calls with 8-bit packets
//   a byte a layer                          which row of frequencies it has; only where layers differ
//   cos, sin of pair 0, 1, ... row_pairs-1  one row of numbers for each offset and each row of frequencies
#ifndef KVSPEED_CUDA_ROPE_CONCAT_PLAN_H_
#define KVSPEED_CUDA_ROPE_CONCAT_PLAN_H_

#include <kvspeed/kvspeed.h>

#include <cstring>

#include "core/rope_table.h"

namespace kvspeed::cuda {

constexpr int kConcatThreads = 256;  // of a block

// n / d for any n below 2^31 as a multiplication: the multiplier is 2^shift / d rounded up, and the error that makes is
// smaller than 1 / d for all such n.
struct FastDivide {
  uint32_t multiplier = 1u << 31, shift = 31;

  FastDivide() = default;
  explicit FastDivide(uint32_t d) {
    while ((uint64_t{1} << (shift - 31)) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }
};

// Strides of everything the kernel reads or writes are in bytes.
struct SourceEntry {
  const char* data;
  int64_t stride[3];  // layer, head, token
};

struct alignas(16) PacketEntry {
  uint32_t first_unit;         // units before this packet
  uint32_t units;              // of one layer's keys or values
  uint32_t tokens;             // > 0
  int32_t rotation;            // the word where the rows of its offset begin; -1: nothing turns
  uint32_t divide_multiplier;  // FastDivide(tokens)
  uint8_t divide_shift;
  uint8_t vector[2];  // keys, values: 16 bytes can be moved at once
  uint8_t unused;
  uint32_t out_page, out_slot;  // where its first token goes, without pages: the low and high half of a token index
  SourceEntry source[2];        // keys, values
};
struct alignas(16) ScaleEntry {
  const float* scale[2];  // keys, values
  int64_t stride[2][2];   // layer, head
};
static_assert(sizeof(PacketEntry) == 96 && sizeof(ScaleEntry) == 48);

enum class LayerRows : int32_t {
  kSame,    // all layers have one row of frequencies
  kMapped,  // the table says which; kNoRow: this layer does not turn
  kOwn      // each has its own
};
constexpr uint8_t kNoRow = 255;

struct alignas(16) ConcatHeader {
  char* out[2];               // keys, values
  int64_t out_stride[2][4];   // layer, page, head, token
  const int32_t* page_table;  // null: no pages
  uint32_t page_size;
  int32_t pages;
  FastDivide page_divide;  // by page_size
  FastDivide head_divide;  // by heads
  uint32_t units;
  uint32_t unit_rows;  // rows of a unit; the last one of a packet's layer may have fewer
  int32_t packets;
  uint32_t heads;
  int32_t head_dim;
  int32_t half;       // pairs of the rotary part
  int32_t row_pairs;  // pairs that the table has numbers for; none beyond them turns
  int32_t entry_words;
  LayerRows layer_rows;
  int32_t layer_map;  // the word where the byte a layer begins
  int32_t row_words;  // of one row of cosines and sines
  uint8_t interleaved;
  uint8_t float8;           // 8-bit packets are float8_e4m3fn, not int8
  uint8_t heads_inside[2];  // keys, values: rows go through the heads of a token first, as the output lies in memory
};

// How rows are spread over threads: item i of a row is its chunks a and b, which turn into each other where they are
// halves of pairs. A chunk is 16 bytes of the output, or one number.
constexpr int64_t row_items(int64_t head_dim, int64_t chunk) { return (head_dim / chunk + 1) / 2; }

class ConcatPlan {
 public:
  explicit ConcatPlan(const kvspeed_rope_concat_args& args) : args_(args) {
    measure_frequencies();
    measure_packets();
  }

  bool empty() const { return header_.packets == 0; }
  // False where a count does not fit into the kernel's 32 bits; offsets into memory always do.
  bool representable() const { return representable_; }
  size_t table_bytes() const { return static_cast<size_t>(table_words_) * 4; }
  // The table of one packet in one layer.
  size_t smallest_table_bytes() const { return static_cast<size_t>(header_.entry_words + header_.row_words + 8) * 4; }
  const ConcatHeader& header() const { return header_; }

  // Cuts the work for a grid of `blocks` blocks whose threads have `rows_in_flight` rows under way. A unit is one pass
  // of a block over as many rows as it has in flight, more where there is plenty of work, and less where there are too
  // few units to go round.
  void cut(int64_t blocks, int rows_in_flight) {
    const int64_t items = row_items(args_.head_dim, args_.head_dim % chunk() == 0 ? chunk() : 1);
    const int64_t step = items < kConcatThreads ? kConcatThreads / items : 1;
    int64_t steps = 0;
    for_each([&](const kvspeed_packet& p) { steps += 2 * args_.layers * ceil_div(args_.heads * p.tokens, step); });
    int64_t unit_steps = steps / blocks;
    if (unit_steps >= rows_in_flight) {
      const int64_t passes = unit_steps / (kUnitsPerBlock * rows_in_flight);
      unit_steps = rows_in_flight * (passes < 1 ? 1 : passes < kMaxPasses ? passes : kMaxPasses);
    }
    header_.unit_rows = static_cast<uint32_t>(step * (unit_steps < 1 ? 1 : unit_steps));
    int64_t units = 0;
    for_each([&](const kvspeed_packet& p) { units += 2 * args_.layers * units_of(p); });
    header_.units = static_cast<uint32_t>(units);
  }

  // Writes the table, piece by piece, to append(data, bytes). `cut` comes first.
  template <class Append>
  void write_table(Append append) const {
    OffsetCache offsets;
    uint32_t first_unit = 0;
    int64_t token = args_.start;
    for_each([&](const kvspeed_packet& p) {
      PacketEntry e = {};
      e.first_unit = first_unit;
      e.units = static_cast<uint32_t>(units_of(p));
      e.tokens = static_cast<uint32_t>(p.tokens);
      e.rotation = turns(p) ? rotation_begin_ + offsets.index(p.offset) * rotation_words_ : -1;
      const FastDivide divide(e.tokens);
      e.divide_multiplier = divide.multiplier;
      e.divide_shift = static_cast<uint8_t>(divide.shift);
      e.vector[0] = vectorised(p.key, p.key_stride, args_.out_key, args_.out_key_stride) && turns_in_vectors(p);
      e.vector[1] = vectorised(p.value, p.value_stride, args_.out_value, args_.out_value_stride);
      if (args_.page_table != nullptr) {
        e.out_page = static_cast<uint32_t>(token / args_.page_size);
        e.out_slot = static_cast<uint32_t>(token % args_.page_size);
      } else {
        e.out_page = static_cast<uint32_t>(token);
        e.out_slot = static_cast<uint32_t>(token >> 32);
      }
      e.source[0] = source(p.key, p.key_stride);
      e.source[1] = source(p.value, p.value_stride);
      append(&e, sizeof(e));
      if (args_.storage != KVSPEED_STORED_PLAIN) {
        const ScaleEntry s = {{p.key_scale, p.value_scale},
                              {{4 * p.key_scale_stride[0], 4 * p.key_scale_stride[1]},
                               {4 * p.value_scale_stride[0], 4 * p.value_scale_stride[1]}}};
        append(&s, sizeof(s));
      }
      first_unit += static_cast<uint32_t>(2 * args_.layers) * e.units;
      token += p.tokens;
    });
    write_layer_map(append);
    OffsetCache again;
    for_each([&](const kvspeed_packet& p) {
      if (!turns(p) || again.known(p.offset)) return;
      again.index(p.offset);
      for (int64_t r = 0; r < rows_; ++r) write_row(p.offset, frequencies(row_layer(r)), append);
    });
  }

 private:
  static constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;
  static constexpr int64_t kUnitsPerBlock = 8, kMaxPasses = 4;
  static constexpr int kMaxRows = 16;  // distinct rows of frequencies that are told apart; models have 1 or 2

  // Numbers offsets in the order in which they come. It remembers a few, so a list without end costs no more than a
  // few comparisons each; what it has forgotten gets a new number, here as in every other walk over the same list.
  class OffsetCache {
   public:
    bool known(int64_t offset) const { return find(offset) >= 0; }
    int32_t index(int64_t offset) {
      const int at = find(offset);
      if (at >= 0) return index_[at];
      const int slot = static_cast<int>(count_ % kRemembered);
      offset_[slot] = offset;
      return index_[slot] = count_++;
    }
    int32_t count() const { return count_; }

   private:
    static constexpr int kRemembered = 64;
    int find(int64_t offset) const {
      for (int i = 0; i < count_ && i < kRemembered; ++i) {
        if (offset_[i] == offset) return i;
      }
      return -1;
    }
    int64_t offset_[kRemembered];
    int32_t index_[kRemembered];
    int32_t count_ = 0;
  };

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t number_bytes() const { return args_.dtype == KVSPEED_FLOAT32 ? 4 : 2; }
  int64_t stored_bytes() const { return args_.storage == KVSPEED_STORED_PLAIN ? number_bytes() : 1; }
  int64_t chunk() const { return 16 / number_bytes(); }  // numbers of a vector

  template <class Visit>
  void for_each(Visit visit) const {
    for (int64_t i = 0; i < args_.num_packets; ++i) {
      if (args_.packets[i].tokens > 0) visit(args_.packets[i]);
    }
  }

  int64_t units_of(const kvspeed_packet& p) const { return ceil_div(args_.heads * p.tokens, header_.unit_rows); }
  bool turns(const kvspeed_packet& p) const { return p.offset != 0 && header_.row_pairs > 0; }
  // A vector turns or keeps its bits as a whole: no row of frequencies ends within one. In half-split pairs the vector
  // with its partners is whole too.
  bool turns_in_vectors(const kvspeed_packet& p) const {
    return !turns(p) || (rows_end_ % (args_.interleaved ? chunk() / 2 : chunk()) == 0 &&
                         (args_.interleaved || header_.half % chunk() == 0));
  }
  bool vectorised(const void* from, const int64_t* from_stride, const void* to, const int64_t* to_stride) const {
    const int64_t bytes = chunk() * stored_bytes();  // that a vector is made from: 16, or 8 or 4 of 8-bit numbers
    bool fits = args_.head_dim % chunk() == 0 && row_items(args_.head_dim, chunk()) <= kConcatThreads &&
                reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(bytes) == 0 &&
                reinterpret_cast<uintptr_t>(to) % 16 == 0;
    for (int i = 0; i < 3; ++i) fits = fits && from_stride[i] * stored_bytes() % bytes == 0;
    for (int i = 0; i < 4; ++i)
      fits = fits && ((i == 1 && !args_.page_table) || to_stride[i] * number_bytes() % 16 == 0);
    return fits;
  }
  SourceEntry source(const void* data, const int64_t* stride) const {
    const int64_t bytes = stored_bytes();
    return {static_cast<const char*>(data), {stride[0] * bytes, stride[1] * bytes, stride[2] * bytes}};
  }

  const float* frequencies(int64_t layer) const { return args_.inv_freq + layer * args_.inv_freq_layer_stride; }
  int64_t row_layer(int64_t row) const { return header_.layer_rows == LayerRows::kOwn ? row : row_layer_[row]; }
  // The row of frequencies that equals this layer's among those known, or their number.
  int64_t known_row(int64_t layer) const {
    const size_t bytes = static_cast<size_t>(header_.half) * sizeof(float);
    int64_t r = 0;
    while (r < rows_ && std::memcmp(frequencies(layer), frequencies(row_layer_[r]), bytes) != 0) ++r;
    return r;
  }

  void measure_frequencies() {
    const bool paged = args_.page_table != nullptr;
    representable_ = args_.head_dim <= kMaxCount && args_.heads <= kMaxCount && args_.layers <= kMaxCount / 2 &&
                     (!paged || (args_.page_size <= kMaxCount && args_.pages <= kMaxCount));
    if (!representable_) return;
    header_.half = static_cast<int32_t>(args_.rotary_dim / 2);
    header_.layer_rows = LayerRows::kSame;
    if (header_.half == 0 || args_.inv_freq == nullptr) return;
    const int64_t layers = args_.inv_freq_layer_stride == 0 ? 1 : args_.layers;
    bool all_turn = true;
    int64_t pairs = 0;
    for (int64_t l = 0; l < layers; ++l) {
      const int64_t turning = turning_pairs(frequencies(l), header_.half);
      pairs = turning > pairs ? turning : pairs;
      all_turn = all_turn && turning > 0;
      rows_end_ |= turning;
      if (turning == 0 || rows_ > kMaxRows || known_row(l) < rows_) continue;
      if (rows_ < kMaxRows) row_layer_[rows_] = l;
      ++rows_;
    }
    if (rows_ > kMaxRows) {
      header_.layer_rows = LayerRows::kOwn;
      rows_ = layers;
    } else if (rows_ > 1 || (rows_ == 1 && !all_turn)) {
      header_.layer_rows = LayerRows::kMapped;
    }
    header_.row_pairs = static_cast<int32_t>(pairs);
  }

  void measure_packets() {
    if (!representable_) return;
    int64_t packets = 0, end = args_.start;  // the checks have seen that end * heads * layers fits 64 bits
    OffsetCache offsets;
    for_each([&](const kvspeed_packet& p) {
      ++packets;
      if (turns(p)) offsets.index(p.offset);
      end += p.tokens;
    });
    // All rows, so that units are few enough too, and rows of a packet. With 128 bytes each this is 256 GiB.
    representable_ = (end - args_.start) * args_.heads * args_.layers <= kMaxCount / 2;
    const bool paged = args_.page_table != nullptr;
    if (paged) representable_ = representable_ && args_.page_size + end - args_.start <= kMaxCount;
    const bool scaled = args_.storage != KVSPEED_STORED_PLAIN;
    const int64_t entry = (sizeof(PacketEntry) + (scaled ? sizeof(ScaleEntry) : 0)) / 4;
    const int64_t map = header_.layer_rows == LayerRows::kMapped ? ceil_div(args_.layers, 4) : 0;
    const int64_t row = 2 * int64_t{header_.row_pairs};
    table_words_ = ceil_div(packets * entry + map + offsets.count() * rows_ * row, 4) * 4;
    representable_ = representable_ && packets <= kMaxCount && table_words_ <= kMaxCount;
    if (!representable_) return;

    header_.packets = args_.layers > 0 && args_.heads > 0 && args_.head_dim > 0 ? static_cast<int32_t>(packets) : 0;
    if (header_.packets == 0) return;
    header_.entry_words = static_cast<int32_t>(entry);
    header_.layer_map = static_cast<int32_t>(packets * entry);
    header_.row_words = static_cast<int32_t>(row);
    rotation_begin_ = static_cast<int32_t>(packets * entry + map);
    rotation_words_ = static_cast<int32_t>(rows_ * row);
    header_.heads = static_cast<uint32_t>(args_.heads);
    header_.head_dim = static_cast<int32_t>(args_.head_dim);
    header_.interleaved = args_.interleaved != 0;
    header_.float8 = args_.storage == KVSPEED_STORED_FLOAT8_E4M3FN;
    header_.head_divide = FastDivide(header_.heads);
    header_.page_table = args_.page_table;
    if (paged) {
      header_.page_size = static_cast<uint32_t>(args_.page_size);
      header_.pages = static_cast<int32_t>(args_.pages);
      header_.page_divide = FastDivide(header_.page_size);
    }
    header_.out[0] = static_cast<char*>(args_.out_key);
    header_.out[1] = static_cast<char*>(args_.out_value);
    for (int i = 0; i < 4; ++i) {
      header_.out_stride[0][i] = args_.out_key_stride[i] * number_bytes();
      header_.out_stride[1][i] = args_.out_value_stride[i] * number_bytes();
    }
    for (int i = 0; i < 2; ++i) header_.heads_inside[i] = header_.out_stride[i][2] < header_.out_stride[i][3];
  }

  template <class Append>
  void write_layer_map(Append append) const {
    if (header_.layer_rows != LayerRows::kMapped) return;
    for (int64_t l = 0; l < ceil_div(args_.layers, 4) * 4; ++l) {
      const bool turning = l < args_.layers && turning_pairs(frequencies(l), header_.half) > 0;
      const uint8_t row = turning ? static_cast<uint8_t>(known_row(l)) : kNoRow;
      append(&row, 1);
    }
  }

  // Pairs of frequency 0 get exactly 1 and 0, by which the kernel knows what keeps its bits.
  template <class Append>
  void write_row(int64_t offset, const float* inv_freq, Append append) const {
    constexpr int kPart = 64;
    float cos[kPart], sin[kPart], both[2 * kPart];
    for (int64_t begin = 0; begin < header_.row_pairs; begin += kPart) {
      const int64_t n = header_.row_pairs - begin < kPart ? header_.row_pairs - begin : kPart;
      fill_rope_row(offset, inv_freq + begin, n, cos, sin);
      for (int64_t i = 0; i < n; ++i) both[2 * i] = cos[i], both[2 * i + 1] = sin[i];
      append(both, static_cast<size_t>(n) * 8);
    }
  }

  const kvspeed_rope_concat_args& args_;
  ConcatHeader header_ = {};
  bool representable_ = true;
  int64_t rows_end_ = 0;  // the pairs that turn in each row, or-ed: a multiple of 2, 4 or 8 where they all are
  int64_t rows_ = 0;      // of frequencies that are told apart
  int64_t row_layer_[kMaxRows] = {};  // the first layer that has each
  int64_t table_words_ = 0;
  int32_t rotation_begin_ = 0, rotation_words_ = 0;  // the first offset's rows, and the words of each offset's
};

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ROPE_CONCAT_PLAN_H_
