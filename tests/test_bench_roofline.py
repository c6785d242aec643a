# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind docs/kernels.md: its tables are those that bench/roofline.py makes, and agree with the code."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roofline", ROOT / "bench" / "roofline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["roofline"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_document_has_the_tables_that_the_script_makes(roofline: ModuleType) -> None:
    text = roofline.DOCUMENT.read_text(encoding="utf-8")
    assert roofline.filled(text) == text, "docs/kernels.md is out of date: run python bench/roofline.py --write"
    for name in roofline.TABLES:
        assert f"<!-- roofline: {name} -->" in text, f"docs/kernels.md does not show the table {name}"


def test_a_mark_without_table_or_end_is_refused(roofline: ModuleType) -> None:
    with pytest.raises(ValueError, match="names the table 'nothing'"):
        roofline.filled("<!-- roofline: nothing -->\n<!-- end -->")
    with pytest.raises(ValueError, match="needs an"):
        roofline.filled("<!-- roofline: cards -->\n")


def test_weights_and_kv_of_the_models_are_the_published_ones(roofline: ModuleType) -> None:
    llama = roofline.LLAMA8
    assert llama.kv_token == 131072
    embedding = 2 * 128256 * 4096
    assert abs(llama.weight_bytes + embedding - 16.06e9) < 0.01e9  # 8.03 billion parameters
    assert roofline.QWEN8.kv_token == 147456 and roofline.LLAMA70.kv_token == 327680


def test_speed_reaches_its_goals_by_arithmetic(roofline: ModuleType) -> None:
    # At 128k and k = 24 of 32: TTFT 1.33 times as fast, KV a quarter less, time per token 1.15 times as fast.
    _, rows = roofline.speed()
    rows = rows[[r[0] for r in rows].index("128k") :]
    row = next(r for r in rows if r[1] == "k = 24")
    assert float(row[3]) >= 1.33 and float(row[6]) >= 1.15 and row[4] == "12.88 GB"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_blocks_are_as_large_as_the_sources_say(roofline: ModuleType, tmp_path: Path) -> None:
    lines = [
        '#include "cuda/segment_decode.cuh"',
        '#include "cuda/segment_prefill.cuh"',
        "using namespace kvspeed::cuda;",
    ]
    for head_dim in (64, 80, 96, 128, 256):
        block = roofline.decode_block(head_dim)
        lines += [f"static_assert(DecodeShape<{head_dim}>::kThreads == {block.threads});"]
        lines += [f"static_assert(DecodeShape<{head_dim}>::kSharedBytes == {block.shared});"]
    for head_dim, tiles in ((64, 1), (128, 1), (256, 1), (64, 2), (128, 2)):
        block = roofline.prefill_block(head_dim, tiles)
        lines += [f"static_assert(PrefillShape<{head_dim}, {tiles}>::kThreads == {block.threads});"]
        lines += [f"static_assert(kPrefillSharedBytes<{head_dim}, {tiles}> == {block.shared});"]
    source = tmp_path / "shapes.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = [str(COMPILER), "-std=c++20", "-fsyntax-only", "-DKVSPEED_SIMT=1", "-Wno-unknown-pragmas"]
    command += [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include", "tests")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, "bench/roofline.py's blocks are not those of the sources:\n" + done.stderr[-4000:]


def test_blocks_on_a_multiprocessor(roofline: ModuleType) -> None:
    block = roofline.Block(128, 40 * 1024, 0)
    assert roofline.resident(block, 86, None) == 2  # 41 of 100 KiB each
    assert roofline.resident(block, 90, None) == 5
    assert roofline.resident(block, 90, 168) == 3  # 4 warps of 32 x 168 registers
    assert roofline.resident(roofline.Block(1024, 0, 0), 90, 32) == 2  # threads
