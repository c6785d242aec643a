# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KV Packet: documents whose keys and values are computed once, alone, and used at any position (arXiv:2604.13226)."""

from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.assemble import assemble
from kvspeed.packet.build import build_packet, build_preamble, build_single
from kvspeed.packet.generate import GenerateStats, generate
from kvspeed.packet.packet import Packet
from kvspeed.packet.tensorfile import TensorFileError
from kvspeed.prompt import PromptIds, prompt_ids

__all__ = [
    "GenerateStats",
    "Packet",
    "PacketAdapter",
    "PromptIds",
    "TensorFileError",
    "assemble",
    "build_packet",
    "build_preamble",
    "build_single",
    "generate",
    "prompt_ids",
]
