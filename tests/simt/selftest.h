// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#ifndef KVSPEED_SIMT_SELFTEST_H_
#define KVSPEED_SIMT_SELFTEST_H_

#include <vector>

namespace kvspeed::selftest {

constexpr int kSharedBytes = 2048;

struct Params {
  const float* in;    // 64 numbers
  float* out;         // 64 numbers, not to be read
  float* scratch;     // 256 numbers that nobody has written
  const float* host;  // memory that was not announced
};

struct Case {
  const char* name;
  void (*kernel)(Params);
};

const std::vector<Case>& cases();
void check_announcements(unsigned seed);  // prints one line

}  // namespace kvspeed::selftest

#endif  // KVSPEED_SIMT_SELFTEST_H_
