// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/rope_concat.cuh"

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace kvspeed::cuda {
namespace {

template <int kBytes>
constexpr size_t kTableBytes = sizeof(uint32_t) * ConcatParams<kBytes>::kTableWords;

// Where a table goes piece by piece: into memory of the host, and from there, when it is full, to the device.
struct TableWriter {
  char* buffer;
  size_t capacity;
  char* device;  // null: the buffer is all there is
  gpu::Stream stream;
  size_t used = 0;
  int error = 0;

  void append(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0 && error == 0) {
      if (used == capacity) flush();
      const size_t part = bytes < capacity - used ? bytes : capacity - used;
      std::memcpy(buffer + used, from, part);
      used += part, from += part, bytes -= part;
    }
  }
  void flush() {
    error = upload(device, buffer, used, stream);
    device += used;
    used = 0;
  }
};

struct ConcatLaunch {
  ConcatPlan& plan;
  gpu::Grid grid;
  gpu::Stream stream;
  void* workspace;

  template <class T, bool kPlain, int kBytes>
  int with_params(const ConcatParams<kBytes>& p) const {
    return gpu::launch(rope_concat_kernel<T, kPlain, kBytes>, grid, kConcatThreads, 0, stream, p);
  }

  template <class T, bool kPlain, int kBytes>
  int inlined() const {
    ConcatParams<kBytes> p;
    p.header = plan.header();
    TableWriter writer = {reinterpret_cast<char*>(p.table), kTableBytes<kBytes>, nullptr, stream};
    plan.write_table([&](const void* data, size_t bytes) { writer.append(data, bytes); });
    // What is left is never read, but it is captured into graphs and seen by tools.
    std::memset(reinterpret_cast<char*>(p.table) + writer.used, 0, kTableBytes<kBytes> - writer.used);
    return with_params<T, kPlain>(p);
  }

  template <class T, bool kPlain>
  int uploaded() const {
    alignas(16) char buffer[kUploadBytes / 16 * 16];
    TableWriter writer = {buffer, sizeof(buffer), static_cast<char*>(workspace), stream};
    plan.write_table([&](const void* data, size_t bytes) { writer.append(data, bytes); });
    if (writer.error == 0) writer.flush();
    if (writer.error != 0) return writer.error;
    ConcatParams<0> p;
    p.header = plan.header();
    p.header.device_table = static_cast<const uint32_t*>(workspace);
    return with_params<T, kPlain>(p);
  }

  template <class T, bool kPlain>
  int run(int64_t sms) {
    const int64_t blocks = sms * kConcatBlocks;
    plan.cut(blocks, kConcatThreads, kConcatRows<T, kPlain>);
    if (!plan.representable()) return kTooMuch;
    const int64_t units = plan.header().units;
    grid = {static_cast<unsigned>(units < blocks ? units : blocks), 1, 1};
    if (plan.table_bytes() <= kTableBytes<kSmallParams>) return inlined<T, kPlain, kSmallParams>();
    if (plan.table_bytes() <= kTableBytes<kLargeParams>) return inlined<T, kPlain, kLargeParams>();
    return uploaded<T, kPlain>();
  }

  static constexpr int kTooMuch = -1;
};

}  // namespace

size_t rope_concat_workspace(const kvspeed_rope_concat_args& args) {
  const ConcatPlan plan(args);
  const size_t bytes = plan.table_bytes();
  return plan.empty() || bytes <= kTableBytes<kLargeParams> ? 0 : (bytes + 63) / 64 * 64;
}

kvspeed_status rope_concat(const kvspeed_rope_concat_args& args, const kvspeed_execution& execution) {
  gpu::announce(args, execution);
  ConcatPlan plan(args);
  if (!plan.representable()) return KVSPEED_UNSUPPORTED;
  if (plan.empty()) return KVSPEED_OK;
  const DeviceGuard guard(execution.device_index);
  if (guard.error() != 0) return report(guard.error());
  const int sms = sm_count(execution.device_index);
  ConcatLaunch launch = {plan, {}, static_cast<gpu::Stream>(execution.stream), execution.workspace};
  const bool plain = args.storage == KVSPEED_STORED_PLAIN;
  int error;
  switch (args.dtype) {
    case KVSPEED_FLOAT32:
      error = plain ? launch.run<float, true>(sms) : launch.run<float, false>(sms);
      break;
    case KVSPEED_BFLOAT16:
      error = plain ? launch.run<gpu::bf16, true>(sms) : launch.run<gpu::bf16, false>(sms);
      break;
    default:
      error = plain ? launch.run<gpu::f16, true>(sms) : launch.run<gpu::f16, false>(sms);
  }
  return error == ConcatLaunch::kTooMuch ? KVSPEED_UNSUPPORTED : report(error);
}

}  // namespace kvspeed::cuda
