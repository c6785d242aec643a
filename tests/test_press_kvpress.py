# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""kvpress_check.py, where a Python has kvpress: this one, or the one that KVSPEED_KVPRESS_PYTHON names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kvspeed.packet.press import as_press

SCRIPT = Path(__file__).with_name("kvpress_check.py")


def test_the_presses_agree_with_kvpress():
    python = os.environ.get("KVSPEED_KVPRESS_PYTHON")
    if not python and importlib.util.find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed here, and KVSPEED_KVPRESS_PYTHON names no Python that has it")
    seed = str(int.from_bytes(os.urandom(3), "little"))
    done = subprocess.run([python or sys.executable, SCRIPT, seed], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.count("ok ") > 100


def stand_in(**members):
    """A class as kvpress makes them, so that the bridge is tested where kvpress is not."""
    base = type("ScorerPress", (), {"__module__": "kvpress.presses", "compress": lambda self: None})
    return type("StandIn", (base,), {"__module__": "kvpress.presses", "compression_ratio": 0.25, **members})()


def test_the_bridge_without_kvpress():
    press = as_press(stand_in())
    assert press.ratio == 0.25 and press.describe()["name"] == "kvpress.StandIn" and as_press(press) is press
    assert not as_press(stand_in(), protect_soft=False).protect_soft
    with pytest.raises(ValueError, match=r"ratio: is 0\.5, and the press of kvpress has compression_ratio 0\.25"):
        replace(press, ratio=0.5)
    with pytest.raises(ValueError, match="StandIn does more than give scores"):
        as_press(stand_in(compress=lambda self: 1))
    with pytest.raises(ValueError, match="fraction of tokens to remove"):
        as_press(stand_in(compression_ratio=1.0))
    other = type("AdaKVPress", (), {"__module__": "kvpress.presses"})()
    with pytest.raises(ValueError, match="AdaKVPress does more than give scores"):
        as_press(other)
