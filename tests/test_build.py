# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The compiled extension: what it links to, what it says about itself, and its kernels on every instruction set."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import pytest
import torch
from kvspeed import _C, ops
from kvspeed.segment import Segment

ROOT = Path(__file__).resolve().parents[1]
ISAS = ops.cpu_isas()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AARCH64 = "aarch64-linux-gnu-g++"


def run(*command: str, timeout: float = 300, **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return str(result.stdout)


def needs(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


# ------------------------------------------------------------------------------------------------------ the binary ----


def test_extension_has_no_torch_symbol_and_needs_no_cuda() -> None:
    needs("nm", "readelf")
    undefined = run("nm", "-D", "--undefined-only", "-C", _C.__file__)
    assert not re.search(r"\b(c10|at|torch|caffe2)::", undefined)
    libraries = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", _C.__file__))
    assert not [name for name in libraries if re.search(r"torch|c10|cuda|cublas|nvrtc|python", name)], libraries
    assert [name for name in libraries if "gomp" in name] in ([], ["libgomp.so.1"]), "OpenMP must be torch's runtime"


def test_extension_exports_its_c_api_and_nothing_else_of_its_own() -> None:
    needs("nm")
    symbols = {line.split()[-1] for line in run("nm", "-D", "--defined-only", _C.__file__).splitlines() if line}
    assert "PyInit__C" in symbols
    ours = {name for name in symbols if "kvspeed" in name}
    assert not [name for name in ours if name.startswith("_Z")], "C++ internals must stay hidden"


def test_import_needs_no_gpu_and_no_compiler(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "/nonexistent"}
    code = (
        "import kvspeed, kvspeed.ops, torch; from kvspeed import _C; "
        "assert not torch.cuda.is_initialized(); print(_C.isa_best())"
    )
    assert int(run(sys.executable, "-c", code, env=environment)) == _C.isa_best()


def test_extension_alone_can_be_imported_before_torch() -> None:
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('kvspeed._C', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); assert 'torch' not in sys.modules; print(m.isa_best())"
    )
    assert int(run(sys.executable, "-c", code, _C.__file__)) == _C.isa_best()


def test_build_info() -> None:
    info = _C.build_info()
    assert set(info) == {"version", "compiler", "isas", "cuda", "cuda_archs"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", info["version"])
    assert info["compiler"] and "baseline" in info["isas"]
    assert info["cuda"] is bool(info["cuda_archs"])
    assert set(ISAS) <= set(info["isas"])
    assert _C.isa_name(_C.isa_best()) in ISAS and _C.isa_name(0) == "auto"
    assert not _C.isa_available(99) and _C.isa_name(99) == "unknown"


def test_unknown_instruction_set_dtype_and_thread_count_are_refused() -> None:
    state = (1, 1, 1, 8), torch.zeros(1, 1, 1)
    out, lse = torch.zeros(state[0]), state[1]
    arguments = [0, 0, 1, 1, 1, 8, out.data_ptr(), (8, 8, 8), lse.data_ptr(), (1, 1, 1), out.data_ptr(), (8, 8, 8)]
    arguments += [lse.data_ptr(), (1, 1, 1), out.data_ptr(), (8, 8, 8), lse.data_ptr(), 1]
    with pytest.raises(RuntimeError, match="instruction set"):
        _C.merge_states(*arguments, 99, None)
    with pytest.raises(RuntimeError, match="dtype"):
        _C.merge_states(7, *arguments[1:], 0, None)
    with pytest.raises(RuntimeError, match="size"):
        _C.merge_states(*arguments[:-1], 0, 0, None)  # no threads


@pytest.mark.parametrize("page", [3, -1, 2**31 - 1])
def test_compiled_code_itself_checks_pages_before_it_writes(page: int) -> None:
    """kvspeed.ops checks them too, so only a direct call can show that an embedder of the C API is safe."""
    pages, size, heads, dim = 3, 4, 2, 8
    out = torch.full((pages + 1, size, heads, dim), 7.0)  # one page more than the call is told of
    packet, table = torch.randn(heads, 2 * size, dim), torch.tensor([1, page], dtype=torch.int32)
    strides = (heads * 2 * size * dim, 2 * size * dim, dim)
    packets = [(packet.data_ptr(), packet.data_ptr(), *strides, *strides, 2 * size, 0)]
    out_stride = (0, size * heads * dim, dim, heads * dim)
    where = (out.data_ptr(), out.data_ptr(), out_stride, out_stride, 0, 2 * size, table.data_ptr(), 2, size, pages)
    with pytest.raises(RuntimeError, match="pages"):
        _C.rope_concat(0, 1, heads, dim, 0, False, packets, 0, 0, *where, 0, 1, 0, None)
    assert (out == 7).all()


# ------------------------------------------------------------------------------------------- the instruction sets ----


@pytest.mark.skipif(len(ISAS) < 2, reason="this machine runs one instruction set only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_instruction_sets_agree(head_dim: int, dtype: torch.dtype) -> None:
    rows, keys, scale = 5, 200, 1.0
    query = torch.randn(2, 6, rows, head_dim).to(dtype)
    segment = Segment(*(torch.randn(2, 2, keys, head_dim).to(dtype) for _ in range(2)), 321)
    tail = [torch.randn(2, 2, 9, head_dim).to(dtype) for _ in range(2)]
    inv_freq = 1e4 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    packet = torch.randn(2, 3, 33, head_dim).to(dtype)
    results = {}
    for isa in ISAS:
        with ops.cpu_isa(isa):
            out, lse = ops.segment_attention(
                query, [segment], *tail, inv_freq=inv_freq, scale=scale, return_lse=True, split_tokens=64
            )
            merged, _ = ops.merge_states(out, lse, out.flip(0).contiguous(), lse.flip(0).contiguous())
            moved = [torch.full((2, 3, 40, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
            ops.rope_concat([packet], [packet], [-777], inv_freq, *moved, start=3)
        assert torch.equal(moved[1][:, :, 3:36], packet), f"{isa}: values are not bit-exact"
        assert moved[0][:, :, :3].isnan().all() and moved[0][:, :, 36:].isnan().all(), f"{isa}: wrote elsewhere"
        results[isa] = out, lse, merged, moved[0][:, :, 3:36]
    step = torch.finfo(dtype).eps
    for isa, result in results.items():
        for mine, reference, limit in zip(result, results["baseline"], (2, 0, 2, 2), strict=True):
            error = (mine.double() - reference.double()).abs().max().item()
            size = reference.double().abs().max().item()
            allowed = limit * step * size if limit else 1e-5
            assert error <= max(allowed, 4e-6 * size), f"{isa} differs from baseline by {error:.3g} of {size:.3g}"


def test_neon_kernels_are_right_under_qemu(tmp_path: Path) -> None:
    """Cross-compiles core, kernels and tests/native with CMake's aarch64 branch, and runs them."""
    needs(AARCH64, "qemu-aarch64", "cmake")
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DKVSPEED_PYTHON=OFF", "-DKVSPEED_TESTS=ON"),
        "-DKVSPEED_CUDA=OFF",
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={AARCH64}"),
        *("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"),
    ]
    run(*configure)
    run("cmake", "--build", str(tmp_path), "--parallel", "2", timeout=600)
    library_root = "/usr/aarch64-linux-gnu"
    output = run("qemu-aarch64", "-L", library_root, str(tmp_path / "kvspeed_native_test"), timeout=600)
    assert "isa neon" in output and "isa baseline" in output and "best: neon" in output
    assert "FAIL" not in output


# ----------------------------------------------------------------------------------------------------- the package ----


def test_sdist_holds_what_a_build_needs(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns(".git", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", "results")
    shutil.copytree(ROOT, tree, ignore=ignore)
    code = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", code, str(tmp_path), cwd=tree).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        names = {member.split("/", 1)[1] for member in archive.getnames() if "/" in member}
    wanted = {"CMakeLists.txt", "setup.py", "pyproject.toml", "csrc/bindings.cpp", "csrc/include/kvspeed/kvspeed.h"}
    folders = ("csrc/core", "csrc/cpu", "csrc/cuda", "cmake", "tests/simt")
    wanted |= {
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).iterdir() if path.is_file()
    }
    wanted |= {"tests/reference.py", "tests/native/kernels.cpp", "python/kvspeed/ops/__init__.py"}
    assert wanted <= names, sorted(wanted - names)
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_stays_small() -> None:
    """The extension is nearly all of a wheel, which is compressed as this is."""
    size = len(zlib.compress(Path(_C.__file__).read_bytes()))
    assert size <= 8_000_000, f"{size / 1e6:.1f} MB with CUDA for {_C.build_info()['cuda_archs']}"
