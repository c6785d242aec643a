// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The C API: check, measure the workspace, plan, run.
#include <sys/mman.h>

#include "core/isa.h"
#include "core/plan.h"
#include "core/rope_table.h"
#include "core/validate.h"
#if KVSPEED_HAVE_CUDA
#include "cuda/kernels.h"
#endif

using namespace kvspeed;

namespace {

kvspeed_status check_execution(const kvspeed_execution* execution) {
  if (execution == nullptr) return KVSPEED_INVALID_ARGUMENT;
  if (execution->device == KVSPEED_CUDA) {
    if (execution->device_index < 0) return KVSPEED_INVALID_ARGUMENT;
    return kvspeed_cuda_built() ? KVSPEED_OK : KVSPEED_UNSUPPORTED;
  }
  if (execution->device != KVSPEED_CPU) return KVSPEED_UNSUPPORTED;
  if (execution->num_threads < 1) return KVSPEED_INVALID_ARGUMENT;
  return cpu_kernels(execution->isa) == nullptr ? KVSPEED_UNSUPPORTED : KVSPEED_OK;
}

#if KVSPEED_HAVE_CUDA
size_t cuda_workspace(const kvspeed_rope_concat_args& args, const kvspeed_execution&) {
  return cuda::rope_concat_workspace(args);
}
size_t cuda_workspace(const kvspeed_segment_attention_args& args, const kvspeed_execution& execution) {
  return cuda::segment_attention_workspace(args, execution.device_index);
}
kvspeed_status cuda_run(const kvspeed_rope_concat_args& args, const kvspeed_execution& execution) {
  const kvspeed_status status = check_workspace(execution, cuda::rope_concat_workspace(args));
  return status == KVSPEED_OK ? cuda::rope_concat(args, execution) : status;
}
kvspeed_status cuda_run(const kvspeed_segment_attention_args& args, const kvspeed_execution& execution) {
  return cuda::segment_attention(args, execution);
}
#endif

// Checked arguments: the bytes that a call needs.
template <class Layout, class Args>
size_t workspace_bytes(const Args& args, const kvspeed_execution& execution) {
#if KVSPEED_HAVE_CUDA
  if (execution.device == KVSPEED_CUDA) return cuda_workspace(args, execution);
#endif
  Workspace workspace(nullptr);
  Layout layout;
  layout.lay_out(args, execution.num_threads, workspace);
  return workspace.used();
}

// What both operations with a plan do: the answer of `*_workspace`, and the call itself, which lays out once.
template <class Layout, class Args>
kvspeed_status ask_workspace(const Args* args, const kvspeed_execution* execution, size_t* bytes) {
  kvspeed_status status = check_execution(execution);
  if (status == KVSPEED_OK) status = validate(args, execution->device);
  if (status == KVSPEED_OK && bytes == nullptr) status = KVSPEED_INVALID_ARGUMENT;
  if (status == KVSPEED_OK) *bytes = workspace_bytes<Layout>(*args, *execution);
  return status;
}

template <class Layout, class Args, class Kernel>
kvspeed_status run(const Args* args, const kvspeed_execution* execution, Kernel kernel) {
  kvspeed_status status = check_execution(execution);
  if (status == KVSPEED_OK) status = validate(args, execution->device);
  if (status != KVSPEED_OK) return status;
#if KVSPEED_HAVE_CUDA
  if (execution->device == KVSPEED_CUDA) return cuda_run(*args, *execution);
#endif
  Layout layout;
  Workspace workspace(execution->workspace);
  layout.lay_out(*args, execution->num_threads, workspace);
  status = check_workspace(*execution, workspace.used());
  if (status != KVSPEED_OK) return status;
  layout.fill();
  (cpu_kernels(execution->isa)->*kernel)(layout.plan);
  return KVSPEED_OK;
}

}  // namespace

kvspeed_status kvspeed_rope_concat_workspace(const kvspeed_rope_concat_args* args, const kvspeed_execution* execution,
                                             size_t* bytes) {
  return ask_workspace<RopeConcatLayout>(args, execution, bytes);
}

kvspeed_status kvspeed_rope_concat(const kvspeed_rope_concat_args* args, const kvspeed_execution* execution) {
  return run<RopeConcatLayout>(args, execution, &CpuKernels::rope_concat);
}

kvspeed_status kvspeed_segment_attention_workspace(const kvspeed_segment_attention_args* args,
                                                   const kvspeed_execution* execution, size_t* bytes) {
  return ask_workspace<AttentionLayout>(args, execution, bytes);
}

kvspeed_status kvspeed_segment_attention(const kvspeed_segment_attention_args* args,
                                         const kvspeed_execution* execution) {
  return run<AttentionLayout>(args, execution, &CpuKernels::segment_attention);
}

kvspeed_status kvspeed_merge_states(const kvspeed_merge_states_args* args, const kvspeed_execution* execution) {
  kvspeed_status status = check_execution(execution);
  if (status == KVSPEED_OK) status = validate(args);
  if (status != KVSPEED_OK) return status;
#if KVSPEED_HAVE_CUDA
  if (execution->device == KVSPEED_CUDA) return cuda::merge_states(*args, *execution);
#endif
  cpu_kernels(execution->isa)->merge_states(*args, execution->num_threads);
  return KVSPEED_OK;
}

kvspeed_status kvspeed_rope_row(int64_t offset, const float* inv_freq, int64_t half, float* row) {
  if (half < 0 || (half > 0 && (inv_freq == nullptr || row == nullptr))) return KVSPEED_INVALID_ARGUMENT;
  fill_rope_row(offset, inv_freq, half, row, row + half);
  return KVSPEED_OK;
}

#if !KVSPEED_HAVE_CUDA
#ifndef KVSPEED_CUDA_WHY_NOT
#define KVSPEED_CUDA_WHY_NOT "it was built without them"
#endif
int kvspeed_cuda_built(void) { return 0; }
int kvspeed_cuda_device_count(const char** message) {
  if (message != nullptr) *message = "this build has no CUDA kernels: " KVSPEED_CUDA_WHY_NOT;
  return 0;
}
int kvspeed_cuda_device_supported(int32_t, int32_t* capability) {
  if (capability != nullptr) *capability = 0;
  return 0;
}
const char* kvspeed_cuda_archs(void) { return ""; }
const char* kvspeed_cuda_last_error(void) { return ""; }
#endif

const char* kvspeed_status_string(kvspeed_status status) {
  switch (status) {
    case KVSPEED_OK:
      return "ok";
    case KVSPEED_INVALID_ARGUMENT:
      return "a size, stride or pointer that cannot be right";
    case KVSPEED_UNSUPPORTED:
      return "dtype, head_dim, device or instruction set not supported by this build";
    case KVSPEED_OUT_OF_RANGE:
      return "tokens or pages beyond the output's capacity";
    case KVSPEED_WORKSPACE_TOO_SMALL:
      return "workspace smaller than asked for";
    case KVSPEED_DEVICE_ERROR:
      return "the device's runtime reported a failure";
  }
  return "unknown status";
}

void kvspeed_advise_huge_pages(void* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  // Whole 2 MiB pages inside the range; the ragged ends keep small pages.
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHuge - 1);
  if (data != nullptr && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}
