# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""EPIC's LegoLink (arXiv:2410.15332): the first n tokens of every document are recomputed, with the question.

The paper's first chunk is left alone, since it is the prompt's beginning; here that is the preamble, so every document
is relinked. In EPIC chunks are cached with a BoS each, which stays in the prompt and is among the n tokens: `bos=True`.
Without it, a document's first word must serve as the sink.
"""

from __future__ import annotations

from kvspeed.eval.methods.base import Context, Prepared
from kvspeed.eval.methods.recompute import Recompute, document_spans

__all__ = ["Epic"]


class Epic(Recompute):
    """A fixed set of rows in all layers.

    Args:
        tokens: first tokens of each document to recompute, BoS included; at least 1 with `bos`.
        bos: put the tokenizer's BoS before each document.
        last: as many tokens of each document's end are recomputed too (EPIC's "init-final").
        before: see `Recompute`.
    """

    name = "epic"

    def __init__(self, tokens: int, *, bos: bool = False, last: int = 0, before: str = "nothing") -> None:
        super().__init__(before=before)
        for name, value, least in (("tokens", tokens, 1 if bos else 0), ("last", last, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer from {least}, got {value!r}")
        self.tokens, self.bos, self.last = tokens, bos, last
        self.name = f"epic-bos-{tokens}" if bos else f"epic-{tokens}"

    def document_ids(self, context: Context, text: str) -> tuple[int, ...]:
        ids = context.document_ids(text)
        if not self.bos:
            return ids
        bos = getattr(context.tokenizer, "bos_token_id", None)
        if bos is None:
            raise ValueError(
                f"{self.name}: the tokenizer has no BoS token to put before each document; use epic-{self.tokens}"
            )
        return (bos, *ids)

    def rows(self, prepared: Prepared, question: int) -> list[int]:
        chosen: list[int] = []
        for begin, end in document_spans(prepared):
            head = min(begin + self.tokens, end)
            chosen += range(begin, head)
            chosen += range(max(head, end - self.last), end)
        return [*chosen, *range(prepared.length, prepared.length + question)]
