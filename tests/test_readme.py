# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: README's Python runs, links lead somewhere, files that are named exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kvspeed
import pytest
from kvspeed.models import ARCHITECTURES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_every_python_block_of_the_readme_runs_in_turn(smollm2: Any, monkeypatch, tmp_path, capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 4
    from kvspeed import smollm2 as loader

    monkeypatch.setattr(loader, "load_smollm2", lambda: smollm2)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = []
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, Python block {number + 1}", "exec"), names)
        printed.append(capsys.readouterr().out)
    speed, packets, both, _ = printed
    assert "sinensis" in speed
    for block, out in ((blocks[0], speed), (blocks[1], packets), (blocks[2], both)):
        promised = re.findall(r"^# (.*?)(?: \.\.\.)?$", block, flags=re.MULTILINE)
        assert len(promised) == 1 and promised[0] in out, (promised, out)
    assert "Peter Holm" in packets and "Peter Holm" in both
    assert kvspeed.Packet.load("bakery.safetensors").text == names["texts"][0]
    assert names["packets"][0].depth == 24
    assert names["out"].shape == (1, 8, 1, 64) and bool(names["out"].isfinite().all())
    assert "FAILED" not in both  # of verify's report


def test_every_python_block_about_packets_runs_in_turn(smollm2_dir: Path, monkeypatch, tmp_path, capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/packets.md").read_text("utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/packets.md, Python block {number + 1}", "exec"), names)
    assert "Bo Lee" in capsys.readouterr().out
    assert len(names["ids"]) == 2 and names["packet"].length == names["packets"][0].length


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(
        r"\b(?:csrc|python|tests|bench|docs|examples|\.ci)/[\w/.*-]*[\w*]", path.read_text(encoding="utf-8")
    )
    for name in named:
        assert any(ROOT.glob(name)), f"{path.name} names {name}"


def test_architecture_document_names_real_modules() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "python" / "kvspeed"
    present = {path.name for path in package.rglob("*.py")} | {path.name for path in (ROOT / "tests").glob("*.py")}
    for name in re.findall(r"\b\w+\.py\b", text):
        assert name in present, f"docs/architecture.md names {name}"


def test_readme_lists_the_architectures_that_are_known() -> None:
    listed = next(line for line in README.splitlines() if line.startswith("| architectures"))
    for entry in ARCHITECTURES.values():
        assert entry.name in listed, f"README does not list {entry.name}"


def test_readme_names_the_commands_that_exist() -> None:
    from kvspeed.cli.app import app
    from typer.main import get_command

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    for name in re.findall(r"kvspeed ([\w-]+)`", README):
        assert name in commands, f"README names kvspeed {name}"
    assert commands >= {"demo", "doctor", "pack", "ask"}
