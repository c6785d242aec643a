# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed pack --press`: smaller packets that `kvspeed ask` uses, and the names that it refuses."""

from __future__ import annotations

import json

import pytest
from cli_tools import refused, run, save_model
from kvspeed import Packet
from kvspeed.cli.texts import ENDING


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny-a")


def test_packs_and_asks(tmp_path, model_dir):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("Ships need light. Lamps give it, and tea is a drink that sailors like.")
    whole = 0
    for name in (None, "cur-50", "random-25-whole", "tova-50"):
        press = ["--press", name] if name else []
        for wanted in ("written" if name is None else "replaced", "kept"):
            result = run("pack", text, "--out", out, "--model", model_dir, *press)
            assert result.exit_code == 0, result.stderr
            assert result.stdout.startswith(wanted)
        (file,) = out.glob(f"*{ENDING}")
        packet = Packet.load(file)
        whole = whole or packet.length
        assert packet.length == whole and (packet.press or {}).get("name") == (name.split("-")[0] if name else None)
        kept = int(whole * (1 - packet.press["ratio"])) if name else whole
        assert packet.keys.shape[2] == kept
    for mode in ("view", "copy"):
        result = run("ask", "What is tea?", "--packets", out, "--model", model_dir, "--mode", mode, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["packets"] == [file.name]


@pytest.mark.parametrize("name", ["cur", "cur-100", "snapkv-30", "cur-30%", ""])
def test_refused_names(tmp_path, name):
    text = tmp_path / "a.txt"
    text.write_text("Tea is a drink.")
    result = run("pack", text, "--out", tmp_path / "out", "--model", tmp_path / "nothing", "--press", name)
    assert "--press" in refused(result) and not (tmp_path / "out").exists()
