// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The global memory that a call may touch: ranges of bytes, each with its tensor's name. Writable ranges remember who
// wrote them, so that reads of scratch memory that nobody wrote and races between threads and blocks are found.
#ifndef KVSPEED_SIMT_GLOBAL_MEMORY_H_
#define KVSPEED_SIMT_GLOBAL_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "simt/runtime.h"

namespace kvspeed::simt {

// Two neighbouring bytes. Launch numbers start at 1, so 0 is "never".
struct GlobalCell {
  uint32_t write_launch, write_block, write_time, write_thread;
  uint32_t read_launch, read_block;
};

struct Range {
  uintptr_t begin, end;
  uintptr_t max_end;  // of this and all before it in the list: ranges of different inputs may overlap
  GlobalCell* cells;  // of writable ranges
  const char* name;
  bool readable;
};

enum class GlobalAccess { kRead, kReadOnce, kWrite };  // kReadOnce: by the path for data that no one writes meanwhile

class GlobalMemory {
 public:
  void clear();
  void add(uintptr_t begin, size_t bytes, Allow allow, const char* name);
  void finish();  // sorts what was added; "" or what is wrong with it
  const std::string& error() const { return error_; }

  const Range* find(uintptr_t begin, size_t bytes, bool write) const;
  std::string describe(uintptr_t begin, size_t bytes, bool write) const;  // why `find` found nothing

 private:
  std::vector<Range> inputs_, outputs_;
  std::vector<std::unique_ptr<GlobalCell[]>> cells_;
  std::string error_;
  bool finished_ = true;
};

GlobalMemory& global_memory();  // what was announced on this OS thread

void check_global(Fiber& f, const void* p, size_t bytes, GlobalAccess access, const void* pc);

}  // namespace kvspeed::simt

#endif  // KVSPEED_SIMT_GLOBAL_MEMORY_H_
