# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Presses: which tokens of a packet are removed when it is built (`build_packet(..., press=...)`)."""

from kvspeed.packet.press.base import LayerKV, Press
from kvspeed.packet.press.bridge import as_press
from kvspeed.packet.press.cur import CURPress
from kvspeed.packet.press.kvzap import KVzapPress, kvzap_press
from kvspeed.packet.press.leverage import LeveragePress
from kvspeed.packet.press.names import PRESSES, press_from_name, press_name
from kvspeed.packet.press.random import RandomPress
from kvspeed.packet.press.tova import TOVAPress

__all__ = [
    "PRESSES",
    "CURPress",
    "KVzapPress",
    "LayerKV",
    "LeveragePress",
    "Press",
    "RandomPress",
    "TOVAPress",
    "as_press",
    "kvzap_press",
    "press_from_name",
    "press_name",
]
