# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Builds the emulator: `load()` gives the module kvspeed._simt, `program()` the path of a native program.

    python tests/simt/build.py driver                     builds simt_driver, prints its path; see driver.cpp
    python tests/simt/build.py driver --check address     the same under AddressSanitizer
    python tests/simt/build.py driver --kernels rope_concat,upload
    python tests/simt/build.py extension

Everything lies in a cache folder (KVSPEED_SIMT_CACHE, else build/simt in the tree), one subfolder a set of options;
Ninja rebuilds there what has changed since. To link another program: its sources, compiled with
-DKVSPEED_SIMT -Icsrc -Icsrc/include -Itests (and -fsanitize=thread for kernels), then libsimt_emulator.a of the
folder that `python tests/simt/build.py selftest` prints, and -ldl -pthread.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


class BuildError(Exception):
    """The compiler's output."""


def _tool(name: str, directory: str) -> str:
    try:
        return str(Path(getattr(importlib.import_module(name), directory)) / name)
    except (ImportError, AttributeError):
        found = shutil.which(name)
        if found is None:
            raise BuildError(f"the emulator needs {name} to build: pip install {name}") from None
        return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout[-20000:]}")


def cache() -> Path:
    root = HERE.parents[1]
    if not os.access(root, os.W_OK):
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvspeed"
    return Path(os.environ.get("KVSPEED_SIMT_CACHE") or root / "build" / "simt")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two test runs at once build one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    target: str,
    *,
    check: str = "access",
    kernels: Sequence[str] = (),
    csrc: Path = CSRC,
    oracle_include: Sequence[Path] = (),
    folder: Path | None = None,
) -> Path:
    """Build one target of CMakeLists.txt; returns the folder it lies in."""
    python = target == "simt_extension"
    key = [
        str(HERE),
        str(csrc),
        check,
        *kernels,
        *map(str, oracle_include),
        os.environ.get("CXX", ""),
        os.environ.get("CXXFLAGS", ""),
    ]
    key += [sys.executable, sysconfig.get_config_var("EXT_SUFFIX") or ""] if python else []
    if folder is None:
        folder = cache() / hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    options = [f"-DSIMT_CHECK={check}", f"-DSIMT_KERNELS={';'.join(kernels)}", f"-DSIMT_CSRC={csrc}"]
    options += [f"-DSIMT_ORACLE_INCLUDE={';'.join(map(str, oracle_include))}"]
    if python:
        import pybind11

        options += ["-DSIMT_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"]
        options += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    cmake, ninja = _tool("cmake", "CMAKE_BIN_DIR"), _tool("ninja", "BIN_DIR")
    with _locked(folder):
        stamp = folder / "options"
        if not (folder / "build.ninja").is_file() or not stamp.is_file() or stamp.read_text() != "\n".join(options):
            _run([cmake, "-S", str(HERE), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options])
            stamp.write_text("\n".join(options))
        jobs = ["--parallel", jobs] if (jobs := os.environ.get("MAX_JOBS")) else []
        _run([cmake, "--build", str(folder), "--target", target, *jobs])
    return folder


def program(name: str, **options) -> Path:
    """Build simt_<name> and return its path; options as for `build`."""
    return build(f"simt_{name}", **options) / f"simt_{name}"


def load() -> ModuleType:
    """The module kvspeed._simt, built if need be: the functions of kvspeed._C, whose CUDA device is the emulator."""
    name = "kvspeed._simt"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, build("simt_extension") / "_simt.so")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a program of the emulator and print its path.")
    parser.add_argument("name", choices=("driver", "selftest", "extension"))
    parser.add_argument("--check", choices=("access", "address", "none"), default="access")
    parser.add_argument("--kernels", default="", help="kernel files by name, with commas; all by default")
    arguments = parser.parse_args()
    kernels = [name for name in arguments.kernels.split(",") if name]
    try:
        folder = build(f"simt_{arguments.name}", check=arguments.check, kernels=kernels)
    except BuildError as error:
        raise SystemExit(str(error)) from None
    print(folder / ("_simt.so" if arguments.name == "extension" else f"simt_{arguments.name}"))


if __name__ == "__main__":
    main()
