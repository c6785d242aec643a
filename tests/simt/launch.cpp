// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// A launch: the blocks of a grid in random order, on one or more OS threads.
#include <atomic>
#include <mutex>
#include <thread>

#include "simt/global_memory.h"
#include "simt/runtime.h"

namespace kvspeed::simt {
namespace {

std::mutex mutex;  // of all below
Options the_options;
Stats the_stats;
std::string first_error;
std::atomic<uint32_t> launches{0};
thread_local std::string last_error;

constexpr int kInvalidConfiguration = 9, kFailed = 719;  // cudaErrorInvalidConfiguration, cudaErrorLaunchFailure

std::string wrong_configuration(const Launch& launch, size_t param_bytes) {
  const auto n = [](auto x) { return std::to_string(x); };
  const gpu::Grid& g = launch.grid;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
    return "a grid of " + n(g.x) + " x " + n(g.y) + " x " + n(g.z) +
           " blocks; 1 to 2^31 - 1, 65535 and 65535 are allowed";
  }
  if (launch.threads < kWarpSize || launch.threads > 1024 || launch.threads % kWarpSize != 0) {
    return n(launch.threads) + " threads a block; whole warps up to 1024 are allowed";
  }
  if (launch.shared_bytes > static_cast<size_t>(launch.options.max_shared_bytes)) {
    return n(launch.shared_bytes) + " bytes of shared memory; " + n(launch.options.max_shared_bytes) + " are allowed";
  }
  if (param_bytes > 32764) return n(param_bytes) + " bytes of parameters; 32764 are allowed";
  return "";
}

void shuffle(std::vector<uint32_t>& order, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = order.size(); i > 1; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[i - 1], order[(state >> 33) % i]);
  }
}

std::string run_grid(const Launch& launch) {
  const gpu::Grid& g = launch.grid;
  std::vector<uint32_t> order(size_t{g.x} * g.y * g.z);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  shuffle(order, launch.options.seed);

  std::atomic<size_t> next{0};
  std::string error;
  const auto work = [&] {
    Stats counted = {};
    for (size_t i; (i = next++) < order.size();) {
      const unsigned index[3] = {order[i] % g.x, order[i] / g.x % g.y, order[i] / g.x / g.y};
      const std::string text = run_block(launch, index, counted);
      if (text.empty()) continue;
      const std::lock_guard lock(mutex);
      if (error.empty()) error = text;
      next = order.size();
    }
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < sizeof(Stats) / sizeof(uint64_t); ++i) {
      reinterpret_cast<uint64_t*>(&the_stats)[i] += reinterpret_cast<const uint64_t*>(&counted)[i];
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < launch.options.threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  return error;
}

int report(int code, const std::string& text) {
  last_error = text;
  const std::lock_guard lock(mutex);
  if (first_error.empty()) first_error = text;
  return code;
}

}  // namespace

Options& options() { return the_options; }
Stats& stats() { return the_stats; }

std::string take_error() {
  const std::lock_guard lock(mutex);
  std::string text;
  text.swap(first_error);
  return text;
}

}  // namespace kvspeed::simt

namespace kvspeed::gpu {

using namespace kvspeed::simt;

const char* error_text(int error) { return error == 0 ? "no error" : last_error.c_str(); }

int launch_kernel(KernelCall call, const void* kernel, Grid grid, int threads, int shared_bytes, const void* params,
                  size_t param_bytes) {
  if (options().hollow) return ++the_stats.launches, 0;
  Launch launch = {call,       kernel,           params,   grid, threads, static_cast<size_t>(shared_bytes),
                   ++launches, &global_memory(), options()};
  std::string error = wrong_configuration(launch, param_bytes);
  if (!error.empty()) return report(kInvalidConfiguration, "launch of " + error);
  launch.memory->finish();
  if (!launch.memory->error().empty()) return report(kFailed, launch.memory->error());
  {
    const std::lock_guard lock(mutex);
    ++the_stats.launches;
  }
  error = run_grid(launch);
  return error.empty() ? 0 : report(kFailed, error);
}

}  // namespace kvspeed::gpu
