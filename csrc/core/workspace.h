// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Carving typed arrays out of the caller's workspace. The same code measures and carves: with no memory behind it, a
// Workspace only counts; with too little, what it gave must not be touched, so a call checks what was used first.
#ifndef KVSPEED_CORE_WORKSPACE_H_
#define KVSPEED_CORE_WORKSPACE_H_

#include <kvspeed/kvspeed.h>

#include <cstddef>
#include <cstdint>

namespace kvspeed {

class Workspace {
 public:
  explicit Workspace(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  // Room for `count` of T, on a cache line of its own; NULL while measuring.
  template <class T>
  T* take(int64_t count) {
    const uintptr_t at = base_ == 0 ? 0 : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }

  size_t used() const { return used_; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
};

// Whether the workspace of a call holds the bytes that it used.
inline kvspeed_status check_workspace(const kvspeed_execution& execution, size_t bytes) {
  if (execution.workspace_bytes < bytes) return KVSPEED_WORKSPACE_TOO_SMALL;
  if (bytes > 0 && execution.workspace == nullptr) return KVSPEED_INVALID_ARGUMENT;
  if (reinterpret_cast<uintptr_t>(execution.workspace) % 64 != 0) return KVSPEED_INVALID_ARGUMENT;
  return KVSPEED_OK;
}

}  // namespace kvspeed

#endif  // KVSPEED_CORE_WORKSPACE_H_
