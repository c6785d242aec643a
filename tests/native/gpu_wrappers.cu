// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Every wrapper of csrc/cuda/gpu.h against plain host arithmetic. The emulator and the PTX are two implementations of
// the same names: this program, built both ways, is what says that they mean the same. Run it first on a new GPU.
//
//   nvcc -std=c++20 -Icsrc -Icsrc/include -Itests -arch=native tests/native/gpu_wrappers.cu -o wrappers && ./wrappers
//
// Prints one line a check; the exit status is the number of failures.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/gpu.h"
#include "native/device_array.h"

namespace {

namespace gpu = kvspeed::gpu;
using gpu::bf16;
using gpu::f16;
using kvspeed::native::DeviceArray;

int failures = 0;
std::mt19937 generator;

void expect(const char* what, size_t wrong, size_t count) {
  failures += wrong != 0;
  std::printf("%s %s: %zu of %zu differ\n", wrong == 0 ? "ok  " : "FAIL", what, wrong, count);
}

// ---- host arithmetic, written apart from the device's ---------------------------------------------------------------

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

constexpr int kBf16Mantissa = 7, kF16Mantissa = 10;
template <class T>
constexpr int kMantissa = kBf16Mantissa;
template <>
constexpr int kMantissa<f16> = kF16Mantissa;

// A 16-bit number's value, by its definition.
double value_of(uint16_t bits, int mantissa) {
  const int exponent_bits = 15 - mantissa, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
  double magnitude;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - bias - mantissa);
  } else {
    magnitude = std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

// The nearest 16-bit number, ties to even; by looking at both neighbours. Not for NaN.
uint16_t nearest(double x, int mantissa) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  const uint16_t infinity = static_cast<uint16_t>(((1 << (15 - mantissa)) - 1) << mantissa);
  int low = 0, high = infinity;  // the largest finite or infinite pattern whose value is at most the magnitude
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (value_of(static_cast<uint16_t>(middle), mantissa) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == infinity) return sign | infinity;
  const double below = value_of(static_cast<uint16_t>(low), mantissa);
  const double step = std::ldexp(1.0, std::max((low >> mantissa), 1) - ((1 << (14 - mantissa)) - 1) - mantissa);
  const double rest = (magnitude - below) / step;
  if (rest > 0.5 || (rest == 0.5 && (low & 1))) ++low;
  return sign | static_cast<uint16_t>(low);
}

// Floats of every exponent and sign, with the special ones, and some half way between 16-bit neighbours.
std::vector<float> hostile_floats(size_t count) {
  std::vector<float> x = {0.0f,       -0.0f,    1.0f,     -1.0f,         INFINITY,       -INFINITY,
                          65504.0f,   65519.9f, 65520.0f, 3.3895314e38f, 3.39617752e38f, 1e-40f,
                          6.1035e-5f, 5.96e-8f, 2.98e-8f, 1.00390625f,   1.0117188f,     1.00048828125f};
  while (x.size() < count) {
    const uint32_t bits = static_cast<uint32_t>(generator());
    const float any = float_of(bits), half_way = float_of((bits & 0xffff0000u) | 0x8000u);
    if (!std::isnan(any)) x.push_back(any);
    if (!std::isnan(half_way)) x.push_back(half_way);
  }
  x.resize(count);
  return x;
}

std::vector<uint32_t> random_words(size_t count) {
  std::vector<uint32_t> words(count);
  for (uint32_t& word : words) word = static_cast<uint32_t>(generator());
  return words;
}

template <class Params>
void run(const char* what, void (*kernel)(Params), gpu::Grid grid, int threads, int shared_bytes,
         const Params& params) {
  kvspeed::native::show_arrays();
  const int error = gpu::launch(kernel, grid, threads, shared_bytes, gpu::Stream{}, params);
  if (error != 0) {
    std::printf("FAIL %s: the launch returned %d: %s\n", what, error, kvspeed::native::error_text(error).c_str());
    std::exit(1);
  }
  kvspeed::native::finish(what);
}

// ---- where a thread is ---------------------------------------------------------------------------------------------

struct PlaceParams {
  int32_t* out;  // [z][y][x][thread][5]
};
KVS_KERNEL(64, 1) void place_kernel(KVS_PARAM PlaceParams p) {
  const int block = (gpu::block_index_z() * 3 + gpu::block_index_y()) * gpu::block_count() + gpu::block_index();
  int32_t* out = p.out + (block * 64 + gpu::thread_index()) * 5;
  gpu::store_u32(out, static_cast<uint32_t>(gpu::compute_here(gpu::thread_index())));
  gpu::store_u32(out + 1, static_cast<uint32_t>(gpu::block_index()));
  gpu::store_u32(out + 2, static_cast<uint32_t>(gpu::block_index_y()));
  gpu::store_u32(out + 3, static_cast<uint32_t>(gpu::block_index_z()));
  gpu::store_u32(out + 4, static_cast<uint32_t>(gpu::block_count()));
}

void check_places() {
  constexpr int kX = 4, kY = 3, kZ = 2, kThreads = 64;
  DeviceArray<int32_t> out(kX * kY * kZ * kThreads * 5);
  out.fill(-1);
  run("places", place_kernel, {kX, kY, kZ}, kThreads, 0, PlaceParams{out.data()});
  const std::vector<int32_t> got = out.host();
  size_t wrong = 0, at = 0;
  for (int z = 0; z < kZ; ++z) {
    for (int y = 0; y < kY; ++y) {
      for (int x = 0; x < kX; ++x) {
        for (int t = 0; t < kThreads; ++t) {
          for (int expected : {t, x, y, z, kX}) wrong += got[at++] != expected;
        }
      }
    }
  }
  expect("thread_index, block_index, block_index_y, block_index_z, block_count, compute_here", wrong, at);
}

// ---- numbers -------------------------------------------------------------------------------------------------------

template <class T>
struct NumberParams {
  const T* all;         // the 65536 patterns
  const float* floats;  // [n]
  float* widened;       // [65536]: to_float
  T* narrowed;          // [n]: from_float
  uint32_t* packed;     // [n / 2]: pack2 of neighbours
  float* unpacked;      // [65536]: unpack2 of neighbouring patterns
  int n;
};
template <class T>
KVS_KERNEL(256, 1)
void number_kernel(KVS_PARAM NumberParams<T> p) {
  const int thread = gpu::block_index() * 256 + gpu::thread_index(), step = gpu::block_count() * 256;
  for (int i = thread; i < 65536; i += step) {
    gpu::store_float(p.widened + i, gpu::to_float(gpu::load_number(p.all + i)));
  }
  for (int i = thread; i < 32768; i += step) {
    const float2 pair = gpu::unpack2<T>(gpu::load_u32(reinterpret_cast<const uint32_t*>(p.all) + i));
    gpu::store_float(p.unpacked + 2 * i, pair.x);
    gpu::store_float(p.unpacked + 2 * i + 1, pair.y);
  }
  for (int i = thread; i < p.n; i += step) {
    gpu::store_number(p.narrowed + i, gpu::from_float<T>(gpu::load_float(p.floats + i)));
  }
  for (int i = thread; i < p.n / 2; i += step) {
    gpu::store_u32(p.packed + i,
                   gpu::pack2<T>(gpu::load_float(p.floats + 2 * i), gpu::load_float(p.floats + 2 * i + 1)));
  }
}

template <class T>
void check_numbers(const char* type) {
  constexpr int kFloats = 20000;
  std::vector<uint16_t> patterns(65536);
  for (int i = 0; i < 65536; ++i) patterns[i] = static_cast<uint16_t>(i);
  const std::vector<float> floats = hostile_floats(kFloats);
  DeviceArray<uint16_t> all(patterns), narrowed(kFloats);
  DeviceArray<float> in(floats), widened(65536), unpacked(65536);
  DeviceArray<uint32_t> packed(kFloats / 2);
  run("numbers", number_kernel<T>, {8, 1, 1}, 256, 0,
      NumberParams<T>{reinterpret_cast<const T*>(all.data()), in.data(), widened.data(),
                      reinterpret_cast<T*>(narrowed.data()), packed.data(), unpacked.data(), kFloats});
  const std::vector<float> wide = widened.host(), split = unpacked.host();
  const std::vector<uint16_t> narrow = narrowed.host();
  const std::vector<uint32_t> pairs = packed.host();
  size_t wrong_wide = 0, wrong_split = 0, wrong_narrow = 0, wrong_pack = 0;
  for (int i = 0; i < 65536; ++i) {
    const float expected = static_cast<float>(value_of(patterns[i], kMantissa<T>));
    wrong_wide += !same(wide[i], expected);
    wrong_split += !same(split[i], expected);
  }
  for (int i = 0; i < kFloats; ++i) {
    const uint16_t expected = nearest(floats[i], kMantissa<T>);
    wrong_narrow += narrow[i] != expected;
    wrong_pack += static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16)) != expected;
  }
  std::printf("%s:\n", type);
  expect("to_float, load_number", wrong_wide, 65536);
  expect("unpack2, load_u32", wrong_split, 65536);
  expect("from_float, store_number", wrong_narrow, kFloats);
  expect("pack2, store_u32", wrong_pack, kFloats);
}

struct MathParams {
  const float* in;  // [n][3]
  uint32_t* out;    // [n][8]
  int n;
};
KVS_KERNEL(256, 1)
void math_kernel(KVS_PARAM MathParams p) {
  for (int i = gpu::thread_index(); i < p.n; i += 256) {
    const float a = gpu::load_float(p.in + 3 * i), b = gpu::load_float(p.in + 3 * i + 1);
    const float c = gpu::load_float(p.in + 3 * i + 2);
    uint32_t* out = p.out + 8 * i;
    gpu::store_u32(out, gpu::float_bits(gpu::mul_rn(a, b) + c));  // two roundings, whatever nvcc would fuse
    gpu::store_u32(out + 1, gpu::float_bits(gpu::fma_rn(a, b, c)));
    gpu::store_u32(out + 2, gpu::float_bits(gpu::exp2_approx(a)));
    gpu::store_float(reinterpret_cast<float*>(out + 3), gpu::bits_float(gpu::float_bits(c)));
    gpu::store_float(reinterpret_cast<float*>(out + 4), gpu::from_float<float>(gpu::to_float(c)));
    gpu::store_u32(out + 5, gpu::float_bits(gpu::reciprocal_approx(b)));
    gpu::store_u32(out + 6, gpu::float_bits(gpu::log2_accurate(b * b)));
    gpu::store_u32(out + 7, gpu::float_bits(gpu::larger(i % 5 == 0 ? gpu::bits_float(0x7fc00000u) : a, b)));
  }
}

void check_math() {
  constexpr int kCount = 20000;
  std::uniform_real_distribution<float> uniform(-126.0f, 127.0f), near_one(-4.0f, 4.0f);
  std::vector<float> in(3 * kCount);
  for (int i = 0; i < kCount; ++i) {
    in[3 * i] = i % 2 ? near_one(generator) : uniform(generator);
    in[3 * i + 1] = i % 3 ? uniform(generator) : std::exp2(uniform(generator) / 3);
    in[3 * i + 2] = uniform(generator) * 100.0f;
  }
  in[0] = -INFINITY, in[3] = 0.0f, in[6] = 127.0f, in[9] = -126.0f, in[12] = -1000.0f;
  in[1] = INFINITY, in[4] = 1.0f;
  DeviceArray<float> input(in);
  DeviceArray<uint32_t> output(8 * kCount);
  run("math", math_kernel, {1, 1, 1}, 256, 0, MathParams{input.data(), output.data(), kCount});
  const std::vector<uint32_t> got = output.host();
  size_t wrong_mul = 0, wrong_fma = 0, wrong_exp = 0, wrong_bits = 0, wrong_over = 0, wrong_log = 0, wrong_larger = 0;
  double worst_exp = 0, worst_over = 0, worst_log = 0;
  for (int i = 0; i < kCount; ++i) {
    const float a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
    const uint32_t* out = &got[8 * i];
    volatile float product = a * b;  // volatile: the host must not fuse it either
    wrong_mul += !same(float_of(out[0]), product + c);
    wrong_fma += !same(float_of(out[1]), std::fma(a, b, c));
    const double power = std::exp2(static_cast<double>(a)), found = float_of(out[2]);
    const double error = power < 1.1754944e-38 ? found : std::fabs(found - power) / power;  // below: flushed to 0
    worst_exp = std::max(worst_exp, error);
    wrong_exp += !(error <= std::ldexp(1.0, -22));
    wrong_bits += out[3] != bits_of(c) || out[4] != bits_of(c);
    const double over = std::isinf(b) ? std::fabs(float_of(out[5])) : std::fabs(float_of(out[5]) * double(b) - 1);
    worst_over = std::max(worst_over, over);
    wrong_over += !(over <= std::ldexp(1.0, -22));
    volatile float square = b * b;
    const double log = std::log2(static_cast<double>(square));
    const double off = std::isinf(b) ? (float_of(out[6]) == INFINITY ? 0 : 1)
                                     : std::fabs(float_of(out[6]) - log) / std::max(std::fabs(log), 1e-4);
    worst_log = std::max(worst_log, off);
    wrong_log += !(off <= std::ldexp(1.0, -21));
    wrong_larger += !same(float_of(out[7]), i % 5 == 0 ? b : std::max(a, b));
  }
  expect("mul_rn", wrong_mul, kCount);
  expect("fma_rn", wrong_fma, kCount);
  expect("exp2_approx", wrong_exp, kCount);
  expect("reciprocal_approx", wrong_over, kCount);
  expect("log2_accurate", wrong_log, kCount);
  std::printf("     largest relative errors %.2e, %.2e, %.2e\n", worst_exp, worst_over, worst_log);
  expect("larger", wrong_larger, kCount);
  expect("float_bits, bits_float, to_float<float>, from_float<float>, load_float, store_float", wrong_bits, kCount);
}

// ---- global memory -------------------------------------------------------------------------------------------------

struct MemoryParams {
  const unsigned char* in;  // [256]
  unsigned char* out;       // [9][256]
};
KVS_KERNEL(32, 1) void memory_kernel(KVS_PARAM MemoryParams p) {
  const int lane = gpu::thread_index();
  const uint64_t policy = gpu::stream_policy();
  if (lane < 16) gpu::store16(p.out + 16 * lane, gpu::load16_stream(p.in + 16 * lane, policy));
  if (lane < 16) gpu::store16(p.out + 256 + 16 * lane, gpu::load16(p.in + 16 * lane));
  const uint2 eight = gpu::load8_stream(p.in + 8 * lane, policy);
  gpu::store_u32(p.out + 512 + 8 * lane, eight.x);
  gpu::store_u32(p.out + 512 + 8 * lane + 4, eight.y);
  const uint64_t wide = gpu::load_u64(p.in + 8 * lane);
  gpu::store_u32(p.out + 768 + 8 * lane, static_cast<uint32_t>(wide));
  gpu::store_u32(p.out + 768 + 8 * lane + 4, static_cast<uint32_t>(wide >> 32));
  for (int i = lane; i < 64; i += 32) {
    gpu::store_u32(p.out + 1024 + 4 * i, gpu::load_u32(p.in + 4 * i));
    gpu::store_u32(p.out + 1280 + 4 * i,
                   static_cast<uint32_t>(gpu::load_int(reinterpret_cast<const int32_t*>(p.in) + i)));
    gpu::store_number(reinterpret_cast<float*>(p.out + 1536) + i,
                      gpu::load_number(reinterpret_cast<const float*>(p.in) + i));
  }
  for (int i = lane; i < 128; i += 32) {
    gpu::store_u16(p.out + 1792 + 2 * i, gpu::load_u16(p.in + 2 * i));
    const uint32_t low = gpu::load_u8(p.in + 2 * i), high = gpu::load_u8(p.in + 2 * i + 1);
    gpu::store_u16(p.out + 2048 + 2 * i, static_cast<uint16_t>(low | high << 8));
  }
}

void check_memory() {
  constexpr int kWays = 9;
  std::vector<unsigned char> in(256);
  for (unsigned char& byte : in) byte = static_cast<unsigned char>(generator());
  const uint32_t payload = 0x7fa12345u;  // a NaN with a payload, which must survive
  std::memcpy(&in[20], &payload, 4);
  DeviceArray<unsigned char> input(in), output(kWays * 256);
  output.fill(0xee);
  run("memory", memory_kernel, {1, 1, 1}, 32, 0, MemoryParams{input.data(), output.data()});
  const std::vector<unsigned char> got = output.host();
  const char* names[kWays] = {"load16_stream, stream_policy, store16",
                              "load16",
                              "load8_stream",
                              "load_u64",
                              "load_u32, store_u32",
                              "load_int",
                              "load_number<float>, store_number<float>",
                              "load_u16, store_u16",
                              "load_u8"};
  for (int way = 0; way < kWays; ++way) {
    size_t wrong = 0;
    for (int i = 0; i < 256; ++i) wrong += got[way * 256 + i] != in[i];
    expect(names[way], wrong, 256);
  }
}

// ---- shared memory and copies into it ------------------------------------------------------------------------------

struct CopyParams {
  const uint32_t* in;  // [3][128][4]
  uint32_t* out;       // [4][128][4]
};
KVS_KERNEL(128, 1) void copy_kernel(KVS_PARAM CopyParams p) {
  KVS_SHARED(memory);
  uint4* stages = reinterpret_cast<uint4*>(memory);  // [4][128]
  const int thread = gpu::thread_index(), other = thread ^ 37;
  for (int stage = 0; stage < 3; ++stage) {
    gpu::copy16_async(stages + stage * 128 + thread, p.in + (stage * 128 + thread) * 4, true);
    gpu::copy_commit();
  }
  gpu::copy16_async(stages + 3 * 128 + thread, p.in, thread % 3 == 0);  // zeros where not
  gpu::copy_commit();
  gpu::copy_wait<3>();
  gpu::sync_block();  // what another thread copied is visible after its wait and a barrier
  gpu::store16(p.out + (0 * 128 + thread) * 4, stages[other]);
  gpu::copy_wait<1>();
  gpu::sync_block();
  gpu::store16(p.out + (1 * 128 + thread) * 4, stages[128 + other]);
  gpu::store16(p.out + (2 * 128 + thread) * 4, stages[256 + other]);
  gpu::copy_wait<0>();
  gpu::sync_block();
  gpu::store16(p.out + (3 * 128 + thread) * 4, stages[384 + other]);
}

void check_copies() {
  const std::vector<uint32_t> in = random_words(3 * 128 * 4);
  DeviceArray<uint32_t> input(in), output(4 * 128 * 4);
  run("copies", copy_kernel, {1, 1, 1}, 128, 4 * 128 * 16, CopyParams{input.data(), output.data()});
  const std::vector<uint32_t> got = output.host();
  size_t wrong = 0, wrong_zero = 0;
  for (int stage = 0; stage < 4; ++stage) {
    for (int thread = 0; thread < 128; ++thread) {
      const int other = thread ^ 37;
      for (int word = 0; word < 4; ++word) {
        const uint32_t found = got[(stage * 128 + thread) * 4 + word];
        if (stage < 3) {
          wrong += found != in[(stage * 128 + other) * 4 + word];
        } else {
          wrong_zero += found != (other % 3 == 0 ? in[word] : 0u);
        }
      }
    }
  }
  expect("copy16_async, copy_commit, copy_wait, sync_block", wrong, 3 * 128 * 4);
  expect("copy16_async with ok false", wrong_zero, 128 * 4);
}

struct MatrixParams {
  const uint16_t* in;  // [4][8][8]
  uint32_t* out;       // [2][32][4]
};
KVS_KERNEL(32, 1) void matrix_kernel(KVS_PARAM MatrixParams p) {
  KVS_SHARED(memory);
  uint16_t* tile = reinterpret_cast<uint16_t*>(memory);  // rows of a matrix 24 numbers apart
  const int lane = gpu::thread_index();
  for (int i = lane; i < 256; i += 32) tile[i / 8 * 24 + i % 8] = gpu::load_u16(p.in + i);
  gpu::sync_warp();
  uint32_t straight[4], turned[4];
  gpu::load_matrix_x4(straight, tile + lane * 24);  // row lane % 8 of matrix lane / 8
  gpu::load_matrix_x4_transposed(turned, tile + lane * 24);
  for (int i = 0; i < 4; ++i) {
    gpu::store_u32(p.out + lane * 4 + i, straight[i]);
    gpu::store_u32(p.out + 128 + lane * 4 + i, turned[i]);
  }
}

void check_matrices() {
  std::vector<uint16_t> in(256);
  for (int i = 0; i < 256; ++i) in[i] = static_cast<uint16_t>(i * 257 + 11);
  DeviceArray<uint16_t> input(in);
  DeviceArray<uint32_t> output(256);
  run("matrices", matrix_kernel, {1, 1, 1}, 32, 32 * 24 * 2, MatrixParams{input.data(), output.data()});
  const std::vector<uint32_t> got = output.host();
  size_t wrong = 0, wrong_turned = 0;
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) {
      for (int e = 0; e < 2; ++e) {  // lane holds row lane / 4, columns 2 (lane % 4) and the next
        const int row = lane / 4, column = lane % 4 * 2 + e;
        wrong += static_cast<uint16_t>(got[lane * 4 + m] >> (16 * e)) != in[m * 64 + row * 8 + column];
        wrong_turned += static_cast<uint16_t>(got[128 + lane * 4 + m] >> (16 * e)) != in[m * 64 + column * 8 + row];
      }
    }
  }
  expect("load_matrix_x4, shared_address, sync_warp", wrong, 256);
  expect("load_matrix_x4_transposed", wrong_turned, 256);
}

// ---- warps ---------------------------------------------------------------------------------------------------------

template <class T>
struct ProductParams {
  const T* a;      // [cases][16][16]
  const T* b;      // [cases][8][16]: column n of B is row n
  const float* c;  // [cases][16][8]
  float* d;        // [cases][16][8]
};
template <class T>
KVS_KERNEL(32, 1)
void product_kernel(KVS_PARAM ProductParams<T> p) {
  const int lane = gpu::thread_index(), group = lane / 4, place = lane % 4 * 2, test = gpu::block_index();
  const T* a = p.a + test * 256;
  const T* b = p.b + test * 128;
  uint32_t left[4];
  for (int i = 0; i < 4; ++i) left[i] = gpu::load_u32(a + (group + i % 2 * 8) * 16 + place + i / 2 * 8);
  const uint32_t right0 = gpu::load_u32(b + group * 16 + place), right1 = gpu::load_u32(b + group * 16 + place + 8);
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = gpu::load_float(p.c + test * 128 + (group + i / 2 * 8) * 8 + place + i % 2);
  gpu::mma_m16n8k16<T>(sum, left, right0, right1);
  for (int i = 0; i < 4; ++i) gpu::store_float(p.d + test * 128 + (group + i / 2 * 8) * 8 + place + i % 2, sum[i]);
}

// The first half of the cases has small whole numbers, whose product is exact: a wrong fragment cannot hide in it.
template <class T>
void check_products(const char* type) {
  constexpr int kCases = 16;
  std::uniform_int_distribution<int> whole(-8, 8);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> a(kCases * 256), b(kCases * 128);
  std::vector<float> c(kCases * 128);
  const auto draw = [&](size_t test) {
    return test < kCases / 2 ? static_cast<float>(whole(generator)) : normal(generator);
  };
  for (size_t i = 0; i < a.size(); ++i) a[i] = nearest(draw(i / 256), kMantissa<T>);
  for (size_t i = 0; i < b.size(); ++i) b[i] = nearest(draw(i / 128), kMantissa<T>);
  for (size_t i = 0; i < c.size(); ++i) c[i] = draw(i / 128);
  DeviceArray<uint16_t> left(a), right(b);
  DeviceArray<float> start(c), output(c.size());
  run("products", product_kernel<T>, {kCases, 1, 1}, 32, 0,
      ProductParams<T>{reinterpret_cast<const T*>(left.data()), reinterpret_cast<const T*>(right.data()), start.data(),
                       output.data()});
  const std::vector<float> got = output.host();
  size_t wrong_exact = 0, wrong = 0;
  for (int test = 0; test < kCases; ++test) {
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        double sum = c[test * 128 + row * 8 + column], size = std::fabs(sum);
        for (int k = 0; k < 16; ++k) {
          const double term = value_of(a[test * 256 + row * 16 + k], kMantissa<T>) *
                              value_of(b[test * 128 + column * 16 + k], kMantissa<T>);
          sum += term, size += std::fabs(term);
        }
        const double error = std::fabs(got[test * 128 + row * 8 + column] - sum);
        if (test < kCases / 2) {
          wrong_exact += !(error == 0);
        } else {
          wrong += !(error <= std::ldexp(size, -20));  // float32 sums, perhaps truncated, in any order
        }
      }
    }
  }
  std::printf("%s:\n", type);
  expect("mma_m16n8k16, whole numbers", wrong_exact, kCases / 2 * 128);
  expect("mma_m16n8k16, random numbers", wrong, kCases / 2 * 128);
}

struct WarpParams {
  const float* in;  // [64]
  float* out;       // [3][5][64]: shuffles, maxima of pairs
};
KVS_KERNEL(64, 1) void warp_kernel(KVS_PARAM WarpParams p) {
  const int thread = gpu::thread_index();
  const float x = gpu::load_float(p.in + thread);
  for (int bit = 0; bit < 5; ++bit) gpu::store_float(p.out + bit * 64 + thread, gpu::shuffle_xor(x, 1 << bit));
}

void check_warps() {
  std::vector<float> in(64);
  std::normal_distribution<float> normal;
  for (float& x : in) x = normal(generator);
  DeviceArray<float> input(in), output(5 * 64);
  run("warps", warp_kernel, {1, 1, 1}, 64, 0, WarpParams{input.data(), output.data()});
  const std::vector<float> got = output.host();
  size_t wrong = 0;
  for (int bit = 0; bit < 5; ++bit) {
    for (int thread = 0; thread < 64; ++thread) wrong += !same(got[bit * 64 + thread], in[thread ^ (1 << bit)]);
  }
  expect("shuffle_xor", wrong, 5 * 64);
}

// More than 48 KB of shared memory has to be asked for; launch does.
struct LargeParams {
  uint32_t* out;
};
KVS_KERNEL(32, 1) void large_kernel(KVS_PARAM LargeParams p) {
  KVS_SHARED(memory);
  uint32_t* words = reinterpret_cast<uint32_t*>(memory);
  const int lane = gpu::thread_index();
  words[96 * 256 - 32 + lane] = static_cast<uint32_t>(lane) * 3u;  // the last ones of 96 KB
  gpu::sync_warp();
  gpu::store_u32(p.out + lane, words[96 * 256 - 32 + (lane ^ 1)]);
}

void check_large() {
  DeviceArray<uint32_t> output(32);
  run("96 KB of shared memory", large_kernel, {1, 1, 1}, 32, 96 << 10, LargeParams{output.data()});
  const std::vector<uint32_t> got = output.host();
  size_t wrong = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) wrong += got[lane] != (lane ^ 1u) * 3u;
  expect("launch with 96 KB of shared memory", wrong, 32);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : std::random_device()();
  generator.seed(seed);
  std::printf("seed %u\n", seed);
  check_places();
  check_numbers<bf16>("bf16");
  check_numbers<f16>("f16");
  check_math();
  check_memory();
  check_copies();
  check_matrices();
  check_products<bf16>("bf16");
  check_products<f16>("f16");
  check_warps();
  check_large();
  std::printf(failures == 0 ? "all wrappers mean what the host says\n" : "%d checks FAILED\n", failures);
  return failures;
}
