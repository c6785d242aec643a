// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What parts of -fsanitize=undefined call where a kernel leaves the language: dereferences of misaligned pointers (a
// wrong answer or a trap on a GPU), indices beyond an array in registers, integer overflow, shifts too far. Host code
// of the same files is checked too, and stops the program.
#include <cstdio>
#include <cstdlib>

#include "simt/runtime.h"

namespace kvspeed::simt {
namespace {

// The start of every record that the compiler makes for a check.
struct Place {
  const char* file;
  uint32_t line, column;
};

void undefined(const char* what, const void* data) {
  const Place& place = *static_cast<const Place*>(data);
  const std::string file = place.file == nullptr ? "?" : place.file;
  const std::string text =
      std::string(what) + " at " + file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line);
  if (self == nullptr) {
    std::fprintf(stderr, "kvspeed emulator, in host code: %s\n", text.c_str());
    std::abort();
  }
  Quiet quiet;
  fail(text);
}

}  // namespace
}  // namespace kvspeed::simt

using kvspeed::simt::undefined;

#if !defined(__SANITIZE_ADDRESS__)  // there the real runtime is linked
extern "C" {
void __ubsan_handle_type_mismatch_v1(void* data, void*) { undefined("misaligned pointer dereferenced", data); }
void __ubsan_handle_out_of_bounds(void* data, void*) { undefined("index beyond an array", data); }
void __ubsan_handle_add_overflow(void* data, void*, void*) { undefined("integer overflow in a sum", data); }
void __ubsan_handle_sub_overflow(void* data, void*, void*) { undefined("integer overflow in a difference", data); }
void __ubsan_handle_mul_overflow(void* data, void*, void*) { undefined("integer overflow in a product", data); }
void __ubsan_handle_negate_overflow(void* data, void*) { undefined("integer overflow in a negation", data); }
void __ubsan_handle_divrem_overflow(void* data, void*, void*) { undefined("division by zero or overflow", data); }
void __ubsan_handle_shift_out_of_bounds(void* data, void*, void*) { undefined("shift by too many bits", data); }
}
#endif
