// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What the parts of simt_driver share: the words of the command line, random tensors, numbers of three types.
#ifndef KVSPEED_SIMT_DRIVER_H_
#define KVSPEED_SIMT_DRIVER_H_

#include <kvspeed/kvspeed.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kvspeed::driver {

// name=value words.
class Words {
 public:
  void set(const std::string& name, const std::string& value) { words_[name] = value; }
  bool has(const std::string& name) const { return words_.count(name) > 0; }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto it = words_.find(name);
    return it == words_.end() ? otherwise : it->second;
  }
  int64_t number(const std::string& name, int64_t otherwise) const {
    return has(name) ? std::atoll(words_.at(name).c_str()) : otherwise;
  }
  double real(const std::string& name, double otherwise) const {
    return has(name) ? std::atof(words_.at(name).c_str()) : otherwise;
  }

 private:
  std::map<std::string, std::string> words_;
};

struct Part {  // "37:5": 37 tokens at offset 5
  int64_t tokens, offset;
};
std::vector<Part> parts_of(const std::string& text);

kvspeed_dtype dtype_of(const std::string& name);
inline size_t bytes_of(kvspeed_dtype dtype) { return dtype == KVSPEED_FLOAT32 ? 4 : 2; }
double number_at(kvspeed_dtype dtype, const void* data, int64_t index);
void set_number(kvspeed_dtype dtype, void* data, int64_t index, double x);
double rounded(kvspeed_dtype dtype, double x);
double unit_roundoff(kvspeed_dtype dtype);  // half the distance of neighbours around 1

// Memory of exactly this many bytes, full of NaN, on a 16-byte boundary or, with `shift`, that many bytes behind one.
class Memory {
 public:
  explicit Memory(size_t bytes, size_t shift = 0);
  void* data() const { return data_; }

 private:
  std::unique_ptr<unsigned char[]> owner_;
  void* data_;
};

// A tensor of four dimensions, the last contiguous; the others with some room between rows where `pad` is set.
struct Tensor {
  kvspeed_dtype dtype = KVSPEED_FLOAT32;
  int64_t size[4] = {}, stride[3] = {};
  std::shared_ptr<Memory> memory;

  Tensor() = default;
  Tensor(kvspeed_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d, bool pad = false, size_t shift = 0);
  void randomise(std::mt19937& random);
  void* data() const { return memory->data(); }
  int64_t index(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return a * stride[0] + b * stride[1] + c * stride[2] + d;
  }
  double at(int64_t a, int64_t b, int64_t c, int64_t d) const { return number_at(dtype, data(), index(a, b, c, d)); }
};

std::vector<float> frequencies(int64_t half);

bool failed(kvspeed_status status, const char* what);  // prints why

// Runs `call` with a workspace of the size that `measure` says, on the emulator; prints what failed.
template <class Args, class Measure, class Call>
bool run_call(const Args& args, Measure measure, Call call) {
  kvspeed_execution execution = {};
  execution.device = KVSPEED_CUDA;
  size_t bytes = 0;
  if (failed(measure(&args, &execution, &bytes), "measuring the workspace")) return false;
  std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, (bytes + 127) / 64 * 64), &std::free);
  execution.workspace = workspace.get();
  execution.workspace_bytes = bytes;
  return !failed(call(&args, &execution), "the call");
}

// The largest difference, and what it is held to.
struct Difference {
  double largest = 0, scale = 0;
  bool wrong_number = false;  // NaN or infinity on one side only
  void add(double got, double want);
};

bool check_attention(const Words& words);
bool check_rope(const Words& words);
bool check_merge(const Words& words);

}  // namespace kvspeed::driver

#endif  // KVSPEED_SIMT_DRIVER_H_
