// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// What the kernels may ask of a GPU, and nothing else: the only file with PTX.
//
// The same kernel sources run three ways. nvcc compiles them against the inline PTX below; with KVSPEED_SIMT a plain
// C++ compiler takes them, and every name here comes from the emulator in tests/simt, which checks what it runs. So a
// kernel uses no CUDA builtin directly: no __shared__, no __syncthreads, no atomics, no asm. Blocks are independent.
#ifndef KVSPEED_CUDA_GPU_H_
#define KVSPEED_CUDA_GPU_H_

#include <cstdint>

#ifdef KVSPEED_SIMT
#include "simt/gpu.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>

#define KVS_DEVICE __device__ __forceinline__
#define KVS_HOST_DEVICE __host__ __device__ __forceinline__
// A kernel: KVS_KERNEL(threads, blocks per SM) void name(const __grid_constant__ Params p).
#define KVS_KERNEL(threads, blocks) __global__ __launch_bounds__(threads, blocks)
#define KVS_PARAM const __grid_constant__
#define KVS_UNROLL _Pragma("unroll")
// The block's dynamic shared memory, 128-byte aligned; a kernel declares it once and carves it up.
#define KVS_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace kvspeed::gpu {

using bf16 = __nv_bfloat16;
using f16 = __half;
using Stream = cudaStream_t;

// ---- where this thread is ------------------------------------------------------------------------------------------

KVS_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
KVS_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
KVS_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }
KVS_DEVICE int block_index_z() { return static_cast<int>(blockIdx.z); }
KVS_DEVICE int block_count() { return static_cast<int>(gridDim.x); }

// ---- numbers -------------------------------------------------------------------------------------------------------

KVS_DEVICE float to_float(float x) { return x; }
KVS_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
KVS_DEVICE float to_float(f16 x) { return __half2float(x); }

template <class T>
KVS_DEVICE T from_float(float x);
template <>
KVS_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
KVS_DEVICE bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
KVS_DEVICE f16 from_float<f16>(float x) {
  return __float2half_rn(x);
}

// Two neighbours in one register, the first in the low half.
template <class T>
KVS_DEVICE uint32_t pack2(float low, float high);
template <>
KVS_DEVICE uint32_t pack2<bf16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
KVS_DEVICE uint32_t pack2<f16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <class T>
KVS_DEVICE float2 unpack2(uint32_t v);
template <>
KVS_DEVICE float2 unpack2<bf16>(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
template <>
KVS_DEVICE float2 unpack2<f16>(uint32_t v) {
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}

KVS_DEVICE float exp2_approx(float x) {  // 2 ulp; -inf gives 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVS_DEVICE float reciprocal_approx(float x) {  // 1 ulp; infinity gives 0
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVS_DEVICE float log2_accurate(float x) { return log2f(x); }       // 1 ulp
KVS_DEVICE float larger(float a, float b) { return fmaxf(a, b); }  // the other one where one is NaN
// Products and sums that must not be fused, or must be, whatever the compiler prefers: results equal the CPU's.
KVS_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
KVS_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// x itself, but computed from again wherever this is written: keeps what follows from it out of the registers of the
// loops around, where the compiler would else carry it along.
KVS_DEVICE int compute_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
KVS_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
KVS_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }

// ---- global memory -------------------------------------------------------------------------------------------------
// Every access names its state space: a pointer that was itself loaded from memory would else become a generic access.

KVS_DEVICE uint64_t stream_policy() {  // for data that is read once: first to leave the L2
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// 16 bytes that this kernel never writes and reads once.
KVS_DEVICE uint4 load16_stream(const void* p, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p)), "l"(policy));
  return v;
}
KVS_DEVICE uint2 load8_stream(const void* p, uint64_t policy) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(__cvta_generic_to_global(p)), "l"(policy));
  return v;
}
KVS_DEVICE uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return v;
}
KVS_DEVICE void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
KVS_DEVICE uint64_t load_u64(const void* p) {
  uint64_t v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
KVS_DEVICE uint32_t load_u32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
KVS_DEVICE uint16_t load_u16(const void* p) {
  uint16_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
KVS_DEVICE uint8_t load_u8(const void* p) {
  uint16_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return static_cast<uint8_t>(v);
}
KVS_DEVICE void store_u32(void* p, uint32_t v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
}
KVS_DEVICE void store_u16(void* p, uint16_t v) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "h"(v) : "memory");
}
KVS_DEVICE float load_float(const float* p) { return __uint_as_float(load_u32(p)); }
KVS_DEVICE int load_int(const int32_t* p) { return static_cast<int>(load_u32(p)); }
KVS_DEVICE void store_float(float* p, float v) { store_u32(p, __float_as_uint(v)); }

// One number of type T, wherever it is aligned to its own size; the bits, so that NaN payloads survive.
template <class T>
KVS_DEVICE T load_number(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return load_float(reinterpret_cast<const float*>(p));
  } else {
    const uint16_t bits = load_u16(p);
    return *reinterpret_cast<const T*>(&bits);
  }
}
template <class T>
KVS_DEVICE void store_number(T* p, T v) {
  if constexpr (sizeof(T) == 4) {
    store_u32(p, *reinterpret_cast<const uint32_t*>(&v));
  } else {
    store_u16(p, *reinterpret_cast<const uint16_t*>(&v));
  }
}

// ---- shared memory -------------------------------------------------------------------------------------------------
// Plain loads and stores through pointers into KVS_SHARED are fine; the compiler sees what they are.

KVS_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory in the background; zeros where `ok` is false, and then nothing is read.
KVS_DEVICE void copy16_async(void* to_shared, const void* from_global, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to_shared)),
               "l"(__cvta_generic_to_global(from_global)), "r"(ok ? 16 : 0)
               : "memory");
}
KVS_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
KVS_DEVICE void copy_wait() {  // until at most kPending of this thread's groups are on their way
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane L gives the address of row L % 8 of matrix L / 8 (16-byte aligned).
KVS_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
KVS_DEVICE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// ---- warps and blocks ----------------------------------------------------------------------------------------------

// d[16 x 8] += a[16 x 16] . b[16 x 8], float32 sums; fragments as in PTX's mma.m16n8k16 (row.col).
template <class T>
KVS_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
KVS_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
KVS_DEVICE void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

KVS_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
KVS_DEVICE void sync_block() { __syncthreads(); }
KVS_DEVICE void sync_warp() { __syncwarp(); }

// ---- launching (host) ----------------------------------------------------------------------------------------------

struct Grid {
  unsigned x, y, z;
};

// Every launcher says first what its call works on. A GPU has no use for it; the emulator then lets kernels touch these
// tensors and the workspace, byte for byte, and nothing else.
template <class Args, class Execution>
void announce(const Args&, const Execution&) {}

// Launches `kernel(params)`; 0 or the runtime's error number. More than 48 KB of shared memory is asked for first.
template <class Params>
int launch(void (*kernel)(Params), Grid grid, int threads, int shared_bytes, Stream stream, const Params& params) {
  if (shared_bytes > 48 << 10) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid.x, grid.y, grid.z),
                                           dim3(static_cast<unsigned>(threads)), arguments,
                                           static_cast<size_t>(shared_bytes), stream));
}

}  // namespace kvspeed::gpu

#endif  // KVSPEED_SIMT
#endif  // KVSPEED_CUDA_GPU_H_
