// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Which thread of a block runs next, and the two barriers. The order of warps and lanes is drawn from the seed.
#include <bit>
#include <cstring>

#include "simt/runtime.h"

namespace kvspeed::simt {

__thread Fiber* self = nullptr;

uint64_t Block::random() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

namespace {

void start_round(Block& block) {
  block.round = block.running->ready;
  block.running->ready = 0;
  block.first_lane = static_cast<int>(block.random() % kWarpSize);
}

Fiber& next_lane(Block& block) {
  const int lane = (std::countr_zero(std::rotr(block.round, block.first_lane)) + block.first_lane) % kWarpSize;
  block.round &= ~(1u << lane);
  return *block.running->lanes[lane];
}

void make_ready(Fiber& f) {
  f.state = State::kReady;
  f.block->warps[static_cast<size_t>(f.warp)].ready |= 1u << f.lane;
}

// This fiber stops: on to the next lane of the warp, or to the scheduler for another warp.
void leave(bool done = false) {
  Fiber& f = *self;
  Block& block = *f.block;
  ++block.stats.switches;
  if (block.error.empty()) {
    if (block.round == 0 && block.stay) start_round(block);
    if (block.round != 0) {
      Fiber& next = next_lane(block);
      if (&next != &f) switch_fiber(f, next, done);
      return;
    }
  }
  switch_fiber(f, block.scheduler, done);
}

void finish(Fiber& f) {
  Block& block = *f.block;
  Warp& warp = block.warps[static_cast<size_t>(f.warp)];
  if (!f.copies.empty()) fail("the thread returns with an asynchronous copy on its way (missing copy_wait<0>)");
  if (block.barriers < 0) block.barriers = f.block_barriers;
  if (f.block_barriers != block.barriers || block.at_barrier > 0) {
    fail("threads of one block pass different numbers of block barriers");
  }
  if (warp.arrived > 0) {
    fail(std::string("the thread returns while other lanes of its warp wait for it in ") + warp.name);
  }
  f.state = State::kDone;
  warp.lanes[f.lane] = nullptr;
  --warp.live;
  --block.live;
}

void fiber_main() {
  Fiber& f = *self;
  enter_fiber(*f.block);
  const Launch& launch = *f.block->launch;
  launch.call(launch.kernel, launch.params);
  ++f.quiet;
  finish(f);
  for (;;) leave(true);
}

void set_up(Block& block, const Launch& launch) {
  static thread_local std::vector<unsigned char> memory;
  constexpr size_t kAlignment = 1024;
  memory.resize(launch.shared_bytes + 2 * kAlignment);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  block.shared.data = memory.data() + (kAlignment - address % kAlignment) % kAlignment;
  block.shared.bytes = launch.shared_bytes;
  block.shared.cells.assign(launch.shared_bytes / 2 + 1, {});
  std::memset(block.shared.data, 0xff, launch.shared_bytes);  // NaN in every type

  const int threads = launch.threads;
  block.fibers.resize(static_cast<size_t>(threads));
  block.warps.resize(static_cast<size_t>((threads + kWarpSize - 1) / kWarpSize));
  block.live = threads;
  for (int i = 0; i < threads; ++i) {
    Fiber& f = block.fibers[static_cast<size_t>(i)];
    f.block = &block;
    f.thread = i;
    f.lane = i % kWarpSize;
    f.warp = i / kWarpSize;
    f.stack = fiber_stack(i);
    f.stack_bytes = kStackBytes;
    prepare_fiber(f, fiber_main);
    Warp& warp = block.warps[static_cast<size_t>(f.warp)];
    warp.lanes[f.lane] = &f;
    ++warp.live;
    warp.ready |= 1u << f.lane;
  }
}

std::string who_waits_where(const Block& block) {
  std::string text = "deadlock:";
  int listed = 0;
  for (const Fiber& f : block.fibers) {
    if (f.state == State::kDone) continue;
    if (++listed > 8) return text + " ...";
    text += (listed > 1 ? ", thread " : " thread ") + std::to_string(f.thread) + " waits in " + f.waits_in;
  }
  return text;
}

}  // namespace

void wait_as(State state, const char* name) {
  self->state = state;
  self->waits_in = name;
  leave();
}

void collective(Collective function, const char* name, void* argument) {
  Fiber& f = *self;
  Block& block = *f.block;
  Warp& warp = block.warps[static_cast<size_t>(f.warp)];
  if (warp.arrived > 0 && warp.collective != function) {
    fail(std::string("divergent warp: this lane calls ") + name + " while others wait in " + warp.name);
  }
  if (warp.live < kWarpSize) {
    fail(std::string(name) + " in a warp of which a lane has already returned");
  }
  warp.collective = function;
  warp.name = name;
  warp.arguments[f.lane] = argument;
  if (++warp.arrived < warp.live) {
    wait_as(State::kAtWarp, name);
    return;
  }
  function(block, warp.lanes, warp.arguments);
  warp.arrived = 0;
  for (Fiber* lane : warp.lanes) {
    if (lane != nullptr && lane != &f) make_ready(*lane);
  }
}

void pass_block_barrier() {
  Fiber& f = *self;
  Block& block = *f.block;
  ++f.block_barriers;
  if (block.barriers >= 0) fail("a block barrier after another thread of the block has returned");
  if (++block.at_barrier < block.live) {
    wait_as(State::kAtBlock, "sync_block");
    return;
  }
  block.at_barrier = 0;
  const Time time = next_block_barrier(f.time);
  if (time < f.time) fail("more block barriers than the emulator's clocks can count");
  for (Fiber& other : block.fibers) {
    other.time = time;
    if (&other != &f) make_ready(other);
  }
}

std::string run_block(const Launch& launch, const unsigned (&index)[3], Stats& stats) {
  Block block;
  block.launch = &launch;
  for (int i = 0; i < 3; ++i) block.index[i] = index[i];
  block.number = (index[2] * launch.grid.y + index[1]) * launch.grid.x + index[0];
  block.random_state = (launch.options.seed + 1) * 0x9e3779b97f4a7c15u ^ (block.number + 1) * 0xd1342543de82ef95u;
  if (block.random_state == 0) block.random_state = 1;
  for (int i = 0; i < 4; ++i) block.random();
  set_up(block, launch);

  while (block.live > 0 && block.error.empty()) {
    const size_t warps = block.warps.size(), start = block.random() % warps;
    size_t i = 0;
    while (i < warps && block.warps[(start + i) % warps].ready == 0) ++i;
    if (i == warps) {
      block.error = who_waits_where(block);
      break;
    }
    block.running = &block.warps[(start + i) % warps];
    start_round(block);
    const Schedule schedule = launch.options.schedule;
    block.stay = schedule == Schedule::kGreedy || (schedule == Schedule::kMixed && block.random() % 8 != 0);
    switch_fiber(block.scheduler, next_lane(block), false);
  }
  self = nullptr;
  ++block.stats.blocks;
  for (size_t i = 0; i < sizeof(Stats) / sizeof(uint64_t); ++i) {
    reinterpret_cast<uint64_t*>(&stats)[i] += reinterpret_cast<const uint64_t*>(&block.stats)[i];
  }
  return block.error;
}

void fail(const std::string& text, const void* pc) {
  Block& block = *self->block;
  ++self->quiet;
  if (block.error.empty()) {
    const auto n = [](auto x) { return std::to_string(x); };
    block.error = "block (" + n(block.index[0]) + ", " + n(block.index[1]) + ", " + n(block.index[2]) + ") thread " +
                  n(self->thread) + " (warp " + n(self->warp) + ", lane " + n(self->lane) + "): " + text +
                  source_place(pc);
  }
  for (;;) leave();  // never resumed: the scheduler ends the block
}

}  // namespace kvspeed::simt
