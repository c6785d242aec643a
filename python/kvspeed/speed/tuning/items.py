# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What is trained on, as tokens: contexts with their questions and answers, and rows of conversations."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvspeed.packet.train.contexts import Context
from kvspeed.packet.train.teacher import Answer
from kvspeed.speed.tuning.rows import Row

__all__ = ["Item", "digest", "given_answers", "item_rows", "micro_batches", "schedule"]


@dataclass(frozen=True, eq=False)
class Item:
    """One thing to train on.

    Attributes:
        context: documents and questions about them, or None:
        row: a conversation.
        answers: of the context's questions, in order.
        packets: whether the context's documents stand in packets, with the adapter's soft tokens.
    """

    context: Context | None = None
    row: Row | None = None
    answers: tuple[Answer, ...] = ()
    packets: bool = False

    @property
    def size(self) -> int:
        """Answers in it, which is what a batch is counted in."""
        return len(self.answers) if self.context is not None else 1

    @property
    def labels(self) -> int:
        """Answer tokens with a loss."""
        if self.context is not None:
            return sum(len(answer.tokens) for answer in self.answers)
        assert self.row is not None
        return self.row.answers

    @property
    def tokens(self) -> int:
        """Tokens that run: documents once, questions and answers; soft tokens not counted."""
        if self.context is not None:
            return self.context.tokens + self.labels
        assert self.row is not None
        return len(self.row.ids)


def given_answers(context: Context, end: Sequence[int]) -> tuple[Answer, ...]:
    """The samples' own answers, ended by the first of the end ids."""
    nothing = torch.zeros(0)
    last = tuple(end[:1])
    return tuple(Answer((*query.target, *last), nothing, None) for query in context.queries)


def item_rows(item: Item) -> list[Row]:
    """A context's questions as sequences of their own, each with all documents before it."""
    if item.row is not None:
        return [item.row]
    context = item.context
    assert context is not None
    prefix = (*context.preamble, *(token for ids in context.documents for token in ids))
    rows = []
    for query, answer in zip(context.queries, item.answers, strict=True):
        prompt = (*prefix, *query.question)
        rows.append(Row(query.id, (*prompt, *answer.tokens), (False,) * len(prompt) + (True,) * len(answer.tokens)))
    return rows


def micro_batches(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Rows of like length together, so that padded they hold at most `tokens` tokens (or are one row)."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if batches and len(batches[-1][0].ids) * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def schedule(items: Sequence[Item], batch_size: int, epochs: int, steps: int | None, seed: int) -> Iterator[list[int]]:
    """Indices of each step's items: every epoch in another order, at least `batch_size` answers a step."""
    made, epoch = 0, 0
    while epoch < epochs if steps is None else made < steps:
        order = list(range(len(items)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        batch: list[int] = []
        held = 0
        for place, index in enumerate(order):
            batch.append(index)
            held += items[index].size
            if held >= batch_size or place == len(order) - 1:
                yield batch
                made, batch, held = made + 1, [], 0
                if made == steps:
                    return
        epoch += 1


def digest(items: Sequence[Item], held: Sequence[Item]) -> str:
    """Sixteen hexadecimal digits that another set of items does not have; a teacher's answers play no part."""
    state = hashlib.sha256()
    for part in (items, held):
        for item in part:
            if item.row is not None:
                state.update(json.dumps([item.row.ids, item.row.answer]).encode())
            elif item.context is not None:
                queries = [[query.question, query.target] for query in item.context.queries]
                state.update(json.dumps([item.context.preamble, item.context.documents, queries]).encode())
        state.update(b"|")
    return state.hexdigest()[:16]
