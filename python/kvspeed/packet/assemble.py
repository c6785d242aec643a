# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Putting packets side by side: a cache that a prompt continues, with no token computed again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import nn

from kvspeed import ops
from kvspeed.cache import KVCache
from kvspeed.devices import layer_devices
from kvspeed.models import base_model
from kvspeed.packet.belongs import check_blocks
from kvspeed.packet.build import max_positions, rope_of
from kvspeed.packet.packet import Packet
from kvspeed.packet.quantise import one_scaled_dtype
from kvspeed.rope import RopeSpec, float32_rope_buffers
from kvspeed.segment import Segment, SegmentList
from kvspeed.state import state_of

__all__ = ["assemble", "lay_out"]

_SPARE = 256  # tokens of room after the packets where the caller names no capacity


def assemble(
    packets: Iterable[Packet],
    *,
    model: nn.Module,
    preamble: Packet | None = None,
    mode: Literal["view", "copy"] = "view",
    capacity: int | None = None,
) -> KVCache:
    """A cache that holds [preamble][packet 1]...[packet N], for a prompt that goes on after them.

    Each block comes straight from its packet and is moved by one rotation: in the kernel, on the query ("view"), or
    once while it is copied ("copy"). Header and trailer tokens, and the places of removed tokens, count as positions.
    The same packet may occur several times. Under SPEED the anchor is that of the first block.

    Args:
        packets: in the order in which the model shall see them; may be empty.
        model: the model that made them, patched as it was then.
        preamble: the block before them (`build_preamble`), without soft tokens.
        mode: "view": packets are read where they lie, nothing is copied, and the model must be patched when the cache
            is used. "copy": one `rope_concat` writes all layers into storage of the cache's own, for any model to use.
            (An unpatched model with sliding windows takes padding behind the packets for distance: give it rows of one
            length.)
        capacity: token slots to allocate in all, packets included; the cache grows beyond them when it must. None: 256
            more than the packets take.

    Returns:
        A `KVCache` whose `prefix_ids` are the tokens it holds, the pad id for soft tokens. Without a block it is empty.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a packet does not belong to the model, its depth, or the other packets (both sides are named); the
            model's positions do not suffice; or `mode` cannot serve these packets.
    """
    blocks = check_blocks(packets, preamble, model)
    return lay_out(blocks, model, mode, _slots(capacity, sum(block.length for block in blocks), model))


def lay_out(blocks: list[Packet], model: nn.Module, mode: str, slots: int) -> KVCache:
    """`assemble` for blocks that were checked (`check_blocks`), with room for `slots` tokens in all."""
    if mode not in ("view", "copy"):
        raise ValueError(f'mode: expected "view" or "copy", got {mode!r}')
    length = sum(block.length for block in blocks)
    state = state_of(model)
    spec = state.spec if state is not None else None
    cache = KVCache(base_model(model).config, capacity=slots - (length if mode == "view" else 0), spec=spec)
    cache.prefix_ids = _prefix_ids(blocks, model)
    if not blocks:
        return cache
    starts = list(accumulate((block.length for block in blocks[:-1]), initial=0))
    if mode == "view" or not one_scaled_dtype(blocks):
        whole = {id(block): block.full() for block in blocks}  # a block that occurs twice stays one
        blocks = [whole[id(block)] for block in blocks]
    if mode == "view":
        _set_segments(cache, blocks, starts, length, model)
    else:
        _set_storage(cache, blocks, starts, length, slots, model)
    if spec is not None and spec.anchor_tokens:
        _set_anchor(cache, blocks[0], spec.anchor_tokens, model)
    return cache


def _set_segments(cache: KVCache, blocks: list[Packet], starts: list[int], length: int, model: nn.Module) -> None:
    devices = layer_devices(model)[: cache.depth]
    placed: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # a block that occurs twice is moved once
    for block in blocks:
        if id(block) not in placed:
            placed[id(block)] = _layers_on(block, devices)
    per_layer = [
        SegmentList.adopt(
            Segment(*placed[id(block)][index], start) for block, start in zip(blocks, starts, strict=True)
        )
        for index in range(cache.depth)
    ]
    pressed = any(block.positions is not None for block in blocks)
    cache.set_segments(per_layer, length, [block.positions for block in blocks] if pressed else ())


def _layers_on(block: Packet, devices: list[torch.device]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer on its device: where they lie, or moved in one copy a run of layers."""
    placed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for device, run in groupby(devices):
        layers = slice(len(placed), len(placed) + len(list(run)))
        placed += zip(block.keys[layers].to(device), block.values[layers].to(device), strict=True)
    return placed


def _set_storage(
    cache: KVCache, blocks: list[Packet], starts: list[int], length: int, slots: int, model: nn.Module
) -> None:
    devices = set(layer_devices(model)[: cache.depth])
    if len(devices) > 1:
        raise ValueError(
            f"mode: 'copy' writes all layers in one launch, and this model is spread over {len(devices)} devices: use "
            "mode='view'"
        )
    removed = length - sum(block.keys.shape[2] for block in blocks)
    pressed = any(block.positions is not None for block in blocks)
    if pressed and any(cache.layer(index).window is not None for index in range(cache.depth)):
        raise ValueError(
            "mode: 'copy' leaves no gaps where tokens were removed, and this model's sliding windows need to know of "
            "them: use mode='view' for packets with removed tokens"
        )
    if state_of(model) is None and float32_rope_buffers(base_model(model)):
        raise ValueError(
            "this model's rotary frequencies were rounded by a cast (such as model.bfloat16()), so that it would not "
            "find moved keys where they are: load it with dtype=..., or call kvspeed.patch_model, which repairs them"
        )
    device = devices.pop()
    rope: RopeSpec = rope_of(model)
    once = {id(block): block.to(device) for block in blocks}  # a block that occurs twice is moved once
    moved = [once[id(block)] for block in blocks]
    scales: dict[str, Any] = {}
    if moved[0].key_scale is not None:  # 8-bit packets become numbers of the model's dtype on the way
        scales = {name: [getattr(block, name) for block in moved] for name in ("key_scale", "value_scale")}
    shape = (cache.depth, blocks[0].keys.shape[1], slots - removed, blocks[0].keys.shape[3])
    keys = ops.empty_huge(shape, blocks[0].dtype, device)
    values = ops.empty_huge(shape, blocks[0].dtype, device)
    ops.rope_concat(
        [block.keys for block in moved],
        [block.values for block in moved],
        starts,  # packets are built at 0, so their new position is their offset
        rope.first(cache.depth),
        keys,
        values,
        interleaved=rope.interleaved,
        **scales,
    )
    cache.set_storage(keys, values, length, removed)


def _set_anchor(cache: KVCache, first: Packet, count: int, model: nn.Module) -> None:
    keys, values = first.anchor_keys, first.anchor_values
    held = keys.shape[2] if keys is not None else 0
    if keys is None or values is None or held < count:
        raise ValueError(
            f"the model is patched with anchor_tokens={count}, and the first block, {first!r}, holds {held} anchor "
            f"token(s): put a block of at least {count} token(s) first that was built with this patch"
        )
    # the anchor is the first tokens' KV in the layers from k on; it never moves, and does not depend on what follows
    devices = layer_devices(model)[cache.depth :]
    cache.set_anchor(
        [key[None, :, :count].to(device) for key, device in zip(keys, devices, strict=True)],
        [value[None, :, :count].to(device) for value, device in zip(values, devices, strict=True)],
    )


def _slots(capacity: int | None, length: int, model: nn.Module) -> int:
    """Token slots in all."""
    limit = max_positions(model)
    if limit is not None and length > limit:
        raise ValueError(f"the packets take {length} positions and the model has {limit}: use fewer or shorter packets")
    if capacity is None:
        return length + _SPARE
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise TypeError(f"capacity: expected an integer or None, got {type(capacity).__name__}")
    if capacity < length:
        raise ValueError(f"capacity: is {capacity}, and the packets take {length} positions: give at least that many")
    if limit is not None and capacity > limit:
        raise ValueError(f"capacity: is {capacity}, and the model has {limit} positions: give at most that many")
    return capacity


def _prefix_ids(blocks: list[Packet], model: nn.Module) -> list[int]:
    pad = pad_id(model)
    ids: list[int] = []
    for block in blocks:
        ids += [pad] * block.header + list(block.token_ids) + [pad] * block.trailer
    return ids


def pad_id(model: nn.Module) -> int:
    """The id that stands for soft tokens and padding: the model's pad, else its EoS, else 0."""
    for config in (getattr(model, "generation_config", None), base_model(model).config):
        for name in ("pad_token_id", "eos_token_id"):
            value: Any = getattr(config, name, None)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and value >= 0:
                return value
    return 0
