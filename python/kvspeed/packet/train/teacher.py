# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The teacher: the same frozen model under full attention, decoding greedily; its answers are computed once and kept.

What is kept of a token is the teacher's distribution: the logarithms of its largest probabilities and of the rest
together (`top`), or all of it. The loss over kept entries and the rest as one event never exceeds the full KL, and is
within the rest's own share of it.

Greedy decoding needs few steps here: the sample's own answer is run as a draft in one forward, and as far as the model
would have written the same, that is its answer. Only where it would not, tokens are decoded one by one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import base_model, cache_argument
from kvspeed.packet.adapter import input_embedding
from kvspeed.packet.tensorfile import TensorFileError, read_tensor_file, write_tensor_file
from kvspeed.packet.train.blocks import BlockKV, blocks_kv, logits_of, rows_hidden
from kvspeed.packet.train.contexts import Context, Query

__all__ = ["Answer", "Teacher", "greedy_answers"]

FORMAT = "kvspeed.teacher"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Answer:
    """What the teacher wrote, and how sure it was.

    Attributes:
        tokens: its greedy tokens up to and with the first end token, or as many as were allowed.
        log_p: float32 `[tokens, n]`, log-probabilities; the last column is that of all others where `ids` is there.
        ids: int32 `[tokens, n - 1]`, whose they are; None: column v is token v.
    """

    tokens: tuple[int, ...]
    log_p: torch.Tensor
    ids: torch.Tensor | None

    def divergence(self, logits: torch.Tensor) -> torch.Tensor:
        """KL(teacher || student), summed over tokens, for student logits `[tokens, vocabulary]`; differentiable."""
        log_q = torch.log_softmax(logits, -1)
        log_p = self.log_p.to(log_q)
        if self.ids is not None:
            ids = self.ids.to(logits.device, torch.long)
            kept = log_q.gather(-1, ids)
            # the rest's probability by log(1 - sum): from the vocabulary's other entries, without cancellation
            others = log_q.scatter(-1, ids, float("-inf"))
            log_q = torch.cat((kept, torch.logsumexp(others, -1, keepdim=True)), -1)
        p = log_p.exp()
        return torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q)).sum()


class Teacher:
    """Greedy answers of the frozen model, from a folder where they were computed before.

    Args:
        model: a causal LM in eval mode, unpatched or patched without a depth.
        end: ids that end an answer.
        max_new_tokens: the most tokens of an answer.
        top: how many of a token's largest probabilities to keep; None: all.
        folder: where answers are kept, a file a context, named by everything they depend on; None: nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        end: Sequence[int],
        *,
        max_new_tokens: int,
        top: int | None = 128,
        folder: Path | None = None,
    ) -> None:
        self.model, self.end, self.max_new_tokens, self.folder = model, frozenset(end), max_new_tokens, folder
        vocabulary = input_embedding(model).weight.shape[0]
        self.top = top if top is not None and top < vocabulary else None
        self._embedding = input_embedding(model)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._settings = [
            model_fingerprint(model),
            str(next(model.parameters()).dtype),
            sorted(self.end),
            max_new_tokens,
            self.top,
        ]

    def answers(self, context: Context) -> list[Answer]:
        """The answers to a context's questions, in order."""
        path = self._path(context)
        if path is not None and path.is_file():
            try:
                return _read(path, len(context.queries))
            except (TensorFileError, ValueError, KeyError):
                pass  # damaged: computed anew and replaced
        with torch.no_grad():
            found = self._compute(context)
        if path is not None:
            tensors, sizes = {}, []
            for index, answer in enumerate(found):
                sizes.append(list(answer.tokens))
                tensors[f"{index}.log_p"] = answer.log_p
                if answer.ids is not None:
                    tensors[f"{index}.ids"] = answer.ids
            write_tensor_file(path, FORMAT, VERSION, {"tokens": sizes}, tensors)
        return found

    def known(self, context: Context) -> bool:
        """Whether the answers are in the folder already."""
        path = self._path(context)
        return path is not None and path.is_file()

    def _path(self, context: Context) -> Path | None:
        if self.folder is None:
            return None
        drafts = [[query.question, query.target] for query in context.queries]
        text = json.dumps([self._settings, context.preamble, context.documents, drafts])
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.safetensors"

    def _compute(self, context: Context) -> list[Answer]:
        prefix = [*context.preamble, *(token for ids in context.documents for token in ids)]
        (past,) = blocks_kv(self.model, [self._embed(prefix)], [0])
        found = greedy_answers(self.model, past, context.queries, self.end, self.max_new_tokens)
        return [self._answer(tokens, logits) for tokens, logits in found]

    def _answer(self, tokens: list[int], logits: torch.Tensor) -> Answer:
        log_p = torch.log_softmax(logits, -1)
        if self.top is None:
            return Answer(tuple(tokens), log_p.cpu(), None)
        kept, ids = log_p.topk(self.top, dim=-1)
        rest = torch.logsumexp(log_p.scatter(-1, ids, float("-inf")), -1, keepdim=True)
        return Answer(tuple(tokens), torch.cat((kept, rest), -1).cpu(), ids.to(torch.int32).cpu())

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        return _embedded(self._embedding, ids)


@torch.no_grad()
def greedy_answers(
    model: nn.Module, past: BlockKV, queries: Sequence[Query], end: frozenset[int], max_new_tokens: int
) -> list[tuple[list[int], torch.Tensor]]:
    """What `model` writes greedily after each question, and the logits `[tokens, vocabulary]` it wrote it by.

    Args:
        model: a causal LM in eval mode.
        past: the KV of everything before the questions.
        queries: the questions; each one's `target` is the draft.
        end: ids that end an answer.
        max_new_tokens: the most tokens of an answer.
    """
    embedding = input_embedding(model)
    last = min(end, default=None)
    drafts = [
        [*query.target[: max_new_tokens - (last is not None)], *([last] if last is not None else [])]
        for query in queries
    ]
    rows = [_embedded(embedding, [*one.question, *draft[:-1]]) for one, draft in zip(queries, drafts, strict=True)]
    found = []
    for query, draft, states in zip(queries, drafts, rows_hidden(model, past, rows), strict=True):
        logits = logits_of(model, states[len(query.question) - 1 :])
        said = logits.argmax(-1).tolist()
        agreed = next((i for i, (a, b) in enumerate(zip(said, draft, strict=True)) if a != b), len(draft))
        ended = next((i for i, token in enumerate(said) if token in end), len(draft))  # also within the draft
        agreed = min(agreed, ended)
        tokens, kept = said[: agreed + 1], logits[: agreed + 1]
        if tokens[-1] not in end and len(tokens) < max_new_tokens:
            more, more_logits = _decode(model, past, [*query.question, *tokens], end, max_new_tokens - len(tokens))
            tokens, kept = [*tokens, *more], torch.cat((kept, more_logits))
        found.append((tokens, kept))
    return found


def _decode(
    model: nn.Module, past: BlockKV, ids: list[int], end: frozenset[int], most: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after `ids`, at least one, and their logits."""
    base, embedding = base_model(model), input_embedding(model)
    cache = DynamicCache()
    for index, (key, value) in enumerate(past):
        cache.update(key[None], value[None], index)
    at, new, rows = past[0][0].shape[1], list(ids), []
    tokens: list[int] = []
    while len(tokens) < most and not (tokens and tokens[-1] in end):
        positions = torch.arange(at, at + len(new), device=embedding.weight.device)[None]
        given: dict[str, Any] = {cache_argument(base): cache}
        embeds = _embedded(embedding, new)[None]
        states = base(inputs_embeds=embeds, position_ids=positions, use_cache=True, **given).last_hidden_state
        rows.append(logits_of(model, states[0, -1:]))
        at += len(new)
        new = [int(rows[-1].argmax())]
        tokens += new
    return tokens, torch.cat(rows)


def _embedded(embedding: Any, ids: Sequence[int]) -> torch.Tensor:
    return embedding(torch.tensor(list(ids), device=embedding.weight.device))


def _read(path: Path, queries: int) -> list[Answer]:
    header, tensors = read_tensor_file(path, FORMAT, VERSION)
    if len(header["tokens"]) != queries:
        raise ValueError("another number of answers")
    return [
        Answer(tuple(tokens), tensors[f"{index}.log_p"].clone(), tensors.get(f"{index}.ids"))
        for index, tokens in enumerate(header["tokens"])
    ]
