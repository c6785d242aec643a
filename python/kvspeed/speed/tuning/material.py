# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""From what a caller hands over to items to train on: samples, conversations, files; split, and with answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvspeed.install import patched
from kvspeed.packet.build import evaluating, max_positions
from kvspeed.packet.train.batches import split
from kvspeed.packet.train.blocks import bfloat16_products, blocks_kv, logits_of
from kvspeed.packet.train.contexts import Context, contexts_of
from kvspeed.packet.train.processes import Processes
from kvspeed.packet.train.shallow import answer_states
from kvspeed.packet.train.teacher import Answer, Teacher
from kvspeed.samples import Sample, check_samples, read_samples
from kvspeed.speed.tuning.items import Item, given_answers
from kvspeed.speed.tuning.rows import Conversation, conversations_of, read_messages, rows_of
from kvspeed.speed.tuning.settings import Choices

__all__ = ["asked", "items_of", "read_data", "sides"]

Parts = tuple[list[Sample], list[Conversation]]


def read_data(path: str | Path) -> list[Any]:
    """The samples or conversations of a file of JSON Lines: conversations where its lines have "messages".

    Raises:
        OSError, ValueError: as `read_samples` and `read_messages`.
    """
    path = Path(path)
    first: dict[bool, int] = {}  # of each kind, the first line
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                first.setdefault(_is_conversation(line, f"{path}, line {number}"), number)
    if len(first) > 1:
        raise ValueError(
            f"{path}: line {first[True]} is a conversation and line {first[False]} is none; put samples and "
            "conversations into files of their own, and give both"
        )
    return list(read_messages(path)) if True in first else list(read_samples(path))


def _is_conversation(line: str, where: str) -> bool:
    """By its keys; a line that is no JSON object is left to the one that reads it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return '"messages"' in line and '"documents"' not in line
    if not isinstance(entry, dict) or "messages" not in entry:
        return False
    if "documents" in entry:
        raise ValueError(f"{where}: has both messages and documents; make it a conversation or a sample")
    return True


def sides(data: Any, dev: Any, seed: int) -> tuple[Parts, Parts]:
    """((samples, conversations) to train on, those that are held out).

    Raises:
        TypeError, ValueError: the data are none, or `dev` is no share, or leaves one side empty.
    """
    samples, conversations = _sorted("data", data)
    if not samples and not conversations:
        raise ValueError("data: got none; give at least one sample or conversation")
    if dev is None or (isinstance(dev, (int, float)) and not isinstance(dev, bool) and dev == 0):
        return (samples, conversations), ([], [])
    if not isinstance(dev, (int, float)) or isinstance(dev, bool):
        held = _sorted("dev", dev)
        if samples and held[0]:
            check_samples([*samples, *held[0]])
        return (samples, conversations), held
    if not 0 <= dev < 1:
        raise ValueError(f"dev: got {dev!r}; give samples or conversations, or a share of at least 0 and below 1")
    train, held_samples = split(samples, dev, seed) if samples else ([], [])
    order = list(range(len(conversations)))
    random.Random(f"dev/{seed}").shuffle(order)
    count = round(dev * len(order))
    if order and count in (0, len(order)):
        raise ValueError(
            f"dev: a share of {dev} of {len(order)} conversations leaves one side empty; give more, another share, "
            "or 0 to hold none out"
        )
    chosen = set(order[:count])
    held_conversations = [one for index, one in enumerate(conversations) if index in chosen]
    kept = [one for index, one in enumerate(conversations) if index not in chosen]
    return (train, kept), (held_samples, held_conversations)


def items_of(
    model: nn.Module,
    tokenizer: Any,
    parts: Parts,
    end: Sequence[int],
    choices: Choices,
    template: dict[str, Any] | None,
) -> list[Item]:
    """Contexts and rows; contexts have the samples' own answers for now.

    Raises:
        ValueError: a text gives no tokens, a conversation has no answer or is too long; the message names it.
    """
    samples, conversations = parts
    contexts = contexts_of(tokenizer, samples, chat_template_kwargs=template) if samples else []
    found = [Item(context=one, answers=given_answers(one, end)) for one in contexts]
    if conversations:
        limit = max_positions(model) or 2**31
        most = min(limit, choices.max_tokens or limit)
        cut = choices.max_tokens is not None
        rows = rows_of(tokenizer, conversations, end, max_tokens=most, cut=cut, chat_template_kwargs=template)
        found += [Item(row=row) for row in rows]
    return found


def asked(
    items: list[Item],
    model: nn.Module,
    end: Sequence[int],
    choices: Choices,
    folder: Path | None,
    processes: Processes,
    tell: Callable[[int, int], None],
) -> list[Item]:
    """The items with what the untouched model, at full depth, says to their contexts: its answers, or its distribution
    over the given ones; this process's share first, the others' from the folder."""
    if choices.labels == "given" and choices.loss == "ce":
        return items
    kind = Teacher if choices.labels == "model" else _OfGiven
    top = choices.top if choices.loss == "kl" else 1
    low = choices.dtype == "bf16" and next(model.parameters()).dtype == torch.float32
    contexts = [index for index, item in enumerate(items) if item.context is not None]
    found = list(items)
    with evaluating(model), patched(model, None, force=True), bfloat16_products(model) if low else nullcontext():
        teacher = kind(model, end, max_new_tokens=choices.max_new_tokens, top=top, folder=folder)
        share = contexts[processes.index :: processes.count]
        for done, index in enumerate(share, 1):
            found[index] = replace(items[index], answers=tuple(teacher.answers(_context(items[index]))))
            tell(done, len(share))
        processes.wait()
        for index in set(contexts) - set(share):
            found[index] = replace(items[index], answers=tuple(teacher.answers(_context(items[index]))))
    return found


class _OfGiven(Teacher):
    """A teacher that is given the answer and says how likely each token was."""

    def __init__(self, model: nn.Module, end: Sequence[int], **options: Any) -> None:
        super().__init__(model, end, **options)
        self._ends = tuple(end)
        self._settings = [*self._settings, "given"]

    def _compute(self, context: Context) -> list[Answer]:
        prefix = [*context.preamble, *(token for ids in context.documents for token in ids)]
        past = blocks_kv(self.model, [self._embed(prefix)], [0])[0]
        tokens = [answer.tokens for answer in given_answers(context, self._ends)]
        pairs = zip(context.queries, tokens, strict=True)
        rows = [self._embed([*query.question, *given[:-1]]) for query, given in pairs]
        states = answer_states(self.model, None, past, rows, [len(given) for given in tokens])
        return [
            self._answer(list(given), logits_of(self.model, part)) for given, part in zip(tokens, states, strict=True)
        ]


def _context(item: Item) -> Context:
    assert item.context is not None
    return item.context


def _sorted(name: str, data: Any) -> Parts:
    """Samples and conversations of a list, a file, or a list of files."""
    if isinstance(data, (str, Path)):
        data = read_data(data)
    samples: list[Sample] = []
    others: list[Any] = []
    if not isinstance(data, (list, tuple)) and not hasattr(data, "__iter__"):
        raise TypeError(f"{name}: expected samples, conversations or a file of them, got {type(data).__name__}")
    for entry in data:
        if isinstance(entry, Sample):
            samples.append(entry)
        elif isinstance(entry, (str, Path)):
            more, conversations = _sorted(name, entry)
            samples, others = samples + more, others + conversations
        else:
            others.append(entry)
    return (check_samples(samples) if samples else []), conversations_of(others)
