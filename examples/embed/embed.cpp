// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// kvspeed from C++, on plain arrays, with neither Python nor torch: the KV of two documents, computed apart and each
// from position 0, is used side by side in one attention, in both ways the library offers:
//
//   copy   rope_concat writes both into one cache, keys rotated to their new positions; attention reads the cache
//   view   segment_attention reads both where they lie, and rotates the query instead
//
// Prints how far the two answers are apart, and returns non-zero where that is more than rounding.
//
//   cmake -S examples/embed -B build/embed -DKVSPEED_CUDA=OFF && cmake --build build/embed && build/embed/embed
//
// Without CMake, with the baseline kernels alone:
//
//   g++ -std=c++20 -O3 -fopenmp -Icsrc/include -Icsrc -DKVSPEED_HAVE_BASELINE=1 -DKVSPEED_ISA_NAME=baseline
//       -DKVSPEED_SIMD_HEADER='"cpu/simd_baseline.h"' csrc/core/*.cpp csrc/cpu/kernels.cpp examples/embed/embed.cpp

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kvspeed/kvspeed.h"

namespace {

constexpr int64_t kLayers = 2, kHeads = 4, kHeadsKv = 2, kHeadDim = 64;
constexpr int64_t kTokens[2] = {37, 21};
constexpr int64_t kTotal = kTokens[0] + kTokens[1];

void Check(kvspeed_status status, const char* what) {
  if (status != KVSPEED_OK) {
    std::fprintf(stderr, "%s: %s\n", what, kvspeed_status_string(status));
    std::exit(1);
  }
}

std::vector<float> Random(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

// The library allocates nothing: the caller asks how much scratch memory a call needs, and brings it, 64-byte aligned.
class Workspace {
 public:
  kvspeed_execution Execution(size_t bytes, int threads) {
    storage_.resize(bytes + 64);
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    kvspeed_execution execution = {};  // zero first: the CPU, and the best instruction set it has
    execution.num_threads = threads;
    execution.workspace = reinterpret_cast<void*>((address + 63) / 64 * 64);
    execution.workspace_bytes = bytes;
    return execution;
  }

 private:
  std::vector<unsigned char> storage_;
};

void Attend(kvspeed_segment_attention_args& args, Workspace& workspace, std::vector<float>& out) {
  constexpr int kThreads = 2;
  args.dtype = KVSPEED_FLOAT32;
  args.batch = 1;
  args.heads = kHeads;
  args.heads_kv = kHeadsKv;
  args.query_tokens = 1;
  args.head_dim = args.rotary_dim = kHeadDim;
  args.query_stride[0] = args.out_stride[0] = kHeads * kHeadDim;
  args.query_stride[1] = args.out_stride[1] = kHeadDim;
  args.query_stride[2] = args.out_stride[2] = kHeadDim;
  args.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  out.assign(kHeads * kHeadDim, 0.0f);
  args.out = out.data();
  size_t bytes = 0;
  kvspeed_execution execution = workspace.Execution(0, kThreads);
  Check(kvspeed_segment_attention_workspace(&args, &execution, &bytes), "segment_attention_workspace");
  execution = workspace.Execution(bytes, kThreads);
  Check(kvspeed_segment_attention(&args, &execution), "segment_attention");
}

}  // namespace

int main() {
  std::mt19937 generator(2026);
  Workspace workspace;

  // The rotary frequencies of the model, as it has them: theta^(-2i/D).
  std::vector<float> inv_freq(kHeadDim / 2);
  for (int64_t i = 0; i < kHeadDim / 2; ++i) inv_freq[i] = static_cast<float>(std::pow(10000.0, -2.0 * i / kHeadDim));

  // Two documents: keys and values [layers, heads, tokens, head_dim], rotated for positions 0, 1, 2 ...
  std::vector<float> keys[2], values[2];
  kvspeed_packet packets[2] = {};
  int64_t position = 0;
  for (int d = 0; d < 2; ++d) {
    keys[d] = Random(kLayers * kHeadsKv * kTokens[d] * kHeadDim, generator);
    values[d] = Random(kLayers * kHeadsKv * kTokens[d] * kHeadDim, generator);
    packets[d].key = keys[d].data();
    packets[d].value = values[d].data();
    const int64_t strides[3] = {kHeadsKv * kTokens[d] * kHeadDim, kTokens[d] * kHeadDim, kHeadDim};
    std::copy(strides, strides + 3, packets[d].key_stride);
    std::copy(strides, strides + 3, packets[d].value_stride);
    packets[d].tokens = kTokens[d];
    packets[d].offset = position;  // used there, computed at 0
    position += kTokens[d];
  }

  // Copy: one call for all layers and both documents.
  const int64_t head_size = kTotal * kHeadDim, layer_size = kHeadsKv * head_size;
  std::vector<float> cache_key(kLayers * layer_size), cache_value(kLayers * layer_size);
  kvspeed_rope_concat_args concat = {};
  concat.dtype = KVSPEED_FLOAT32;
  concat.layers = kLayers;
  concat.heads = kHeadsKv;
  concat.head_dim = concat.rotary_dim = kHeadDim;
  concat.packets = packets;
  concat.num_packets = 2;
  concat.inv_freq = inv_freq.data();
  concat.out_key = cache_key.data();
  concat.out_value = cache_value.data();
  const int64_t out_strides[4] = {layer_size, 0, head_size, kHeadDim};
  std::copy(out_strides, out_strides + 4, concat.out_key_stride);
  std::copy(out_strides, out_strides + 4, concat.out_value_stride);
  concat.capacity = kTotal;
  size_t bytes = 0;
  kvspeed_execution execution = workspace.Execution(0, 2);
  Check(kvspeed_rope_concat_workspace(&concat, &execution, &bytes), "rope_concat_workspace");
  execution = workspace.Execution(bytes, 2);
  Check(kvspeed_rope_concat(&concat, &execution), "rope_concat");

  // One query after both documents, rotated for its own position already; here, layer 1.
  const std::vector<float> query = Random(kHeads * kHeadDim, generator);
  const int64_t layer = 1;

  kvspeed_segment whole = {};
  whole.key = cache_key.data() + layer * layer_size;
  whole.value = cache_value.data() + layer * layer_size;
  whole.key_stride[1] = whole.value_stride[1] = head_size;
  whole.key_stride[2] = whole.value_stride[2] = kHeadDim;
  whole.tokens = kTotal;
  kvspeed_segment_attention_args over_copy = {};
  over_copy.query = query.data();
  over_copy.segments = &whole;
  over_copy.num_segments = 1;
  std::vector<float> copied;
  Attend(over_copy, workspace, copied);

  // View: the same documents where they lie. Batch stride 0 would share them between all rows of a batch.
  kvspeed_segment segments[2] = {};
  for (int d = 0; d < 2; ++d) {
    segments[d].key = keys[d].data() + layer * packets[d].key_stride[0];
    segments[d].value = values[d].data() + layer * packets[d].value_stride[0];
    segments[d].key_stride[1] = segments[d].value_stride[1] = packets[d].key_stride[1];
    segments[d].key_stride[2] = segments[d].value_stride[2] = packets[d].key_stride[2];
    segments[d].tokens = packets[d].tokens;
    segments[d].offset = packets[d].offset;
  }
  kvspeed_segment_attention_args over_view = {};
  over_view.query = query.data();
  over_view.segments = segments;
  over_view.num_segments = 2;
  over_view.inv_freq = inv_freq.data();
  std::vector<float> viewed;
  Attend(over_view, workspace, viewed);

  float difference = 0.0f, largest = 0.0f;
  for (size_t i = 0; i < copied.size(); ++i) {
    difference = std::max(difference, std::fabs(copied[i] - viewed[i]));
    largest = std::max(largest, std::fabs(copied[i]));
  }
  std::printf("kernels: %s\n", kvspeed_isa_name(kvspeed_isa_best()));
  std::printf("largest output %.4f, copy and view differ by %.2e\n", largest, difference);
  return largest > 0.0f && difference < 1e-5f ? 0 : 1;
}
