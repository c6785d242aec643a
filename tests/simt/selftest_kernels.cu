// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Small kernels, right and wrong ones. Each wrong one has a fault that a GPU would not report.
#include "cuda/gpu.h"
#include "simt/selftest.h"

namespace kvspeed::selftest {
namespace {

using namespace kvspeed::gpu;

constexpr int kThreads = 64;

int thread() { return thread_index(); }
int lane() { return thread_index() % 32; }

void copy16(Params p, unsigned char* shared, int from, int to) {
  copy16_async(shared + 16 * to, p.in + 4 * from, true);
}

// ---- right ---------------------------------------------------------------------------------------------------------

void ok_block_barrier(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[thread()] = load_float(p.in + thread());
  sync_block();
  store_float(p.out + thread(), s[kThreads - 1 - thread()]);
}
void ok_warp_barrier(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  for (int i = 0; i < 3; ++i) {
    s[thread()] = load_float(p.in + thread()) + static_cast<float>(i);
    sync_warp();
    const float v = s[thread() ^ 1];
    sync_warp();
    if (i == 2) store_float(p.out + thread(), v);
  }
}
void ok_two_stages(const Params p) {
  KVS_SHARED(shared);
  if (thread() < 16) copy16(p, shared, thread(), thread());
  copy_commit();
  if (thread() < 16) copy16(p, shared, thread(), 16 + thread());
  copy_commit();
  copy_wait<1>();
  sync_block();
  float v = reinterpret_cast<float*>(shared)[thread()];
  copy_wait<0>();
  sync_block();
  v += reinterpret_cast<float*>(shared)[64 + thread()];
  store_float(p.out + thread(), v);
}
void ok_scratch(const Params p) {  // written, then read behind a barrier
  store_float(p.scratch + thread(), 1.0f);
  sync_block();
  store_float(p.out + thread(), load_float(p.scratch + (thread() ^ 32)));
}
void ok_collectives(const Params p) {
  KVS_SHARED(shared);
  uint4* rows = reinterpret_cast<uint4*>(shared);
  rows[thread()] = make_uint4(0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u);  // ones
  sync_warp();
  uint32_t a[4];
  load_matrix_x4(a, rows + (thread() & 32) + lane());
  float d[4] = {};
  mma_m16n8k16<bf16>(d, a, a[0], a[1]);
  store_float(p.out + thread(), shuffle_xor(d[0], 3));  // 16 everywhere
}
void ok_zero_fill(const Params p) {  // a copy that is switched off reads nothing, wherever it points
  KVS_SHARED(shared);
  copy16_async(shared + 16 * thread(), p.in + 4000000, false);
  copy_commit();
  copy_wait<0>();
  store_float(p.out + thread(), reinterpret_cast<float*>(shared)[4 * thread()]);
}

// ---- shared memory -------------------------------------------------------------------------------------------------

void race_read_after_write(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[thread()] = 1.0f;
  sync_warp();  // not enough: the neighbour is in the other warp
  store_float(p.out + thread(), s[thread() ^ 32]);
}
void race_in_warp(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[thread()] = 1.0f;
  store_float(p.out + thread(), s[thread() ^ 1]);
}
void race_write_after_read(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[thread()] = 1.0f;
  sync_block();
  const float v = s[thread() ^ 32];
  s[thread()] = 2.0f;
  store_float(p.out + thread(), v);
}
void race_write_after_read_in_warp(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[thread()] = 1.0f;
  sync_warp();
  const float v = s[thread() ^ 5];
  s[thread()] = 2.0f;
  store_float(p.out + thread(), v);
}
void race_write_after_read_only(const Params p) {  // one lane writes what the others have only read
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  if (thread() == 0) s[0] = 1.0f;
  sync_block();
  float v = s[0];
  v += shuffle_xor(v, 1);  // orders nothing
  if (lane() == 7) s[0] = 2.0f;
  store_float(p.out + thread(), v);
}
void race_write_write(const Params) {
  KVS_SHARED(shared);
  reinterpret_cast<float*>(shared)[thread() / 2] = static_cast<float>(thread());
}
void race_matrix_own_row(const Params p) {  // a lane's own row goes to other lanes: a barrier is needed all the same
  KVS_SHARED(shared);
  uint4* rows = reinterpret_cast<uint4*>(shared);
  rows[thread()] = make_uint4(0, 0, 0, 0);
  uint32_t a[4];
  load_matrix_x4(a, rows + thread());
  store_u32(p.out + thread(), a[0]);
}
void shared_uninitialised(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  if (thread() != 5) s[thread()] = 1.0f;
  sync_block();
  store_float(p.out + thread(), s[thread()]);
}
void shared_out_of_bounds(const Params) {
  KVS_SHARED(shared);
  reinterpret_cast<float*>(shared)[kSharedBytes / 4 + thread()] = 1.0f;
}
void shared_before_start(const Params) {
  KVS_SHARED(shared);
  reinterpret_cast<float*>(shared)[thread() - 1] = 1.0f;
}
void shared_misaligned(const Params) {
  KVS_SHARED(shared);
  *reinterpret_cast<uint4*>(shared + 16 * thread() + 4) = make_uint4(1, 2, 3, 4);
}
void matrix_misaligned(const Params p) {
  KVS_SHARED(shared);
  reinterpret_cast<uint4*>(shared)[thread()] = make_uint4(0, 0, 0, 0);
  sync_block();
  uint32_t a[4];
  load_matrix_x4(a, shared + 16 * lane() + (lane() == 7 ? 8 : 0));
  store_u32(p.out + thread(), a[0]);
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

void copy_without_wait(const Params p) {
  KVS_SHARED(shared);
  copy16(p, shared, thread() / 4, thread());
  copy_commit();
  sync_block();
  store_float(p.out + thread(), reinterpret_cast<float*>(shared)[4 * thread()]);
  copy_wait<0>();
}
void copy_wait_too_lax(const Params p) {
  KVS_SHARED(shared);
  copy16(p, shared, thread() / 4, thread());
  copy_commit();
  copy_commit();
  copy_wait<2>();
  sync_block();
  store_float(p.out + thread(), reinterpret_cast<float*>(shared)[4 * thread()]);
  copy_wait<0>();
}
void copy_without_commit(const Params p) {
  KVS_SHARED(shared);
  copy16(p, shared, thread() / 4, thread());
  copy_wait<0>();
  sync_block();
  store_float(p.out + thread(), reinterpret_cast<float*>(shared)[4 * thread()]);
  copy_commit();
  copy_wait<0>();
}
void copy_without_barrier(const Params p) {  // waited for, but by another thread only
  KVS_SHARED(shared);
  copy16(p, shared, thread() / 4, thread());
  copy_commit();
  copy_wait<0>();
  store_float(p.out + thread(), reinterpret_cast<float*>(shared)[4 * (thread() ^ 1)]);
}
void copy_outstanding(const Params p) {
  KVS_SHARED(shared);
  copy16(p, shared, thread() / 4, thread());
  copy_commit();
}
void copy_over_readers(const Params p) {
  KVS_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[4 * thread()] = 1.0f;
  sync_block();
  store_float(p.out + thread(), s[4 * (thread() ^ 32)]);
  copy16(p, shared, thread() / 4, thread());
  copy_commit();
  copy_wait<0>();
}
void copy_misaligned(const Params p) {
  KVS_SHARED(shared);
  copy16_async(shared + 16 * thread(), p.in + 1, true);
  copy_commit();
  copy_wait<0>();
}
void copy_out_of_bounds(const Params p) {
  KVS_SHARED(shared);
  copy16_async(shared + 16 * thread(), p.in + 4 * thread(), true);  // 16 rows of 4 there are
  copy_commit();
  copy_wait<0>();
}

// ---- global memory -------------------------------------------------------------------------------------------------

void global_read_out_of_bounds(const Params p) { store_float(p.out + thread(), load_float(p.in + thread() + 1)); }
void global_write_out_of_bounds(const Params p) { store_float(p.out + thread() + 1, 0.0f); }
void global_before_start(const Params p) { store_float(p.out + thread(), load_float(p.in + thread() - 1)); }
void global_misaligned(const Params p) { store16(p.out + 4 * (thread() % 16) + 1, make_uint4(0, 0, 0, 0)); }
void global_write_to_input(const Params p) { store_float(const_cast<float*>(p.in) + thread(), 0.0f); }
void global_read_of_output(const Params p) { store_float(p.out + thread(), load_float(p.out + thread())); }
void global_host_pointer(const Params p) { store_float(p.out + thread(), load_float(p.host + thread())); }
void global_plain_read(const Params p) { store_float(p.out + thread(), p.in[thread()]); }
void global_plain_write(const Params p) { p.out[thread()] = 1.0f; }
void global_shared_address(const Params p) {
  KVS_SHARED(shared);
  store_float(reinterpret_cast<float*>(shared) + thread(), 1.0f);
  store_float(p.out + thread(), 0.0f);
}
void scratch_uninitialised(const Params p) { store_float(p.out + thread(), load_float(p.scratch + thread())); }
void scratch_race(const Params p) {
  store_float(p.scratch + thread(), 1.0f);
  store_float(p.out + thread(), load_float(p.scratch + (thread() ^ 32)));
}
void scratch_non_coherent(const Params p) {
  store16(p.scratch + 4 * (thread() % 16) + 64 * (thread() / 16), make_uint4(0, 0, 0, 0));
  load16_stream(p.scratch + 4 * (thread() % 16) + 64 * (thread() / 16), stream_policy());
}
void blocks_write_the_same(const Params p) { store_float(p.out + thread(), 1.0f); }
void blocks_read_each_other(const Params p) {
  store_float(p.scratch + block_index() * kThreads + thread(), 1.0f);
  if (block_index() == 1) load_float(p.scratch + thread());
}
void threads_write_the_same(const Params p) {
  store_float(p.out + thread() % 32, 1.0f);
  sync_block();
}
void wild_policy(const Params p) { load16_stream(p.in + 4 * (thread() % 16), 7); }

// ---- divergence ----------------------------------------------------------------------------------------------------

void divergent_block_barrier(const Params) {
  if (thread() < 40) sync_block();
}
void divergent_collective(const Params p) {
  float v = 1.0f;
  if (thread() % 2 == 1) {
    v = shuffle_xor(v, 1);
  } else {
    sync_warp();
  }
  store_float(p.out + thread(), v);
}
void divergent_barriers(const Params) {  // one warp waits in the warp's barrier, one lane in the block's
  if (thread() == 3) {
    sync_block();
  } else {
    sync_warp();
    sync_block();
  }
  if (thread() == 3) sync_warp();
}
void early_exit(const Params p) {
  if (thread() >= 40) return;
  sync_block();
  store_float(p.out + thread(), 1.0f);
}
void early_exit_in_warp(const Params p) {
  if (lane() == 9) return;
  store_float(p.out + thread(), shuffle_xor(1.0f, 1));
}
void shuffle_masks_differ(const Params p) { store_float(p.out + thread(), shuffle_xor(1.0f, lane() < 16 ? 1 : 2)); }
void register_out_of_bounds(const Params p) {
  float fragment[4] = {};
  fragment[thread() / 16 + 1] = 1.0f;
  store_float(p.out + thread(), fragment[0] + fragment[2]);
}
void index_overflow(const Params p) {
  const int stride = 1 << 30;
  store_float(p.out + thread(), static_cast<float>(stride * (thread() / 16)));
}
void uninitialised_accumulator(const Params p) {
  float d[4];
  const uint32_t a[4] = {0, 0, 0, 0};
  mma_m16n8k16<bf16>(d, a, 0, 0);
  store_float(p.out + thread(), d[0]);
}

}  // namespace

#define KVS_CASE(name) {#name, name}
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      KVS_CASE(ok_block_barrier),
      KVS_CASE(ok_warp_barrier),
      KVS_CASE(ok_two_stages),
      KVS_CASE(ok_scratch),
      KVS_CASE(ok_collectives),
      KVS_CASE(ok_zero_fill),
      KVS_CASE(race_read_after_write),
      KVS_CASE(race_in_warp),
      KVS_CASE(race_write_after_read),
      KVS_CASE(race_write_after_read_in_warp),
      KVS_CASE(race_write_after_read_only),
      KVS_CASE(race_write_write),
      KVS_CASE(race_matrix_own_row),
      KVS_CASE(shared_uninitialised),
      KVS_CASE(shared_out_of_bounds),
      KVS_CASE(shared_before_start),
      KVS_CASE(shared_misaligned),
      KVS_CASE(matrix_misaligned),
      KVS_CASE(copy_without_wait),
      KVS_CASE(copy_wait_too_lax),
      KVS_CASE(copy_without_commit),
      KVS_CASE(copy_without_barrier),
      KVS_CASE(copy_outstanding),
      KVS_CASE(copy_over_readers),
      KVS_CASE(copy_misaligned),
      KVS_CASE(copy_out_of_bounds),
      KVS_CASE(global_read_out_of_bounds),
      KVS_CASE(global_write_out_of_bounds),
      KVS_CASE(global_before_start),
      KVS_CASE(global_misaligned),
      KVS_CASE(global_write_to_input),
      KVS_CASE(global_read_of_output),
      KVS_CASE(global_host_pointer),
      KVS_CASE(global_plain_read),
      KVS_CASE(global_plain_write),
      KVS_CASE(global_shared_address),
      KVS_CASE(scratch_uninitialised),
      KVS_CASE(scratch_race),
      KVS_CASE(scratch_non_coherent),
      KVS_CASE(blocks_write_the_same),
      KVS_CASE(blocks_read_each_other),
      KVS_CASE(threads_write_the_same),
      KVS_CASE(wild_policy),
      KVS_CASE(divergent_block_barrier),
      KVS_CASE(divergent_collective),
      KVS_CASE(divergent_barriers),
      KVS_CASE(early_exit),
      KVS_CASE(early_exit_in_warp),
      KVS_CASE(shuffle_masks_differ),
      KVS_CASE(register_out_of_bounds),
      KVS_CASE(index_overflow),
      KVS_CASE(uninitialised_accumulator),
  };
  return all;
}

}  // namespace kvspeed::selftest
