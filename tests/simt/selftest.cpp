// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Runs every kernel of selftest_kernels.cu and prints one line each: "name schedule seed: what the emulator said", with
// "clean" and the sum of the output where it said nothing. tests/test_simt_emulator.py knows what it should say.
#include "simt/selftest.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "simt/gpu.h"
#include "simt/options.h"

int main(int count, char** words) {
  using namespace kvspeed;
  const int seeds = count > 1 ? std::atoi(words[1]) : 1;
  const std::string only = count > 2 ? words[2] : "";
  alignas(16) static float memory[4096];
  for (const selftest::Case& c : selftest::cases()) {
    if (std::strncmp(only.c_str(), c.name, only.size()) != 0) continue;
    for (int schedule = 0; schedule < 3; ++schedule) {
      for (int seed = 1; seed <= seeds; ++seed) {
        for (float& x : memory) x = 1.0f;
        selftest::Params p = {memory + 1024, memory + 2048, memory + 3072, memory};
        simt::options().seed = static_cast<uint64_t>(seed);
        simt::options().schedule = static_cast<simt::Schedule>(schedule);
        simt::forget_memory();
        simt::allow_memory(p.in, 64 * sizeof(float), simt::Allow::kRead, "in");
        simt::allow_memory(p.out, 64 * sizeof(float), simt::Allow::kWrite, "out");
        simt::allow_memory(p.scratch, 256 * sizeof(float), simt::Allow::kReadWrite, "scratch");
        const unsigned blocks = std::strncmp(c.name, "blocks_", 7) == 0 ? 2 : 1;
        const int error = gpu::launch(c.kernel, gpu::Grid{blocks, 1, 1}, 64, selftest::kSharedBytes, nullptr, p);
        const std::string found = simt::take_error();
        float sum = 0;
        for (int i = 0; i < 64; ++i) sum += p.out[i];
        std::printf("%s %d %d: ", c.name, schedule, seed);
        if (error == 0 && found.empty()) {
          std::printf("clean, sum %g\n", static_cast<double>(sum));
        } else {
          std::printf("%s\n", found.c_str());
        }
      }
    }
  }
  if (!only.empty()) return 0;

  const struct {
    const char* name;
    gpu::Grid grid;
    int threads, shared_bytes;
  } launches[] = {
      {"launch_no_blocks", {0, 1, 1}, 64, 0},        {"launch_wide_grid", {1, 65536, 1}, 64, 0},
      {"launch_partial_warp", {1, 1, 1}, 48, 0},     {"launch_many_threads", {1, 1, 1}, 1056, 0},
      {"launch_much_memory", {1, 1, 1}, 64, 101377}, {"launch_ok", {1, 1, 1}, 64, 101376},
  };
  for (const auto& launch : launches) {
    selftest::Params p = {memory + 1024, memory + 2048, memory + 3072, memory};
    simt::forget_memory();
    simt::allow_memory(p.in, 64 * sizeof(float), simt::Allow::kRead, "in");
    simt::allow_memory(p.out, 64 * sizeof(float), simt::Allow::kWrite, "out");
    const auto kernel = selftest::cases()[0].kernel;
    const int error = gpu::launch(kernel, launch.grid, launch.threads, launch.shared_bytes, nullptr, p);
    std::printf("%s: %s\n", launch.name, error == 0 ? "clean" : gpu::error_text(error));
    simt::take_error();
  }
  selftest::check_announcements(static_cast<unsigned>(std::random_device{}()));
  return 0;
}
