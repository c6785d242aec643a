# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED over shared contexts, differentiable: one shallow pass over the documents, and deep columns for the rows alone.

The loss and the gradients are those of one forward of every row's whole sequence with `speed_mask` in the layers >= k,
while documents run through k - 1 layers and two projections, once for all questions about them; questions through k
layers; and only the token before an answer and the answer itself through all. The anchors see nothing but anchors, so
that they run by themselves, a token or so through all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvspeed.install import patched
from kvspeed.models import base_model, cache_argument
from kvspeed.packet.train.blocks import BlockKV, blocks_kv, join_kv, shared_cache
from kvspeed.plan import DeepPlan, Keys, Plan
from kvspeed.rule import SpeedSpec

__all__ = ["anchors_kv", "answer_states", "context_blocks_kv"]


def anchors_kv(model: nn.Module, spec: SpeedSpec, embeds: torch.Tensor) -> BlockKV:
    """The anchors' KV in the layers >= k, of their input embeddings `[n, hidden]`; n may be 0.

    They see nothing but anchors, so that this serves every prompt that begins with them.
    """
    if len(embeds):
        with patched(model, spec, force=True):
            return blocks_kv(model, [embeds], [0])[0][spec.k :]
    inner: Any = model
    weight = inner.get_input_embeddings().weight
    config: Any = base_model(model).config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    empty = weight.new_zeros(getattr(config, "num_key_value_heads", None) or config.num_attention_heads, 0, size)
    return [(empty, empty)] * (config.num_hidden_layers - spec.k)


def context_blocks_kv(
    model: nn.Module,
    spec: SpeedSpec | None,
    blocks: Sequence[torch.Tensor],
    starts: Sequence[int],
    anchors: BlockKV | None = None,
) -> BlockKV:
    """The KV that rows see of the blocks before them: all tokens in the layers < k, the anchors above.

    Args:
        model: a causal LM in eval mode, patched or not.
        spec: SPEED at a depth; None: all layers see all.
        blocks: input embeddings, `[T_i, hidden]` each; blocks see only themselves. Together they lie at positions 0, 1,
            ... without holes, and the first one holds all anchors.
        starts: the position of each block's first token.
        anchors: what `anchors_kv` gives of the first tokens, where that is there already.

    Returns:
        `L` layers' (keys, values), `[H_kv, T, D]`; T differs between layers < k and the others.

    Raises:
        ValueError: the first block is shorter than the anchors.
    """
    if spec is None:
        return join_kv(blocks_kv(model, blocks, starts))
    if spec.gaps:
        raise ValueError(f"the model leaves out the layers {list(spec.gaps)} of prompts, and blocks need a depth k")
    if len(blocks[0]) < spec.anchor_tokens:
        raise ValueError(
            f"anchor_tokens is {spec.anchor_tokens} and the first block before the questions has {len(blocks[0])} "
            "tokens; give fewer anchors, or a longer preamble"
        )
    with patched(model, spec, force=True):
        lower = join_kv(blocks_kv(model, blocks, starts, spec.k))
        upper = anchors if anchors is not None else anchors_kv(model, spec, blocks[0][: spec.anchor_tokens])
    return [*lower, *upper]


def answer_states(
    model: nn.Module, spec: SpeedSpec | None, past: BlockKV, rows: Sequence[torch.Tensor], answers: Sequence[int]
) -> list[torch.Tensor]:
    """Last hidden states `[answers[i], hidden]` from which each row's answer tokens are predicted.

    All rows run as one sequence behind the shared past, under a mask that keeps them apart: nothing is padded, and the
    past is not copied for each.

    Args:
        model: as for `context_blocks_kv`; its attention is "sdpa" or "eager", which take such a mask.
        spec: the same as there.
        past: what it gave.
        rows: input embeddings, `[T_i, hidden]` each: a question and its answer without the answer's last token.
        answers: tokens of each row's answer, the last one included; at least 1.
    """
    base = base_model(model)
    held, lengths = past[0][0].shape[1], [len(row) for row in rows]
    row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    position = held + torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor(lengths).cumsum(0).tolist()
    index = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, answers, strict=True)])
    embeds = torch.cat(list(rows))[None]
    device = embeds.device
    given: dict[str, Any] = {cache_argument(base): shared_cache(past, 1)}
    with patched(model, spec, force=True) as state:
        if spec is not None:
            deep = _Columns.of(spec, index, row, position, answers)
            given["kvspeed_plan"] = Plan(cache=None, past=0, padding=None, plain_mask=True, kernels=False, deep=deep)
        hidden = base(
            inputs_embeds=embeds,
            attention_mask=_masks(state.config, held, row, position, embeds),
            position_ids=position[None].to(device),
            use_cache=True,
            **given,
        ).last_hidden_state[0]
    return list((hidden if spec is not None else hidden[index.to(device)]).split(list(answers)))


def _masks(config: Any, held: int, row: torch.Tensor, position: torch.Tensor, like: torch.Tensor) -> Any:
    """The mask `[1, 1, S, held + S]` of rows that see all of the past and themselves, by kind of layer.

    Raises:
        ValueError: the model's attention takes no such mask.
    """
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"the model's attention is {implementation!r}, which takes no mask that keeps questions apart; load the "
            'model with attn_implementation="sdpa" for training'
        )
    everywhere = torch.cat([torch.arange(held), position])
    own = torch.cat([torch.full((held,), -1), row])
    seen = ((own == -1) | (own == row[:, None])) & (everywhere <= position[:, None])
    window = getattr(config, "sliding_window", None)
    near = seen & (position[:, None] - everywhere < window) if window else seen

    def made(mask: torch.Tensor) -> torch.Tensor:
        mask = mask.to(like.device)[None, None]
        if implementation == "sdpa":
            return mask
        return like.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(like.dtype).min)

    kinds = {"full_attention": seen, "sliding_attention": near}
    present = set(getattr(config, "layer_types", None) or [])
    if len(present) > 1:
        return {kind: made(kinds[kind]) for kind in present}
    return made(kinds[next(iter(present), "sliding_attention" if window else "full_attention")])


@dataclass
class _Columns(DeepPlan):
    """The deep columns of rows that run as one sequence: the token before each answer, and the answer. Keys begin with
    the anchors, which all rows see.

    Attributes:
        row: int64 `[Q]`, whose column it is.
        later: bool `[Q]`, whether later columns of its row see it.
    """

    row: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    later: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(
        cls, spec: SpeedSpec, index: torch.Tensor, row: torch.Tensor, position: torch.Tensor, answers: Sequence[int]
    ) -> _Columns:
        place = torch.cat([torch.arange(count) for count in answers])
        slot = torch.cat([torch.arange(spec.anchor_tokens), position[index]])[None]
        every = torch.ones_like(slot, dtype=torch.bool)
        return cls(
            spec=spec,
            index=index[None],
            keys=lambda: Keys(slot, every, every),
            padding=torch.zeros(1, 1, dtype=torch.long),
            query_slot=position[index][None],
            plain=False,
            row=row[index],
            later=(place > 0) | (spec.boundary == "keep"),
        )

    def visible(self, window: int | None) -> torch.Tensor:
        query, key = self.query_slot[0][:, None], self.keys().slot[0]
        anchors, columns = self.spec.anchor_tokens, self.columns
        seen = torch.eye(columns, dtype=torch.bool)
        if self.spec.upper_attention == "causal":
            before = self.query_slot[0] <= query
            seen = seen | ((self.row == self.row[:, None]) & before & self.later)
        seen = torch.cat([torch.ones(columns, anchors, dtype=torch.bool), seen], 1)
        if window is not None:
            seen = seen & (query - key < window)
        return seen[None, None]
