// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What `announce` allows for the arguments of a call, byte by byte, against a second way of counting: every element of
// every tensor by its indices.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "simt/global_memory.h"
#include "simt/selftest.h"

namespace kvspeed::selftest {
namespace {

constexpr size_t kBytes = 1 << 17;
alignas(64) unsigned char memory[kBytes];

struct Expected {
  std::vector<char> read = std::vector<char>(kBytes), write = std::vector<char>(kBytes);

  void bytes(const void* p, int64_t offset, int64_t count, bool readable, bool writable) {
    const size_t at = static_cast<size_t>(static_cast<const unsigned char*>(p) + offset - memory);
    for (size_t i = at; i < at + static_cast<size_t>(count); ++i) read[i] |= readable, write[i] |= writable;
  }
};

int count_wrong(const Expected& expected) {
  simt::GlobalMemory& allowed = simt::global_memory();
  allowed.finish();
  if (!allowed.error().empty()) std::printf("(%s) ", allowed.error().c_str());
  int wrong = allowed.error().empty() ? 0 : 1;
  for (size_t i = 0; i < kBytes; ++i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory) + i;
    wrong += (allowed.find(at, 1, false) != nullptr) != (expected.read[i] != 0);
    wrong += (allowed.find(at, 1, true) != nullptr) != (expected.write[i] != 0);
  }
  return wrong;
}

int rope_concat(bool paged, std::mt19937& random) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  Expected expected;
  kvspeed_packet packet = {};
  packet.key = memory + 1024, packet.value = memory + 1024;  // interleaved: value lies behind key in each row
  kvspeed_rope_concat_args g = {};
  g.dtype = KVSPEED_BFLOAT16;
  g.layers = draw(1, 3), g.heads = draw(1, 3), g.head_dim = draw(1, 24);
  packet.tokens = draw(1, 9);
  const int64_t d = g.head_dim, row = 2 * d + draw(0, 3), head = packet.tokens * row + draw(0, 2),
                layer = g.heads * head;
  packet.value = memory + 1024 + 2 * d;
  const int64_t source[3] = {layer, head, row};
  std::memcpy(packet.key_stride, source, sizeof source);
  std::memcpy(packet.value_stride, source, sizeof source);
  g.packets = &packet;
  g.num_packets = 1;
  g.start = draw(0, 5);
  g.page_size = draw(1, 4), g.pages = 20;
  static int32_t table[20];
  for (int i = 0; i < 20; ++i) table[i] = 19 - i;
  if (draw(0, 1) == 1) table[g.start / g.page_size] = 77;  // a page that is not there: its tokens are dropped
  const int64_t token_row = d + draw(0, 2), page_row = g.page_size * token_row, out_head = 20 * page_row;
  g.out_key = memory + 16384, g.out_value = memory + 65536;
  for (auto* stride : {g.out_key_stride, g.out_value_stride}) {
    stride[0] = g.heads * out_head, stride[1] = page_row, stride[2] = out_head, stride[3] = token_row;
  }
  g.capacity = 20 * g.page_size;
  if (paged) g.page_table = table, g.page_table_length = 20;
  for (int64_t l = 0; l < g.layers; ++l) {
    for (int64_t h = 0; h < g.heads; ++h) {
      for (int64_t t = 0; t < packet.tokens; ++t) {
        const int64_t from = 2 * (l * layer + h * head + t * row), token = g.start + t;
        expected.bytes(packet.key, from, 2 * d, true, false);
        expected.bytes(packet.value, from, 2 * d, true, false);
        const int64_t page = paged ? table[token / g.page_size] : token / g.page_size;
        if (page >= g.pages) continue;
        const int64_t to =
            2 * (l * g.heads * out_head + page * page_row + h * out_head + token % g.page_size * token_row);
        expected.bytes(g.out_key, to, 2 * d, false, true);
        expected.bytes(g.out_value, to, 2 * d, false, true);
      }
    }
  }
  kvspeed_execution execution = {};
  execution.workspace = memory + 64, execution.workspace_bytes = static_cast<size_t>(draw(0, 100));
  expected.bytes(execution.workspace, 0, static_cast<int64_t>(execution.workspace_bytes), true, true);
  gpu::announce(g, execution);
  const int wrong = count_wrong(expected);
  if (wrong != 0) {
    std::printf("[%d %d %d %d] ", static_cast<int>(g.layers), static_cast<int>(g.heads), static_cast<int>(d),
                static_cast<int>(packet.tokens));
  }
  return wrong;
}

int attention(bool paged, std::mt19937& random) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  Expected expected;
  kvspeed_segment_attention_args g = {};
  g.dtype = KVSPEED_FLOAT16;
  g.batch = draw(1, 3), g.heads_kv = draw(1, 2), g.heads = 2 * g.heads_kv, g.query_tokens = draw(1, 3);
  g.head_dim = 8 * draw(1, 2), g.rotary_dim = 8;
  const int64_t d = g.head_dim;
  static int32_t table[12] = {3, 1, -1, 0, 2, 5, 9, 4, 6, 7, 8, 10}, first[3], lengths[3];
  static float rope[8], sinks[4];
  kvspeed_segment s = {};
  s.tokens = draw(0, 7);
  s.key = memory, s.value = memory + 8192;
  s.page_size = 2, s.pages = 9, s.page_table_stride = paged ? 4 : 0;
  const bool shared = !paged && draw(0, 1) == 1;
  const int64_t token = d + 8, head = 10 * token, outer = paged ? s.page_size * token : g.heads_kv * head;
  const int64_t paged_head = 12 * outer;
  for (auto* stride : {s.key_stride, s.value_stride}) {
    stride[0] = shared ? 0 : outer, stride[1] = paged ? paged_head : head, stride[2] = token;
  }
  if (paged) s.page_table = table;
  s.first = first, s.rope = rope;
  g.segments = &s, g.num_segments = 1;
  g.tail.tokens = 0;
  g.tail_tokens = lengths;
  g.sinks = sinks;
  g.query = memory + 20480, g.out = memory + 30720, g.lse = reinterpret_cast<float*>(memory + 50176);
  const int64_t rows[3] = {0, g.query_tokens * d, d};
  for (int i = 0; i < 3; ++i) g.query_stride[i] = g.out_stride[i] = rows[i];
  g.query_stride[0] = g.out_stride[0] = g.heads * rows[1] + 8;
  for (int64_t b = 0; b < g.batch; ++b) {
    for (int64_t h = 0; h < g.heads; ++h) {
      for (int64_t t = 0; t < g.query_tokens; ++t) {
        const int64_t at = 2 * (b * g.query_stride[0] + h * rows[1] + t * d);
        expected.bytes(g.query, at, 2 * d, true, false);
        expected.bytes(g.out, at, 2 * d, false, true);
        expected.bytes(g.lse, 4 * ((b * g.heads + h) * g.query_tokens + t), 4, false, true);
      }
    }
    for (int64_t h = 0; h < g.heads_kv; ++h) {
      for (int64_t t = 0; t < s.tokens; ++t) {
        const int64_t page = paged ? table[b * 4 + t / 2] : 0;
        if (page < 0 || page >= s.pages) continue;
        const int64_t at =
            2 * (paged ? page * outer + h * paged_head + t % 2 * token : b * s.key_stride[0] + h * head + t * token);
        expected.bytes(s.key, at, 2 * d, true, false);
        expected.bytes(s.value, at, 2 * d, true, false);
      }
    }
  }
  gpu::announce(g, {});
  return count_wrong(expected);
}

}  // namespace

void check_announcements(unsigned seed) {
  std::mt19937 random(seed);
  int wrong[4] = {};
  for (int i = 0; i < 20; ++i) {
    wrong[0] += rope_concat(false, random);
    wrong[1] += rope_concat(true, random);
    wrong[2] += attention(false, random);
    wrong[3] += attention(true, random);
  }
  std::printf("announce %d %d %d %d bytes wrong\n", wrong[0], wrong[1], wrong[2], wrong[3]);
  simt::forget_memory();
}

}  // namespace kvspeed::selftest
