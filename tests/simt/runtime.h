// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The emulator's own structures. Kernels never see them.
//
// A block runs on one OS thread. Each of its threads is a fiber with a stack of its own; a fiber runs until it has to
// wait for others, and then jumps straight to the next lane of its warp that can run (scheduler.cpp). What it does to
// memory goes through shared.cpp or global.cpp: called by the functions of gpu.h, and, for plain loads and stores, by
// the compiler's thread-sanitizer instrumentation, whose runtime is replaced by hooks.cpp.
#ifndef KVSPEED_SIMT_RUNTIME_H_
#define KVSPEED_SIMT_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "simt/gpu.h"
#include "simt/options.h"

namespace kvspeed::simt {

struct Block;
struct Fiber;
class GlobalMemory;

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 256 << 10;

// ---- clocks --------------------------------------------------------------------------------------------------------
// A thread's time is (block barriers passed, warp barriers passed since). There are no other ways to wait for each
// other, so this pair says all that a vector clock would: threads of one warp are ordered by either number, threads of
// different warps by the first.

using Time = uint32_t;
constexpr int kWarpBits = 12;
constexpr Time next_block_barrier(Time t) { return ((t >> kWarpBits) + 1) << kWarpBits; }
constexpr bool same_block_phase(Time a, Time b) { return a >> kWarpBits == b >> kWarpBits; }

// ---- shared memory -------------------------------------------------------------------------------------------------

constexpr uint16_t kNobody = 0xffff;

// What is known of two neighbouring bytes of shared memory. The readers are those since the last write; a warp's lanes
// are kept for the warp that read last, which suffices: any other warp's read in that phase is already a race with a
// writer of this one.
struct SharedCell {
  Time written, read;
  uint32_t reading_warps, reading_lanes;
  uint16_t writer = kNobody;
  uint8_t last_warp;
  bool valid, in_flight;  // written at all; the target of a copy that has not been waited for
};

struct SharedMemory {
  unsigned char* data = nullptr;
  size_t bytes = 0;
  std::vector<SharedCell> cells;
};

extern bool instrumented;  // whether plain loads and stores of kernels are seen; else only some checks can be made

enum class Access { kRead, kReadByWarp, kWrite };
void check_shared(Fiber& f, size_t offset, size_t bytes, Access access, const void* pc);
// The same address as an offset into the block's shared memory; at least `bytes` (of the memory) where it is none.
size_t shared_offset(const Fiber& f, const void* p);

// ---- asynchronous copies -------------------------------------------------------------------------------------------

struct AsyncCopy {
  unsigned char* to;
  const unsigned char* from;  // null: zeros
  int group;
};

// ---- threads, warps, blocks ----------------------------------------------------------------------------------------

enum class State : uint8_t { kReady, kAtWarp, kAtBlock, kDone };

struct Fiber {
  Block* block = nullptr;  // null: the scheduler itself
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  size_t stack_bytes = 0;
  int thread = 0, lane = 0, warp = 0;
  Time time = 0;
  int block_barriers = 0;
  State state = State::kReady;
  const char* waits_in = "the start";
  int quiet = 0;  // > 0 while the emulator itself runs on this fiber: its own loads and stores are not the kernel's
  int copy_groups = 0;  // committed so far; copies not yet committed carry this number
  std::vector<AsyncCopy> copies;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

using Collective = void (*)(Block& block, Fiber* const* lanes, void* const* arguments);

struct Warp {
  uint32_t ready = 0;  // lanes that can run
  int live = 0, arrived = 0;
  Collective collective = nullptr;  // what the lanes that have arrived wait in
  const char* name = "";
  Fiber* lanes[kWarpSize] = {};  // null: has returned
  void* arguments[kWarpSize] = {};
};

struct Launch {
  gpu::KernelCall call;
  const void* kernel;
  const void* params;
  gpu::Grid grid;
  int threads;
  size_t shared_bytes;
  uint32_t number;  // of launches in this process
  GlobalMemory* memory;
  Options options;
};

struct Block {
  const Launch* launch = nullptr;
  unsigned index[3] = {};
  uint32_t number = 0;  // in the grid
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  SharedMemory shared;
  int live = 0, at_barrier = 0;
  int barriers = -1;  // that the threads which have returned passed
  std::string error;
  Stats stats = {};
  // Scheduling: lanes of `running` that still have a turn in this round, and where in the warp the round starts.
  Fiber scheduler;
  Warp* running = nullptr;
  uint32_t round = 0;
  int first_lane = 0;
  bool stay = false;
  uint64_t random_state = 1;

  uint64_t random();
};

extern __thread Fiber* self __attribute__((tls_model("initial-exec")));  // null outside kernels

// Runs one block to its end; its error, or "".
std::string run_block(const Launch& launch, const unsigned (&index)[3], Stats& stats);

// All live lanes of the warp meet here, and the last to arrive does it for all. A void* per lane.
void collective(Collective function, const char* name, void* argument);
void wait_as(State state, const char* name);
void pass_block_barrier();

// Ends the block with this text, prefixed with the thread and followed by the place in the source.
[[noreturn]] void fail(const std::string& text, const void* pc = nullptr);

std::string source_place(const void* pc);  // " at file:line <- file:line", from the debug information; "" without

// Held by every entry from a kernel into the emulator.
class Quiet {
 public:
  Quiet() : fiber_(self) {
    if (fiber_ != nullptr) ++fiber_->quiet;
  }
  ~Quiet() {
    if (fiber_ != nullptr) --fiber_->quiet;
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  Fiber* fiber_;
};

// ---- fibers --------------------------------------------------------------------------------------------------------

char* fiber_stack(int i);  // of this OS thread; made when first asked for
// Makes `fiber` start in `entry` when it is first switched to.
void prepare_fiber(Fiber& fiber, void (*entry)());
void switch_fiber(Fiber& from, Fiber& to, bool from_is_done);
void enter_fiber(Block& block);  // the first thing a fiber does

#define KVS_CALLER __builtin_return_address(0)

}  // namespace kvspeed::simt

#endif  // KVSPEED_SIMT_RUNTIME_H_
