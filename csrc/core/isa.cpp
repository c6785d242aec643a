// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#include "core/isa.h"

#include <initializer_list>

namespace kvspeed {
namespace {

[[maybe_unused]] bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

[[maybe_unused]] bool runs_avx512() {
#if defined(__x86_64__)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
#else
  return false;
#endif
}

}  // namespace

const CpuKernels* cpu_kernels(kvspeed_isa isa) {
  switch (isa) {
    case KVSPEED_ISA_AUTO:
      return cpu_kernels(kvspeed_isa_best());
    case KVSPEED_ISA_BASELINE:
      return &cpu::baseline::kKernels;
#if KVSPEED_HAVE_AVX2
    case KVSPEED_ISA_AVX2:
      return runs_avx2() ? &cpu::avx2::kKernels : nullptr;
#endif
#if KVSPEED_HAVE_AVX512
    case KVSPEED_ISA_AVX512:
      return runs_avx512() ? &cpu::avx512::kKernels : nullptr;
#endif
#if KVSPEED_HAVE_NEON
    case KVSPEED_ISA_NEON:
      return &cpu::neon::kKernels;
#endif
    default:
      return nullptr;
  }
}

}  // namespace kvspeed

kvspeed_isa kvspeed_isa_best(void) {
  for (kvspeed_isa isa : {KVSPEED_ISA_AVX512, KVSPEED_ISA_AVX2, KVSPEED_ISA_NEON}) {
    if (kvspeed::cpu_kernels(isa) != nullptr) return isa;
  }
  return KVSPEED_ISA_BASELINE;
}

int kvspeed_isa_available(kvspeed_isa isa) { return kvspeed::cpu_kernels(isa) != nullptr; }

const char* kvspeed_isa_name(kvspeed_isa isa) {
  switch (isa) {
    case KVSPEED_ISA_AUTO:
      return "auto";
    case KVSPEED_ISA_BASELINE:
      return "baseline";
    case KVSPEED_ISA_AVX2:
      return "avx2";
    case KVSPEED_ISA_AVX512:
      return "avx512";
    case KVSPEED_ISA_NEON:
      return "neon";
  }
  return "unknown";
}
