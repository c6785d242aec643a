# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The differentiable forward over blocks that see only themselves, and rows that see every block.

One forward under a block mask equals separately computed packets that are rotated into place, so training needs neither
a rotation nor a mask of the whole length: each block runs at its final positions in a batch of its own (right padding
is never seen under a causal mask), and the questions run as rows over the KV of all blocks. No `[T, T]` mask is made,
documents cost their own squares only, and questions about the same documents share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from kvspeed.models import base_model, cache_argument, causal_lm
from kvspeed.packet.build import evaluating
from kvspeed.plan import Plan
from kvspeed.state import state_of

__all__ = [
    "BlockKV",
    "bfloat16_products",
    "blocks_kv",
    "frozen",
    "join_kv",
    "logits_of",
    "rows_hidden",
    "shared_cache",
]

# Keys and values of each layer, `[H_kv, T, D]`, rotated for the positions at which they are used.
BlockKV = list[tuple[torch.Tensor, torch.Tensor]]


class _Enough(Exception):
    """The layers that were asked for have left their KV."""


class _FirstLayers(DynamicCache):
    """A cache that ends the forward as soon as its last layer has its KV: what would follow is needed by nobody."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._last = layers - 1

    def update(self, *args: Any, **kwargs: Any) -> Any:
        found = super().update(*args, **kwargs)
        layer: Any = self.layers[self._last] if len(self.layers) > self._last else None
        if layer is not None and layer.is_initialized:
            raise _Enough
        return found


def blocks_kv(
    model: nn.Module, blocks: Sequence[torch.Tensor], starts: Sequence[int], layers: int | None = None
) -> list[BlockKV]:
    """KV of blocks that see only themselves; differentiable.

    Args:
        model: a causal LM in eval mode, with any patch or none: every layer that runs takes all tokens.
        blocks: input embeddings, `[T_i, hidden]` each.
        starts: the position of each block's first token.
        layers: how many layers' KV to compute, 1 or more; None: of all. Of the last one only K and V are computed.
    """
    base = base_model(model)
    longest = max(len(block) for block in blocks)
    embeds = blocks[0].new_zeros(len(blocks), longest, blocks[0].shape[1])
    rows = [torch.cat((block, embeds[index, len(block) :])) for index, block in enumerate(blocks)]
    first = torch.tensor(list(starts), device=embeds.device)
    positions = first[:, None] + torch.arange(longest, device=embeds.device)
    depth = len(base.layers) if layers is None else layers  # type: ignore[arg-type]
    cache = _FirstLayers(depth)
    given: dict[str, Any] = {cache_argument(base): cache}
    if state_of(model) is not None:
        given["kvspeed_plan"] = Plan(cache=None, past=0, padding=None, plain_mask=True, kernels=False)
    with suppress(_Enough):
        base(inputs_embeds=torch.stack(rows), position_ids=positions, use_cache=True, **given)
    found = [[part.unbind(0) for part in _layer(cache, index)] for index in range(depth)]
    # a slice's gradient is a tensor of zeros with the slice's in it: only where there is padding
    return [
        [
            (keys[index], values[index])
            if len(block) == longest
            else (keys[index][:, : len(block)], values[index][:, : len(block)])
            for keys, values in found
        ]
        for index, block in enumerate(blocks)
    ]


def join_kv(blocks: Sequence[BlockKV]) -> BlockKV:
    """The KV of blocks side by side, in their order."""
    if len(blocks) == 1:
        return blocks[0]
    return [
        (torch.cat([key for key, _ in layer], dim=1), torch.cat([value for _, value in layer], dim=1))
        for layer in zip(*blocks, strict=True)
    ]


def rows_hidden(model: nn.Module, past: BlockKV, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Last hidden states `[T_i, hidden]` of rows that each see all of `past` and, causally, themselves.

    Args:
        model: as for `blocks_kv`.
        past: the KV of everything before the rows, from position 0 on without holes.
        rows: input embeddings, `[T_i, hidden]` each; every row begins at the first position after `past`.
    """
    base = base_model(model)
    held = past[0][0].shape[1]
    longest = max(len(row) for row in rows)
    padding = rows[0].new_zeros(longest, rows[0].shape[1])
    embeds = torch.stack([torch.cat((row, padding[len(row) :])) for row in rows])
    positions = (held + torch.arange(longest, device=embeds.device))[None].expand(len(rows), -1)
    hidden: Any = base(
        inputs_embeds=embeds,
        position_ids=positions,
        use_cache=True,
        **{cache_argument(base): shared_cache(past, len(rows))},
    ).last_hidden_state
    return [hidden[index, : len(row)] for index, row in enumerate(rows)]


def shared_cache(past: BlockKV, rows: int) -> DynamicCache:
    """A cache in which each of `rows` rows has `past` before it; layers may differ in length."""
    cache = DynamicCache()
    for index, (key, value) in enumerate(past):
        cache.update(key[None].expand(rows, -1, -1, -1), value[None].expand(rows, -1, -1, -1), index)
    return cache


def logits_of(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """float32 logits (float64 of such a model) of last hidden states `[..., hidden]`, as the model's own forward makes
    them."""
    inner: Any = causal_lm(model)
    logits = inner.get_output_embeddings()(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if getattr(inner.config, "model_type", "") == "granite":
        logits = logits / inner.config.logits_scaling
    cap = getattr(inner.config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode and without gradients of its weights inside the block, and as it was after it."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)


@contextmanager
def bfloat16_products(model: nn.Module) -> Iterator[None]:
    """The decoder's linear layers with weights and products in bfloat16, everything between them as it was.

    What `torch.autocast` does, without casting frozen weights anew in every forward, and with attention and the head
    left in the model's dtype: on a CPU with bfloat16 instructions the products take half the time, the rest does not.
    """
    linears = [part for part in base_model(model).layers.modules() if isinstance(part, nn.Linear)]  # type: ignore[union-attr]
    before = [part.weight.data for part in linears]
    try:
        for part in linears:
            part.weight.data = part.weight.data.bfloat16()
            part.forward = partial(_bfloat16_linear, part)  # type: ignore[method-assign]
        yield
    finally:
        for part, weight in zip(linears, before, strict=True):
            part.weight.data = weight
            part.__dict__.pop("forward", None)


def _bfloat16_linear(part: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = nn.functional.linear(x.bfloat16(), part.weight).to(x.dtype)
    return product if part.bias is None else product + part.bias


def _layer(cache: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    layer = cache.layers[index]
    return layer.keys, layer.values
