# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KV Packet (arXiv:2604.13226): documents wrapped in trained soft tokens, put side by side, nothing recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Context, Method, Prepared
from kvspeed.eval.methods.work import Work, question_work
from kvspeed.packet.assemble import lay_out
from kvspeed.packet.belongs import check_blocks

__all__ = ["PacketMethod"]


class PacketMethod(Method):
    """Packets with the context's adapter, behind the preamble's own block.

    Args:
        adapter: False for packets without soft tokens.
        press: how the packets are compressed when they are built; see `build_packet`.
        name: in tables.
    """

    name = "packet"

    def __init__(self, *, adapter: bool = True, press: Any = None, name: str | None = None) -> None:
        self.adapter, self.press = adapter, press
        self.name = name or self.name

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(context.document_ids(text) for text in documents)
        packets = [context.packet(text, adapter=self.adapter, press=self.press) for text in documents]
        packets = check_blocks(packets, context.preamble, context.model)
        return Prepared(context, ids, [], sum(packet.length for packet in packets), {"packets": packets})

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = lay_out(prepared.extra["packets"], context.model, context.mode, slots)
        return context.forward(question, cache), cache

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        """Tokens that were removed from the packets are not looked at."""
        stored = sum(packet.keys.shape[2] for packet in prepared.extra["packets"])
        return question_work(prepared.context.shape, stored, question_tokens)

    def kv_bytes(self, prepared: Prepared) -> int:
        return sum(packet.kv_bytes for packet in prepared.extra["packets"])

    def stored_bytes(self, prepared: Prepared) -> int:
        return sum(packet.kv_bytes for packet in prepared.extra["packets"][1 if prepared.preamble else 0 :])
