// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
//   simt_driver attention d=128 b=2 h=8 hkv=2 s=3 seg=100:7,33:-5 tail=70 window=50 softcap=20 sinks=1 split=64
//   simt_driver rope d=64 layers=2 heads=3 seg=37:5,5:0,64:11 page=16 start=3
//   simt_driver merge d=80 b=2 h=3 s=5
//
// Random tensors through the C API and the emulator, held against float64. Every run repeats over `seeds` seeds in all
// three schedules (schedule=0, 1 or 2 for one). The exit status is 0 where all agree and the emulator found no fault.
#include "simt/driver.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "simt/options.h"
#include "simt/types.h"

namespace kvspeed::driver {

std::vector<Part> parts_of(const std::string& text) {
  std::vector<Part> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, end - at);
    const size_t colon = word.find(':');
    parts.push_back({std::atoll(word.c_str()), colon == std::string::npos ? 0 : std::atoll(word.c_str() + colon + 1)});
    at = end + 1;
  }
  return parts;
}

kvspeed_dtype dtype_of(const std::string& name) {
  return name == "f32" ? KVSPEED_FLOAT32 : name == "f16" ? KVSPEED_FLOAT16 : KVSPEED_BFLOAT16;
}

double number_at(kvspeed_dtype dtype, const void* data, int64_t index) {
  if (dtype == KVSPEED_FLOAT32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == KVSPEED_BFLOAT16 ? gpu::to_float(gpu::bf16{bits}) : gpu::to_float(gpu::f16{bits});
}

void set_number(kvspeed_dtype dtype, void* data, int64_t index, double x) {
  const float f = static_cast<float>(x);
  if (dtype == KVSPEED_FLOAT32) {
    static_cast<float*>(data)[index] = f;
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == KVSPEED_BFLOAT16 ? gpu::from_float<gpu::bf16>(f).bits : gpu::from_float<gpu::f16>(f).bits;
  }
}

double rounded(kvspeed_dtype dtype, double x) {
  float place;
  set_number(dtype, &place, 0, x);
  return number_at(dtype, &place, 0);
}

double unit_roundoff(kvspeed_dtype dtype) {
  return dtype == KVSPEED_FLOAT32 ? 0x1p-24 : dtype == KVSPEED_FLOAT16 ? 0x1p-11 : 0x1p-8;
}

Memory::Memory(size_t bytes, size_t shift) : owner_(new unsigned char[bytes + shift]) {  // new aligns to 16
  std::memset(owner_.get(), 0xff, bytes + shift);
  data_ = owner_.get() + shift;
}

Tensor::Tensor(kvspeed_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d, bool pad, size_t shift)
    : dtype(dtype), size{a, b, c, d} {
  stride[2] = d + (pad ? 8 : 0);
  stride[1] = c * stride[2] + (pad ? 16 : 0);
  stride[0] = b * stride[1] + (pad ? 24 : 0);
  memory = std::make_shared<Memory>(static_cast<size_t>(a * stride[0]) * bytes_of(dtype), shift);
}

void Tensor::randomise(std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size[0]; ++i) {
    for (int64_t j = 0; j < size[1]; ++j) {
      for (int64_t k = 0; k < size[2]; ++k) {
        for (int64_t l = 0; l < size[3]; ++l) set_number(dtype, data(), index(i, j, k, l), normal(random));
      }
    }
  }
}

std::vector<float> frequencies(int64_t half) {
  std::vector<float> f(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    f[static_cast<size_t>(i)] =
        static_cast<float>(std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half)));
  }
  return f;
}

bool failed(kvspeed_status status, const char* what) {
  const std::string found = simt::take_error();
  if (status == KVSPEED_OK && found.empty()) return false;
  std::printf("%s: %s; %s\n", what, kvspeed_status_string(status), found.empty() ? "no fault found" : found.c_str());
  return true;
}

void Difference::add(double got, double want) {
  if (std::isfinite(want) != std::isfinite(got) || (!std::isfinite(want) && !(want == got))) {
    wrong_number = true;
  } else if (std::isfinite(want)) {
    largest = std::max(largest, std::fabs(got - want));
    scale = std::max(scale, std::fabs(want));
  }
}

}  // namespace kvspeed::driver

int main(int count, char** words) {
  using namespace kvspeed;
  driver::Words given;
  for (int i = 2; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = word.find('=');
    if (equals == std::string::npos) {
      std::fprintf(stderr, "%s is not name=value\n", words[i]);
      return 2;
    }
    given.set(word.substr(0, equals), word.substr(equals + 1));
  }
  const std::string what = count > 1 ? words[1] : "";
  const auto check = what == "attention" ? driver::check_attention
                     : what == "rope"    ? driver::check_rope
                     : what == "merge"   ? driver::check_merge
                                         : nullptr;
  if (check == nullptr) {
    std::fprintf(stderr, "usage: %s attention|rope|merge name=value ...\n", words[0]);
    return 2;
  }
  simt::options().threads = static_cast<int>(given.number("threads", 1));
  const int64_t first = given.number("seed", 1), seeds = given.number("seeds", 1);
  bool ok = true;
  for (int64_t seed = first; seed < first + seeds; ++seed) {
    for (int schedule = 0; schedule < 3; ++schedule) {
      if (given.has("schedule") && given.number("schedule", 0) != schedule) continue;
      simt::options().seed = static_cast<uint64_t>(seed);
      simt::options().schedule = static_cast<simt::Schedule>(schedule);
      simt::stats() = {};
      std::printf("seed=%d schedule=%d ", static_cast<int>(seed), schedule);
      if (!check(given)) ok = false;
      const simt::Stats& s = simt::stats();
      const auto n = [](uint64_t x) { return static_cast<unsigned long long>(x); };
      std::printf(
          "  launches %llu, blocks %llu, mma %llu, ldmatrix %llu (conflicts %llu), copies %llu, switches %llu\n",
          n(s.launches), n(s.blocks), n(s.mma), n(s.ldmatrix), n(s.ldmatrix_conflicts), n(s.async_copies),
          n(s.switches));
    }
  }
  return ok ? 0 : 1;
}
