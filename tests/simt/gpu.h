// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The names of csrc/cuda/gpu.h, for kernels that run on the CPU: every CUDA thread is a fiber, and what it does to
// memory is checked. Only declarations: the definitions lie in files that are compiled without instrumentation.
//
// Memory of the "device" is memory of the host. What a kernel may touch of it is what `announce` has named.
#ifndef KVSPEED_SIMT_GPU_H_
#define KVSPEED_SIMT_GPU_H_

#include <kvspeed/kvspeed.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simt/types.h"

#define KVS_DEVICE inline
#define KVS_HOST_DEVICE inline
#define KVS_KERNEL(threads, blocks)
#define KVS_PARAM const
#define KVS_UNROLL
#define KVS_SHARED(name) unsigned char* const name = ::kvspeed::gpu::shared_memory()

namespace kvspeed::gpu {

using Stream = void*;

// ---- where this thread is ------------------------------------------------------------------------------------------

int thread_index();
int block_index();
int block_index_y();
int block_index_z();
int block_count();
unsigned char* shared_memory();

// ---- numbers -------------------------------------------------------------------------------------------------------

template <class T>
inline uint32_t pack2(float low, float high) {
  return from_float<T>(low).bits | uint32_t{from_float<T>(high).bits} << 16;
}
template <class T>
inline float2 unpack2(uint32_t v) {
  return {to_float(T{static_cast<uint16_t>(v)}), to_float(T{static_cast<uint16_t>(v >> 16)})};
}
float exp2_approx(float x);
inline int compute_here(int x) { return x; }
float reciprocal_approx(float x);
float log2_accurate(float x);
float larger(float a, float b);
float mul_rn(float a, float b);
float fma_rn(float a, float b, float c);
inline uint32_t float_bits(float x) { return std::bit_cast<uint32_t>(x); }
inline float bits_float(uint32_t x) { return std::bit_cast<float>(x); }

// ---- global memory -------------------------------------------------------------------------------------------------

uint64_t stream_policy();
uint4 load16_stream(const void* p, uint64_t policy);
uint2 load8_stream(const void* p, uint64_t policy);
uint4 load16(const void* p);
void store16(void* p, uint4 v);
uint64_t load_u64(const void* p);
uint32_t load_u32(const void* p);
uint16_t load_u16(const void* p);
uint8_t load_u8(const void* p);
void store_u32(void* p, uint32_t v);
void store_u16(void* p, uint16_t v);
float load_float(const float* p);
int load_int(const int32_t* p);
void store_float(float* p, float v);

template <class T>
inline T load_number(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return load_float(p);
  } else {
    return T{load_u16(p)};
  }
}
template <class T>
inline void store_number(T* p, T v) {
  if constexpr (sizeof(T) == 4) {
    store_u32(p, float_bits(v));
  } else {
    store_u16(p, v.bits);
  }
}

// ---- shared memory -------------------------------------------------------------------------------------------------

void copy16_async(void* to_shared, const void* from_global, bool ok);
void copy_commit();
void wait_for_copies(int pending);
template <int kPending>
inline void copy_wait() {
  wait_for_copies(kPending);
}

// Arguments travel by value, so that a kernel's fragments stay what they are on a GPU: registers, with no address.
uint4 load_matrix(const void* shared_row);
uint4 load_matrix_transposed(const void* shared_row);
inline void load_matrix_x4(uint32_t (&r)[4], const void* shared_row) {
  const uint4 v = load_matrix(shared_row);
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}
inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* shared_row) {
  const uint4 v = load_matrix_transposed(shared_row);
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}

// ---- warps and blocks ----------------------------------------------------------------------------------------------

float4 mma_bf16(float4 d, uint4 a, uint2 b);
float4 mma_f16(float4 d, uint4 a, uint2 b);
template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr auto mma = sizeof(T) == 2 && std::is_same_v<T, bf16> ? mma_bf16 : mma_f16;
  const float4 r = mma({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1});
  d[0] = r.x, d[1] = r.y, d[2] = r.z, d[3] = r.w;
}
float shuffle_xor(float v, int mask);
void sync_block();
void sync_warp();

// ---- launching (host) ----------------------------------------------------------------------------------------------

struct Grid {
  unsigned x, y, z;
};

// What the call about to be launched may touch: every tensor of its arguments, to the byte, and its workspace. Whatever
// was announced before on this thread is forgotten.
void announce(const kvspeed_rope_concat_args& args, const kvspeed_execution& execution);
void announce(const kvspeed_segment_attention_args& args, const kvspeed_execution& execution);
void announce(const kvspeed_merge_states_args& args, const kvspeed_execution& execution);

const char* error_text(int error);  // of a launch on this thread

using KernelCall = void (*)(const void* kernel, const void* params);
int launch_kernel(KernelCall call, const void* kernel, Grid grid, int threads, int shared_bytes, const void* params,
                  size_t param_bytes);

template <class Params>
__attribute__((no_sanitize("thread"))) void call_kernel(const void* kernel, const void* params) {
  (*static_cast<void (*const*)(Params)>(kernel))(*static_cast<const Params*>(params));
}
template <class Params>
int launch(void (*kernel)(Params), Grid grid, int threads, int shared_bytes, Stream, const Params& params) {
  return launch_kernel(&call_kernel<Params>, &kernel, grid, threads, shared_bytes, &params, sizeof(Params));
}

}  // namespace kvspeed::gpu

#endif  // KVSPEED_SIMT_GPU_H_
