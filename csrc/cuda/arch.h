// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Which devices a list of built architectures serves: plain C++, so that it is tested without a device.
#ifndef KVSPEED_CUDA_ARCH_H_
#define KVSPEED_CUDA_ARCH_H_

namespace kvspeed::cuda {

// `archs` as kvspeed_cuda_archs() gives it, e.g. "80;86;90a;80-ptx"; `capability` 10 * major + minor, e.g. 90.
//
// Machine code of X.y runs on devices X.z with z >= y ("90a": on 9.0 alone; "100f": on those of its family from 10.0
// on), and PTX of X.y, which the driver compiles, on every later device ("90a-ptx": on 9.0 alone).
constexpr bool archs_serve(const char* archs, int capability) {
  const char* p = archs;
  while (*p != '\0') {
    int arch = 0;
    while (*p >= '0' && *p <= '9') arch = 10 * arch + (*p++ - '0');
    const char variant = *p == 'a' || *p == 'f' ? *p++ : '\0';
    const bool ptx = *p == '-';
    const bool same_major = arch / 10 == capability / 10;
    const bool serves = variant == 'a' ? arch == capability : arch <= capability && (same_major || (ptx && !variant));
    if (arch > 0 && serves) return true;
    while (*p != '\0' && *p++ != ';') {
    }
  }
  return false;
}

static_assert(archs_serve("80", 80) && archs_serve("80", 86) && !archs_serve("86", 80) && !archs_serve("80", 90));
static_assert(archs_serve("86;80-ptx", 121) && archs_serve("86;80-ptx", 80) && !archs_serve("86;80-ptx", 75));
static_assert(archs_serve("90a", 90) && !archs_serve("90a;90a-ptx", 100) && !archs_serve("", 80));
static_assert(archs_serve("100f", 103) && !archs_serve("100f-ptx", 120) && archs_serve("89;120", 121));

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_ARCH_H_
