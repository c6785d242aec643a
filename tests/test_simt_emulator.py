# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The emulator itself: right kernels pass, each kind of fault is caught, and it means what CUTLASS means."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SIMT = Path(__file__).with_name("simt")
sys.path.insert(0, str(SIMT))
import build  # noqa: E402

RACE = r"race: |nobody has written"  # which of the two a schedule shows
FLIGHT = "asynchronous copy that nobody has waited for"
EXPECTED = {
    "race_read_after_write": RACE,
    "race_in_warp": RACE,
    "race_write_after_read": "race: ",
    "race_write_after_read_in_warp": "race: ",
    "race_write_after_read_only": r"race: write over what another (warp|lane) reads",
    "race_write_write": "race: two threads write",
    "race_matrix_own_row": "race: read",
    "shared_uninitialised": "nobody has written",
    "shared_out_of_bounds": "beyond the block's 2048 bytes",
    "shared_before_start": "beyond the block's 2048 bytes",
    "shared_misaligned": "misaligned pointer",
    "matrix_misaligned": "ldmatrix from an address that is no multiple of 16",
    "copy_without_wait": FLIGHT,
    "copy_wait_too_lax": FLIGHT,
    "copy_without_commit": FLIGHT,
    "copy_without_barrier": RACE + "|" + FLIGHT,
    "copy_outstanding": "returns with an asynchronous copy on its way",
    "copy_over_readers": "race: |" + FLIGHT,
    "copy_misaligned": "from a global address that is no multiple of 16",
    "copy_out_of_bounds": "16-byte read of global memory out of bounds; nearest is in",
    "global_read_out_of_bounds": "4-byte read of global memory out of bounds; nearest is in, which ends 0 bytes before",
    "global_write_out_of_bounds": "4-byte write to global memory out of bounds; nearest is out",
    "global_before_start": "nearest is in, which starts 4 bytes after",
    "global_misaligned": "16-byte access to global memory at an address that is no multiple of 16",
    "global_write_to_input": "write to in, which is an input",
    "global_read_of_output": "read of out, which is an output",
    "global_host_pointer": "read of global memory out of bounds",
    "global_plain_read": "plain read of memory that is neither shared",
    "global_plain_write": "plain write to memory that is neither shared",
    "global_shared_address": "access to shared memory by a function for global memory",
    "scratch_uninitialised": "global memory that nobody has written",
    "scratch_race": "global memory that nobody has written|race: read of global memory",
    "scratch_non_coherent": "non-coherent path",
    "blocks_write_the_same": "two blocks write the same bytes",
    "blocks_read_each_other": "another block of the launch (writes|reads)|nobody has written",
    "threads_write_the_same": "two threads of a block write the same bytes",
    "wild_policy": "cache policy",
    "divergent_block_barrier": "after another thread of the block has returned|different numbers of block barriers",
    "divergent_collective": "divergent warp",
    "divergent_barriers": "deadlock|divergent warp",
    "early_exit": "after another thread of the block has returned|different numbers of block barriers",
    "early_exit_in_warp": "returns while other lanes|already returned",
    "shuffle_masks_differ": "different or wild masks",
    "register_out_of_bounds": "index beyond an array",
    "index_overflow": "integer overflow in a product",
}
LAUNCHES = {
    "launch_no_blocks": "a grid of 0 x 1 x 1",
    "launch_wide_grid": "a grid of 1 x 65536 x 1",
    "launch_partial_warp": "48 threads a block",
    "launch_many_threads": "1056 threads a block",
    "launch_much_memory": "101377 bytes of shared memory; 101376 are allowed",
    "launch_ok": "^clean$",
}
SUMS = {"block_barrier": 64, "warp_barrier": 192, "two_stages": 128, "scratch": 64, "collectives": 1024, "zero_fill": 0}


def _run(command: list[str | Path], **environment: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout
    return done.stdout


def _lines(output: str) -> dict[str, list[str]]:
    """What was said of each case, over schedules and seeds."""
    said: dict[str, list[str]] = {}
    for line in output.splitlines():
        name, _, text = line.partition(": ")
        said.setdefault(name.split()[0], []).append(text)
    return said


@pytest.fixture(scope="module")
def selftest() -> Path:
    return build.program("selftest")


@pytest.fixture(scope="module")
def said(selftest: Path) -> dict[str, list[str]]:
    return _lines(_run([selftest, "4"]))


def test_right_kernels_pass(said):
    right = {name: texts for name, texts in said.items() if name.startswith("ok_")}
    assert right.keys() == {f"ok_{name}" for name in SUMS}
    for name, texts in right.items():
        assert texts == [f"clean, sum {SUMS[name[3:]]}"] * 12


@pytest.mark.parametrize("name", EXPECTED)
def test_fault_is_caught_under_every_seed_and_schedule(said, name):
    assert len(said[name]) == 12
    for text in said[name]:
        assert re.search(EXPECTED[name], text)
        if "misaligned" not in name and "deadlock" not in text:
            assert re.search(r"block \(\d+, 0, 0\) thread \d+", text)


def test_every_faulty_kernel_is_expected(said):
    faulty = {name for name in said if not name.startswith(("ok_", "launch_", "announce"))}
    assert faulty == {*EXPECTED, "uninitialised_accumulator"}


def test_uninitialised_registers_show_in_the_result(said):
    for text in said["uninitialised_accumulator"]:
        assert abs(float(text.removeprefix("clean, sum "))) > 1e38 or "nan" in text


def test_faults_name_the_line(said):
    if shutil.which("addr2line") is None:
        pytest.skip("addr2line is not installed")
    lines = (SIMT / "selftest_kernels.cu").read_text().splitlines()
    for name in ("global_read_out_of_bounds", "shared_uninitialised", "copy_out_of_bounds"):
        line = int(re.search(r"selftest_kernels\.cu:(\d+)", said[name][0]).group(1))
        start = next(i for i, text in enumerate(lines, 1) if f"void {name}(" in text)
        assert start <= line <= start + 8


def test_launches_that_no_gpu_takes_are_refused(said):
    for name, text in LAUNCHES.items():
        assert re.search(text, said[name][0])


def test_announcement_covers_exactly_the_tensors(selftest):
    for _ in range(5):
        assert _run([selftest, "0"]).splitlines()[-1] == "announce 0 0 0 0 bytes wrong"


def test_seeds_repeat_and_differ(selftest):
    first = _run([selftest, "6", "global_plain_write"])
    assert first == _run([selftest, "6", "global_plain_write"])
    assert len({re.search(r"thread \d+", line).group() for line in first.splitlines()}) > 2


def test_right_kernels_pass_under_address_sanitizer():
    program = build.program("selftest", check="address")
    texts = _lines(_run([program, "2", "ok_"], ASAN_OPTIONS="detect_leaks=0"))
    assert {name: set(said) for name, said in texts.items()} == {
        f"ok_{name}": {f"clean, sum {value}"} for name, value in SUMS.items()
    }


def test_address_sanitizer_sees_registers(tmp_path):
    program = build.program("selftest", check="address")
    done = subprocess.run([program, "1", "register_out_of_bounds"], capture_output=True, text=True)
    assert done.returncode != 0 and "out of bounds" in done.stderr


KERNELS = ("segment_attention", "attention_d64", "rope_concat", "merge_states")
CALLS = (
    "attention d=64 b=2 h=6 hkv=2 s=3 seg=70:7,33:-5 tail=41 first=1 window=60 sinks=1",
    "attention d=64 b=2 h=6 hkv=2 s=2 seg=70:7,33:-5 tail=90 split=32 page=7 lengths=1 rope=0",
    "attention d=64 b=1 h=2 hkv=1 s=70 seg=70:7 tail=90 softcap=20 dtype=f16 shift=2",
    "rope d=64 seg=37:5,5:0,64:11 page=16 start=3",
    "rope d=40 r=24 interleaved=1 seg=37:5,5:0 storage=int8 shift=2",
    "merge d=80 b=2 h=3 s=5 dtype_b=f32",
)


@pytest.mark.parametrize("call", CALLS)
def test_kernels_pass_under_address_sanitizer(call):
    """What the emulator does not see: arrays in registers, the launchers' own code, undefined behaviour."""
    program = build.program("driver", check="address", kernels=KERNELS)
    output = _run([program, *call.split(), "seeds=1", "schedule=2"], ASAN_OPTIONS="detect_leaks=0")
    assert " ok " in output


def _cutlass_include() -> Path | None:
    spec = importlib.util.find_spec("cutlass_library")
    folder = Path(spec.origin).parent / "source" / "include" if spec and spec.origin else None
    return folder if folder and (folder / "cute" / "tensor.hpp").is_file() else None


def _cuda_include() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    return next((Path(h) / "include" for h in homes if h and (Path(h) / "include" / "cuda_runtime.h").is_file()), None)


def test_fragment_layouts_equal_cutlass():
    cutlass, cuda = _cutlass_include(), _cuda_include()
    if cutlass is None or cuda is None:
        pytest.skip("needs the headers of nvidia-cutlass (pip install --no-deps nvidia-cutlass) and of CUDA")
    program = build.program("oracle", check="none", oracle_include=[cutlass, cuda / "cccl", cuda])
    output = _run([program])
    assert "ldmatrix.x4: 0 of 256 wrong" in output and "ldmatrix.x4.trans: 0 of 256 wrong" in output


def test_aarch64(tmp_path):
    """The other switch between fibers, where there is a cross compiler and qemu."""
    compiler, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or qemu is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64")
    csrc = build.CSRC
    flags = ["-std=c++20", "-O1", "-DKVSPEED_SIMT", f"-I{csrc}", f"-I{csrc}/include", f"-I{SIMT.parent}"]
    kernel_flags = ["-fsanitize=thread", "-fsanitize=alignment,bounds,signed-integer-overflow"]
    kernel_flags += ["-ftrivial-auto-var-init=pattern", "-xc++"]
    sources = [SIMT / "selftest_kernels.cu", SIMT / "selftest.cpp", SIMT / "selftest_announce.cpp"]
    sources += [SIMT / f"{name}.cpp" for name in re.findall(r"(\w+)\.cpp", _emulator_sources())]
    running = []
    for source in sources:
        extra = kernel_flags if source.suffix == ".cu" else []
        running.append(subprocess.Popen([compiler, *flags, *extra, "-c", source, "-o", tmp_path / f"{source.stem}.o"]))
        if len(running) % 2 == 0:
            running[-2].wait()
    assert [process.wait() for process in running] == [0] * len(running)
    program = tmp_path / "selftest"
    link = [compiler, "-static", "-pthread", *sorted(tmp_path.glob("*.o")), "-o", program, "-ldl"]
    subprocess.run(link, check=True, stderr=subprocess.DEVNULL)
    texts = _lines(_run([qemu, program, "1"]))
    for name, value in SUMS.items():
        assert texts[f"ok_{name}"] == [f"clean, sum {value}"] * 3
    for name, pattern in EXPECTED.items():
        assert all(re.search(pattern, text) for text in texts[name]), name
    assert texts["announce 0 0 0 0 bytes wrong".split()[0]]


def _emulator_sources() -> str:
    text = (SIMT / "CMakeLists.txt").read_text()
    return re.search(r"add_library\(simt_emulator STATIC(.*?)\)", text, re.S).group(1)
