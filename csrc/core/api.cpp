// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// The C API: check, measure the workspace, plan, run.
#include <sys/mman.h>

#include "core/isa.h"
#include "core/plan.h"
#include "core/validate.h"

using namespace kvspeed;

namespace {

// Where a call runs: the kernels, or the reason why there are none.
kvspeed_status choose_kernels(const kvspeed_execution* execution, const CpuKernels** kernels) {
  if (execution == nullptr || execution->num_threads < 1) return KVSPEED_INVALID_ARGUMENT;
  if (execution->device != KVSPEED_CPU) return KVSPEED_UNSUPPORTED;  // no CUDA kernels in this build
  *kernels = cpu_kernels(execution->isa);
  return *kernels == nullptr ? KVSPEED_UNSUPPORTED : KVSPEED_OK;
}

kvspeed_status check_workspace(const kvspeed_execution& execution, size_t bytes) {
  if (execution.workspace_bytes < bytes) return KVSPEED_WORKSPACE_TOO_SMALL;
  if (bytes > 0 && execution.workspace == nullptr) return KVSPEED_INVALID_ARGUMENT;
  if (reinterpret_cast<uintptr_t>(execution.workspace) % 64 != 0) return KVSPEED_INVALID_ARGUMENT;
  return KVSPEED_OK;
}

// What both operations with a plan do: measure, check, lay out again over real memory, fill.
template <class Layout, class Args>
kvspeed_status prepare(const Args& args, const kvspeed_execution& execution, Layout& layout) {
  Workspace measure(nullptr);
  layout.lay_out(args, execution.num_threads, measure);
  const kvspeed_status status = check_workspace(execution, measure.used());
  if (status != KVSPEED_OK) return status;
  Workspace workspace(execution.workspace);
  layout.lay_out(args, execution.num_threads, workspace);
  layout.fill();
  return KVSPEED_OK;
}

template <class Layout, class Args>
kvspeed_status measure(const Args* args, int num_threads, size_t* bytes) {
  kvspeed_status status = validate(args);
  if (status != KVSPEED_OK) return status;
  if (bytes == nullptr || num_threads < 1) return KVSPEED_INVALID_ARGUMENT;
  Workspace workspace(nullptr);
  Layout layout;
  layout.lay_out(*args, num_threads, workspace);
  *bytes = workspace.used();
  return KVSPEED_OK;
}

}  // namespace

kvspeed_status kvspeed_rope_concat_workspace(const kvspeed_rope_concat_args* args, int32_t num_threads, size_t* bytes) {
  return measure<RopeConcatLayout>(args, num_threads, bytes);
}

kvspeed_status kvspeed_rope_concat(const kvspeed_rope_concat_args* args, const kvspeed_execution* execution) {
  kvspeed_status status = validate(args);
  const CpuKernels* kernels = nullptr;
  if (status == KVSPEED_OK) status = choose_kernels(execution, &kernels);
  RopeConcatLayout layout;
  if (status == KVSPEED_OK) status = prepare(*args, *execution, layout);
  if (status == KVSPEED_OK) kernels->rope_concat(layout.plan);
  return status;
}

kvspeed_status kvspeed_segment_attention_workspace(const kvspeed_segment_attention_args* args, int32_t num_threads,
                                                   size_t* bytes) {
  return measure<AttentionLayout>(args, num_threads, bytes);
}

kvspeed_status kvspeed_segment_attention(const kvspeed_segment_attention_args* args,
                                         const kvspeed_execution* execution) {
  kvspeed_status status = validate(args);
  const CpuKernels* kernels = nullptr;
  if (status == KVSPEED_OK) status = choose_kernels(execution, &kernels);
  AttentionLayout layout;
  if (status == KVSPEED_OK) status = prepare(*args, *execution, layout);
  if (status == KVSPEED_OK) kernels->segment_attention(layout.plan);
  return status;
}

kvspeed_status kvspeed_merge_states(const kvspeed_merge_states_args* args, const kvspeed_execution* execution) {
  kvspeed_status status = validate(args);
  const CpuKernels* kernels = nullptr;
  if (status == KVSPEED_OK) status = choose_kernels(execution, &kernels);
  if (status == KVSPEED_OK) kernels->merge_states(*args, execution->num_threads);
  return status;
}

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
