// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// cp.async. Its target holds NaN from the moment of issue until the thread waits for the copy's group, and until then
// nobody may touch it; the bytes that arrive are a write at the time of the wait, so others need a barrier after it.
#include <cstring>

#include "simt/global_memory.h"
#include "simt/runtime.h"

namespace kvspeed::simt {
namespace {

constexpr size_t kBytes = 16;

void set_in_flight(Fiber& f, size_t offset, bool in_flight) {
  for (size_t cell = offset / 2; cell < (offset + kBytes) / 2; ++cell) {
    f.block->shared.cells[cell].in_flight = in_flight;
  }
}

void land(Fiber& f, const AsyncCopy& copy) {
  const size_t offset = shared_offset(f, copy.to);
  set_in_flight(f, offset, false);
  check_shared(f, offset, kBytes, Access::kWrite, nullptr);
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, kBytes);
  } else {
    std::memcpy(copy.to, copy.from, kBytes);
  }
}

}  // namespace
}  // namespace kvspeed::simt

namespace kvspeed::gpu {

using namespace kvspeed::simt;

void copy16_async(void* to_shared, const void* from_global, bool ok) {
  Quiet quiet;
  Fiber& f = *self;
  ++f.block->stats.async_copies;
  const size_t offset = shared_offset(f, to_shared);
  if (offset >= f.block->shared.bytes) fail("asynchronous copy to an address that is not shared memory", KVS_CALLER);
  if (offset % kBytes != 0) fail("asynchronous copy to a shared address that is no multiple of 16", KVS_CALLER);
  if (reinterpret_cast<uintptr_t>(from_global) % kBytes != 0) {
    fail("asynchronous copy from a global address that is no multiple of 16", KVS_CALLER);
  }
  if (ok) check_global(f, from_global, kBytes, GlobalAccess::kRead, KVS_CALLER);
  check_shared(f, offset, kBytes, Access::kWrite, KVS_CALLER);
  set_in_flight(f, offset, true);
  std::memset(to_shared, 0xff, kBytes);
  f.copies.push_back({static_cast<unsigned char*>(to_shared),
                      ok ? static_cast<const unsigned char*>(from_global) : nullptr, f.copy_groups});
}

void copy_commit() { ++self->copy_groups; }

void wait_for_copies(int pending) {
  Quiet quiet;
  Fiber& f = *self;
  size_t landed = 0;
  while (landed < f.copies.size() && f.copies[landed].group < f.copy_groups - pending) land(f, f.copies[landed++]);
  f.copies.erase(f.copies.begin(), f.copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

}  // namespace kvspeed::gpu
