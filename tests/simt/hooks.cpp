// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The runtime that -fsanitize=thread expects, replaced: a compiler told to instrument a kernel calls these functions
// for every load and store that it cannot keep in registers, and so plain accesses to shared memory are checked. Plain
// accesses to anything but shared memory, the thread's own stack and constants are errors: global memory is reached
// through the functions of gpu.h only.
#include <link.h>

#include <cstring>

#include "simt/runtime.h"

namespace kvspeed::simt {

bool instrumented = false;

namespace {

struct Constants {
  uintptr_t begin[8], end[8];
  int count = 0;
};

int add_constants(dl_phdr_info* info, size_t, void* data) {
  Constants& c = *static_cast<Constants*>(data);
  const uintptr_t here = reinterpret_cast<uintptr_t>(&add_constants);
  Constants found;
  bool ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
    if (header.p_type == PT_LOAD && here >= begin && here < end) ours = true;
    const bool constant = (header.p_type == PT_LOAD && (header.p_flags & PF_W) == 0) || header.p_type == PT_GNU_RELRO;
    if (constant && found.count < 8) found.begin[found.count] = begin, found.end[found.count++] = end;
  }
  if (ours) c = found;
  return ours ? 1 : 0;
}

bool is_constant(uintptr_t p) {
  static const Constants constants = [] {
    Constants c;
    dl_iterate_phdr(add_constants, &c);
    return c;
  }();
  for (int i = 0; i < constants.count; ++i) {
    if (p >= constants.begin[i] && p < constants.end[i]) return true;
  }
  return false;
}

// alignment: what the compiler relied on.
void plain(const void* p, size_t bytes, size_t alignment, bool write, const void* pc) {
  Fiber* f = self;
  if (f == nullptr || f->quiet > 0 || bytes == 0) return;
  const uintptr_t stack = reinterpret_cast<uintptr_t>(f->stack), at = reinterpret_cast<uintptr_t>(p);
  if (at - stack < kStackBytes) return;
  Quiet quiet;
  const size_t offset = shared_offset(*f, p);
  if (offset < f->block->shared.bytes) {
    if (at % alignment != 0) {
      fail(std::to_string(bytes) + "-byte access to a shared address that is no multiple of it", pc);
    }
    check_shared(*f, offset, bytes, write ? Access::kWrite : Access::kRead, pc);
    return;
  }
  if (offset < f->block->shared.bytes + 4096 || offset > ~size_t{4095}) {
    fail("access beyond the block's " + std::to_string(f->block->shared.bytes) + " bytes of shared memory", pc);
  }
  if (!write && is_constant(at)) return;
  fail(std::string("plain ") + (write ? "write to" : "read of") +
           " memory that is neither shared nor the thread's own (global memory goes through the functions of gpu.h)",
       pc);
}

[[noreturn]] void refuse(const char* what, const void* pc) {
  Quiet quiet;
  fail(what, pc);
}

}  // namespace
}  // namespace kvspeed::simt

using kvspeed::simt::plain;

extern "C" {

#define KVS_HOOKS(n)                                                                     \
  void __tsan_read##n(void* p) { plain(p, n, n, false, KVS_CALLER); }                    \
  void __tsan_write##n(void* p) { plain(p, n, n, true, KVS_CALLER); }                    \
  void __tsan_unaligned_read##n(void* p) { plain(p, n, 1, false, KVS_CALLER); }          \
  void __tsan_unaligned_write##n(void* p) { plain(p, n, 1, true, KVS_CALLER); }          \
  void __tsan_volatile_read##n(void* p) { plain(p, n, n, false, KVS_CALLER); }           \
  void __tsan_volatile_write##n(void* p) { plain(p, n, n, true, KVS_CALLER); }           \
  void __tsan_unaligned_volatile_read##n(void* p) { plain(p, n, 1, false, KVS_CALLER); } \
  void __tsan_unaligned_volatile_write##n(void* p) { plain(p, n, 1, true, KVS_CALLER); }
KVS_HOOKS(1)
KVS_HOOKS(2)
KVS_HOOKS(4)
KVS_HOOKS(8)
KVS_HOOKS(16)

void __tsan_read_range(void* p, unsigned long n) { plain(p, n, 1, false, KVS_CALLER); }
void __tsan_write_range(void* p, unsigned long n) { plain(p, n, 1, true, KVS_CALLER); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  plain(from, n, 1, false, KVS_CALLER);
  plain(to, n, 1, true, KVS_CALLER);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  plain(from, n, 1, false, KVS_CALLER);
  plain(to, n, 1, true, KVS_CALLER);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int c, unsigned long n) {
  plain(to, n, 1, true, KVS_CALLER);
  return std::memset(to, c, n);
}
void __tsan_init() { kvspeed::simt::instrumented = true; }  // called by every instrumented file when it is loaded
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

// Atomics: the host code of a launcher may use them, a kernel may not.
#define KVS_ATOMICS(bits, type)                                                                           \
  type __tsan_atomic##bits##_load(const volatile type* p, int) {                                          \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic load in a kernel", KVS_CALLER);     \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                       \
  void __tsan_atomic##bits##_store(volatile type* p, type v, int) {                                       \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic store in a kernel", KVS_CALLER);    \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                       \
  type __tsan_atomic##bits##_exchange(volatile type* p, type v, int) {                                    \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic in a kernel", KVS_CALLER);          \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                       \
  type __tsan_atomic##bits##_fetch_add(volatile type* p, type v, int) {                                   \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic in a kernel", KVS_CALLER);          \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                    \
  }                                                                                                       \
  type __tsan_atomic##bits##_fetch_or(volatile type* p, type v, int) {                                    \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic in a kernel", KVS_CALLER);          \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type v, int, int) { \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic in a kernel", KVS_CALLER);          \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }                                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type v, int, int) {   \
    if (kvspeed::simt::self != nullptr) kvspeed::simt::refuse("atomic in a kernel", KVS_CALLER);          \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);         \
  }
KVS_ATOMICS(8, unsigned char)
KVS_ATOMICS(16, unsigned short)
KVS_ATOMICS(32, unsigned int)
KVS_ATOMICS(64, unsigned long)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"
