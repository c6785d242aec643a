# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The student: the frozen model over packets, with the soft tokens as the only thing that has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvspeed.models import base_model
from kvspeed.packet.adapter import PacketAdapter, input_embedding
from kvspeed.packet.train.blocks import BlockKV, blocks_kv, join_kv, logits_of, rows_hidden
from kvspeed.packet.train.contexts import Context
from kvspeed.packet.train.teacher import Answer
from kvspeed.patch import patched
from kvspeed.plan import Plan, labelled_rows
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
        if self.spec is not None:
            return [self._shallow(context, index, answers[index]) for index in range(len(answers))]
        documents = self._documents(context)
        starts = _starts(context, documents)
        past = [*self._preamble(context), *blocks_kv(self.model, documents, starts)]
        return self._answers(context, answers, join_kv(past))

    # ---- all layers -----------------------------------------------------------------------------------------------

    def _answers(self, context: Context, answers: Sequence[Answer], past: BlockKV) -> list[torch.Tensor]:
        rows = [
            self._embed([*query.question, *answer.tokens[:-1]])
            for query, answer in zip(context.queries, answers, strict=True)
        ]
        hidden = rows_hidden(self.model, past, rows)
        picked = [states[len(query.question) - 1 :] for states, query in zip(hidden, context.queries, strict=True)]
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

    # ---- SPEED ----------------------------------------------------------------------------------------------------

    def _shallow(self, context: Context, index: int, answer: Answer) -> torch.Tensor:
        """One sample under SPEED: layers < k under a block mask, the layers above on the few tokens that live there."""
        assert self.spec is not None
        query = context.queries[index]
        blocks = [self._embed(context.preamble)] if context.preamble else []
        blocks += self._documents(context)
        blocks.append(self._embed([*query.question, *answer.tokens]))
        embeds = torch.cat(blocks)
        total, new = len(embeds), len(answer.tokens)
        labels = torch.full((1, total), -100)
        labels[0, total - new :] = torch.tensor(answer.tokens)
        deep, _ = labelled_rows(self.spec, labels, None)
        masks = _block_masks(self.model, [len(block) for block in blocks], embeds)
        plan = Plan(cache=None, past=0, padding=None, plain_mask=True, kernels=False, deep=deep)
        with patched(self.model, self.spec, force=True):
            hidden = base_model(self.model)(
                inputs_embeds=embeds[None],
                attention_mask=masks,
                position_ids=torch.arange(total, device=embeds.device)[None],
                use_cache=False,
                kvspeed_plan=plan,
            ).last_hidden_state[0]
        # the columns end with the last question token and the answer, whose last token predicts nothing
        return logits_of(self.model, hidden[-new - 1 : -1])


def _starts(context: Context, documents: Sequence[torch.Tensor]) -> list[int]:
    """The position of each document's first token."""
    starts, at = [], len(context.preamble)
    for document in documents:
        starts.append(at)
        at += len(document)
    return starts


def _block_masks(model: nn.Module, lengths: list[int], like: torch.Tensor) -> Any:
    """The additive mask `[1, 1, T, T]` of blocks that see themselves and a last one that sees all, by kind of layer."""
    config: Any = base_model(model).config
    block = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(block))
    seen = ((block[:, None] == block) | (block[:, None] == len(lengths) - 1)) & (place[:, None] >= place)
    window = getattr(config, "sliding_window", None)
    near = seen & (place[:, None] - place < window) if window else seen
    kinds = {"full_attention": seen, "sliding_attention": near}

    def added(mask: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(like.dtype).min
        return like.new_zeros(mask.shape).masked_fill(~mask.to(like.device), lowest)[None, None]

    present = set(getattr(config, "layer_types", None) or [])
    if len(present) > 1:
        return {kind: added(kinds[kind]) for kind in present}
    only = next(iter(present), "sliding_attention" if window else "full_attention")
    return added(kinds[only])
