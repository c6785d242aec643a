// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// kvspeed from C++ on a GPU, the way a serving stack holds its cache: the KV of two documents, computed apart, becomes
// pages of a paged cache (rope_concat), or is read where it lies (segment_attention with rotated queries). Both calls
// of attention are captured into one CUDA graph, which is then replayed.
//
// Prints how far the two answers are apart, and returns non-zero where that is more than rounding; 77 without a GPU.
//
//   cmake -G Ninja -S examples/embed -B build/embed -DKVSPEED_CUDA=ON -DKVSPEED_CUDA_ARCHS=native
//   cmake --build build/embed && build/embed/embed_cuda

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kvspeed/kvspeed.h"

namespace {

constexpr int64_t kLayers = 2, kHeads = 8, kHeadsKv = 2, kHeadDim = 64, kPageSize = 16;
constexpr int64_t kTokens[2] = {37, 21};
constexpr int64_t kPages = 8;
constexpr int32_t kPageTable[] = {5, 0, 3, 6};  // 4 pages of 16 hold the 58 tokens, in any order

using Bf16 = uint16_t;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void Check(kvspeed_status status, const char* what) {
  if (status == KVSPEED_OK) return;
  std::fprintf(stderr, "%s: %s %s\n", what, kvspeed_status_string(status),
               status == KVSPEED_DEVICE_ERROR ? kvspeed_cuda_last_error() : "");
  std::exit(1);
}

template <class T>
T* OnDevice(const std::vector<T>& numbers) {
  void* memory = nullptr;
  Check(cudaMalloc(&memory, numbers.size() * sizeof(T)), "cudaMalloc");
  Check(cudaMemcpy(memory, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<T*>(memory);
}

float ToFloat(Bf16 number) {
  const uint32_t bits = uint32_t{number} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::vector<Bf16> Random(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<Bf16> numbers(static_cast<size_t>(count));
  for (Bf16& number : numbers) {
    const float value = normal(generator);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    number = static_cast<Bf16>(bits >> 16);
  }
  return numbers;
}

// The library allocates nothing. A stack would take this from the arena it has; here it is made once a call.
void Bring(kvspeed_execution& execution, size_t bytes) {
  execution.workspace_bytes = bytes;
  if (bytes > 0) Check(cudaMalloc(&execution.workspace, bytes), "cudaMalloc");
}

}  // namespace

int main() {
  const char* message = "";
  int32_t capability = 0;
  if (kvspeed_cuda_device_count(&message) == 0) {
    std::printf("no GPU: %s\n", message);
    return 77;
  }
  if (!kvspeed_cuda_device_supported(0, &capability)) {
    std::printf("device 0 has compute capability %d, and the kernels were built for %s\n", capability,
                kvspeed_cuda_archs());
    return 77;
  }
  std::mt19937 generator(2026);
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  kvspeed_execution execution = {};
  execution.device = KVSPEED_CUDA;
  execution.stream = stream;

  std::vector<float> inv_freq(kHeadDim / 2);  // host memory: the library makes rotation rows of it
  for (int64_t i = 0; i < kHeadDim / 2; ++i) inv_freq[i] = static_cast<float>(std::pow(10000.0, -2.0 * i / kHeadDim));

  // Two documents, [layers, heads, tokens, head_dim], rotated for positions 0, 1, 2 ...
  kvspeed_packet packets[2] = {};
  int64_t total = 0;
  for (int d = 0; d < 2; ++d) {
    const int64_t strides[3] = {kHeadsKv * kTokens[d] * kHeadDim, kTokens[d] * kHeadDim, kHeadDim};
    packets[d].key = OnDevice(Random(kLayers * strides[0], generator));
    packets[d].value = OnDevice(Random(kLayers * strides[0], generator));
    std::copy(strides, strides + 3, packets[d].key_stride);
    std::copy(strides, strides + 3, packets[d].value_stride);
    packets[d].tokens = kTokens[d];
    packets[d].offset = total;
    total += kTokens[d];
  }

  // The cache of the serving stack: [layers, pages, page_size, heads, head_dim] for keys, the same for values.
  const int64_t token_size = kHeadsKv * kHeadDim, page_size = kPageSize * token_size, layer_size = kPages * page_size;
  Bf16* cache_key = OnDevice(std::vector<Bf16>(kLayers * layer_size));
  Bf16* cache_value = OnDevice(std::vector<Bf16>(kLayers * layer_size));
  const int32_t* page_table = OnDevice(std::vector<int32_t>(std::begin(kPageTable), std::end(kPageTable)));

  kvspeed_rope_concat_args concat = {};
  concat.dtype = KVSPEED_BFLOAT16;
  concat.layers = kLayers;
  concat.heads = kHeadsKv;
  concat.head_dim = concat.rotary_dim = kHeadDim;
  concat.packets = packets;
  concat.num_packets = 2;
  concat.inv_freq = inv_freq.data();
  concat.out_key = cache_key;
  concat.out_value = cache_value;
  const int64_t out_strides[4] = {layer_size, page_size, kHeadDim, token_size};
  std::copy(out_strides, out_strides + 4, concat.out_key_stride);
  std::copy(out_strides, out_strides + 4, concat.out_value_stride);
  concat.page_table = page_table;
  concat.page_table_length = std::size(kPageTable);
  concat.page_size = kPageSize;
  concat.pages = kPages;
  concat.capacity = concat.page_table_length * kPageSize;
  size_t bytes = 0;
  Check(kvspeed_rope_concat_workspace(&concat, &execution, &bytes), "rope_concat_workspace");
  kvspeed_execution concat_execution = execution;
  Bring(concat_execution, bytes);
  Check(kvspeed_rope_concat(&concat, &concat_execution), "rope_concat");

  // One query token after both documents, in layer 1.
  const int64_t layer = 1, out_size = kHeads * kHeadDim;
  kvspeed_segment paged = {};
  paged.key = cache_key + layer * layer_size;
  paged.value = cache_value + layer * layer_size;
  const int64_t paged_strides[3] = {page_size, kHeadDim, token_size};  // page, head, token
  std::copy(paged_strides, paged_strides + 3, paged.key_stride);
  std::copy(paged_strides, paged_strides + 3, paged.value_stride);
  paged.tokens = total;
  paged.page_table = page_table;
  paged.page_table_stride = std::size(kPageTable);
  paged.page_size = kPageSize;
  paged.pages = kPages;

  kvspeed_segment in_place[2] = {};
  for (int d = 0; d < 2; ++d) {
    in_place[d].key = static_cast<const Bf16*>(packets[d].key) + layer * packets[d].key_stride[0];
    in_place[d].value = static_cast<const Bf16*>(packets[d].value) + layer * packets[d].value_stride[0];
    std::copy(packets[d].key_stride + 1, packets[d].key_stride + 3, in_place[d].key_stride + 1);
    std::copy(packets[d].value_stride + 1, packets[d].value_stride + 3, in_place[d].value_stride + 1);
    in_place[d].tokens = packets[d].tokens;
    in_place[d].offset = packets[d].offset;
    // A row of cosines and sines an offset, brought over once: then a call has nothing to upload.
    std::vector<float> row(kHeadDim);
    Check(kvspeed_rope_row(packets[d].offset, inv_freq.data(), kHeadDim / 2, row.data()), "rope_row");
    in_place[d].rope = OnDevice(row);
  }

  kvspeed_segment_attention_args attention = {};
  attention.dtype = KVSPEED_BFLOAT16;
  attention.batch = attention.query_tokens = 1;
  attention.heads = kHeads;
  attention.heads_kv = kHeadsKv;
  attention.head_dim = attention.rotary_dim = kHeadDim;
  attention.inv_freq = inv_freq.data();
  attention.query = OnDevice(Random(out_size, generator));
  const int64_t row_strides[3] = {out_size, kHeadDim, kHeadDim};
  std::copy(row_strides, row_strides + 3, attention.query_stride);
  std::copy(row_strides, row_strides + 3, attention.out_stride);
  attention.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  kvspeed_segment_attention_args over_pages = attention, over_packets = attention;
  over_pages.segments = &paged;
  over_pages.num_segments = 1;
  over_pages.out = OnDevice(std::vector<Bf16>(out_size));
  over_packets.segments = in_place;
  over_packets.num_segments = 2;
  over_packets.out = OnDevice(std::vector<Bf16>(out_size));

  kvspeed_execution executions[2] = {execution, execution};
  kvspeed_segment_attention_args* calls[2] = {&over_pages, &over_packets};
  for (int i = 0; i < 2; ++i) {
    Check(kvspeed_segment_attention_workspace(calls[i], &executions[i], &bytes), "segment_attention_workspace");
    Bring(executions[i], bytes);
  }
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < 2; ++i) Check(kvspeed_segment_attention(calls[i], &executions[i]), "segment_attention");
  Check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  Check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  Check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

  std::vector<Bf16> paged_out(out_size), packets_out(out_size);
  Check(cudaMemcpy(paged_out.data(), over_pages.out, out_size * sizeof(Bf16), cudaMemcpyDeviceToHost), "cudaMemcpy");
  Check(cudaMemcpy(packets_out.data(), over_packets.out, out_size * sizeof(Bf16), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  float difference = 0.0f, largest = 0.0f;
  for (int64_t i = 0; i < out_size; ++i) {
    const float a = ToFloat(paged_out[i]), b = ToFloat(packets_out[i]);
    difference = std::fmax(difference, std::fabs(a - b));
    largest = std::fmax(largest, std::fabs(a));
  }
  std::printf("compute capability %d: largest output %.4f, pages and packets differ by %.2e\n", capability, largest,
              difference);
  return largest > 0.0f && difference <= largest / 64 ? 0 : 1;  // keys of the copy were rounded once more, to bfloat16
}
