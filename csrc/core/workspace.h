// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Carving typed arrays out of the caller's workspace. The same code measures and carves: with no memory behind it, a
// Workspace only counts.
#ifndef KVSPEED_CORE_WORKSPACE_H_
#define KVSPEED_CORE_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

namespace kvspeed {

class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

  // Room for `count` of T, on a cache line of its own; NULL while measuring.
  template <class T>
  T* take(int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }

  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace kvspeed

#endif  // KVSPEED_CORE_WORKSPACE_H_
