// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "simt/global_memory.h"

#include <algorithm>
#include <cstring>

namespace kvspeed::simt {
namespace {

bool earlier(const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; }

// Sorts, joins what one tensor holds without a gap, and drops repetitions.
void sort_and_join(std::vector<Range>& ranges) {
  std::stable_sort(ranges.begin(), ranges.end(), earlier);
  size_t kept = 0;
  for (const Range& r : ranges) {
    Range* last = kept > 0 ? &ranges[kept - 1] : nullptr;
    if (last != nullptr && r.begin <= last->end && std::strcmp(r.name, last->name) == 0) {
      last->end = std::max(last->end, r.end);
    } else if (last == nullptr || r.begin != last->begin || r.end != last->end) {
      ranges[kept++] = r;
    }
  }
  ranges.resize(kept);
  uintptr_t end = 0;
  for (Range& r : ranges) r.max_end = end = std::max(end, r.end);
}

const Range* find_in(const std::vector<Range>& ranges, uintptr_t begin, uintptr_t end) {
  auto after =
      std::upper_bound(ranges.begin(), ranges.end(), begin, [](uintptr_t at, const Range& r) { return at < r.begin; });
  while (after != ranges.begin()) {
    --after;
    if (end <= after->end) return &*after;
    if (end > after->max_end) return nullptr;
  }
  return nullptr;
}

}  // namespace

void GlobalMemory::clear() {
  inputs_.clear();
  outputs_.clear();
  cells_.clear();
  error_.clear();
  finished_ = true;
}

void GlobalMemory::add(uintptr_t begin, size_t bytes, Allow allow, const char* name) {
  if (bytes == 0) return;
  std::vector<Range>& list = allow == Allow::kRead ? inputs_ : outputs_;
  list.push_back({begin, begin + bytes, 0, nullptr, name, allow != Allow::kWrite});
  finished_ = false;
}

void GlobalMemory::finish() {
  if (finished_) return;
  finished_ = true;
  sort_and_join(inputs_);
  sort_and_join(outputs_);
  for (size_t i = 0; i < outputs_.size(); ++i) {
    Range& r = outputs_[i];
    if (i > 0 && r.begin < outputs_[i - 1].end && error_.empty()) {
      error_ = std::string("the call's ") + outputs_[i - 1].name + " and " + r.name + " overlap";
    }
    if (r.cells == nullptr) {
      cells_.push_back(std::make_unique<GlobalCell[]>((r.end - r.begin + 3) / 2));
      r.cells = cells_.back().get();
    }
  }
}

const Range* GlobalMemory::find(uintptr_t begin, size_t bytes, bool write) const {
  const Range* r = find_in(outputs_, begin, begin + bytes);
  if (r != nullptr && (write || r->readable)) return r;
  return write ? nullptr : find_in(inputs_, begin, begin + bytes);
}

std::string GlobalMemory::describe(uintptr_t begin, size_t bytes, bool write) const {
  const std::string what = std::to_string(bytes) + "-byte " + (write ? "write to " : "read of ");
  if (write) {
    if (const Range* r = find_in(inputs_, begin, begin + bytes)) return what + r->name + ", which is an input";
  } else {
    if (const Range* r = find_in(outputs_, begin, begin + bytes)) return what + r->name + ", which is an output";
  }
  const Range* nearest = nullptr;
  uintptr_t distance = ~uintptr_t{0};
  for (const auto* list : {&inputs_, &outputs_}) {
    for (const Range& r : *list) {
      const uintptr_t d = begin + bytes <= r.begin ? r.begin - begin : begin >= r.end ? begin - r.end + 1 : 0;
      if (d < distance) distance = d, nearest = &r;
    }
  }
  std::string text = what + "global memory out of bounds";
  if (nearest != nullptr && distance < (uintptr_t{1} << 30)) {
    text += std::string("; nearest is ") + nearest->name + ", ";
    text += begin < nearest->begin
                ? "which starts " + std::to_string(nearest->begin - begin) + " bytes after the address"
                : "which ends " + std::to_string(begin < nearest->end ? nearest->end - begin : begin - nearest->end) +
                      " bytes " + (begin < nearest->end ? "after" : "before") + " the address";
  } else {
    text += ", far from any tensor of the call (memory of the host, or never announced?)";
  }
  return text;
}

GlobalMemory& global_memory() {
  static thread_local GlobalMemory memory;
  return memory;
}

void check_global(Fiber& f, const void* p, size_t bytes, GlobalAccess access, const void* pc) {
  const Block& block = *f.block;
  const Launch& launch = *block.launch;
  ++f.block->stats.global_accesses;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
  const bool write = access == GlobalAccess::kWrite;
  if (begin % bytes != 0) {
    fail(std::to_string(bytes) + "-byte access to global memory at an address that is no multiple of " +
             std::to_string(bytes),
         pc);
  }
  if (shared_offset(f, p) < block.shared.bytes) fail("access to shared memory by a function for global memory", pc);
  const Range* range = launch.memory->find(begin, bytes, write);
  if (range == nullptr) fail(launch.memory->describe(begin, bytes, write), pc);
  if (range->cells == nullptr) return;

  const auto bad = [&](const char* what) { fail(std::string(what) + ": " + range->name, pc); };
  for (size_t i = (begin - range->begin) / 2; i <= (begin + bytes - 1 - range->begin) / 2; ++i) {
    GlobalCell& c = range->cells[i];
    const bool written_now = c.write_launch == launch.number;
    const bool by_other_block = written_now && c.write_block != block.number;
    const bool by_other_thread = written_now && !by_other_block && c.write_thread != static_cast<uint32_t>(f.thread);
    if (write) {
      if (by_other_block) bad("two blocks write the same bytes of global memory");
      if (by_other_thread) bad("two threads of a block write the same bytes of global memory");
      if (c.read_launch == launch.number && c.read_block != block.number) {
        bad("write to bytes of global memory that another block of the launch reads");
      }
      c.write_launch = launch.number;
      c.write_block = block.number;
      c.write_time = f.time;
      c.write_thread = static_cast<uint32_t>(f.thread);
    } else {
      if (c.write_launch == 0) bad("read of global memory that nobody has written");
      if (by_other_block) bad("read of bytes of global memory that another block of the launch writes");
      if (written_now && access == GlobalAccess::kReadOnce) {
        bad("read by the non-coherent path of global memory that this launch writes");
      }
      const bool same_warp = static_cast<int>(c.write_thread) / kWarpSize == f.warp;
      if (by_other_thread && (same_warp ? c.write_time >= f.time : same_block_phase(c.write_time, f.time))) {
        bad("race: read of global memory that another thread wrote with no barrier between");
      }
      c.read_launch = launch.number;
      c.read_block = block.number;
    }
  }
}

void forget_memory() { global_memory().clear(); }
void allow_memory(const void* p, size_t bytes, Allow allow, const char* name) {
  global_memory().add(reinterpret_cast<uintptr_t>(p), bytes, allow, name);
}

}  // namespace kvspeed::simt

namespace kvspeed::gpu {

using namespace kvspeed::simt;

namespace {

constexpr uint64_t kPolicy = 0x12f0000000000000;

template <class V>
V load(const void* p, GlobalAccess access, const void* pc) {
  Quiet quiet;
  check_global(*self, p, sizeof(V), access, pc);
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
void store(void* p, V v, const void* pc) {
  Quiet quiet;
  check_global(*self, p, sizeof(V), GlobalAccess::kWrite, pc);
  std::memcpy(p, &v, sizeof v);
}
void check_policy(uint64_t policy, const void* pc) {
  Quiet quiet;
  if (policy != kPolicy) fail("a load with a cache policy that stream_policy() did not make", pc);
}

}  // namespace

uint64_t stream_policy() { return kPolicy; }
uint4 load16_stream(const void* p, uint64_t policy) {
  check_policy(policy, KVS_CALLER);
  return load<uint4>(p, GlobalAccess::kReadOnce, KVS_CALLER);
}
uint2 load8_stream(const void* p, uint64_t policy) {
  check_policy(policy, KVS_CALLER);
  return load<uint2>(p, GlobalAccess::kReadOnce, KVS_CALLER);
}
uint4 load16(const void* p) { return load<uint4>(p, GlobalAccess::kRead, KVS_CALLER); }
void store16(void* p, uint4 v) { store(p, v, KVS_CALLER); }
uint64_t load_u64(const void* p) { return load<uint64_t>(p, GlobalAccess::kRead, KVS_CALLER); }
uint32_t load_u32(const void* p) { return load<uint32_t>(p, GlobalAccess::kRead, KVS_CALLER); }
uint16_t load_u16(const void* p) { return load<uint16_t>(p, GlobalAccess::kRead, KVS_CALLER); }
uint8_t load_u8(const void* p) { return load<uint8_t>(p, GlobalAccess::kRead, KVS_CALLER); }
void store_u32(void* p, uint32_t v) { store(p, v, KVS_CALLER); }
void store_u16(void* p, uint16_t v) { store(p, v, KVS_CALLER); }
float load_float(const float* p) { return load<float>(p, GlobalAccess::kRead, KVS_CALLER); }
int load_int(const int32_t* p) { return load<int32_t>(p, GlobalAccess::kRead, KVS_CALLER); }
void store_float(float* p, float v) { store(p, v, KVS_CALLER); }

}  // namespace kvspeed::gpu
