# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The examples run: the C++ one is compiled with plain g++ flags, the RAG finds, stores and reuses its packets."""

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
CUDA_HEADERS = next(
    (
        home / "include"
        for home in (Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda"), Path("/usr/local/cuda"))
        if (home / "include" / "cuda_runtime_api.h").is_file()
    ),
    None,
)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the flags are those of Linux compilers")
def test_core_embeds_in_cpp_without_cmake_torch_or_python(tmp_path: Path) -> None:
    # As in the header of embed.cpp: the baseline kernels alone, which any processor runs.
    program = tmp_path / "embed"
    command = [
        *(str(COMPILER), "-std=c++20", "-O1", "-fopenmp"),
        *("-DKVSPEED_HAVE_BASELINE=1", "-DKVSPEED_ISA_NAME=baseline", '-DKVSPEED_SIMD_HEADER="cpu/simd_baseline.h"'),
        *("-Icsrc/include", "-Icsrc", *sorted(str(p) for p in (ROOT / "csrc/core").glob("*.cpp"))),
        *("csrc/cpu/kernels.cpp", "examples/embed/embed.cpp", "-o", str(program)),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "copy and view differ by" in run.stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(CUDA_HEADERS is None, reason="no CUDA toolkit")
def test_gpu_program_is_right_cpp(tmp_path: Path) -> None:
    # Compiled only: it runs where there is a GPU.
    command = [
        *(str(COMPILER), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Icsrc/include", f"-isystem{CUDA_HEADERS}"),
        *("-c", "examples/embed/embed_cuda.cpp", "-o", str(tmp_path / "embed_cuda.o")),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def _rag() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rag", ROOT / "examples" / "rag.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rag_passages_keep_every_word_and_stay_short() -> None:
    rag = _rag()
    paragraphs = [f"p{i} " + "word " * (20 * (i % 5)) for i in range(12)]
    pieces = rag.passages("\n\n".join(paragraphs))
    assert " ".join(pieces).split() == " ".join(paragraphs).split()
    assert all(len(piece.split()) <= rag.WORDS for piece in pieces)
    assert rag.passages(" \n\n ") == []


def test_rag_ranks_the_passage_with_the_rare_word_first() -> None:
    rag = _rag()
    texts = ["the sea and the moon", "the moon and a zebra", "the sea, the sea, the sea"]
    assert rag.BM25(texts).best("What of the zebra?", 2)[0] == 1
    assert rag.BM25(texts).best("sea", 3)[0] == 2


@pytest.mark.parametrize("k", [None, 24])
def test_rag_answers_and_computes_each_passage_once(smollm2, tmp_path, monkeypatch, capsys, k) -> None:
    rag = _rag()
    monkeypatch.setattr(rag, "load_model", lambda name: smollm2)
    notes = tmp_path / "notes.txt"
    notes.write_text("The key of the boat house hangs behind the green door.\n\n" + "Nothing else happened. " * 52)
    arguments = [str(notes), "-q", "Where does the key hang?", "--passages", "1", "--store", str(tmp_path / "packets")]
    arguments += [] if k is None else ["--k", str(k)]
    assert rag.main(arguments) == 0
    first = capsys.readouterr().out
    assert "2 computed" in first and "The key of the boat house" in first
    assert rag.main(arguments) == 0
    again = capsys.readouterr().out
    assert "0 computed" in again
    assert first.split("\n\n", 1)[1].splitlines()[1] == again.split("\n\n", 1)[1].splitlines()[1]
    if k is None:
        assert "green door" in again


def test_rag_computes_anew_for_another_model(tmp_path, monkeypatch, capsys) -> None:
    from cli_tools import save_model

    rag = _rag()
    notes = tmp_path / "notes.txt"
    notes.write_text("The key hangs behind the door.")
    arguments = [str(notes), "-q", "Where?", "--store", str(tmp_path / "packets"), "--model"]
    for seed, computed in ((0, 1), (0, 0), (1, 1), (0, 0)):
        assert rag.main([*arguments, str(save_model(tmp_path / f"tiny-{seed}", seed=seed))]) == 0
        assert f" {computed} computed" in capsys.readouterr().out


def test_rag_says_in_a_sentence_that_a_file_is_missing(tmp_path, capsys) -> None:
    assert _rag().main([str(tmp_path / "no.txt"), "-q", "Where?"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and "no.txt cannot be read" in printed.err
