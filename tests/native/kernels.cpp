// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Runs the three operations through the C API, without Python, on every instruction set that this machine has, and
// compares them with plain float64 code. tests/test_build.py compiles it for aarch64 and runs it under qemu, where no
// Python is. Prints one line a check; the exit status is the number of failures.
#include <kvspeed/kvspeed.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

int failures = 0;
uint64_t state = 88172645463325252u;

double uniform() {  // xorshift, in [-1, 1)
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<double>(state >> 11) / 4503599627370496.0 - 1.0;
}

// A float16 number's value, and the nearest one with few bits: enough to store exact test data in any of the types.
double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

struct Array {  // numbers of one dtype, and what they are worth
  kvspeed_dtype dtype;
  std::vector<char> bytes;
  std::vector<double> values;

  Array(kvspeed_dtype type, size_t n) : dtype(type), bytes(n * (type == KVSPEED_FLOAT32 ? 4 : 2)), values(n) {
    for (size_t i = 0; i < n; ++i) Set(i, std::round(uniform() * 128) / 64);
  }
  void Set(size_t i, double x) {  // x = m / 64 with |m| <= 128: exact in all three types
    values[i] = x;
    const float f = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if (dtype == KVSPEED_FLOAT32) {
      std::memcpy(&bytes[4 * i], &f, 4);
    } else if (dtype == KVSPEED_BFLOAT16) {
      const uint16_t b = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&bytes[2 * i], &b, 2);
    } else {
      const uint32_t magnitude = bits & 0x7fffffff;
      const uint16_t h =
          static_cast<uint16_t>((bits >> 16 & 0x8000) | (magnitude ? (magnitude - (112u << 23)) >> 13 : 0));
      std::memcpy(&bytes[2 * i], &h, 2);
    }
  }
  double Get(size_t i) const {  // what an operation has written
    if (dtype == KVSPEED_FLOAT32) {
      float f;
      std::memcpy(&f, &bytes[4 * i], 4);
      return f;
    }
    uint16_t h;
    std::memcpy(&h, &bytes[2 * i], 2);
    if (dtype == KVSPEED_FLOAT16) return half_value(h);
    const uint32_t bits = uint32_t{h} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  double Tolerance() const { return dtype == KVSPEED_FLOAT32 ? 2e-6 : dtype == KVSPEED_BFLOAT16 ? 1e-2 : 1.3e-3; }
};

void report(const char* what, kvspeed_isa isa, kvspeed_dtype dtype, int64_t dim, kvspeed_status status, double error,
            double tolerance) {
  const bool good = status == KVSPEED_OK && error <= tolerance;
  failures += !good;
  std::printf("%s %s isa %s dtype %d head_dim %d: error %.2e of %.2e%s%s\n", good ? "ok  " : "FAIL", what,
              kvspeed_isa_name(isa), dtype, static_cast<int>(dim), error, tolerance, status == KVSPEED_OK ? "" : ", ",
              status == KVSPEED_OK ? "" : kvspeed_status_string(status));
}

struct Execution {
  kvspeed_execution e = {};
  std::vector<char> memory;
  Execution(kvspeed_isa isa, size_t bytes) : memory(bytes + 64) {
    e.isa = isa;
    e.num_threads = 2;
    e.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    e.workspace_bytes = bytes;
  }
};

void check_rope_concat(kvspeed_isa isa, kvspeed_dtype dtype, int64_t dim, int64_t rotary, int interleaved) {
  const int64_t layers = 2, heads = 3, tokens[2] = {5, 70}, offsets[2] = {0, -1234};
  std::vector<float> inv_freq(rotary / 2);
  for (int64_t i = 0; i < rotary / 2; ++i) inv_freq[i] = static_cast<float>(std::pow(10000.0, -2.0 * i / rotary));
  Array key[2] = {{dtype, size_t(layers * heads * tokens[0] * dim)}, {dtype, size_t(layers * heads * tokens[1] * dim)}};
  Array value[2] = {key[0], key[1]};
  const int64_t total = tokens[0] + tokens[1];
  Array out_key(dtype, layers * heads * total * dim), out_value = out_key;
  kvspeed_packet packets[2] = {};
  for (int i = 0; i < 2; ++i) {
    packets[i].key = key[i].bytes.data();
    packets[i].value = value[i].bytes.data();
    const int64_t stride[3] = {heads * tokens[i] * dim, tokens[i] * dim, dim};
    for (int j = 0; j < 3; ++j) packets[i].key_stride[j] = packets[i].value_stride[j] = stride[j];
    packets[i].tokens = tokens[i];
    packets[i].offset = offsets[i];
  }
  kvspeed_rope_concat_args g = {};
  g.dtype = dtype, g.layers = layers, g.heads = heads, g.head_dim = dim, g.rotary_dim = rotary;
  g.interleaved = interleaved, g.packets = packets, g.num_packets = 2, g.inv_freq = inv_freq.data();
  g.out_key = out_key.bytes.data(), g.out_value = out_value.bytes.data(), g.capacity = total;
  const int64_t stride[4] = {heads * total * dim, 0, total * dim, dim};
  for (int j = 0; j < 4; ++j) g.out_key_stride[j] = g.out_value_stride[j] = stride[j];
  size_t bytes = 0;
  Execution unsized(isa, 0);
  kvspeed_status status = kvspeed_rope_concat_workspace(&g, &unsized.e, &bytes);
  Execution execution(isa, bytes);
  if (status == KVSPEED_OK) status = kvspeed_rope_concat(&g, &execution.e);
  double error = 0;
  for (int64_t lh = 0; lh < layers * heads; ++lh) {
    for (int64_t t = 0; t < total; ++t) {
      const int p = t >= tokens[0];
      const int64_t from = (lh * tokens[p] + t - (p ? tokens[0] : 0)) * dim, to = (lh * total + t) * dim;
      for (int64_t d = 0; d < dim; ++d) {
        double expected = key[p].values[from + d];
        if (d < rotary && offsets[p] != 0) {
          const int64_t pair = interleaved ? d / 2 : d % (rotary / 2);
          const bool first = interleaved ? d % 2 == 0 : d < rotary / 2;
          const int64_t other = interleaved ? d ^ 1 : (first ? d + rotary / 2 : d - rotary / 2);
          const double angle = double(offsets[p]) * inv_freq[pair], y = key[p].values[from + other];
          expected = expected * std::cos(angle) + (first ? -y : y) * std::sin(angle);
        }
        error = std::fmax(error, std::fabs(out_key.Get(to + d) - expected));
        if (out_value.Get(to + d) != value[p].values[from + d]) error = INFINITY;
      }
    }
  }
  report(interleaved ? "rope_concat interleaved" : "rope_concat", isa, dtype, dim, status, error,
         2 * key[0].Tolerance());
}

void check_segment_attention(kvspeed_isa isa, kvspeed_dtype dtype, int64_t dim, int64_t group, int64_t query_tokens,
                             float softcap) {
  const int64_t heads_kv = 2, heads = heads_kv * group, lengths[2] = {150, 37}, offset = 777;
  std::vector<float> inv_freq(dim / 2);
  for (int64_t i = 0; i < dim / 2; ++i) inv_freq[i] = static_cast<float>(std::pow(10000.0, -2.0 * i / dim));
  Array key[2] = {{dtype, size_t(heads_kv * lengths[0] * dim)}, {dtype, size_t(heads_kv * lengths[1] * dim)}};
  Array value[2] = {{dtype, key[0].values.size()}, {dtype, key[1].values.size()}};
  Array query(dtype, heads * query_tokens * dim), out(dtype, heads * query_tokens * dim);
  std::vector<float> lse(heads * query_tokens);
  kvspeed_segment s[2] = {};
  for (int i = 0; i < 2; ++i) {
    s[i].key = key[i].bytes.data(), s[i].value = value[i].bytes.data(), s[i].tokens = lengths[i];
    s[i].key_stride[1] = s[i].value_stride[1] = lengths[i] * dim;
    s[i].key_stride[2] = s[i].value_stride[2] = dim;
  }
  s[0].offset = offset;
  kvspeed_segment_attention_args g = {};
  g.dtype = dtype, g.batch = 1, g.heads = heads, g.heads_kv = heads_kv, g.query_tokens = query_tokens;
  g.head_dim = g.rotary_dim = dim, g.inv_freq = inv_freq.data(), g.query = query.bytes.data();
  g.query_stride[1] = g.out_stride[1] = query_tokens * dim, g.query_stride[2] = g.out_stride[2] = dim;
  g.segments = s, g.num_segments = 1, g.tail = s[1];
  g.scale = 1 / std::sqrt(static_cast<float>(dim)), g.softcap = softcap, g.out = out.bytes.data(), g.lse = lse.data();
  g.split_tokens = 100;
  size_t bytes = 0;
  Execution unsized(isa, 0);
  kvspeed_status status = kvspeed_segment_attention_workspace(&g, &unsized.e, &bytes);
  Execution execution(isa, bytes);
  if (status == KVSPEED_OK) status = kvspeed_segment_attention(&g, &execution.e);
  double error = 0;
  for (int64_t row = 0; row < heads * query_tokens; ++row) {
    const int64_t head = row / query_tokens, token = row % query_tokens;
    std::vector<double> scores, sum(dim);
    double denominator = 0;
    for (int i = 0; i < 2; ++i) {
      const int64_t end = i == 0 ? lengths[0] : lengths[1] - query_tokens + token + 1;
      for (int64_t t = 0; t < end; ++t) {
        const size_t at = (head / group * lengths[i] + t) * dim;
        double score = 0;
        for (int64_t d = 0; d < dim / 2; ++d) {
          const double x = key[i].values[at + d], y = key[i].values[at + dim / 2 + d];
          const double angle = i == 0 ? double(offset) * inv_freq[d] : 0;
          score += query.values[row * dim + d] * (x * std::cos(angle) - y * std::sin(angle)) +
                   query.values[row * dim + dim / 2 + d] * (y * std::cos(angle) + x * std::sin(angle));
        }
        score *= g.scale;
        if (softcap > 0) score = softcap * std::tanh(score / softcap);
        denominator += std::exp(score);
        for (int64_t d = 0; d < dim; ++d) sum[d] += std::exp(score) * value[i].values[at + d];
      }
    }
    for (int64_t d = 0; d < dim; ++d) {
      error = std::fmax(error, std::fabs(out.Get(row * dim + d) - sum[d] / denominator));
    }
    error = std::fmax(error, 0.1 * std::fabs(lse[row] - std::log(denominator)));
  }
  report(query_tokens > 1 ? "segment_attention, many rows" : "segment_attention", isa, dtype, dim, status, error,
         query.Tolerance());
}

void check_merge_states(kvspeed_isa isa, kvspeed_dtype dtype, int64_t dim) {
  const int64_t rows = 4;
  Array a(dtype, rows * dim), b(dtype, rows * dim), out(dtype, rows * dim);
  const float lse_a[rows] = {1.0f, -INFINITY, 3.0f, -INFINITY}, lse_b[rows] = {2.5f, 0.5f, -INFINITY, -INFINITY};
  float lse[rows];
  kvspeed_merge_states_args g = {};
  g.dtype_a = g.dtype_b = dtype, g.batch = g.heads = 1, g.tokens = rows, g.head_dim = dim;
  g.out_a = a.bytes.data(), g.out_b = b.bytes.data(), g.out = out.bytes.data();
  g.out_a_stride[2] = g.out_b_stride[2] = g.out_stride[2] = dim, g.lse_a_stride[2] = g.lse_b_stride[2] = 1;
  g.lse_a = lse_a, g.lse_b = lse_b, g.lse = lse;
  Execution execution(isa, 0);
  const kvspeed_status status = kvspeed_merge_states(&g, &execution.e);
  double error = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const double wa = std::exp(double(lse_a[r])), wb = std::exp(double(lse_b[r])), total = wa + wb;
    for (int64_t d = 0; d < dim; ++d) {
      const double expected = total == 0 ? 0 : (wa * a.values[r * dim + d] + wb * b.values[r * dim + d]) / total;
      error = std::fmax(error, std::fabs(out.Get(r * dim + d) - expected));
    }
    if (total == 0 ? lse[r] != -INFINITY : std::fabs(lse[r] - std::log(total)) > 1e-6) error = INFINITY;
  }
  report("merge_states", isa, dtype, dim, status, error, a.Tolerance());
}

}  // namespace

int main() {
  for (kvspeed_isa isa : {KVSPEED_ISA_BASELINE, KVSPEED_ISA_AVX2, KVSPEED_ISA_AVX512, KVSPEED_ISA_NEON}) {
    if (!kvspeed_isa_available(isa)) continue;
    for (kvspeed_dtype dtype : {KVSPEED_FLOAT32, KVSPEED_BFLOAT16, KVSPEED_FLOAT16}) {
      for (int64_t dim : {8, 64, 80}) {
        check_rope_concat(isa, dtype, dim, dim, 0);
        check_rope_concat(isa, dtype, dim, dim, 1);
        check_segment_attention(isa, dtype, dim, 3, 1, 0.0f);
        check_segment_attention(isa, dtype, dim, 3, 7, 5.0f);
        check_merge_states(isa, dtype, dim);
      }
      check_rope_concat(isa, dtype, 46, 20, 0);
      check_rope_concat(isa, dtype, 5, 4, 1);
    }
  }
  std::printf("best: %s\n", kvspeed_isa_name(kvspeed_isa_best()));
  return failures;
}
