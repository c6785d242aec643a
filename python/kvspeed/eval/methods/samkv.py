# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SamKV (arXiv:2508.11661): keep the parts of each document that the question, seen with the others, asks for.

Of every document its first and last tokens stay (the anchors). The question runs once over preamble and anchors, which
gives its queries in the last layers. For each document they are personalised: the mean over the other documents of
their own queries (of their last tokens), weighted by their cosine with the question's, is added. Blocks of the document
between its anchors are scored by this query on their mean key; how many stay depends on where the anchors' own score
lies between the best and the worst block. What stays is recomputed, each new key and value mixed with the old one; all
else is dropped, and the prompt gets short, each token at its own position.

There is no public code of the authors. Where the paper leaves room, or a public re-implementation stumbles: the
preamble is not a document and stays whole; query heads are averaged within the group that shares a KV head; documents'
queries are rotated to stand right before the question, so that all queries are compared at one place; tokens that stay
because of any of the layers are recomputed in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from kvspeed import ops
from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Block, Context, Method, Prepared
from kvspeed.eval.methods.rows import Counted, Watcher, recompute
from kvspeed.eval.methods.work import Work, visible_pairs

__all__ = ["SamKV"]


class Entry(NamedTuple):
    """What is kept of a document between prompts.

    Attributes:
        kv: all of it, computed alone.
        anchors: KV of its first and last tokens.
        query: `[layers, H_q, 1, D]`, mean of its last tokens in the last layers of the model.
        means: `[layers, H_kv, blocks, D]`, mean keys of the blocks between its anchors; there may be none.
    """

    kv: Block
    anchors: Block
    query: torch.Tensor
    means: torch.Tensor


class SamKV(Method):
    """Sparse documents, recomputed where they stay.

    Args:
        initial: tokens at each document's beginning that stay.
        local: tokens at its end that stay.
        block: tokens that are kept or dropped together.
        stable: last layers whose queries and keys decide.
        theta: share of the recomputed KV.
        name: in tables.
    """

    name = "samkv"

    def __init__(
        self,
        *,
        initial: int = 8,
        local: int = 16,
        block: int = 8,
        stable: int = 4,
        theta: float = 0.9,
        name: str | None = None,
    ) -> None:
        for what, value in (("initial", initial), ("local", local), ("block", block), ("stable", stable)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what}: expected an integer from 1, got {value!r}")
        if not 0 <= theta <= 1:
            raise ValueError(f"theta: the share of recomputed KV, expected 0 to 1, got {theta!r}")
        self.initial, self.local, self.block, self.stable, self.theta = initial, local, block, stable, theta
        self.name = name or self.name

    # ---- offline ---------------------------------------------------------------------------------------------------

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        if any(context.shape.windows):
            raise ValueError(
                f"{self.name}: drops tokens, and this model has sliding windows, in which the others' places are not "
                "known; use a model with full attention in all layers"
            )
        ids = tuple(context.document_ids(text) for text in documents)
        settings = (self.initial, self.local, self.block, self.stable)
        entries = [context.keep(("samkv", settings, one), lambda one=one: self._entry(context, one)) for one in ids]  # type: ignore[misc]
        blocks = [entry.kv for entry in entries]
        preamble = context.preamble
        if preamble is not None:
            blocks.insert(0, Block.of(preamble))
        length = len(context.preamble_ids) + sum(map(len, ids))
        context.check_room(length + context.max_new_tokens)
        return Prepared(context, ids, blocks, length, {"entries": entries})

    def _entry(self, context: Context, ids: Sequence[int]) -> Entry:
        shape, tokens = context.shape, len(ids)
        context.check_room(tokens)
        size = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        keys, values = (ops.empty_huge(size, context.dtype, context.device) for _ in range(2))
        cache = KVCache(context.base.config)
        cache.set_storage(keys, values, 0)
        queries: dict[int, torch.Tensor] = {}
        recompute(context, cache, ids, range(tokens), tokens, watch=self._watch(context, queries, self.local))
        layers = self._layers(context)
        middle = keys[layers.start :, :, self.initial : max(tokens - self.local, self.initial)]
        parts = middle.split(self.block, 2) if middle.shape[2] else ()
        means = [part.float().mean(2, keepdim=True).to(keys.dtype) for part in parts]
        kv = Block(keys, values)
        return Entry(
            kv,
            _chosen(kv, self._anchors(tokens)),
            torch.stack([queries[layer] for layer in layers]).unsqueeze(2),
            torch.cat(means, 2) if means else middle,
        )

    def _layers(self, context: Context) -> range:
        return range(max(context.shape.layers - self.stable, 0), context.shape.layers)

    def _watch(self, context: Context, found: dict[int, torch.Tensor], last: int | None) -> dict[int, Watcher]:
        """Notes the mean query `[H_q, D]` of the (last) rows in the layers that decide."""

        def note(layer: int) -> Watcher:
            def mean(query: torch.Tensor) -> None:
                rows = query if last is None else query[:, :, -last:]
                found[layer] = rows[0].float().mean(1).to(query.dtype)

            return mean

        return {layer: note(layer) for layer in self._layers(context)}

    def _anchors(self, tokens: int) -> list[int]:
        return [*range(min(self.initial, tokens)), *range(max(tokens - self.local, self.initial), tokens)]

    # ---- online ----------------------------------------------------------------------------------------------------

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context, entries, asked = prepared.context, prepared.extra["entries"], len(question)
        context.check_room(prepared.length + asked + context.max_new_tokens)
        passes: list[Counted] = []
        kept = [self._anchors(len(ids)) for ids in prepared.documents]
        if entries:
            blocks = [entry.anchors for entry in entries]
            generic, run = self._ask(prepared, blocks, kept, question)
            passes.append(run)
            kept = [sorted({*a, *b}) for a, b in zip(kept, self._choose(prepared, generic), strict=True)]
        blocks = [_chosen(entry.kv, rows) for entry, rows in zip(entries, kept, strict=True)]
        cache, ids, positions = self._lay(prepared, blocks, kept, question)
        first = prepared.preamble
        logits, run = recompute(
            context,
            cache,
            ids,
            range(first, len(ids)),
            asked,
            positions=positions[first:],
            theta=self.theta,
        )
        passes.append(run)
        prepared.extra["kept"] = positions[first : len(ids) - asked]
        prepared.done = lambda: _sum([one.work() for one in passes], asked, context.shape.logits)
        return logits, cache

    def _lay(
        self, prepared: Prepared, blocks: list[Block], kept: list[list[int]], question: Sequence[int]
    ) -> tuple[KVCache, list[int], list[int]]:
        """A cache of preamble and chosen tokens, and ids and positions of these and the question."""
        context = prepared.context
        begins = list(accumulate(map(len, prepared.documents), initial=prepared.preamble))
        ids, positions = list(context.preamble_ids), list(range(prepared.preamble))
        for begin, document, rows in zip(begins, prepared.documents, kept, strict=False):
            ids += [document[row] for row in rows]
            positions += [begin + row for row in rows]
        removed = prepared.length - len(ids)
        if prepared.preamble:
            blocks, begins = [prepared.blocks[0], *blocks], [0, *begins]
        begins = begins[: len(blocks)]
        slots = len(ids) + len(question) + context.max_new_tokens
        cache = context.place(blocks, slots, "copy", begins, removed)
        positions += range(prepared.length, prepared.length + len(question))
        return cache, [*ids, *question], positions

    def _ask(
        self, prepared: Prepared, blocks: list[Block], kept: list[list[int]], question: Sequence[int]
    ) -> tuple[torch.Tensor, Counted]:
        """The question's mean queries `[layers, H_q, D]` over preamble and anchors."""
        cache, ids, positions = self._lay(prepared, blocks, kept, question)
        asked = len(question)
        found: dict[int, torch.Tensor] = {}
        rows = range(len(ids) - asked, len(ids))
        watch = self._watch(prepared.context, found, None)
        _, run = recompute(prepared.context, cache, ids, rows, asked, positions=positions[-asked:], watch=watch)
        return torch.stack([found[layer] for layer in self._layers(prepared.context)]), run

    def _choose(self, prepared: Prepared, generic: torch.Tensor) -> list[list[int]]:
        """Tokens between the anchors that stay, of each document."""
        context, entries = prepared.context, prepared.extra["entries"]
        lengths = [len(ids) for ids in prepared.documents]
        begins = list(accumulate(lengths[:-1], initial=prepared.preamble))
        layers = self._layers(context)
        before = [prepared.length - length for length in lengths]
        queries = _moved(context, layers, [entry.query for entry in entries], before)
        means = _moved(context, layers, [entry.means for entry in entries], begins)
        anchors = [
            entry.anchors.keys[layers.start :].float().mean(2, keepdim=True).to(generic.dtype) for entry in entries
        ]
        anchors = _moved(context, layers, anchors, begins)
        personal = personalised(generic, torch.cat(queries, 2).transpose(1, 2))
        kept = []
        for index, (mean, anchor, length) in enumerate(zip(means, anchors, lengths, strict=True)):
            blocks = blocks_to_keep(personal[:, index], mean, anchor)
            tokens: list[int] = []
            for number in blocks:
                begin = self.initial + number * self.block
                tokens += range(begin, min(begin + self.block, length - self.local))
            kept.append(tokens)
        return kept

    # ---- costs -----------------------------------------------------------------------------------------------------

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        """Before a question: that of the anchors alone."""
        shape, first = prepared.context.shape, prepared.preamble
        kept = first + sum(len(self._anchors(len(ids))) for ids in prepared.documents)
        both = [range(first, kept + question_tokens)]
        if prepared.documents:
            both.append(range(kept, kept + question_tokens))
        rows, pairs = sum(map(len, both)), sum(visible_pairs(one, None) for one in both)
        extra = shape.logits * (len(both) - 1)
        return Work(question_tokens, (rows,) * shape.layers, (pairs,) * shape.layers, extra)

    def kv_bytes(self, prepared: Prepared) -> int:
        kept = prepared.extra.get("kept")
        tokens = sum(len(self._anchors(len(ids))) for ids in prepared.documents) if kept is None else len(kept)
        return prepared.context.token_bytes * (prepared.preamble + tokens)

    def stored_bytes(self, prepared: Prepared) -> int:
        own = [t for entry in prepared.extra["entries"] for t in (entry.query, entry.means)]
        return super().stored_bytes(prepared) + sum(t.numel() * t.element_size() for t in own)


def personalised(generic: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Queries of each document, float32 `[layers, N, H_q, D]`.

    The question's `generic` `[layers, H_q, D]` plus the mean over the other documents of their queries `documents`
    `[layers, N, H_q, D]`, each times its cosine with the question's.
    """
    generic, documents = generic.float().unsqueeze(1), documents.float()
    weighted = documents * torch.cosine_similarity(documents, generic, dim=-1).unsqueeze(-1)
    others = weighted.sum(1, keepdim=True) - weighted
    return generic + others / max(documents.shape[1] - 1, 1)


def blocks_to_keep(query: torch.Tensor, means: torch.Tensor, anchor: torch.Tensor) -> list[int]:
    """Numbers of the blocks that stay, rising.

    Args:
        query: float32 `[layers, H_q, D]`.
        means: `[layers, H_kv, blocks, D]`, mean keys at their positions.
        anchor: `[layers, H_kv, 1, D]`, the mean key of the anchors.
    """
    layers, heads, blocks, size = means.shape
    if not blocks:
        return []
    shared = query.view(layers, heads, -1, size).mean(2).unsqueeze(2)  # a group of query heads shares its KV head
    scores = (means.float() * shared).sum((1, 3))
    own = (anchor.float() * shared).sum((1, 2, 3))
    most, least = scores.max(1).values, scores.min(1).values
    share = (most - own) / (most - least).clamp_min(1e-8)
    share = torch.where((own > least) & (own <= most), share, torch.zeros_like(share))
    count = int(float(share.mean()) * blocks)
    return sorted(set(scores.topk(count, dim=1).indices.flatten().tolist()))


def _chosen(block: Block, rows: list[int]) -> Block:
    """Some tokens of a block that was computed from position 0; keys stay rotated for where they stood."""
    index = torch.tensor(rows, dtype=torch.long, device=block.keys.device)
    return Block(block.keys.index_select(2, index), block.values.index_select(2, index))


def _moved(context: Context, layers: range, vectors: list[torch.Tensor], offsets: list[int]) -> list[torch.Tensor]:
    """`[layers, heads, n, D]` each, rotated on by its offset."""
    sizes = [part.shape[2] for part in vectors]
    first = vectors[0]
    out = first.new_empty((*first.shape[:2], sum(sizes), first.shape[3]))
    if sum(sizes):
        frequencies = (
            context.rope.inv_freq if context.rope.inv_freq.ndim == 1 else context.rope.inv_freq[layers.start :]
        )
        given = [(part, offset) for part, offset in zip(vectors, offsets, strict=True) if part.shape[2]]
        parts = [part for part, _ in given]
        ops.rope_concat(
            parts,
            parts,
            [offset for _, offset in given],
            frequencies.contiguous(),
            out,
            torch.empty_like(out),
            interleaved=context.rope.interleaved,
        )
    return list(out.split(sizes, 2))


def _sum(works: list[Work], question: int, logits: int) -> Work:
    """Of several passes, each of which ends with logits."""
    rows = tuple(map(sum, zip(*(work.rows for work in works), strict=True)))
    pairs = tuple(map(sum, zip(*(work.pairs for work in works), strict=True)))
    return Work(question, rows, pairs, sum(work.extra for work in works) + logits * (len(works) - 1))
