// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Shared memory: bounds, bytes never written, bytes of a copy on its way, and races.
#include "simt/runtime.h"

namespace kvspeed::simt {
namespace {

// Has what another thread did at `then` happened before what f does now?
bool before(const Fiber& f, int other_warp, Time then) {
  return other_warp == f.warp ? then < f.time : then < f.time && !same_block_phase(then, f.time);
}

[[noreturn]] void bad(Fiber& f, const std::string& what, size_t offset, int other, const void* pc) {
  self = &f;  // a collective checks for all lanes: name the one it is about
  std::string text = what + ", shared byte " + std::to_string(offset);
  if (other >= 0) text += ", the other thread being " + std::to_string(other);
  fail(text, pc);
}

void check_read(Fiber& f, SharedCell& c, size_t offset, bool by_warp, const void* pc) {
  if (!c.valid) bad(f, "read of shared memory that nobody has written", offset, -1, pc);
  // A collective hands what it reads to other lanes, so even a lane's own store must lie before a barrier.
  if (c.writer != kNobody && (c.writer != f.thread || by_warp) && !before(f, c.writer / kWarpSize, c.written)) {
    bad(f, "race: read of what another thread wrote with no barrier between", offset, c.writer, pc);
  }
  const uint32_t lanes = by_warp ? ~0u : 1u << f.lane;
  if (same_block_phase(c.read, f.time)) {
    c.reading_lanes = c.read == f.time && c.last_warp == f.warp ? c.reading_lanes | lanes : lanes;
    c.reading_warps |= 1u << f.warp;
  } else {
    c.reading_lanes = lanes;
    c.reading_warps = 1u << f.warp;
  }
  c.read = f.time;
  c.last_warp = static_cast<uint8_t>(f.warp);
}

void check_write(Fiber& f, SharedCell& c, size_t offset, const void* pc) {
  if (c.writer != kNobody && c.writer != f.thread && !before(f, c.writer / kWarpSize, c.written)) {
    bad(f, "race: two threads write with no barrier between", offset, c.writer, pc);
  }
  if (same_block_phase(c.read, f.time)) {
    if ((c.reading_warps & ~(1u << f.warp)) != 0) {
      bad(f, "race: write over what another warp reads with no barrier between", offset, -1, pc);
    }
    if (c.last_warp == f.warp && c.read == f.time && (c.reading_lanes & ~(1u << f.lane)) != 0) {
      bad(f, "race: write over what another lane reads with no barrier between", offset, -1, pc);
    }
  }
  c.writer = static_cast<uint16_t>(f.thread);
  c.written = f.time;
  c.valid = true;
  c.reading_warps = c.reading_lanes = 0;
}

}  // namespace

size_t shared_offset(const Fiber& f, const void* p) {
  return static_cast<size_t>(static_cast<const unsigned char*>(p) - f.block->shared.data);
}

void check_shared(Fiber& f, size_t offset, size_t bytes, Access access, const void* pc) {
  Block& block = *f.block;
  ++block.stats.shared_accesses;
  if (offset > block.shared.bytes || bytes > block.shared.bytes - offset) {
    bad(f, "access beyond the block's " + std::to_string(block.shared.bytes) + " bytes of shared memory", offset, -1,
        pc);
  }
  for (size_t cell = offset / 2; cell <= (offset + bytes - 1) / 2; ++cell) {
    SharedCell& c = block.shared.cells[cell];
    if (c.in_flight) {
      bad(f, "access to bytes of an asynchronous copy that nobody has waited for", cell * 2, c.writer, pc);
    }
    if (!instrumented) continue;  // who wrote what is not known
    if (access == Access::kWrite) {
      check_write(f, c, cell * 2, pc);
    } else {
      check_read(f, c, cell * 2, access == Access::kReadByWarp, pc);
    }
  }
}

}  // namespace kvspeed::simt
