// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The three operations on a GPU against the same operations on the CPU, through the C API: small, ragged shapes that
// reach every path, and no Python, so that compute-sanitizer runs it in seconds.
//
//   nvcc -std=c++20 -Icsrc -Icsrc/include -Itests -arch=native tests/native/gpu_ops.cu libkvspeed_core.a -lgomp
//   compute-sanitizer --tool memcheck ./a.out        (or racecheck, initcheck, synccheck)
//
// Prints one line a case; the exit status is the number of failures.
#include <kvspeed/kvspeed.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "native/device_array.h"

namespace {

using kvspeed::native::DeviceArray;

int failures = 0;
std::mt19937 generator;

size_t size_of(kvspeed_dtype dtype) { return dtype == KVSPEED_FLOAT32 ? 4 : 2; }
double epsilon_of(kvspeed_dtype dtype) {
  return std::ldexp(1.0, dtype == KVSPEED_FLOAT32 ? -23 : dtype == KVSPEED_BFLOAT16 ? -8 : -11);
}

// Numbers with few bits, exact in all types: what differs is what was done with them.
uint16_t half_bits(float x, kvspeed_dtype dtype) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (dtype == KVSPEED_BFLOAT16) return static_cast<uint16_t>(bits >> 16);
  const uint32_t magnitude = bits & 0x7fffffff;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (magnitude ? (magnitude - (112u << 23)) >> 13 : 0));
}
double value_at(const unsigned char* bytes, size_t i, kvspeed_dtype dtype) {
  if (dtype == KVSPEED_FLOAT32) {
    float x;
    std::memcpy(&x, bytes + 4 * i, 4);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, bytes + 2 * i, 2);
  if (dtype == KVSPEED_BFLOAT16) {
    const uint32_t bits = uint32_t{h} << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : INFINITY;
  return h & 0x8000 ? -magnitude : magnitude;
}

// The same bytes on the host and on the device. A device pointer is given to the GPU's call, a host one to the CPU's.
struct Both {
  std::vector<unsigned char> host;
  std::unique_ptr<DeviceArray<unsigned char>> device;

  void* on(bool gpu) { return gpu ? static_cast<void*>(device->data()) : host.data(); }
  void upload() { device = std::make_unique<DeviceArray<unsigned char>>(host); }
  std::vector<unsigned char> result(bool gpu) const { return gpu ? device->host() : host; }
};

Both numbers(size_t count, kvspeed_dtype dtype) {
  std::uniform_int_distribution<int> step(-128, 128);
  Both both;
  both.host.resize(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(step(generator)) / 64.0f;
    if (dtype == KVSPEED_FLOAT32) {
      std::memcpy(&both.host[4 * i], &x, 4);
    } else {
      const uint16_t bits = half_bits(x, dtype);
      std::memcpy(&both.host[2 * i], &bits, 2);
    }
  }
  both.upload();
  return both;
}
template <class T>
Both array(const std::vector<T>& values) {
  Both both;
  both.host.resize(values.size() * sizeof(T));
  std::memcpy(both.host.data(), values.data(), both.host.size());
  both.upload();
  return both;
}
Both poison(size_t count, kvspeed_dtype dtype) {  // NaN in every type
  Both both;
  both.host.assign(count * size_of(dtype), 0xff);
  both.upload();
  return both;
}

// Runs one call on the CPU or the GPU with the workspace that it asks for.
template <class Args>
kvspeed_status run(const Args& args, bool gpu,
                   kvspeed_status (*workspace)(const Args*, const kvspeed_execution*, size_t*),
                   kvspeed_status (*call)(const Args*, const kvspeed_execution*)) {
  kvspeed_execution execution = {};
  execution.device = gpu ? KVSPEED_CUDA : KVSPEED_CPU;
  execution.num_threads = 1;
  size_t bytes = 0;
  if (workspace != nullptr) {
    const kvspeed_status status = workspace(&args, &execution, &bytes);
    if (status != KVSPEED_OK) return status;
  }
  DeviceArray<unsigned char> on_device(gpu ? bytes : 0);
  std::vector<uint64_t> on_host(gpu ? 0 : (bytes + 64) / 8 + 8);
  const auto address = (reinterpret_cast<uintptr_t>(on_host.data()) + 63) / 64 * 64;
  execution.workspace = gpu ? static_cast<void*>(on_device.data()) : reinterpret_cast<void*>(address);
  execution.workspace_bytes = bytes;
  const kvspeed_status status = call(&args, &execution);
  if (gpu) kvspeed::native::finish("a call");
  return status;
}

void compare(const char* what, kvspeed_status status, const Both& gpu, const Both& cpu, kvspeed_dtype dtype,
             double tolerance) {
  double worst = 0;
  const std::vector<unsigned char> a = gpu.result(true), b = cpu.result(false);
  for (size_t i = 0; i < a.size() / size_of(dtype); ++i) {
    const double x = value_at(a.data(), i, dtype), y = value_at(b.data(), i, dtype);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;  // both untouched: the poison
    const double error = std::fabs(x - y);
    worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
  }
  const bool good = status == KVSPEED_OK && worst <= tolerance;
  failures += !good;
  std::printf("%s %s: %s, largest difference %.2e of %.2e\n", good ? "ok  " : "FAIL", what,
              kvspeed_status_string(status), worst, tolerance);
  if (status == KVSPEED_DEVICE_ERROR) std::printf("     %s\n", kvspeed_cuda_last_error());
}

std::vector<float> frequencies(int64_t half) {
  std::vector<float> inv_freq(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) inv_freq[i] = static_cast<float>(std::pow(10000.0, -double(i) / double(half)));
  return inv_freq;
}

// ---- rope_concat ---------------------------------------------------------------------------------------------------

struct ConcatCase {
  const char* name;
  kvspeed_dtype dtype;
  int64_t head_dim, rotary_dim;
  bool paged = false;
  kvspeed_storage storage = KVSPEED_STORED_PLAIN;
  bool interleaved = false;
};

void rope_concat(const ConcatCase& c) {
  constexpr int64_t kLayers = 2, kHeads = 3, kPage = 4, kStart = 2;
  const std::vector<int64_t> lengths = {5, 0, 1, 70};
  const int64_t total = 76, pages = 21, capacity = c.paged ? 20 * kPage : total + kStart + 3;
  const std::vector<float> inv_freq = frequencies(c.rotary_dim / 2);
  std::vector<Both> keys, values, key_scales, value_scales;
  for (int64_t tokens : lengths) {
    const size_t count = static_cast<size_t>(kLayers * kHeads * tokens * c.head_dim);
    const auto make = [&] {
      if (c.storage == KVSPEED_STORED_PLAIN) return numbers(count, c.dtype);
      std::vector<uint8_t> bytes(count);
      for (uint8_t& byte : bytes) {
        byte = static_cast<uint8_t>(generator());
        if ((byte & 0x7f) == 0x7f) byte = 0;  // float8's NaN
      }
      return array(bytes);
    };
    keys.push_back(make());
    values.push_back(make());
    key_scales.push_back(array(std::vector<float>(kLayers * kHeads, 1.0f / 64)));
    value_scales.push_back(array(std::vector<float>(kLayers * kHeads, 1.0f / 32)));
  }
  const size_t out_count = static_cast<size_t>(kLayers * kHeads * (c.paged ? pages * kPage : capacity) * c.head_dim);
  Both out_key = poison(out_count, c.dtype), out_value = poison(out_count, c.dtype);
  std::vector<int32_t> table(20);
  for (int i = 0; i < 20; ++i) table[static_cast<size_t>(i)] = (i * 7 + 3) % 20 + 1;
  Both pages_table = array(table);

  kvspeed_status status = KVSPEED_OK;
  for (bool gpu : {false, true}) {
    std::vector<kvspeed_packet> packets(lengths.size());
    int64_t position = kStart;
    for (size_t i = 0; i < packets.size(); ++i) {
      kvspeed_packet& p = packets[i];
      p = {};
      p.key = keys[i].on(gpu), p.value = values[i].on(gpu);
      const int64_t strides[3] = {kHeads * lengths[i] * c.head_dim, lengths[i] * c.head_dim, c.head_dim};
      std::copy(strides, strides + 3, p.key_stride);
      std::copy(strides, strides + 3, p.value_stride);
      p.tokens = lengths[i], p.offset = position;
      if (c.storage != KVSPEED_STORED_PLAIN) {
        p.key_scale = static_cast<const float*>(key_scales[i].on(gpu));
        p.value_scale = static_cast<const float*>(value_scales[i].on(gpu));
        p.key_scale_stride[0] = p.value_scale_stride[0] = kHeads;
        p.key_scale_stride[1] = p.value_scale_stride[1] = 1;
      }
      position += lengths[i];
    }
    kvspeed_rope_concat_args args = {};
    args.dtype = c.dtype, args.storage = c.storage;
    args.layers = kLayers, args.heads = kHeads, args.head_dim = c.head_dim, args.rotary_dim = c.rotary_dim;
    args.interleaved = c.interleaved;
    args.packets = packets.data(), args.num_packets = static_cast<int64_t>(packets.size());
    args.inv_freq = inv_freq.data();
    args.out_key = out_key.on(gpu), args.out_value = out_value.on(gpu);
    const int64_t plain[4] = {kHeads * capacity * c.head_dim, 0, capacity * c.head_dim, c.head_dim};
    const int64_t paged[4] = {pages * kPage * kHeads * c.head_dim, kPage * kHeads * c.head_dim, c.head_dim,
                              kHeads * c.head_dim};
    std::copy(c.paged ? paged : plain, (c.paged ? paged : plain) + 4, args.out_key_stride);
    std::copy(c.paged ? paged : plain, (c.paged ? paged : plain) + 4, args.out_value_stride);
    args.start = kStart, args.capacity = capacity;
    if (c.paged) {
      args.page_table = static_cast<const int32_t*>(pages_table.on(gpu));
      args.page_table_length = 20, args.page_size = kPage, args.pages = pages;
    }
    const kvspeed_status got = run(args, gpu, kvspeed_rope_concat_workspace, kvspeed_rope_concat);
    if (got != KVSPEED_OK) status = got;
  }
  const double largest = c.storage == KVSPEED_STORED_PLAIN ? 4.0 : 20.0;
  compare(c.name, status, out_key, out_key, c.dtype, largest * epsilon_of(c.dtype));
  compare("  its values, to the bit", status, out_value, out_value, c.dtype, 0.0);
}

// ---- segment_attention ---------------------------------------------------------------------------------------------

struct AttendCase {
  const char* name;
  kvspeed_dtype dtype;
  int64_t head_dim, query_tokens;
  std::vector<int64_t> segments;
  int64_t tail;
  int64_t heads = 4, heads_kv = 2;
  bool with_rope = false, padded = false, sinks = false;
  float softcap = 0.0f;
  int64_t window = 0, split_tokens = 0;
  bool device_length = false;  // the tail's length in device memory, shorter than its storage
  int64_t misaligned = 0;      // numbers by which keys and values are moved off 16 bytes
};

void attend(const AttendCase& c) {
  constexpr int64_t kBatch = 2;
  const std::vector<float> inv_freq = frequencies(c.head_dim / 2);
  const auto count = [&](int64_t tokens) {
    return static_cast<size_t>(kBatch * c.heads_kv * tokens * c.head_dim + c.misaligned);
  };
  Both query = numbers(static_cast<size_t>(kBatch * c.heads * c.query_tokens * c.head_dim), c.dtype);
  std::vector<Both> keys, values, rows, firsts;
  std::vector<int64_t> lengths = c.segments;
  lengths.push_back(c.device_length ? c.tail + 9 : c.tail);
  int64_t position = 3;
  std::vector<int64_t> offsets;
  for (int64_t tokens : lengths) {
    keys.push_back(numbers(count(tokens), c.dtype));
    values.push_back(numbers(count(tokens), c.dtype));
    offsets.push_back(position);
    std::vector<float> row(static_cast<size_t>(c.head_dim));
    kvspeed_rope_row(position, inv_freq.data(), c.head_dim / 2, row.data());
    rows.push_back(array(row));
    firsts.push_back(array(std::vector<int32_t>{static_cast<int32_t>(tokens / 3), 0}));
    position += tokens;
  }
  const int64_t tail_tokens[2] = {c.tail, c.tail};
  Both length = array(std::vector<int32_t>{static_cast<int32_t>(tail_tokens[0]), static_cast<int32_t>(tail_tokens[1])});
  std::vector<float> logits(static_cast<size_t>(c.heads));
  for (float& x : logits) x = static_cast<float>(static_cast<int>(generator() % 9)) / 4.0f - 1.0f;
  Both sinks = array(logits);
  const size_t out_count = static_cast<size_t>(kBatch * c.heads * c.query_tokens * c.head_dim);
  Both out = poison(out_count, c.dtype);
  Both lse = poison(static_cast<size_t>(kBatch * c.heads * c.query_tokens), KVSPEED_FLOAT32);

  kvspeed_status status = KVSPEED_OK;
  for (bool gpu : {false, true}) {
    std::vector<kvspeed_segment> segments(lengths.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      const bool is_tail = i + 1 == lengths.size();
      kvspeed_segment& s = segments[i];
      s = {};
      s.key = static_cast<unsigned char*>(keys[i].on(gpu)) + c.misaligned * 2;
      s.value = static_cast<unsigned char*>(values[i].on(gpu)) + c.misaligned * 2;
      const int64_t strides[3] = {c.heads_kv * lengths[i] * c.head_dim, lengths[i] * c.head_dim, c.head_dim};
      std::copy(strides, strides + 3, s.key_stride);
      std::copy(strides, strides + 3, s.value_stride);
      // The CPU is told the tail's length; the GPU may find it in memory.
      s.tokens = is_tail && c.device_length && !gpu ? c.tail : lengths[i];
      s.offset = is_tail ? 0 : offsets[i];
      s.start = is_tail ? offsets[i] : 0;
      if (c.padded) s.first = static_cast<const int32_t*>(firsts[i].on(gpu));
      if (c.with_rope && gpu && !is_tail) s.rope = static_cast<const float*>(rows[i].on(true));
    }
    kvspeed_segment_attention_args args = {};
    args.dtype = c.dtype;
    args.batch = kBatch, args.heads = c.heads, args.heads_kv = c.heads_kv;
    args.query_tokens = c.query_tokens, args.head_dim = args.rotary_dim = c.head_dim;
    args.inv_freq = inv_freq.data();
    args.query = query.on(gpu);
    const int64_t strides[3] = {c.heads * c.query_tokens * c.head_dim, c.query_tokens * c.head_dim, c.head_dim};
    std::copy(strides, strides + 3, args.query_stride);
    std::copy(strides, strides + 3, args.out_stride);
    args.segments = segments.data(), args.num_segments = static_cast<int64_t>(segments.size()) - 1;
    args.tail = segments.back();
    if (c.device_length && gpu) args.tail_tokens = static_cast<const int32_t*>(length.on(true));
    args.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    args.softcap = c.softcap, args.window = c.window, args.split_tokens = c.split_tokens;
    if (c.sinks) args.sinks = static_cast<const float*>(sinks.on(gpu));
    args.out = out.on(gpu), args.lse = static_cast<float*>(lse.on(gpu));
    const kvspeed_status got = run(args, gpu, kvspeed_segment_attention_workspace, kvspeed_segment_attention);
    if (got != KVSPEED_OK) status = got;
  }
  // Values are within 2, probabilities and the rotated query are rounded to 16 bits on the GPU alone.
  compare(c.name, status, out, out, c.dtype, 8.0 * epsilon_of(c.dtype));
  compare("  its log-sum-exp", status, lse, lse, KVSPEED_FLOAT32, 8.0 * epsilon_of(c.dtype));
}

// ---- merge_states --------------------------------------------------------------------------------------------------

void merge(kvspeed_dtype a, kvspeed_dtype b, int64_t head_dim) {
  constexpr int64_t kBatch = 2, kHeads = 3, kTokens = 5;
  const size_t rows = kBatch * kHeads * kTokens, count = rows * static_cast<size_t>(head_dim);
  Both out_a = numbers(count, a), out_b = numbers(count, b), out = poison(count, a);
  std::vector<float> lse(rows);
  for (float& x : lse) x = static_cast<float>(static_cast<int>(generator() % 41) - 20) / 4.0f;
  lse[0] = lse[7] = -INFINITY;
  Both lse_a = array(lse);
  std::shuffle(lse.begin() + 1, lse.end(), generator);
  Both lse_b = array(lse), joined = poison(rows, KVSPEED_FLOAT32);
  kvspeed_status status = KVSPEED_OK;
  for (bool gpu : {false, true}) {
    kvspeed_merge_states_args args = {};
    args.dtype_a = a, args.dtype_b = b;
    args.batch = kBatch, args.heads = kHeads, args.tokens = kTokens, args.head_dim = head_dim;
    const int64_t strides[3] = {kHeads * kTokens * head_dim, kTokens * head_dim, head_dim};
    const int64_t row_strides[3] = {kHeads * kTokens, kTokens, 1};
    for (int i = 0; i < 3; ++i) {
      args.out_a_stride[i] = args.out_b_stride[i] = args.out_stride[i] = strides[i];
      args.lse_a_stride[i] = args.lse_b_stride[i] = row_strides[i];
    }
    args.out_a = out_a.on(gpu), args.out_b = out_b.on(gpu), args.out = out.on(gpu);
    args.lse_a = static_cast<const float*>(lse_a.on(gpu)), args.lse_b = static_cast<const float*>(lse_b.on(gpu));
    args.lse = static_cast<float*>(joined.on(gpu));
    const kvspeed_status got = run<kvspeed_merge_states_args>(args, gpu, nullptr, kvspeed_merge_states);
    if (got != KVSPEED_OK) status = got;
  }
  compare("merge_states", status, out, out, a, 4.0 * epsilon_of(a));
  compare("  its log-sum-exp", status, joined, joined, KVSPEED_FLOAT32, 1e-5);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : std::random_device()();
  generator.seed(seed);
  std::printf("seed %u\n", seed);
  const kvspeed_dtype f32 = KVSPEED_FLOAT32, bf16 = KVSPEED_BFLOAT16, f16 = KVSPEED_FLOAT16;

  rope_concat({"rope_concat bf16", bf16, 128, 128});
  rope_concat({"rope_concat f16, half rotated, interleaved", f16, 64, 32, false, KVSPEED_STORED_PLAIN, true});
  rope_concat({"rope_concat f32, head_dim 46", f32, 46, 20});
  rope_concat({"rope_concat bf16, pages", bf16, 64, 64, true});
  rope_concat({"rope_concat int8 to bf16", bf16, 64, 64, false, KVSPEED_STORED_INT8});
  rope_concat({"rope_concat float8 to f16, pages", f16, 128, 128, true, KVSPEED_STORED_FLOAT8_E4M3FN});

  attend({"decode, tail alone", bf16, 128, 1, {}, 70});
  attend({"decode over segments, many splits", f16, 64, 1, {130, 0, 67}, 9, 4, 2, true, true, true, 0, 0, 64});
  attend({"decode, rows computed by the call, softcap", bf16, 128, 2, {65}, 5, 6, 2, false, false, true, 20.0f});
  attend({"decode, window, head_dim 256", bf16, 256, 1, {100}, 30, 4, 2, true, true, false, 0, 40});
  attend({"decode, length in device memory", f16, 128, 1, {33}, 50, 4, 2, true, false, false, 0, 0, 0, true});
  attend({"decode, misaligned", bf16, 80, 1, {40}, 20, 7, 1, true, false, false, 0, 0, 0, false, 3});
  attend({"decode, 33 segments", bf16, 64, 1, std::vector<int64_t>(33, 5), 4, 4, 2, true});
  attend({"prefill, causal", bf16, 128, 70, {}, 70});
  attend({"prefill over segments", f16, 64, 40, {50, 0, 81}, 40, 4, 2, true, true, true, 0, 0, 64});
  attend({"prefill, rows computed by the call, softcap, window",
          bf16,
          96,
          33,
          {65},
          40,
          6,
          2,
          false,
          false,
          false,
          20.0f,
          50});
  attend({"prefill, length in device memory, head_dim 256",
          f16,
          256,
          20,
          {33},
          50,
          4,
          2,
          true,
          false,
          false,
          0,
          0,
          0,
          true});
  attend({"prefill, misaligned", bf16, 80, 30, {40}, 30, 3, 1, true, false, false, 0, 0, 0, false, 1});
  attend({"prefill, 33 segments", bf16, 64, 20, std::vector<int64_t>(33, 5), 20, 4, 2, true});

  merge(bf16, bf16, 128);
  merge(f32, f16, 80);
  std::printf(failures == 0 ? "the GPU agrees with the CPU\n" : "%d checks FAILED\n", failures);
  return failures;
}
