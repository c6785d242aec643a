# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The student: the frozen model over packets, with the soft tokens as the only thing that has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kvspeed.packet.adapter import PacketAdapter, input_embedding
from kvspeed.packet.train.blocks import BlockKV, blocks_kv, join_kv, logits_of
from kvspeed.packet.train.contexts import Context
from kvspeed.packet.train.shallow import answer_states, context_blocks_kv
from kvspeed.packet.train.teacher import Answer
from kvspeed.rule import SpeedSpec

__all__ = ["Student", "context_kv"]


def context_kv(model: nn.Module, context: Context, adapter: PacketAdapter | None) -> BlockKV:
    """The KV before a context's questions: of full attention where `adapter` is None, else of packets side by side."""
    embed = input_embedding(model)
    texts = [embed(torch.tensor(ids)) for ids in context.documents]
    preamble = embed(torch.tensor(context.preamble))
    if adapter is None:
        return blocks_kv(model, [torch.cat([preamble, *texts])], [0])[0]
    blocks = [adapter.wrap(text) for text in texts]
    starts = [len(preamble) + sum(map(len, blocks[:index])) for index in range(len(blocks))]
    return join_kv([*blocks_kv(model, [preamble], [0]), *blocks_kv(model, blocks, starts)])


class Student:
    """Answers' logits over packets, and their loss.

    Args:
        model: a causal LM, frozen and in eval mode while this is used.
        adapter: the soft tokens.
        loss: "kl": KL(teacher || student) over the vocabulary; "ce": cross-entropy of the teacher's tokens.
        spec: SPEED at a depth, or None.
        recompute: run the documents a second time in the backward pass, one at a time, instead of keeping their
            activations: memory of one document instead of all, for one forward more.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: PacketAdapter,
        *,
        loss: str = "kl",
        spec: SpeedSpec | None = None,
        recompute: bool = False,
    ) -> None:
        self.model, self.adapter, self.loss, self.spec, self.recompute = model, adapter, loss, spec, recompute
        self._embedding = input_embedding(model)
        self._preambles: dict[tuple[int, ...], BlockKV] = {}

    def evaluate(self, context: Context, answers: Sequence[Answer]) -> tuple[float, int]:
        """(summed loss, answer tokens) of one context."""
        with torch.no_grad():
            return float(self._loss(self.logits(context, answers), answers)), sum(len(one.tokens) for one in answers)

    def backward(self, context: Context, answers: Sequence[Answer], scale: float) -> float:
        """Adds the gradient of `scale` x the summed loss to the soft tokens' `.grad`; returns the summed loss."""
        if self.recompute and self.spec is None:
            return self._backward_by_document(context, answers, scale)
        loss = self._loss(self.logits(context, answers), answers)
        (loss * scale).backward()
        return float(loss.detach())

    def logits(self, context: Context, answers: Sequence[Answer]) -> list[torch.Tensor]:
        """Logits `[answer tokens, vocabulary]` of each answer; row t predicts its token t."""
        documents = self._documents(context)
        starts = _starts(context, documents)
        if self.spec is None:
            past = join_kv([*self._preamble(context), *blocks_kv(self.model, documents, starts)])
        elif context.preamble:
            preamble = self._embed(context.preamble)
            past = context_blocks_kv(self.model, self.spec, [preamble, *documents], [0, *starts])
        else:
            past = context_blocks_kv(self.model, self.spec, documents, starts)
        return self._answers(context, answers, past)

    def _answers(self, context: Context, answers: Sequence[Answer], past: BlockKV) -> list[torch.Tensor]:
        rows = [
            self._embed([*query.question, *answer.tokens[:-1]])
            for query, answer in zip(context.queries, answers, strict=True)
        ]
        picked = answer_states(self.model, self.spec, past, rows, [len(answer.tokens) for answer in answers])
        return list(logits_of(self.model, torch.cat(picked)).split([len(states) for states in picked]))

    def _backward_by_document(self, context: Context, answers: Sequence[Answer], scale: float) -> float:
        with torch.no_grad():
            documents = self._documents(context)
            starts = _starts(context, documents)
            found = [blocks_kv(self.model, [one], [at])[0] for one, at in zip(documents, starts, strict=True)]
        leaves = [[(key.requires_grad_(), value.requires_grad_()) for key, value in layers] for layers in found]
        past = join_kv([*self._preamble(context), *leaves])
        loss = self._loss(self._answers(context, answers, past), answers)
        (loss * scale).backward()
        for ids, at, layers in zip(context.documents, starts, leaves, strict=True):
            wrapped = self.adapter.wrap(self._embed(ids))
            (again,) = blocks_kv(self.model, [wrapped], [at])
            outputs = [part for layer in again for part in layer]
            torch.autograd.backward(outputs, [part.grad for layer in layers for part in layer])
        return float(loss.detach())

    def _preamble(self, context: Context) -> list[BlockKV]:
        """Its KV, which no soft token changes."""
        if not context.preamble:
            return []
        if context.preamble not in self._preambles:
            with torch.no_grad():
                self._preambles[context.preamble] = blocks_kv(self.model, [self._embed(context.preamble)], [0])[0]
        return [self._preambles[context.preamble]]

    def _documents(self, context: Context) -> list[torch.Tensor]:
        return [self.adapter.wrap(self._embed(ids)) for ids in context.documents]

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self._embedding(torch.tensor(list(ids), device=self._embedding.weight.device))

    def _loss(self, logits: list[torch.Tensor], answers: Sequence[Answer]) -> torch.Tensor:
        """Sum over all answer tokens."""
        if self.loss == "ce":
            targets = torch.tensor([token for one in answers for token in one.tokens], device=logits[0].device)
            return nn.functional.cross_entropy(torch.cat(logits), targets, reduction="sum")
        return torch.stack([one.divergence(rows) for one, rows in zip(answers, logits, strict=True)]).sum()


def _starts(context: Context, documents: Sequence[torch.Tensor]) -> list[int]:
    """The position of each document's first token."""
    starts, at = [], len(context.preamble)
    for document in documents:
        starts.append(at)
        at += len(document)
    return starts
