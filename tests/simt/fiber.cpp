// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Stacks, and the switch from one to another: the registers that a callee must keep, and the stack pointer.
#include <sys/mman.h>

#include <memory>
#include <new>

#include "simt/runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" __attribute__((visibility("hidden"))) void kvspeed_simt_switch(void** save, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl kvspeed_simt_switch
.hidden kvspeed_simt_switch
.type kvspeed_simt_switch,@function
kvspeed_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvspeed_simt_switch,.-kvspeed_simt_switch
)");
constexpr int kSavedWords = 6;  // before the return address
constexpr int kFrameWords = 8;  // those, the address, and a word that keeps the stack as a call would leave it
constexpr int kEntryWord = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl kvspeed_simt_switch
.hidden kvspeed_simt_switch
.type kvspeed_simt_switch,%function
kvspeed_simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kvspeed_simt_switch,.-kvspeed_simt_switch
)");
constexpr int kFrameWords = 20;
constexpr int kEntryWord = 11;  // x30
#else
#error "The emulator's fibers need a switch for this processor; x86-64 and AArch64 have one."
#endif

namespace kvspeed::simt {
namespace {

struct Unmap {
  void operator()(char* p) const { munmap(p, kStackBytes); }
};

}  // namespace

char* fiber_stack(int i) {
  static thread_local std::vector<std::unique_ptr<char, Unmap>> stacks;
  while (stacks.size() <= static_cast<size_t>(i)) {
    void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    stacks.emplace_back(static_cast<char*>(p));
  }
  return stacks[static_cast<size_t>(i)].get();
}

void prepare_fiber(Fiber& fiber, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, kStackBytes);  // what the last fiber left when it ended
#endif
  // Tops of stacks a power of two apart would share a few cache sets, so each starts some lines lower than the last.
  const size_t colour = static_cast<size_t>(fiber.thread % 61) * 320;
  void** frame = reinterpret_cast<void**>(fiber.stack + kStackBytes - 256 - colour) - kFrameWords;
  for (int i = 0; i < kFrameWords; ++i) frame[i] = nullptr;
  frame[kEntryWord] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = frame;
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool from_is_done) {
  self = to.block == nullptr ? nullptr : &to;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(from_is_done ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
  kvspeed_simt_switch(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void enter_fiber([[maybe_unused]] Block& block) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (block.scheduler.stack == nullptr) {  // the first fiber of a block is entered from the scheduler
    block.scheduler.stack = static_cast<char*>(const_cast<void*>(bottom));
    block.scheduler.stack_bytes = bytes;
  }
#endif
}

}  // namespace kvspeed::simt
