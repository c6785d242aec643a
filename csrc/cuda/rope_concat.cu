// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/rope_concat.cuh"

namespace kvspeed::cuda {
namespace {

template <int kBytes>
constexpr size_t kTableBytes = sizeof(uint32_t) * ConcatParams<kBytes>::kTableWords;

template <class T, bool kPlain, int kBytes>
int launch_with(const ConcatPlan& plan, gpu::Grid grid, gpu::Stream stream) {
  ConcatParams<kBytes> p;
  p.header = plan.header();
  char* table = reinterpret_cast<char*>(p.table);
  char* end = table;
  plan.write_table([&](const void* data, size_t bytes) {
    std::memcpy(end, data, bytes);
    end += bytes;
  });
  // What is left is never read, but graphs keep it and tools see it.
  std::memset(end, 0, static_cast<size_t>(table + kTableBytes<kBytes> - end));
  return gpu::launch(rope_concat_kernel<T, kPlain, kBytes>, grid, kConcatThreads, 0, stream, p);
}

template <class T, bool kPlain>
int launch_typed(const ConcatPlan& plan, gpu::Grid grid, gpu::Stream stream) {
  return plan.table_bytes() <= kTableBytes<kSmallParams> ? launch_with<T, kPlain, kSmallParams>(plan, grid, stream)
                                                         : launch_with<T, kPlain, kLargeParams>(plan, grid, stream);
}

int launch_plan(ConcatPlan& plan, kvspeed_dtype dtype, bool plain, int64_t sms, gpu::Stream stream) {
  const int64_t blocks = sms * kConcatBlocks;
  plan.cut(blocks, kConcatRows);
  const int64_t units = plan.header().units;
  const gpu::Grid grid = {static_cast<unsigned>(units < blocks ? units : blocks), 1, 1};
  switch (dtype) {
    case KVSPEED_FLOAT32:
      return plain ? launch_typed<float, true>(plan, grid, stream) : launch_typed<float, false>(plan, grid, stream);
    case KVSPEED_BFLOAT16:
      return plain ? launch_typed<gpu::bf16, true>(plan, grid, stream)
                   : launch_typed<gpu::bf16, false>(plan, grid, stream);
    default:
      return plain ? launch_typed<gpu::f16, true>(plan, grid, stream)
                   : launch_typed<gpu::f16, false>(plan, grid, stream);
  }
}

template <class P>
P* plus(P* p, int64_t bytes) {
  return p == nullptr ? p : reinterpret_cast<P*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes));
}
void* plus(void* p, int64_t bytes) { return plus(static_cast<char*>(p), bytes); }

// The layers [begin, begin + layers) of a call with one packet.
kvspeed_rope_concat_args some_layers(const kvspeed_rope_concat_args& g, kvspeed_packet& packet, int64_t begin,
                                     int64_t layers) {
  const int64_t number = g.dtype == KVSPEED_FLOAT32 ? 4 : 2, stored = g.storage == KVSPEED_STORED_PLAIN ? number : 1;
  packet = g.packets[0];
  packet.key = plus(static_cast<const char*>(packet.key), begin * packet.key_stride[0] * stored);
  packet.value = plus(static_cast<const char*>(packet.value), begin * packet.value_stride[0] * stored);
  packet.key_scale = plus(packet.key_scale, begin * packet.key_scale_stride[0] * 4);
  packet.value_scale = plus(packet.value_scale, begin * packet.value_scale_stride[0] * 4);
  kvspeed_rope_concat_args part = g;
  part.packets = &packet;
  part.layers = layers;
  part.inv_freq = plus(g.inv_freq, begin * g.inv_freq_layer_stride * 4);
  part.out_key = plus(g.out_key, begin * g.out_key_stride[0] * number);
  part.out_value = plus(g.out_value, begin * g.out_value_stride[0] * number);
  return part;
}

// In one launch where its table fits, which is the rule; else as two calls, one after the other.
int launch_call(const kvspeed_rope_concat_args& g, int64_t sms, gpu::Stream stream) {
  ConcatPlan plan(g);
  if (plan.empty()) return 0;
  if (plan.table_bytes() <= kTableBytes<kLargeParams>) {
    return launch_plan(plan, g.dtype, g.storage == KVSPEED_STORED_PLAIN, sms, stream);
  }
  if (g.num_packets > 1) {
    kvspeed_rope_concat_args first = g, second = g;
    first.num_packets = g.num_packets / 2;
    second.num_packets = g.num_packets - first.num_packets;
    second.packets = g.packets + first.num_packets;
    for (int64_t i = 0; i < first.num_packets; ++i) second.start += g.packets[i].tokens;
    const int error = launch_call(first, sms, stream);
    return error != 0 ? error : launch_call(second, sms, stream);
  }
  kvspeed_packet packet;
  const int64_t half = g.layers / 2;
  const int error = launch_call(some_layers(g, packet, 0, half), sms, stream);
  return error != 0 ? error : launch_call(some_layers(g, packet, half, g.layers - half), sms, stream);
}

}  // namespace

// Everything travels among the parameters of the launches.
size_t rope_concat_workspace(const kvspeed_rope_concat_args&) { return 0; }

kvspeed_status rope_concat(const kvspeed_rope_concat_args& args, const kvspeed_execution& execution) {
  gpu::announce(args, execution);
  {
    const ConcatPlan plan(args);
    if (!plan.representable() || plan.smallest_table_bytes() > kTableBytes<kLargeParams>) return KVSPEED_UNSUPPORTED;
    if (plan.empty()) return KVSPEED_OK;
  }
  const DeviceGuard guard(execution.device_index);
  if (guard.error() != 0) return report(guard.error());
  return report(launch_call(args, sm_count(execution.device_index), static_cast<gpu::Stream>(execution.stream)));
}

}  // namespace kvspeed::cuda
