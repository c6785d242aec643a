// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "simt/driver.h"

namespace kvspeed::driver {
namespace {

// One segment with all that its struct points to.
struct Run {
  Tensor key, value;  // [batch, heads_kv, tokens, d], or pages [1, heads_kv, pages * page_size, d] seen page by page
  std::vector<int32_t> first, table;
  std::vector<float> rope;
  int64_t tokens, offset, start, page_size, pages;
  bool shared;

  int64_t row(int64_t b, int64_t t) const {  // the third index of token t
    if (page_size == 0) return t;
    const int64_t used = (tokens + page_size - 1) / page_size;
    return table[static_cast<size_t>((shared ? 0 : b) * used + t / page_size)] * page_size + t % page_size;
  }
  int64_t outer(int64_t b) const { return page_size == 0 && !shared ? b : 0; }
};

struct Case {
  kvspeed_dtype dtype;
  int64_t b, h, hkv, s, d, r, tail, window, split;
  bool interleaved, sinks, lse, lengths;
  double scale, softcap;
  Tensor query, out;
  std::vector<Run> runs;  // the tail last
  std::vector<float> inv_freq, sink, lse_out;
  std::vector<int32_t> tail_tokens;
};

Run make_run(const Words& w, const Case& c, int64_t tokens, int64_t offset, bool tail, std::mt19937& random) {
  Run run;
  run.tokens = tokens;
  run.offset = offset;
  run.start = static_cast<int64_t>(random() % 7);
  run.page_size = w.number("page", 0);
  run.shared = !tail && w.number("shared", 0) != 0;
  run.pages = 0;
  const bool pad = w.number("pad", 0) != 0;
  const size_t shift = static_cast<size_t>(w.number("shift", 0));
  if (run.page_size > 0) {
    const int64_t used = (tokens + run.page_size - 1) / run.page_size, rows = run.shared ? 1 : c.b;
    run.pages = used * rows + 2;
    run.table.resize(static_cast<size_t>(run.pages));
    std::iota(run.table.begin(), run.table.end(), 0);
    std::shuffle(run.table.begin(), run.table.end(), random);
    run.table.resize(static_cast<size_t>(used * rows));
    run.key = Tensor(c.dtype, 1, c.hkv, run.pages * run.page_size, c.d, pad, shift);
    run.value = Tensor(c.dtype, 1, c.hkv, run.pages * run.page_size, c.d, pad, shift);
  } else {
    run.key = Tensor(c.dtype, run.shared ? 1 : c.b, c.hkv, tokens, c.d, pad, shift);
    run.value = Tensor(c.dtype, run.shared ? 1 : c.b, c.hkv, tokens, c.d, pad, shift);
  }
  run.key.randomise(random);
  run.value.randomise(random);
  if (w.number("first", 0) != 0) {
    for (int64_t i = 0; i < c.b; ++i)
      run.first.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(tokens + 1)));
    // What padding holds must not matter.
    for (int64_t b = 0; b < c.b && !run.shared && run.page_size == 0; ++b) {
      for (int64_t t = 0; t < run.first[static_cast<size_t>(b)]; ++t) {
        for (int64_t h = 0; h < c.hkv; ++h) {
          for (int64_t i = 0; i < c.d; ++i) {
            set_number(c.dtype, run.key.data(), run.key.index(b, h, t, i), NAN);
            set_number(c.dtype, run.value.data(), run.value.index(b, h, t, i), NAN);
          }
        }
      }
    }
  }
  if (offset != 0 && w.number("rope", 1) != 0) {
    run.rope.resize(static_cast<size_t>(c.r));
    kvspeed_rope_row(offset, c.inv_freq.data(), c.r / 2, run.rope.data());
  }
  return run;
}

kvspeed_segment to_segment(const Run& run) {
  kvspeed_segment s = {};
  s.key = run.key.data();
  s.value = run.value.data();
  for (int i = 0; i < 3; ++i) s.key_stride[i] = run.key.stride[i], s.value_stride[i] = run.value.stride[i];
  if (run.shared) s.key_stride[0] = s.value_stride[0] = 0;
  s.tokens = run.tokens;
  s.offset = run.offset;
  s.start = run.start;
  s.first = run.first.empty() ? nullptr : run.first.data();
  s.rope = run.rope.empty() ? nullptr : run.rope.data();
  if (run.page_size > 0) {
    s.page_table = run.table.data();
    s.page_table_stride = run.shared ? 0 : (run.tokens + run.page_size - 1) / run.page_size;
    s.page_size = run.page_size;
    s.pages = run.pages;
    s.key_stride[0] = run.page_size * run.key.stride[2];
    s.value_stride[0] = run.page_size * run.value.stride[2];
  }
  return s;
}

// The query turned by -offset as the kernels turn it, in float32 with cosines rounded from float64, and rounded once:
// a number that falls on the other side of a rounding would move a logit by more than all else.
std::vector<double> turned_query(const Case& c, int64_t b, int64_t h, int64_t s, int64_t offset) {
  std::vector<double> q(static_cast<size_t>(c.d));
  for (int64_t i = 0; i < c.d; ++i) q[static_cast<size_t>(i)] = c.query.at(b, h, s, i);
  if (offset == 0) return q;
  for (int64_t i = 0; i < c.r / 2; ++i) {
    const size_t x = static_cast<size_t>(c.interleaved ? 2 * i : i);
    const size_t y = static_cast<size_t>(c.interleaved ? 2 * i + 1 : i + c.r / 2);
    const double angle = static_cast<double>(offset) * c.inv_freq[static_cast<size_t>(i)];
    const float cos = static_cast<float>(std::cos(angle)), sin = static_cast<float>(std::sin(angle));
    const float u = static_cast<float>(q[x]), v = static_cast<float>(q[y]);
    q[x] = rounded(c.dtype, double{u * cos + v * sin});
    q[y] = rounded(c.dtype, double{v * cos - u * sin});
  }
  return q;
}

void reference_row(const Case& c, int64_t b, int64_t h, int64_t s, std::vector<double>& out, double& lse) {
  const int64_t kv = h / (c.h / c.hkv);
  const int64_t tail = c.lengths ? c.tail_tokens[static_cast<size_t>(b)] : c.tail;
  const int64_t at = c.runs.back().start + tail - c.s + s;  // the query's position
  std::vector<double> logits;
  std::vector<std::pair<const Run*, int64_t>> keys;
  for (size_t i = 0; i < c.runs.size(); ++i) {
    const Run& run = c.runs[i];
    const bool is_tail = i + 1 == c.runs.size();
    const std::vector<double> q = turned_query(c, b, h, s, run.offset);
    for (int64_t t = run.first.empty() ? 0 : run.first[static_cast<size_t>(b)]; t < (is_tail ? tail : run.tokens);
         ++t) {
      const int64_t place = run.start + run.offset + t;
      if (is_tail && t > tail - c.s + s) continue;
      if (c.window > 0 && (place <= at - c.window || place > at)) continue;
      double x = 0;
      for (int64_t j = 0; j < c.d; ++j) x += q[static_cast<size_t>(j)] * run.key.at(run.outer(b), kv, run.row(b, t), j);
      x *= c.scale;
      if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
      logits.push_back(x);
      keys.push_back({&run, t});
    }
  }
  out.assign(static_cast<size_t>(c.d), 0.0);
  double maximum = c.sinks ? c.sink[static_cast<size_t>(h)] : -INFINITY;
  for (double x : logits) maximum = std::max(maximum, x);
  if (maximum == -INFINITY) {
    lse = -INFINITY;
    return;
  }
  double sum = c.sinks ? std::exp(c.sink[static_cast<size_t>(h)] - maximum) : 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp(logits[i] - maximum);
    sum += weight;
    const Run& run = *keys[i].first;
    for (int64_t j = 0; j < c.d; ++j) {
      out[static_cast<size_t>(j)] += weight * run.value.at(run.outer(b), kv, run.row(b, keys[i].second), j);
    }
  }
  for (double& x : out) x /= sum;
  lse = maximum + std::log(sum);
}

}  // namespace

bool check_attention(const Words& w) {
  std::mt19937 random(static_cast<unsigned>(w.number("data", 1)));
  Case c = {};
  c.dtype = dtype_of(w.text("dtype", "bf16"));
  c.b = w.number("b", 1), c.hkv = w.number("hkv", 1), c.h = w.number("h", c.hkv), c.s = w.number("s", 1);
  c.d = w.number("d", 128), c.r = w.number("r", c.d), c.tail = w.number("tail", 0);
  c.window = w.number("window", 0), c.split = w.number("split", 0);
  c.interleaved = w.number("interleaved", 0), c.sinks = w.number("sinks", 0), c.lse = w.number("lse", 1);
  c.lengths = w.number("lengths", 0);
  c.scale = static_cast<float>(w.real("scale", 1 / std::sqrt(static_cast<double>(c.d))));
  c.softcap = static_cast<float>(w.real("softcap", 0));
  c.inv_freq = frequencies(c.r / 2);
  const bool pad = w.number("pad", 0) != 0;
  const size_t shift = static_cast<size_t>(w.number("shift", 0));
  c.query = Tensor(c.dtype, c.b, c.h, c.s, c.d, pad, shift);
  c.query.randomise(random);
  c.out = Tensor(c.dtype, c.b, c.h, c.s, c.d, pad, shift);
  for (int64_t i = 0; i < c.h && c.sinks; ++i) c.sink.push_back(std::normal_distribution<float>()(random));
  c.lse_out.assign(static_cast<size_t>(c.b * c.h * c.s), NAN);
  for (const Part& part : parts_of(w.text("seg", ""))) {
    c.runs.push_back(make_run(w, c, part.tokens, part.offset, false, random));
  }
  c.runs.push_back(make_run(w, c, c.tail, 0, true, random));
  if (c.lengths) {
    for (int64_t b = 0; b < c.b; ++b) {
      c.tail_tokens.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(c.tail + 1)));
    }
  }

  std::vector<kvspeed_segment> segments;
  for (size_t i = 0; i + 1 < c.runs.size(); ++i) segments.push_back(to_segment(c.runs[i]));
  kvspeed_segment_attention_args g = {};
  g.dtype = c.dtype;
  g.batch = c.b, g.heads = c.h, g.heads_kv = c.hkv, g.query_tokens = c.s, g.head_dim = c.d, g.rotary_dim = c.r;
  g.interleaved = c.interleaved;
  g.inv_freq = c.inv_freq.data();
  g.query = c.query.data(), g.out = c.out.data();
  for (int i = 0; i < 3; ++i) g.query_stride[i] = c.query.stride[i], g.out_stride[i] = c.out.stride[i];
  g.segments = segments.data();
  g.num_segments = static_cast<int64_t>(segments.size());
  g.tail = to_segment(c.runs.back());
  g.tail_tokens = c.lengths ? c.tail_tokens.data() : nullptr;
  g.scale = static_cast<float>(c.scale), g.softcap = static_cast<float>(c.softcap), g.window = c.window;
  g.sinks = c.sinks ? c.sink.data() : nullptr;
  g.lse = c.lse ? c.lse_out.data() : nullptr;
  g.split_tokens = c.split;
  if (!run_call(g, kvspeed_segment_attention_workspace, kvspeed_segment_attention)) return false;

  Difference out, lse;
  std::vector<double> want;
  double want_lse = 0;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t h = 0; h < c.h; ++h) {
      for (int64_t s = 0; s < c.s; ++s) {
        reference_row(c, b, h, s, want, want_lse);
        for (int64_t i = 0; i < c.d; ++i) out.add(c.out.at(b, h, s, i), want[static_cast<size_t>(i)]);
        if (c.lse) lse.add(c.lse_out[static_cast<size_t>((b * c.h + h) * c.s + s)], want_lse);
      }
    }
  }
  // Weights and results are each rounded once to the dtype.
  const bool ok = !out.wrong_number && !lse.wrong_number &&
                  out.largest <= 2 * unit_roundoff(c.dtype) * std::max(out.scale, 0.5) &&
                  lse.largest <= 1e-5 * (1 + lse.scale);
  std::printf(
      "%s out %.2e of %.2f, lse %.1e%s\n", ok ? "ok" : "WRONG", out.largest, out.scale, lse.largest,
      out.wrong_number || lse.wrong_number ? ", NaN or infinity where there should be none or the reverse" : "");
  return ok;
}

}  // namespace kvspeed::driver
