// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "simt/driver.h"

namespace kvspeed::driver {
namespace {

double float8_e4m3fn(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -size : size;
}

struct Source {
  Part part;
  Tensor plain[2];                     // key, value
  std::vector<unsigned char> byte[2];  // 8-bit: [layers, heads, tokens, d]
  std::vector<float> scale[2];         // [layers, heads]
};

}  // namespace

bool check_rope(const Words& w) {
  std::mt19937 random(static_cast<unsigned>(w.number("data", 1)));
  const kvspeed_dtype dtype = dtype_of(w.text("dtype", "bf16"));
  const int64_t layers = w.number("layers", 2), heads = w.number("heads", 2), d = w.number("d", 64);
  const int64_t r = w.number("r", d), start = w.number("start", 0), page = w.number("page", 0);
  const bool interleaved = w.number("interleaved", 0), pad = w.number("pad", 0);
  const size_t shift = static_cast<size_t>(w.number("shift", 0));
  const int64_t storage = w.text("storage", "") == "int8" ? 1 : w.text("storage", "") == "fp8" ? 2 : 0;

  std::vector<Source> sources;
  int64_t tokens = 0;
  for (const Part& part : parts_of(w.text("seg", "37:5,5:0,64:11"))) {
    Source s;
    s.part = part;
    tokens += part.tokens;
    for (int kv = 0; kv < 2; ++kv) {
      if (storage == 0) {
        s.plain[kv] = Tensor(dtype, layers, heads, part.tokens, d, pad, shift);
        s.plain[kv].randomise(random);
        continue;
      }
      s.byte[kv].resize(static_cast<size_t>(layers * heads * part.tokens * d));
      for (auto& x : s.byte[kv]) {
        do x = static_cast<unsigned char>(random());
        while (storage == 2 && (x & 0x7f) == 0x7f);
      }
      for (int64_t i = 0; i < layers * heads; ++i) {
        s.scale[kv].push_back(std::uniform_real_distribution<float>(0.001f, 0.02f)(random));
      }
    }
    sources.push_back(std::move(s));
  }
  const int64_t used = page > 0 ? (start + tokens + page - 1) / page : 0, pages = used + 2;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  table.resize(static_cast<size_t>(used));
  const int64_t capacity = page > 0 ? used * page : start + tokens + w.number("spare", 3);
  // Paged outputs are [layers, pages * page_size, heads, d] here.
  Tensor out[2];
  for (Tensor& t : out) {
    t = page > 0 ? Tensor(dtype, layers, pages * page, heads, d, pad, shift)
                 : Tensor(dtype, layers, heads, capacity, d, pad, shift);
  }
  const auto out_index = [&](const Tensor& t, int64_t l, int64_t h, int64_t token, int64_t i) {
    if (page == 0) return t.index(l, h, token, i);
    return t.index(l, table[static_cast<size_t>(token / page)] * page + token % page, h, i);
  };

  const std::vector<float> inv_freq = frequencies(r / 2);
  std::vector<kvspeed_packet> packets;
  for (const Source& s : sources) {
    kvspeed_packet p = {};
    p.tokens = s.part.tokens;
    p.offset = s.part.offset;
    if (storage == 0) {
      p.key = s.plain[0].data(), p.value = s.plain[1].data();
      for (int i = 0; i < 3; ++i) p.key_stride[i] = s.plain[0].stride[i], p.value_stride[i] = s.plain[1].stride[i];
    } else {
      p.key = s.byte[0].data(), p.value = s.byte[1].data();
      p.key_stride[2] = p.value_stride[2] = d;
      p.key_stride[1] = p.value_stride[1] = p.tokens * d;
      p.key_stride[0] = p.value_stride[0] = heads * p.tokens * d;
      p.key_scale = s.scale[0].data(), p.value_scale = s.scale[1].data();
      p.key_scale_stride[0] = p.value_scale_stride[0] = heads;
      p.key_scale_stride[1] = p.value_scale_stride[1] = 1;
    }
    packets.push_back(p);
  }
  kvspeed_rope_concat_args g = {};
  g.dtype = dtype;
  g.storage = static_cast<kvspeed_storage>(storage);
  g.layers = layers, g.heads = heads, g.head_dim = d, g.rotary_dim = r, g.interleaved = interleaved;
  g.packets = packets.data();
  g.num_packets = static_cast<int64_t>(packets.size());
  g.inv_freq = inv_freq.data();
  g.out_key = out[0].data(), g.out_value = out[1].data();
  int64_t* stride[2] = {g.out_key_stride, g.out_value_stride};
  for (int kv = 0; kv < 2; ++kv) {
    const int64_t* from = out[kv].stride;
    stride[kv][0] = from[0];
    stride[kv][1] = page * from[1];
    stride[kv][2] = page > 0 ? from[2] : from[1];
    stride[kv][3] = page > 0 ? from[1] : from[2];
  }
  g.start = start, g.capacity = capacity;
  if (page > 0) g.page_table = table.data(), g.page_table_length = used, g.page_size = page, g.pages = pages;
  if (!run_call(g, kvspeed_rope_concat_workspace, kvspeed_rope_concat)) return false;

  Difference turned;
  int64_t wrong_bits = 0, at = start;
  for (const Source& s : sources) {
    for (int64_t l = 0; l < layers; ++l) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < s.part.tokens; ++t) {
          for (int kv = 0; kv < 2; ++kv) {
            std::vector<double> x(static_cast<size_t>(d));
            for (int64_t i = 0; i < d; ++i) {
              double& v = x[static_cast<size_t>(i)];
              if (storage == 0) {
                v = s.plain[kv].at(l, h, t, i);
              } else {
                const unsigned char b = s.byte[kv][static_cast<size_t>(((l * heads + h) * s.part.tokens + t) * d + i)];
                const float stored = storage == 1 ? static_cast<signed char>(b) : static_cast<float>(float8_e4m3fn(b));
                v = stored * s.scale[kv][static_cast<size_t>(l * heads + h)];
              }
            }
            std::vector<bool> turns(static_cast<size_t>(d), false);
            for (int64_t i = 0; i < r / 2 && kv == 0 && s.part.offset != 0; ++i) {
              const size_t a = static_cast<size_t>(interleaved ? 2 * i : i);
              const size_t b = static_cast<size_t>(interleaved ? 2 * i + 1 : i + r / 2);
              const double angle = static_cast<double>(s.part.offset) * inv_freq[static_cast<size_t>(i)];
              const double u = x[a], v = x[b];
              x[a] = u * std::cos(angle) - v * std::sin(angle);
              x[b] = v * std::cos(angle) + u * std::sin(angle);
              turns[a] = turns[b] = true;
            }
            for (int64_t i = 0; i < d; ++i) {
              const double got = number_at(dtype, out[kv].data(), out_index(out[kv], l, h, at + t, i));
              const double want = x[static_cast<size_t>(i)];
              if (turns[static_cast<size_t>(i)]) {
                turned.add(got, want);
              } else if (got != rounded(dtype, want)) {
                ++wrong_bits;
              }
            }
          }
        }
      }
    }
    at += s.part.tokens;
  }
  const bool ok = wrong_bits == 0 && !turned.wrong_number &&
                  turned.largest <= (1.01 * unit_roundoff(dtype) + 2e-7) * std::max(turned.scale, 1.0);
  std::printf("%s turned keys %.2e of %.2f, wrong copies %lld\n", ok ? "ok" : "WRONG", turned.largest, turned.scale,
              static_cast<long long>(wrong_bits));
  return ok;
}

bool check_merge(const Words& w) {
  std::mt19937 random(static_cast<unsigned>(w.number("data", 1)));
  const kvspeed_dtype dtype_a = dtype_of(w.text("dtype", "bf16")), dtype_b = dtype_of(w.text("dtype_b", "bf16"));
  const int64_t b = w.number("b", 2), h = w.number("h", 3), s = w.number("s", 5), d = w.number("d", 64);
  const bool pad = w.number("pad", 0);
  const size_t shift = static_cast<size_t>(w.number("shift", 0));
  Tensor out_a(dtype_a, b, h, s, d, pad, shift), out_b(dtype_b, b, h, s, d, pad, shift), out(dtype_a, b, h, s, d, pad);
  Tensor lse_a(KVSPEED_FLOAT32, b, h, s, 1, pad), lse_b(KVSPEED_FLOAT32, b, h, s, 1, pad);
  for (Tensor* t : {&out_a, &out_b, &lse_a, &lse_b}) t->randomise(random);
  const auto empty = [&](const Tensor& t, int64_t i) {  // some states have seen nothing
    set_number(KVSPEED_FLOAT32, t.data(), t.index(i / h % b, i % h, i % s, 0), -INFINITY);
  };
  empty(lse_a, 0), empty(lse_b, 0), empty(lse_a, 4), empty(lse_b, 7);
  std::vector<float> lse(static_cast<size_t>(b * h * s), NAN);
  kvspeed_merge_states_args g = {};
  g.dtype_a = dtype_a, g.dtype_b = dtype_b;
  g.batch = b, g.heads = h, g.tokens = s, g.head_dim = d;
  g.out_a = out_a.data(), g.out_b = out_b.data(), g.out = out.data();
  g.lse_a = static_cast<const float*>(lse_a.data()), g.lse_b = static_cast<const float*>(lse_b.data());
  g.lse = lse.data();
  for (int i = 0; i < 3; ++i) {
    g.out_a_stride[i] = out_a.stride[i], g.out_b_stride[i] = out_b.stride[i], g.out_stride[i] = out.stride[i];
    g.lse_a_stride[i] = lse_a.stride[i], g.lse_b_stride[i] = lse_b.stride[i];
  }
  const auto nothing = [](const kvspeed_merge_states_args*, const kvspeed_execution*, size_t* bytes) {
    *bytes = 0;
    return KVSPEED_OK;
  };
  if (!run_call(g, nothing, kvspeed_merge_states)) return false;
  Difference values, logs;
  for (int64_t i = 0; i < b * h * s; ++i) {
    const int64_t x = i / s / h, y = i / s % h, z = i % s;
    const double la = lse_a.at(x, y, z, 0), lb = lse_b.at(x, y, z, 0), top = std::max(la, lb);
    const double wa = top == -INFINITY ? 0 : std::exp(la - top), wb = top == -INFINITY ? 0 : std::exp(lb - top);
    logs.add(lse[static_cast<size_t>(i)], top == -INFINITY ? -INFINITY : top + std::log(wa + wb));
    for (int64_t j = 0; j < d; ++j) {
      const double want = wa + wb == 0 ? 0 : (wa * out_a.at(x, y, z, j) + wb * out_b.at(x, y, z, j)) / (wa + wb);
      values.add(out.at(x, y, z, j), want);
    }
  }
  const bool ok = !values.wrong_number && !logs.wrong_number && logs.largest <= 1e-6 * (1 + logs.scale) &&
                  values.largest <= (1.01 * unit_roundoff(dtype_a) + 1e-6) * std::max(values.scale, 1.0);
  std::printf("%s values %.2e of %.2f, lse %.1e\n", ok ? "ok" : "WRONG", values.largest, values.scale, logs.largest);
  return ok;
}

}  // namespace kvspeed::driver
