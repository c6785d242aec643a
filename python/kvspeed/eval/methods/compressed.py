# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Compression: packets with removed tokens, and one cache of the whole prompt with as many removed, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvspeed.eval.methods.base import Context, Method, Prepared
from kvspeed.eval.methods.packet import PacketMethod
from kvspeed.packet.build import build_single
from kvspeed.packet.press import PRESSES, Press
from kvspeed.samples import document_text

__all__ = ["SingleCache", "compressed_methods"]


class SingleCache(PacketMethod):
    """Preamble and documents as one sequence under full attention, with tokens of the documents removed.

    Nothing of it can be shared between prompts. The preamble stays whole: without BoS attention loses its sink, and the
    comparison with packets, whose preamble is never compressed, would not be fair.

    Args:
        press: how tokens are removed; the fraction is that of the documents' tokens.
    """

    name = "single"
    shares = False

    def __init__(self, *, press: Press | None = None, name: str | None = None) -> None:
        super().__init__(adapter=False, press=press, name=name)

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(context.document_ids(text) for text in documents)
        if not documents:
            return super().prepare(context, documents)
        described = None if self.press is None else repr(sorted(self.press.describe().items()))
        block = context.keep(
            ("single", tuple(documents), described),
            lambda: build_single(
                context.model,
                context.tokenizer,
                [document_text(text) for text in documents],
                preamble=context.preamble,
                press=self.press,
            ),
        )
        return Prepared(context, ids, [], block.length, {"packets": [block]})

    def stored_bytes(self, prepared: Prepared) -> int:
        """Everything but what the preamble's tokens, which are all there, take of it."""
        if not prepared.documents:
            return 0
        (block,) = prepared.extra["packets"]
        return block.kv_bytes // block.keys.shape[2] * (block.keys.shape[2] - prepared.preamble)


def compressed_methods() -> dict[str, Callable[..., Method]]:
    """`packet+cur-<n>`, `packet+cur-<n>-whole` (soft tokens not protected) and `single+cur-<n>`, of every press, by
    name; n is the percentage that is removed."""
    methods: dict[str, Callable[..., Method]] = {}
    for name, press in PRESSES.items():
        methods[f"packet+{name}-<n>"] = partial(_packets, press, True)
        methods[f"packet+{name}-<n>-whole"] = partial(_packets, press, False)
        methods[f"single+{name}-<n>"] = partial(_single, press)
    return methods


def _packets(press: type[Press], protect_soft: bool, percent: int) -> PacketMethod:
    """Packets with n % of their tokens removed; -whole: soft tokens may go too."""
    return PacketMethod(press=press(percent / 100, protect_soft=protect_soft))


def _single(press: type[Press], percent: int) -> SingleCache:
    """One cache of the whole prompt with n % of the documents' tokens removed."""
    return SingleCache(press=press(percent / 100))
