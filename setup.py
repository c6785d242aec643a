# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Build `kvspeed._C` with CMake. Everything else is in pyproject.toml.

KVSPEED_CUDA=AUTO|OFF      For CUDA kernels to come; this version has none: both do the same, and ON is refused.
KVSPEED_BUILD_TYPE         CMake build type, Release by default.
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


def _tool(name: str, directory: str) -> str:
    """The path of a build tool: from its pip package where that is importable, else from PATH."""
    try:
        return str(Path(getattr(importlib.import_module(name), directory)) / name)
    except (ImportError, AttributeError):
        found = shutil.which(name)
        if found is None:
            raise SystemExit(f"kvspeed needs {name} to build: pip install {name}") from None
        return found


def _forget_moved_build(build: Path) -> None:
    """Empty a build folder that was configured elsewhere: the tree was copied, or its interpreter or CMake is gone."""
    cache = build / "CMakeCache.txt"
    if not cache.is_file():
        return
    entries = dict(
        line.split("=", 1) for line in cache.read_text(errors="replace").splitlines() if "=" in line and line[:1] != "#"
    )
    made_for = [entries.get("CMAKE_HOME_DIRECTORY:INTERNAL", ""), entries.get("CMAKE_CACHEFILE_DIR:INTERNAL", "")]
    tools = [value for name, value in entries.items() if name.split(":")[0] in ("CMAKE_COMMAND", "CMAKE_MAKE_PROGRAM")]
    if made_for != [str(ROOT), str(build)] or not all(Path(tool).exists() for tool in tools):
        shutil.rmtree(build)
        build.mkdir(parents=True)


class CMakeBuild(build_ext):
    """Configure and build one CMake target, and let CMake put it where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        cuda = os.environ.get("KVSPEED_CUDA", "AUTO").upper()
        if cuda not in ("AUTO", "ON", "OFF"):
            raise SystemExit(f"KVSPEED_CUDA is {cuda!r}; it must be AUTO, ON or OFF")
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
            f"-DKVSPEED_VERSION={self.distribution.get_version()}",
            f"-DKVSPEED_EXTENSION_DIR={target.parent}",
            f"-DKVSPEED_EXTENSION_NAME={target.name}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--target", "kvspeed_extension"], check=True)


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
