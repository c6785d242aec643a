// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// From an address in the code to a line of the source.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "simt/runtime.h"

namespace kvspeed::simt {

std::string source_place(const void* pc) {
  Dl_info info;
  if (pc == nullptr || dladdr(pc, &info) == 0 || info.dli_fname == nullptr) return "";
  // The return address lies behind the call. A program that is not position-independent keeps its own addresses.
  const uintptr_t base = reinterpret_cast<uintptr_t>(info.dli_fbase), at = reinterpret_cast<uintptr_t>(pc) - 1;
  std::string places;
  for (const uintptr_t address : {at - base, at}) {
    char command[1024], line[1024];
    std::snprintf(command, sizeof command, "addr2line -s -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
                  static_cast<size_t>(address));
    FILE* pipe = popen(command, "r");
    if (pipe == nullptr) return "";
    for (int i = 0; i < 4 && std::fgets(line, sizeof line, pipe) != nullptr; ++i) {
      line[std::strcspn(line, " \n")] = 0;
      if (line[0] == '?') break;
      places += (places.empty() ? " at " : " <- ") + std::string(line);
    }
    pclose(pipe);
    if (!places.empty()) break;
  }
  return places;
}

}  // namespace kvspeed::simt
