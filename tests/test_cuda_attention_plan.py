# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""How attention on a GPU is cut into blocks and splits: plain C++, so it is tested without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_plans(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "attention_plan"
    source = ROOT / "tests/native/attention_plan.cpp"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
