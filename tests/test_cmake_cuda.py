# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which nvcc, architectures and number of jobs a build chooses, and what it says where there is no nvcc that works.

The compilers here are scripts that answer as nvcc and nvidia-smi do, so that no toolkit and no GPU is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "cmake" / "KvspeedCuda.cmake"
KNOWN = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]  # what nvcc 13.0 lists

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def nvcc(folder: Path, *, release: str = "13.0", known: list[int] | None = None, compile_: str = "exit 0") -> Path:
    listing = "\\n".join(f"sm_{arch}" for arch in known or KNOWN)
    return script(
        folder / "nvcc",
        f'case "$*" in\n  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;\n'
        f"  --list-gpu-code) printf '{listing}\\n' ;;\n  --help) echo help ;;\n  *) {compile_} ;;\nesac",
    )


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what leads to an nvcc or limits architectures."""
    drop = ("CUDACXX", "CUDAHOSTCXX", "CUDA_HOME", "CUDA_PATH", "KVSPEED_CUDA", "KVSPEED_CUDA_ARCHS")
    return {**{name: value for name, value in os.environ.items() if name not in drop}, **changes}


def call(code: str, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake code that may use the module; what it `report`s comes out on stderr, one line each."""
    file = folder / "call.cmake"
    file.write_text(
        'cmake_policy(VERSION 3.22)\nmacro(report)\n  message("${ARGN}")\nendmacro()\n'
        f'set(CMAKE_CUDA_HOST_COMPILER c++)\ninclude("{MODULE}")\n{code}\n'
    )
    command = ["cmake", "-P", str(file)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment(**changes), check=False
    )


def why_not(tool: Path, folder: Path) -> str:
    done = call(f'kvspeed_try_nvcc("{tool}" why)\nreport("<${{why}}>")', folder)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()[1:-1]


def archs(asked: str, folder: Path, *, gpus: str | None = None, known: list[int] | None = None) -> list[str]:
    """CMake's list and the list of names; a GPU is what nvidia-smi shows. Raises with the message that stopped it."""
    smi = f"echo '{gpus}'" if gpus is not None else "echo no driver >&2; exit 9"
    script(folder / "bin" / "nvidia-smi", smi)
    code = f'kvspeed_choose_archs("{nvcc(folder, known=known)}" "{asked}" list names)\nreport("${{list}}|${{names}}")'
    done = call(code, folder, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split()))
    return done.stderr.strip().splitlines()[-1].split("|")


# ---------------------------------------------------------------------------------------------------------- nvcc ----


def test_nvcc_is_looked_for_where_the_user_points(tmp_path):
    code = 'kvspeed_find_nvcc(path why)\nreport("<${path}|${why}>")'
    home, named, other = (nvcc(tmp_path / name) for name in ("home/bin", "named", "path"))
    found = call(code, tmp_path, CUDA_HOME=str(tmp_path / "home"), PATH=f"{other.parent}:{os.environ['PATH']}").stderr
    assert f"<{home}|>" in found
    assert f"<{other}|>" in call(code, tmp_path, PATH=f"{other.parent}:{os.environ['PATH']}").stderr
    empty = call(code, tmp_path, CUDA_HOME=str(tmp_path / "none"), PATH=f"{other.parent}:{os.environ['PATH']}").stderr
    assert f"<{other}|>" in empty  # a CUDA_HOME without nvcc does not hide the one on PATH
    assert f"<{named}|>" in call(code, tmp_path, CUDACXX=str(named), CUDA_HOME=str(tmp_path / "home")).stderr
    missing = call(code, tmp_path, CUDACXX=str(tmp_path / "gone")).stderr
    assert f"<|there is no nvcc at {tmp_path / 'gone'}" in missing
    nowhere = call(f"set(CMAKE_IGNORE_PATH /usr/local/cuda/bin)\n{code}", tmp_path, PATH=cmake_alone(tmp_path)).stderr
    assert "<|no nvcc was found in CUDA_HOME, PATH or /usr/local/cuda>" in nowhere


def cmake_alone(folder: Path) -> str:
    """A PATH with cmake on it, and no nvcc."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("cmake", "c++", "g++", "cc", "as", "ld", "make", "ninja", "nproc", "uname"):
        tool = shutil.which(name)
        if tool is not None and not (tools / name).exists():
            (tools / name).symlink_to(tool)
    return str(tools)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, []),
        ({"release": "12.4"}, []),
        ({"release": "14.1"}, []),
        ({"release": "11.8"}, ["CUDA 11.8", "12.4 or newer"]),
        ({"release": "12.3"}, ["CUDA 12.3", "12.4 or newer"]),
        ({"compile_": "echo 'ptxas fatal   : Memory allocation failure' >&2; exit 1"}, ["ptxas fatal", "c++"]),
        ({"compile_": "exit 139"}, ["it says nothing"]),
        (
            {"compile_": "printf 'ld: cannot find -lcudart_static\\ncollect2: error\\n'; exit 1"},
            ["find -lcudart_static"],
        ),
        (
            {
                "compile_": "echo 'x.h:1:2: error: -- unsupported GNU version! gcc versions later than 13 are not "
                "supported! The nvcc flag ... can be used' >&2; exit 1"
            },
            ["refuses the host compiler c++", "gcc versions later than 13 are not supported", "set CUDAHOSTCXX"],
        ),
    ],
    ids=["13.0", "12.4", "14.1", "11.8", "12.3", "fails", "dies", "no-runtime", "host-compiler"],
)
def test_what_an_nvcc_is_good_for(tmp_path, options, parts):
    said = why_not(nvcc(tmp_path, **options), tmp_path)
    assert bool(said) == bool(parts), said
    assert all(part in said for part in parts), said
    assert "\n" not in said and not list(tmp_path.glob("nvcc-probe"))


def test_an_nvcc_that_does_not_run(tmp_path):
    assert "does not run (nvcc: libfoo.so not found)" in why_not(
        script(tmp_path / "nvcc", "echo 'nvcc: libfoo.so not found' >&2; exit 127"), tmp_path
    )
    assert "does not tell its version" in why_not(script(tmp_path / "nvcc", "echo hello"), tmp_path)
    assert "does not run" in why_not(tmp_path / "gone", tmp_path)


# -------------------------------------------------------------------------------------------------- architectures ----


def test_default_architectures(tmp_path):
    default = "80-real;86-real;89-real;90-real;100-real;120-real;80-virtual"
    assert archs("", tmp_path) == [default, "80;86;89;90;100;120;80-ptx"]
    assert archs("", tmp_path, gpus="")[1] == "80;86;89;90;100;120;80-ptx"
    older = [75, 80, 86, 87, 89, 90]  # nvcc 12.4
    assert archs("", tmp_path, known=older)[1] == "80;86;89;90;80-ptx"
    assert archs("", tmp_path, gpus="9.0")[1] == "90"
    assert archs("", tmp_path, gpus="8.9\n9.0\n8.9") == ["89-real;90-real", "89;90"]
    assert archs("", tmp_path, gpus="12.1", known=older) == ["80-virtual", "80-ptx"]  # left to the driver
    assert archs("", tmp_path, gpus="7.5")[1] == "80;86;89;90;100;120;80-ptx"  # none that would do: as without a GPU


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("90", "90"),
        ("9.0", "90"),
        ("90-real", "90"),
        ("80;90", "80;90"),
        ("8.0, 12.0", "80;120"),
        ("8.0 8.6+PTX", "80;86;86-ptx"),
        ("80-virtual", "80-ptx"),
        ("10.0-ptx 100", "100-ptx;100"),
        ("90a", "90a"),
        ("90 90 9.0", "90"),
        ("native", "89;90"),
        ("native;80+PTX", "89;90;80;80-ptx"),
    ],
)
def test_architectures_that_are_asked_for(tmp_path, asked, names):
    got, reported = archs(asked, tmp_path, gpus="8.9\n9.0")
    assert reported == names
    assert got == ";".join(f"{n[:-4]}-virtual" if n.endswith("-ptx") else f"{n}-real" for n in names.split(";"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("hopper", "KVSPEED_CUDA_ARCHS has hopper; write architectures as 90"),
        ("sm_90", "KVSPEED_CUDA_ARCHS has sm_90; write"),
        ("75", "KVSPEED_CUDA_ARCHS has 75; kvspeed's kernels need compute capability 8.0 or newer"),
        ("7.0+PTX", "has 70; kvspeed's kernels need"),
        ("80;130", "KVSPEED_CUDA_ARCHS has 130, which .*nvcc cannot compile for; it knows 75, 80, 86"),
        ("native", "KVSPEED_CUDA_ARCHS=native, but nvidia-smi shows no GPU"),
    ],
)
def test_architectures_that_cannot_be(tmp_path, asked, message):
    with pytest.raises(RuntimeError, match=message):
        archs(asked, tmp_path)


def test_jobs_fit_the_cores(tmp_path):
    done = call('kvspeed_cuda_jobs(jobs)\nreport("<${jobs}>")', tmp_path)
    jobs = int(re.findall(r"<(\d+)>", done.stderr)[0])
    assert 1 <= jobs <= len(os.sched_getaffinity(0))
    core = sorted(os.sched_getaffinity(0))[0]
    if shutil.which("taskset"):
        inner = f'include("{MODULE}")\nkvspeed_cuda_jobs(jobs)\nmessage("<${{jobs}}>")'
        (tmp_path / "inner.cmake").write_text(inner)
        run = f"execute_process(COMMAND taskset -c {core} cmake -P inner.cmake ERROR_VARIABLE text)"
        assert "<1>" in call(f'{run}\nreport("${{text}}")', tmp_path).stderr


# ------------------------------------------------------------------------------------------------ the whole build ----


def configure(folder: Path, *options: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-DKVSPEED_PYTHON=OFF", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(**changes), check=False)


@pytest.mark.parametrize("state", ["missing", "old", "broken"])
def test_auto_builds_for_cpus_alone_where_nvcc_is_no_use(tmp_path, state):
    tool = {
        "missing": lambda: tmp_path / "gone",
        "old": lambda: nvcc(tmp_path, release="11.8"),
        "broken": lambda: nvcc(tmp_path, compile_="echo 'error: no licence' >&2; exit 1"),
    }[state]()
    reason = {"missing": "there is no nvcc", "old": "is of CUDA 11.8", "broken": "(error: no licence)"}[state]
    done = configure(tmp_path, CUDACXX=str(tool))
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "kvspeed:" in line]
    assert len(said) == 1 and reason in said[0]
    assert said[0].startswith("-- kvspeed: building without CUDA kernels, because ")
    forced = configure(tmp_path, "-DKVSPEED_CUDA=ON", CUDACXX=str(tool))
    assert forced.returncode != 0
    sentence = " ".join(forced.stderr.split())
    assert "KVSPEED_CUDA=ON, but" in sentence and reason in sentence and "KVSPEED_CUDA=OFF" in sentence


def test_off_looks_for_no_compiler_and_other_words_are_refused(tmp_path):
    tool = script(tmp_path / "nvcc", f"touch {tmp_path / 'called'}; exit 1")
    assert configure(tmp_path, "-DKVSPEED_CUDA=OFF", CUDACXX=str(tool)).returncode == 0
    assert not (tmp_path / "called").exists()
    refused = configure(tmp_path, "-DKVSPEED_CUDA=MAYBE")
    assert refused.returncode != 0 and "KVSPEED_CUDA is MAYBE; it must be AUTO, ON or OFF" in refused.stderr
