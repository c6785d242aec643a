// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Holds the emulator's fragment layouts against CUTLASS's. Prints one line a check; the exit status says whether all
// hold. Built only where CUTLASS's and CUDA's headers are (see tests/test_simt_emulator.py).
#include "simt/oracle.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "cuda/gpu.h"
#include "simt/options.h"

namespace kvspeed::oracle {
namespace {

using namespace kvspeed::gpu;

struct Fragments {
  uint32_t a[32][4], b[32][2];
  float c[32][4];
};
struct Params {
  Fragments* fragments;
  const uint16_t* numbers;  // 256
  uint16_t* loaded;         // [32][8]
};

template <class T>
void multiply(const Params p) {
  Fragments& f = *p.fragments;
  const int t = thread_index();
  mma_m16n8k16<T>(f.c[t], f.a[t], f.b[t][0], f.b[t][1]);
}

template <bool kTransposed>
void load(const Params p) {
  KVS_SHARED(shared);
  const int t = thread_index();
  uint16_t* row = reinterpret_cast<uint16_t*>(shared) + 8 * t;
  std::memcpy(row, p.numbers + 8 * t, 16);
  sync_block();
  uint32_t r[4];
  if (kTransposed) {
    load_matrix_x4_transposed(r, row);
  } else {
    load_matrix_x4(r, row);
  }
  std::memcpy(p.loaded + 8 * t, r, 16);
}

bool run(void (*kernel)(Params), const Params& p) {
  const int error = launch(kernel, Grid{1, 1, 1}, 32, 512, nullptr, p);
  if (error != 0) std::printf("%s\n", error_text(error));
  return error == 0;
}

template <class T>
bool check_mma(bool is_bf16) {
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<float> normal;
  T a[256], b[128];  // column-major, as CUTLASS numbers them
  float c[128];
  for (T& x : a) x = from_float<T>(normal(random));
  for (T& x : b) x = from_float<T>(normal(random));
  for (float& x : c) x = normal(random);
  Fragments f = {};
  for (int t = 0; t < 32; ++t) {
    for (int v = 0; v < 8; ++v) f.a[t][v / 2] |= uint32_t{a[index_a(is_bf16, t, v)].bits} << (16 * (v % 2));
    for (int v = 0; v < 4; ++v) f.b[t][v / 2] |= uint32_t{b[index_b(is_bf16, t, v)].bits} << (16 * (v % 2));
    for (int v = 0; v < 4; ++v) f.c[t][v] = c[index_c(is_bf16, t, v)];
  }
  if (!run(multiply<T>, {&f, nullptr, nullptr})) return false;
  double error = 0;
  for (int t = 0; t < 32; ++t) {
    for (int v = 0; v < 4; ++v) {
      const int at = index_c(is_bf16, t, v), m = at % 16, n = at / 16;
      double want = c[at];
      for (int k = 0; k < 16; ++k) want += double{to_float(a[m + 16 * k])} * double{to_float(b[n + 8 * k])};
      error = std::fmax(error, std::fabs(want - double{f.c[t][v]}));
    }
  }
  std::printf("mma %s: largest error %.1e\n", is_bf16 ? "bf16" : "f16", error);
  return error < 1e-4;
}

bool check_load(bool transposed) {
  uint16_t numbers[256], loaded[256] = {};
  for (int i = 0; i < 256; ++i) numbers[i] = static_cast<uint16_t>(i);
  if (!run(transposed ? load<true> : load<false>, {nullptr, numbers, loaded})) return false;
  int wrong = 0;
  for (int t = 0; t < 32; ++t) {
    for (int e = 0; e < 8; ++e) wrong += loaded[8 * t + e] != loaded_number(transposed, t, e);
  }
  std::printf("ldmatrix.x4%s: %d of 256 wrong\n", transposed ? ".trans" : "", wrong);
  return wrong == 0;
}

}  // namespace
}  // namespace kvspeed::oracle

int main() {
  using namespace kvspeed;
  bool ok = oracle::check_mma<gpu::bf16>(true);
  ok = oracle::check_mma<gpu::f16>(false) && ok;
  ok = oracle::check_load(false) && ok;
  ok = oracle::check_load(true) && ok;
  return ok ? 0 : 1;
}
