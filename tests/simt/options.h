// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// How the emulator runs kernels, and what it counted: for tests, drivers and the Python module.
#ifndef KVSPEED_SIMT_OPTIONS_H_
#define KVSPEED_SIMT_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvspeed::simt {

enum class Schedule {
  kGreedy = 0,       // a warp runs until all its lanes wait for other warps
  kInterleaved = 1,  // another warp after every step
  kMixed = 2,
};

struct Options {
  uint64_t seed = 1;  // of the order of blocks, warps and lanes
  Schedule schedule = Schedule::kMixed;
  int threads = 1;                  // OS threads that blocks run on
  int max_shared_bytes = 99 << 10;  // per block: the smallest limit of the GPUs that are built for (8.6, 8.9, 12.0)
  bool hollow = false;  // launches are counted and do nothing, so that what is left of a call is the host's part
};

struct Stats {
  uint64_t launches, blocks, mma, ldmatrix, ldmatrix_conflicts, async_copies, shared_accesses, global_accesses,
      switches;
};

Options& options();
Stats& stats();  // of all launches since it was last set to {}

// The text of the first failed launch since the last call of this function, then forgotten; "" where none failed.
std::string take_error();

// Memory that launches on this thread may touch, for tests that launch kernels without arguments of the C API.
void forget_memory();
enum class Allow { kRead, kWrite, kReadWrite };
void allow_memory(const void* p, size_t bytes, Allow allow, const char* name);

}  // namespace kvspeed::simt

#endif  // KVSPEED_SIMT_OPTIONS_H_
