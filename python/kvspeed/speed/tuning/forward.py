# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The loss of a model under SPEED, with as little work as there is: what the training loop calls.

Contexts run once for all their questions (`packet.train.shallow`). Conversations run as a ragged batch in which the
layers >= k take the gathered deep rows alone: the anchors, the answers and what predicts them (`kvspeed.labelled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from kvspeed.install import patched
from kvspeed.labelled import labelled_rows
from kvspeed.models import base_model
from kvspeed.packet.adapter import PacketAdapter, input_embedding
from kvspeed.packet.train.blocks import BlockKV, logits_of
from kvspeed.packet.train.contexts import Context
from kvspeed.packet.train.shallow import anchors_kv, answer_states, context_blocks_kv
from kvspeed.packet.train.teacher import Answer
from kvspeed.plan import Plan
from kvspeed.rule import SpeedSpec
from kvspeed.speed.tuning.items import Item, item_rows, micro_batches
from kvspeed.speed.tuning.rows import Row

__all__ = ["Found", "Learner"]


class Found:
    """What a pass over some items gave.

    Attributes:
        loss: summed over answer tokens.
        labels: answer tokens.
        exact: answers whose every token was the model's first choice, which is to say that greedy decoding writes them.
        answers: how many answers there were; a conversation counts as one.
    """

    def __init__(self) -> None:
        self.loss, self.labels, self.exact, self.answers = 0.0, 0, 0, 0

    def add(self, loss: torch.Tensor, hits: Sequence[torch.Tensor]) -> None:
        self.loss += float(loss.detach())
        self.labels += sum(len(one) for one in hits)
        self.exact += sum(bool(one.all()) for one in hits)
        self.answers += len(hits)


class Learner:
    """The model that learns.

    Args:
        model: a causal LM, bare or wrapped by PEFT.
        spec: SPEED at a depth; None: all layers, the control.
        loss: "ce" or "kl".
        adapter: soft tokens for items in packets.
        teacher: for "kl" on conversations: gives the model of which to take the distributions, inside a block.
        micro_tokens: tokens, padded, of a forward over rows.
        by_rows: run contexts too as rows of their own, and let rows be recomputed: for gradient checkpointing, which
            takes no cache. Contexts in packets keep theirs, and their activations.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: SpeedSpec | None,
        *,
        loss: str = "ce",
        adapter: PacketAdapter | None = None,
        teacher: Callable[[], AbstractContextManager[nn.Module]] | None = None,
        micro_tokens: int = 4096,
        by_rows: bool = False,
    ) -> None:
        self.model, self.spec, self.loss, self.adapter, self.teacher = model, spec, loss, adapter, teacher
        self.micro_tokens, self.by_rows = micro_tokens, by_rows
        self._embedding = input_embedding(model)
        self._anchors: dict[tuple[int, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def evaluate(self, items: Sequence[Item]) -> Found:
        found = Found()
        with torch.no_grad():
            self._run(items, lambda loss, hits: found.add(loss, hits))
        return found

    def backward(self, items: Sequence[Item], scale: float) -> Found:
        """Adds the gradient of `scale` x the summed loss to the weights' `.grad`."""
        found = Found()

        def learn(loss: torch.Tensor, hits: Sequence[torch.Tensor]) -> None:
            (loss * scale).backward()
            found.add(loss, hits)

        self._run(items, learn)
        return found

    def _run(self, items: Sequence[Item], use: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]) -> None:
        """`use` is called for each part that makes one graph."""
        rows: list[Row] = []
        self._anchors.clear()
        for item in items:
            if self._as_context(item):
                use(*self._context(item))
            else:
                rows += item_rows(item)
        for leaves, computed in self._anchors.values():
            # the anchors' own graph, once for all contexts
            pairs = [(one, leaf.grad) for one, leaf in zip(computed, leaves, strict=True) if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
        self._anchors.clear()
        with _recomputing(self.model, self.by_rows):
            for batch in micro_batches(rows, self.micro_tokens):
                use(*self._rows(batch))

    def _as_context(self, item: Item) -> bool:
        if item.context is None or (self.by_rows and not item.packets):
            return False
        if self.spec is not None and self.spec.gaps:
            return False  # what lies above a gap depends on who asks
        anchors = self.spec.anchor_tokens if self.spec is not None else 0
        first = len(item.context.preamble)
        return item.packets or anchors <= first + sum(map(len, item.context.documents))

    # ---- contexts -------------------------------------------------------------------------------------------------

    def context_logits(self, item: Item) -> list[torch.Tensor]:
        """Logits `[answer tokens, vocabulary]` of each of a context's answers."""
        context = item.context
        assert context is not None
        preamble = self._embed(context.preamble)
        documents = [self._embed(ids) for ids in context.documents]
        if item.packets:
            assert self.adapter is not None
            blocks = [self.adapter.wrap(one) for one in documents]
            blocks = [preamble, *blocks] if len(preamble) else blocks
        else:
            blocks = [torch.cat([preamble, *documents])]
        starts = [sum(map(len, blocks[:index])) for index in range(len(blocks))]
        anchors = self._anchors_of(context) if self.spec is not None else None
        past = context_blocks_kv(self.model, self.spec, blocks, starts, anchors)
        pairs = list(zip(context.queries, item.answers, strict=True))
        rows = [self._embed([*query.question, *answer.tokens[:-1]]) for query, answer in pairs]
        counts = [len(answer.tokens) for answer in item.answers]
        states = answer_states(self.model, self.spec, past, rows, counts)
        return list(logits_of(self.model, torch.cat(states)).split(counts))

    def _anchors_of(self, context: Context) -> BlockKV | None:
        """The anchors' KV above k: made once for all contexts of a pass that begin alike, leaves of their graphs. None
        where the preamble does not hold them."""
        assert self.spec is not None
        ids = context.preamble[: self.spec.anchor_tokens]
        if len(ids) < self.spec.anchor_tokens:
            return None
        if ids not in self._anchors:
            computed = [part for pair in anchors_kv(self.model, self.spec, self._embed(ids)) for part in pair]
            leaves = [part.detach().requires_grad_(part.requires_grad) for part in computed]
            self._anchors[ids] = (leaves, computed)
        leaves, _ = self._anchors[ids]
        return list(zip(leaves[::2], leaves[1::2], strict=True))

    def _context(self, item: Item) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = self.context_logits(item)
        targets = [torch.tensor(answer.tokens, device=logits[0].device) for answer in item.answers]
        hits = [rows.detach().argmax(-1) == target for rows, target in zip(logits, targets, strict=True)]
        if self.loss == "ce":
            return _cross_entropy(torch.cat(logits), torch.cat(targets)), hits
        return _divergence(item.answers, logits), hits

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self._embedding(torch.tensor(list(ids), dtype=torch.long, device=self._embedding.weight.device))

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _rows(self, batch: Sequence[Row]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits, targets, owner = self.rows_logits(self.model, batch, self.spec)
        hit = logits.detach().argmax(-1) == targets
        hits = [hit[owner == index] for index in range(len(batch))]
        if self.loss == "ce":
            return _cross_entropy(logits, targets), hits
        assert self.teacher is not None
        with torch.no_grad(), self.teacher() as teacher:
            log_p = torch.log_softmax(self.rows_logits(teacher, batch, None)[0], -1)
        return nn.functional.kl_div(torch.log_softmax(logits, -1), log_p, reduction="sum", log_target=True), hits

    def rows_logits(
        self, model: nn.Module, batch: Sequence[Row], spec: SpeedSpec | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float32 logits `[n, vocabulary]` of a batch's answer tokens, these tokens `[n]`, and their rows `[n]`."""
        longest = max(len(row.ids) for row in batch)
        shape, device = (len(batch), longest), self._embedding.weight.device
        ids, labels, mask = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100), torch.zeros(shape).long()
        for index, row in enumerate(batch):
            count = len(row.ids)
            ids[index, :count], mask[index, :count] = torch.tensor(row.ids), 1
            labels[index, :count] = torch.where(torch.tensor(row.answer), ids[index, :count], -100)
        base = base_model(model)
        ragged = None if bool(mask.all()) else mask.to(device)
        given: dict[str, Any] = {"input_ids": ids.to(device), "attention_mask": ragged, "use_cache": False}
        with patched(model, spec, force=True):
            if spec is not None:
                deep, labels = labelled_rows(spec, labels, mask)
                given["kvspeed_plan"] = Plan(
                    cache=None, past=0, padding=None, plain_mask=True, kernels=False, deep=deep
                )
            hidden = base(**given).last_hidden_state
        predicted = (labels[:, 1:] != -100).to(device)
        targets = labels[:, 1:].to(device)[predicted]
        return logits_of(model, hidden[:, :-1][predicted]), targets, predicted.nonzero()[:, 0]


@contextmanager
def _recomputing(model: nn.Module, on: bool) -> Iterator[None]:
    """Lets the gradient checkpointing of transformers work inside the block, if it is enabled: it asks for layers in
    training mode. What is inside the layers stays as it is, so that no dropout enters the loss.
    """
    layers: Any = base_model(model).layers if on else ()
    before = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = True
        yield
    finally:
        for layer, mode in zip(layers, before, strict=True):
            layer.training = mode


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


def _divergence(answers: Sequence[Answer], logits: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([one.divergence(rows) for one, rows in zip(answers, logits, strict=True)]).sum()
