# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Build `kvspeed._C` with CMake. Everything else is in pyproject.toml.

KVSPEED_CUDA=AUTO|ON|OFF   CUDA kernels where nvcc works (AUTO, the default), or stop without them (ON), or none (OFF).
KVSPEED_CUDA_ARCHS=...     Such as "80;90", "9.0+PTX" or "native". Default: those of the visible GPUs, else a list.
KVSPEED_BUILD_TYPE         CMake build type, Release by default.
KVSPEED_CUDA_LINEINFO=1    Source lines of the CUDA kernels for Nsight Compute and compute-sanitizer.
CUDA_HOME, CUDACXX         Where nvcc is; CUDAHOSTCXX: the C++ compiler that it drives.
MAX_JOBS                   Compilers at once; default: by cores, and for nvcc by memory too.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CACHED_TOOLS = ("CMAKE_COMMAND", "CMAKE_MAKE_PROGRAM", "CMAKE_CUDA_COMPILER", "CMAKE_CXX_COMPILER")


def _tool(name: str, directory: str) -> str:
    """The path of a build tool: from its pip package where that is importable, else from PATH."""
    try:
        return str(Path(getattr(importlib.import_module(name), directory)) / name)
    except (ImportError, AttributeError):
        found = shutil.which(name)
        if found is None:
            raise SystemExit(f"kvspeed needs {name} to build: pip install {name}") from None
        return found


def _nvcc_environment() -> str:
    """What decides which nvcc is found; CMake itself would keep the first one for ever."""
    return "|".join(os.environ.get(name, "") for name in ("CUDACXX", "CUDAHOSTCXX", "CUDA_HOME", "CUDA_PATH"))


def _forget_moved_build(build: Path) -> None:
    """Empty a build folder that was configured for something else: another tree, tools that are gone, another nvcc."""
    cache = build / "CMakeCache.txt"
    if not cache.is_file():
        return
    entries = dict(
        line.split("=", 1) for line in cache.read_text(errors="replace").splitlines() if "=" in line and line[:1] != "#"
    )
    made_for = [entries.get("CMAKE_HOME_DIRECTORY:INTERNAL", ""), entries.get("CMAKE_CACHEFILE_DIR:INTERNAL", "")]
    tools = [value for name, value in entries.items() if name.split(":")[0] in CACHED_TOOLS and value]
    nvcc = entries.get("KVSPEED_NVCC_ENVIRONMENT:UNINITIALIZED", "")
    if (
        made_for != [str(ROOT), str(build)]
        or nvcc != _nvcc_environment()
        or not all(Path(tool).exists() for tool in tools)
    ):
        shutil.rmtree(build)
        build.mkdir(parents=True)


class CMakeBuild(build_ext):
    """Configure and build one CMake target, and let CMake put it where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        cuda = os.environ.get("KVSPEED_CUDA", "").upper() or "AUTO"
        if cuda not in ("AUTO", "ON", "OFF"):
            raise SystemExit(f"KVSPEED_CUDA is {cuda!r}; it must be AUTO, ON or OFF")
        jobs = os.environ.get("MAX_JOBS", "")
        if jobs and not (jobs.isdecimal() and int(jobs)):
            raise SystemExit(f"MAX_JOBS is {jobs!r}; it must be a number of compilers, 1 or more")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = (Path(self.build_temp) / "cmake").resolve()
        build.mkdir(parents=True, exist_ok=True)
        _forget_moved_build(build)
        cmake = _tool("cmake", "CMAKE_BIN_DIR")
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja', 'BIN_DIR')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('KVSPEED_BUILD_TYPE', 'Release')}",
            f"-DKVSPEED_CUDA={cuda}",
            f"-DKVSPEED_CUDA_ARCHS={os.environ.get('KVSPEED_CUDA_ARCHS', '')}",
            f"-DKVSPEED_CUDA_LINEINFO={os.environ.get('KVSPEED_CUDA_LINEINFO') or 'OFF'}",
            f"-DKVSPEED_NVCC_ENVIRONMENT={_nvcc_environment()}",
            f"-DKVSPEED_VERSION={self.distribution.get_version()}",
            f"-DKVSPEED_EXTENSION_DIR={target.parent}",
            f"-DKVSPEED_EXTENSION_NAME={target.name}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        compile_ = [cmake, "--build", str(build), "--target", "kvspeed_extension"]
        if jobs:
            compile_ += ["--parallel", jobs]
        for command, what in ((configure, "CMake could not configure kvspeed"), (compile_, "kvspeed did not compile")):
            if subprocess.run(command).returncode:
                hint = "" if cuda == "OFF" else "; KVSPEED_CUDA=OFF builds without CUDA kernels"
                raise SystemExit(f"{what}: the reason is in the output above{hint}")


class FreshBuildPy(build_py):
    """Do not pack modules of an earlier build that are gone from the tree: setuptools never empties build/lib."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            package = Path(self.build_lib) / "kvspeed"
            for path in package.glob("**/*") if package.is_dir() else ():
                if path.is_file() and path.suffix != ".so":
                    path.unlink()
        super().run()


setup(ext_modules=[Extension("kvspeed._C", sources=[])], cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuildPy})
