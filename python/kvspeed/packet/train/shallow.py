# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED over shared contexts, differentiable: one shallow pass over the documents, and deep columns for the rows alone.

The loss and the gradients are those of one forward of every row's whole sequence with `speed_mask` in the layers >= k,
while documents run through k - 1 layers and two projections, once for all questions about them; questions through k
layers; and only the token before an answer and the answer itself through all. The anchors see nothing but anchors, so
that they run by themselves, a token or so through all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvspeed.models import base_model, cache_argument
from kvspeed.packet.train.blocks import BlockKV, blocks_kv, join_kv, rows_hidden, shared_cache, stack_of_rows
from kvspeed.patch import patched
from kvspeed.plan import DeepPlan, Keys, Plan
from kvspeed.rule import SpeedSpec

__all__ = ["answer_states", "context_blocks_kv"]


def context_blocks_kv(
    model: nn.Module, spec: SpeedSpec | None, blocks: Sequence[torch.Tensor], starts: Sequence[int]
) -> BlockKV:
    """The KV that rows see of the blocks before them: all tokens in the layers < k, the anchors above.

    Args:
        model: a causal LM in eval mode, patched or not.
        spec: SPEED at a depth; None: all layers see all.
        blocks: input embeddings, `[T_i, hidden]` each; blocks see only themselves. Together they lie at positions 0, 1,
            ... without holes, and the first one holds all anchors.
        starts: the position of each block's first token.

    Returns:
        `L` layers' (keys, values), `[H_kv, T, D]`; T differs between layers < k and the others.

    Raises:
        ValueError: the first block is shorter than the anchors.
    """
    if spec is None:
        return join_kv(blocks_kv(model, blocks, starts))
    anchors = spec.anchor_tokens
    if len(blocks[0]) < anchors:
        raise ValueError(
            f"anchor_tokens is {anchors} and the first block before the questions has {len(blocks[0])} tokens; give "
            "fewer anchors, or a longer preamble"
        )
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    with patched(model, spec, force=True):
        lower = join_kv(blocks_kv(model, blocks, starts, spec.k))
        if anchors:
            (upper,) = blocks_kv(model, [blocks[0][:anchors]], [0])
            return [*lower, *upper[spec.k :]]
    key, value = lower[0]
    return [*lower, *[(key[:, :0], value[:, :0])] * (layers - spec.k)]


def answer_states(
    model: nn.Module, spec: SpeedSpec | None, past: BlockKV, rows: Sequence[torch.Tensor], answers: Sequence[int]
) -> list[torch.Tensor]:
    """Last hidden states `[answers[i], hidden]` from which each row's answer tokens are predicted.

    Args:
        model: as for `context_blocks_kv`.
        spec: the same as there.
        past: what it gave.
        rows: input embeddings, `[T_i, hidden]` each: a question and its answer without the answer's last token.
        answers: tokens of each row's answer, the last one included; at least 1.
    """
    if spec is None:
        hidden = rows_hidden(model, past, rows)
        return [states[len(states) - count :] for states, count in zip(hidden, answers, strict=True)]
    base = base_model(model)
    held = past[0][0].shape[1]
    embeds, positions = stack_of_rows(rows, held)
    plan = Plan(
        cache=None,
        past=0,
        padding=None,
        plain_mask=True,
        kernels=False,
        deep=_columns(spec, held, [len(row) for row in rows], answers),
    )
    with patched(model, spec, force=True):
        cache: dict[str, Any] = {cache_argument(base): shared_cache(past, len(rows))}
        hidden = base(
            inputs_embeds=embeds, position_ids=positions, use_cache=True, kvspeed_plan=plan, **cache
        ).last_hidden_state
    return [hidden[index, :count] for index, count in enumerate(answers)]


def _columns(spec: SpeedSpec, held: int, lengths: Sequence[int], answers: Sequence[int]) -> DeepPlan:
    """The deep columns of rows: the token before each answer, and the answer; keys begin with the anchors."""
    width = max(answers)
    count = torch.tensor(list(answers))[:, None]
    column = torch.arange(width)[None]
    valid = column < count
    index = torch.where(valid, torch.tensor(list(lengths))[:, None] - count + column, 0)
    # Fillers have slots of their own, so that each sees itself alone.
    query_slot = torch.where(valid, held + index, -1 - column)
    anchor = torch.arange(spec.anchor_tokens).expand(len(lengths), -1)
    later = valid & ((column > 0) | (spec.boundary == "keep"))
    always = torch.ones_like(anchor, dtype=torch.bool)
    keys = Keys(
        torch.cat([anchor, query_slot], 1),
        torch.cat([always, valid], 1),
        torch.cat([always, later.expand_as(valid)], 1),
    )
    return DeepPlan(
        spec=spec,
        index=index,
        keys=lambda: keys,
        padding=torch.zeros(1, 1, dtype=torch.long),
        query_slot=query_slot,
        plain=False,
    )
