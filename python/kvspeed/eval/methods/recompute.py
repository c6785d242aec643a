# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What recomputing methods share: KV of documents computed apart, a copy of it, and some of its rows computed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Block, Context, Method, Prepared
from kvspeed.eval.methods.rows import Choice, recompute
from kvspeed.eval.methods.rowset import RowSet
from kvspeed.eval.methods.work import Work

__all__ = ["Recompute", "document_spans", "prompt_so_far"]


class Recompute(Method):
    """Documents are put side by side; then `rows`, fewer from some layers on, run through the model again.

    Args:
        before: what each document's KV is computed behind, whose own KV is then dropped: "nothing"; "bos", the
            tokenizer's BoS where it has one; "preamble", as in the method `sink`.
    """

    def __init__(self, *, before: str = "nothing") -> None:
        if before not in ("nothing", "bos", "preamble"):
            raise ValueError(f'before: expected "nothing", "bos" or "preamble", got {before!r}')
        self.before = before

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(self.document_ids(context, text) for text in documents)
        bos = getattr(context.tokenizer, "bos_token_id", None)
        before = {"preamble": context.preamble_ids, "bos": () if bos is None else (bos,)}.get(self.before, ())
        blocks = [context.alone(document, before) for document in ids]
        preamble = context.preamble
        if preamble is not None:
            blocks.insert(0, Block.of(preamble))
        length = len(context.preamble_ids) + sum(map(len, ids))
        context.check_room(length + context.max_new_tokens)
        return Prepared(context, ids, blocks, length)

    def document_ids(self, context: Context, text: str) -> tuple[int, ...]:
        """Ids of a document as this method computes it."""
        return context.document_ids(text)

    def rows(self, prepared: Prepared, question: int) -> Sequence[int]:
        """Positions that run through layer 0, rising, those of the question last: all, unless a method takes fewer."""
        return range(prepared.preamble, prepared.length + question)

    def choices(self, prepared: Prepared, question: int) -> Mapping[int, Choice]:
        """Layers before which fewer rows are chosen, and how."""
        return {}

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = context.place(prepared.blocks, slots, "copy")
        ids = [*prompt_so_far(prepared), *question]
        rows = self.rows(prepared, len(question))
        choices = self.choices(prepared, len(question))
        logits, run = recompute(context, cache, ids, rows, len(question), choices)
        prepared.done = run.work
        return logits, cache

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        rows = RowSet(self.rows(prepared, question_tokens), torch.device("cpu"))
        windows = prepared.context.shape.windows
        return Work(question_tokens, (len(rows),) * len(windows), tuple(rows.pairs(window) for window in windows))


def prompt_so_far(prepared: Prepared) -> list[int]:
    """Ids of preamble and documents."""
    return [*prepared.context.preamble_ids, *(token for document in prepared.documents for token in document)]


def document_spans(prepared: Prepared) -> list[tuple[int, int]]:
    """Begin and end of each document in the prompt."""
    ends = list(accumulate(map(len, prepared.documents), initial=prepared.preamble))
    return list(pairwise(ends))
