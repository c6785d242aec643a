# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as nvcc compiles them, for every architecture, without a GPU; see cuda_gates.py for the rules.

Judged is the installed extension where it holds all architectures. Else most of this is skipped; where KVSPEED_CI_NVCC
is set, a build is made here, which takes minutes the first time, and a missing nvcc fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import cuda_gates
import pytest
from cuda_gates import ARCHS, Kernel
from kvspeed import _C

HEAD_DIMS, DTYPES = (64, 80, 96, 128, 256), ("bf16", "f16")


def needs(*tools: str) -> None:
    missing = [name for name in tools if not (cuda_gates.tool(name) or shutil.which(name))]
    if missing and os.environ.get("KVSPEED_CI_NVCC"):
        pytest.fail(f"KVSPEED_CI_NVCC is set, and there is no {', '.join(missing)}")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.fixture(scope="session")
def kernels() -> list[Kernel]:
    needs("cuobjdump", "nvdisasm", "c++filt")
    if {str(arch) for arch in ARCHS} <= set(_C.build_info()["cuda_archs"]):
        return cuda_gates.read([Path(_C.__file__)])
    if not os.environ.get("KVSPEED_CI_NVCC"):
        pytest.skip("kvspeed is installed without all CUDA architectures; KVSPEED_CI_NVCC=1 compiles them here")
    needs("nvcc", "cmake", "ninja")
    cache = Path(os.environ.get("KVSPEED_CACHE") or Path.home() / ".cache" / "kvspeed")
    return cuda_gates.read(cuda_gates.build(cache / "cuda-gates"))


def test_every_kernel_is_there_for_every_architecture(kernels: list[Kernel]) -> None:
    built: dict[str, set[int]] = {}
    for kernel in kernels:
        built.setdefault(kernel.name, set()).add(kernel.arch)
    assert not {name: archs for name, archs in built.items() if archs != set(ARCHS)}
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for kind in ("segment_decode", "segment_prefill"):
                wanted = rf"{kind}\w*<{dtype}, {head_dim}\b"
                assert [name for name in built if re.match(wanted, name)], f"no {wanted}"
    for kind in ("rope_concat", "merge_states", "merge_splits"):
        assert [name for name in built if name.startswith(kind)], f"no {kind}"


def test_machine_code(kernels: list[Kernel]) -> None:
    faults = [fault for kernel in kernels for fault in cuda_gates.faults(kernel)]
    assert not faults, "\n".join(["", *faults])


def test_registers(kernels: list[Kernel]) -> None:
    table = json.loads(cuda_gates.TABLE.read_text())
    release = cuda_gates.nvcc_release()
    if release != table["nvcc"]:
        pytest.skip(f"the ceilings are those of nvcc {table['nvcc']}, this one is {release}")
    faults = cuda_gates.over_the_ceiling(kernels, table)
    assert not faults, "\n".join(["", *faults])


def test_the_table_of_ceilings_is_well_formed() -> None:
    table = json.loads(cuda_gates.TABLE.read_text())
    assert set(table) == {"nvcc", "archs", "registers"} and table["archs"] == list(ARCHS)
    for name, row in table["registers"].items():
        assert len(row) == len(ARCHS) and name == cuda_gates.shorten(name), name
        assert all(isinstance(n, int) and 0 < n <= 256 and n % cuda_gates.GRANULE == 0 for n in row), name


# ------------------------------------------------------------------------------------------- the rules themselves ----

BAD = r"""
#include <cuda_bf16.h>
using bf16 = __nv_bfloat16;
// Somewhere in shared or in global memory: the compiler cannot know.
__global__ void generic_access(float* out, int here) {
  __shared__ float near[64];
  float* p = here ? near : out;
  p[threadIdx.x] = 1.0f;
  __syncthreads();
  out[64 + threadIdx.x] = near[threadIdx.x ^ 1];
}
// An array with an index that only run time knows.
__global__ void local_array(const int* at, float* out) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[at[i] & 63] = out[i];
  for (int i = 0; i < 64; ++i) out[i] = values[i] * values[at[i + 64] & 63];
}
// More numbers at once than 1024 threads have registers for.
__global__ void __launch_bounds__(1024) spill(float* out) {
  float values[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = out[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i * 1024 + threadIdx.x] = values[127 - i] * values[i];
}
// No tensor cores, no copies in the background.
template <class T, int D>
__global__ void segment_decode(float* out) { out[threadIdx.x] = D; }
template __global__ void segment_decode<bf16, 64>(float*);
__global__ void fine(const float4* a, float4* b) { b[threadIdx.x] = a[threadIdx.x]; }
"""


@pytest.fixture(scope="session")
def bad(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    needs("nvcc", "cuobjdump", "nvdisasm", "c++filt")
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad.cu").write_text(BAD)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
    nvcc = os.environ.get("CUDACXX") or cuda_gates.tool("nvcc")
    assert nvcc is not None
    cuda_gates._run([nvcc, "-O3", *targets, "-c", folder / "bad.cu", "-o", folder / "bad.o"])
    return cuda_gates.read([folder / "bad.o"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generic_access", ["generic access"]),
        ("local_array", ["local memory", "bytes of stack"]),
        ("spill", ["local memory", "bytes of stack"]),
        ("segment_decode<bf16, 64>", ["no HMMA", "no LDSM", "no LDGSTS"]),
        ("fine", []),
    ],
)
def test_bad_machine_code_is_found(bad: list[Kernel], name: str, words: list[str]) -> None:
    mine = [kernel for kernel in bad if kernel.name == name]
    assert {kernel.arch for kernel in mine} == {80, 90}
    for kernel in mine:
        faults = "\n".join(cuda_gates.faults(kernel)).replace("\\", "")
        assert bool(faults) == bool(words), faults
        assert all(word in faults for word in words), faults


def test_registers_beyond_the_ceiling_are_found() -> None:
    table = {"archs": [80, 90], "registers": {"a": [64, 72], "gone": [8, 8]}}
    good = [Kernel("a", 80, registers=64), Kernel("a", 90, registers=70)]
    assert cuda_gates.over_the_ceiling(good, table) == ["registers.json has a row for gone, which is not built"]
    del table["registers"]["gone"]
    assert not cuda_gates.over_the_ceiling(good, table)
    found = cuda_gates.over_the_ceiling([*good, Kernel("b", 80), Kernel("a", 100), Kernel("a", 80, 65)], table)
    assert [line.split("; ")[0] for line in found] == [
        "a for sm_100 has no ceiling in registers.json",
        "a for sm_80 uses 65 registers, more than 64",
        "b for sm_80 has no ceiling in registers.json",
    ]


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("void kvspeed::cuda::segment_decode<__nv_bfloat16, 128>(kvspeed::cuda::Params)", "segment_decode<bf16, 128>"),
        ("kvspeed::cuda::(anonymous namespace)::upload(kvspeed::cuda::Block<(int)4>)", "upload"),
        ("void kvspeed::cuda::f<__half, (int)80, true>(kvspeed::gpu::X (*)(int))", "f<f16, 80, true>"),
        ("void kvspeed::cuda::f<float, (kvspeed::cuda::Kind)1>(int)", "f<float, (Kind)1>"),
    ],
)
def test_names_of_kernels_are_short(demangled: str, short: str) -> None:
    assert cuda_gates.shorten(demangled) == short


def test_reading_the_tools_output() -> None:
    kernels: dict[tuple[str, int], Kernel] = {}
    cuda_gates._read_resources(
        "Fatbin elf code:\n================\narch = sm_90\n\nResource usage:\n Common:\n  GLOBAL:0\n Function f:\n"
        "  REG:40 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:416 TEXTURE:0 SURFACE:0 SAMPLER:0\n",
        kernels,
    )
    cuda_gates._read_sass(
        '\tcode for sm_90\n\t\tFunction : f\n\t.headerflags\t@"EF"\n'
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;         /* 0x00000a00ff017b82 */\n"
        "                                                                  /* 0x000fe20000000800 */\n"
        "        /*0010*/              @!P0 LD.E R2, desc[UR4][R2.64] ;    /* 0x000000a00ff017b82 */\n"
        "        /*12340*/             @UP1 LDG.E.EF.128.CONSTANT R4, desc[UR4][R2.64] ;  /* 0x00 */\n",
        kernels,
    )
    (kernel,) = kernels.values()
    assert (kernel.arch, kernel.registers, kernel.stack, kernel.local) == (90, 40, 8, 16)
    assert kernel.opcodes == {"LDC": 1, "LD.E": 1, "LDG.E.EF.128.CONSTANT": 1}
    assert kernel.count(cuda_gates.WIDE_LOAD) == 1 and kernel.count(r"LD(\.\w+)*") == 1
