# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What one forward of a patched model has to do: computed once before the first layer, read by every layer.

Words used here. A *slot* is a token's column in the batch as the model is given it, left padding included; its
*position* is the slot less the row's padding. The *columns* of the deep layers (>= k) are the tokens that run through
them in this forward; their *keys* are those columns and what the cache keeps of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvspeed.devices import to_device
from kvspeed.rule import SpeedSpec

if TYPE_CHECKING:
    from kvspeed.cache import KVCache
    from kvspeed.segment_layer import SegmentLayer

__all__ = ["DeepPlan", "Keys", "Plan", "plan_deep"]


@dataclass
class Plan:
    """One forward of a patched model.

    Attributes:
        cache: the KVCache in use, or None (training, `use_cache=False`).
        past: tokens that the cache has seen before this forward.
        padding: int64 `[B]` on the CPU, left padding of each row counted in tail slots; None where no row is padded.
        plain_mask: whether the attention mask was left padding and nothing more.
        kernels: whether `ops.segment_attention` may serve this forward (no gradients, no dropout, no weights wanted).
        deep: what layers >= k do; None where every layer takes every token.
        tail_length: for a step of `kvspeed.graph`, whose `update` gives the whole storage: `(layer, skip)` -> int32
            `[B]` on the layer's device, how many of its tokens from `skip` on are there. None: what `update` gives.
        masks: of layers with a window whose rows are padded behind packets, made by the first layer of each kind.
    """

    cache: KVCache | None
    past: int
    padding: torch.Tensor | None
    plain_mask: bool
    kernels: bool
    deep: DeepPlan | None = None
    tail_length: Callable[[int, int], torch.Tensor] | None = None
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    def tail(self, layer: int, skip: int = 0, row: int | None = None) -> dict[str, Any]:
        """The keyword that tells `segment_attention` how long the tail is, where its shape does not."""
        if self.tail_length is None:
            return {}
        length = self.tail_length(layer, skip)
        return {"tail_length": length if row is None else length[row : row + 1]}

    def first(self, device: torch.device, skip: int = 0) -> torch.Tensor | None:
        """`padding`, less `skip` tokens, as the kernels take it: int32 `[B]` on `device`."""
        if self.padding is None or self.cache is None:
            return None
        return self.cache.first(self.padding, device, skip)


class Keys(NamedTuple):
    """What the columns may look at.

    Attributes:
        slot: int64 `[B or 1, N]`.
        seen: bool `[B or 1, N]`, False for keys that are no token (a short row's missing anchor, a duplicate).
        answer: bool `[B or 1, N]`, True for tokens that later ones see: answers, a kept boundary token. Or `[B, Q, N]`.
    """

    slot: torch.Tensor
    seen: torch.Tensor
    answer: torch.Tensor


@dataclass
class DeepPlan:
    """Which tokens run in the layers >= k in one forward, what they see, and what of them stays.

    Attributes:
        spec: the depth and the rule.
        index: int64 `[B or 1, Q]`, the columns, as token indices within this forward.
        keys: gives the `Keys` in storage order: kept ones first, then this forward's columns. Called for masks only: a
            decode step needs none.
        padding: int64 `[B or 1, 1]`.
        query_slot: int64 `[B or 1, Q]`.
        plain: whether a single query sees every key, so that no mask is needed.
        order: the columns' order in storage, as indices into `index`; None: as they are.
        kept: how many columns in storage order stay after the forward.
        anchors: columns, first in order, that go to the anchor area from `anchor_at` on.
        arriving: bool `[B, anchors]` or None: rows whose anchor is in this forward.
        new_slots: slots of the columns that stay, the anchor area aside.
        new_anchor_only: those of them that only rows see in which they are anchors.
        area: the anchor area's `(columns, count of each row, end)` in padded rows, else None.
        whole: whether the columns are all tokens of the forward, in order, so that there is nothing to gather.
        valid: bool `[B, Q]`, False for columns that stand for no token, or for one that is no column in its row; None:
            all are. Those are not put back among the tokens.
        tuples: whether the model's layers return tuples (transformers 4.57), which is seen at layer 0.
    """

    spec: SpeedSpec
    index: torch.Tensor
    keys: Callable[[], Keys]
    padding: torch.Tensor
    query_slot: torch.Tensor
    plain: bool
    order: torch.Tensor | None = None
    kept: int = 0
    anchors: int = 0
    arriving: torch.Tensor | None = None
    new_slots: list[int] = field(default_factory=list)
    new_anchor_only: set[int] = field(default_factory=set)
    area: tuple[int, torch.Tensor, int] | None = None
    whole: bool = False
    valid: torch.Tensor | None = None
    tuples: bool = False
    _full: torch.Tensor | None = None
    _places: torch.Tensor | None = None
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    _moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _gathered: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        return self.index.shape[1]

    def gather(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """The columns of `tensor` `[B or 1, T, ...]`."""
        if self.whole:
            return tensor
        index = self._on(self.index, tensor.device)
        if tensor.shape[0] == 1 and index.shape[0] == 1:
            return tensor[:, index[0]]
        tensor = tensor.expand(batch, *tensor.shape[1:])
        index = index.expand(batch, -1)
        return tensor.gather(1, index.view(*index.shape, *(1,) * (tensor.ndim - 2)).expand(-1, -1, *tensor.shape[2:]))

    def gather_once(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        """`gather` for tensors that every layer is given again (cos, sin, position ids)."""
        found = self._gathered.get(id(tensor))
        if found is None or found[0] is not tensor:
            found = (tensor, self.gather(tensor, batch))
            self._gathered[id(tensor)] = found
        return found[1]

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """`gather` for one layer among others that take all tokens: `put` follows when that layer has run."""
        if self.whole and self.valid is None:
            return hidden
        self._full = hidden
        return self.gather(hidden, hidden.shape[0])

    def put(self, columns: torch.Tensor) -> torch.Tensor:
        """The tokens that `take` was given, with those that are columns as the layer left them."""
        full, self._full = self._full, None
        if full is None:
            return columns
        places = self._on(self._inverse(full.shape[1]), full.device)
        at = places.clamp_min(0).expand(full.shape[0], -1)[..., None].expand_as(full)
        return torch.where((places >= 0)[..., None], columns.gather(1, at), full)

    def _inverse(self, tokens: int) -> torch.Tensor:
        """int64 `[B or 1, tokens]`: the column of each token, -1 for tokens that are none."""
        if self._places is None:
            index = self.index
            if self.valid is not None:
                index = torch.where(self.valid, index.expand_as(self.valid), tokens)  # to a place that is cut off
            places = torch.full((index.shape[0], tokens + 1), -1)
            self._places = places.scatter(1, index, torch.arange(self.columns).expand_as(index))[:, :tokens]
        return self._places

    def _on(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """One of the plan's own tensors on `device`, brought there once for all layers."""
        if tensor.device == device:
            return tensor
        found = self._moved.get((id(tensor), device))
        if found is None:
            found = self._moved[id(tensor), device] = (
                tensor,
                to_device(tensor, device),
            )  # the first keeps its id taken
        return found[1]

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """bool `[B or 1, 1, Q, N]` on `device`, True where a column sees a key; None where each sees all."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        mask = self._masks[window]
        return None if mask is None else self._on(mask, device)

    def _build_mask(self, window: int | None) -> torch.Tensor | None:
        if self.plain and window is None:
            return None
        visible = self.visible(window)
        return None if self.plain and bool(visible.all()) else visible

    def visible(self, window: int | None) -> torch.Tensor:
        """The rule, and the window, as bool `[B or 1, 1, Q, N]`; on the device where the plan's own tensors are."""
        keys = self.keys()
        query, key = self.query_slot[:, :, None], keys.slot[:, None, :]
        near = query - key < window if window is not None else None
        seen = (key - self.padding[:, :, None]) < self.spec.anchor_tokens
        if self.spec.upper_attention == "causal":
            seen = seen | (keys.answer if keys.answer.ndim == 3 else keys.answer[:, None, :])
        seen = ((seen & (key <= query)) | (key == query)) & keys.seen[:, None, :]
        if near is not None:
            seen = seen & near
        # A row that is only padding, or a column that repeats an anchor, would see nothing: softmax needs one key.
        alone = ~seen.any(-1, keepdim=True)
        return (seen | (alone & (key == query)))[:, None]

    def store(self, layer: SegmentLayer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the columns' KV `[B, H_kv, Q, D]` into a deep layer; returns all keys and values of this forward."""
        if self.order is not None:
            order = self._on(self.order, key.device)
            key, value = key[:, :, order], value[:, :, order]
        at = layer.length
        if self.anchors:
            if self.arriving is not None and layer.length > 0:
                old_key, old_value = layer.view(self.anchors)
                arriving = self._on(self.arriving, key.device)[:, None, :, None]
                layer.write(
                    torch.where(arriving, key[:, :, : self.anchors], old_key),
                    torch.where(arriving, value[:, :, : self.anchors], old_value),
                    0,
                )
            else:
                layer.write(key[:, :, : self.anchors], value[:, :, : self.anchors], 0)
            at = layer.length = max(at, self.anchors)  # now, so that a storage that grows takes them along
            key, value = key[:, :, self.anchors :], value[:, :, self.anchors :]
        layer.write(key, value, at)
        layer.length = at + self.kept
        return layer.view(at + key.shape[2])

    def remember(self, cache: KVCache) -> None:
        """The forward is over: tell `cache` what of it stays."""
        cache.deep_slots.extend(self.new_slots)
        cache.anchor_only |= self.new_anchor_only
        if self.area is not None:
            cache.anchor_area, cache.anchor_count, cache.anchor_end = self.area


def plan_deep(
    spec: SpeedSpec, cache: KVCache | None, past: int, tokens: int, prompt_end: int, padding: torch.Tensor | None
) -> DeepPlan:
    """Plan the deep layers for `tokens` new tokens at slots `past` on, of which those below `prompt_end` are prompt."""
    if padding is None and cache is not None and cache.anchor_count is not None:  # the padded rows were left behind
        padding = torch.zeros_like(cache.anchor_count)
    if padding is None:
        return _plan_uniform(spec, cache, past, tokens, prompt_end)
    return _plan_padded(spec, cache, past, tokens, prompt_end, padding)


def _plan_uniform(spec: SpeedSpec, cache: KVCache | None, past: int, tokens: int, prompt_end: int) -> DeepPlan:
    """Every row has the same tokens at the same slots, and slot and position are one."""
    end = past + tokens
    anchors = list(range(past, min(spec.anchor_tokens, end)))
    answers = list(range(max(past, prompt_end, spec.anchor_tokens), end))
    boundary = [prompt_end - 1] if max(past, spec.anchor_tokens) <= prompt_end - 1 < end else []
    keep = spec.boundary == "keep"
    columns = anchors + boundary + answers
    # A transient boundary token is written last, where dropping it costs nothing; without a cache nothing is written.
    stored = columns if keep or cache is None else anchors + answers + boundary
    kept = len(stored) if keep else len(stored) - len(boundary)
    old = cache.deep_slots if cache is not None else []

    def keys() -> Keys:
        slots = torch.tensor([old + stored], dtype=torch.long)
        answer = torch.ones_like(slots, dtype=torch.bool)
        if boundary and not keep:
            answer[slots == boundary[0]] = False
        return Keys(slots, torch.ones_like(answer), answer)

    slots = torch.tensor([columns], dtype=torch.long)
    order = None
    if stored != columns:
        order = torch.tensor([columns.index(slot) for slot in stored])
    return DeepPlan(
        spec=spec,
        index=slots - past,
        keys=keys,
        padding=torch.zeros(1, 1, dtype=torch.long),
        query_slot=slots,
        plain=len(columns) == 1 and spec.upper_attention == "causal",
        order=order,
        kept=kept,
        new_slots=stored[:kept],
        whole=columns == list(range(past, end)),
    )


def _plan_padded(
    spec: SpeedSpec, cache: KVCache | None, past: int, tokens: int, prompt_end: int, padding: torch.Tensor
) -> DeepPlan:
    """Left-padded rows: each row's anchors lie at its own slots, in an anchor area that comes first in storage."""
    end, batch = past + tokens, padding.shape[0]
    old = list(cache.deep_slots) if cache is not None else []
    hidden = set(cache.anchor_only) if cache is not None else set()
    prefix = cache.assembled if cache is not None else 0
    # The area holds the anchors among the first turn's prompt tokens. Where a row's prompt was shorter than that, its
    # later anchors are kept like answers: seen by all if they are answers, else only by rows in which they are anchors.
    if cache is not None and cache.anchor_count is not None:
        area, count, area_end = cache.anchor_area, cache.anchor_count, cache.anchor_end
    elif cache is not None and (old or prefix):  # anchors came with assembled packets
        area, count, area_end = 0, torch.zeros(batch, dtype=torch.long), prefix
    else:
        count = (prompt_end - padding).clamp(0, spec.anchor_tokens)
        area, area_end = int(count.max()) if batch else 0, prompt_end
    column = torch.arange(area)
    area_slot = padding[:, None] + column  # [B, area]
    real = column < count[:, None]
    arriving = real & (area_slot >= past) & (area_slot < end)
    anchors = area if bool(arriving.any()) else 0
    boundary = prompt_end - 1 if past <= prompt_end - 1 < end else None
    late_end = min(end, prompt_end, int(padding.max()) + spec.anchor_tokens) if batch else 0
    late = [] if prefix else list(range(max(past, area_end), late_end))  # packets that came first hold all anchors
    answers = list(range(max(past, prompt_end), end))
    keep = spec.boundary == "keep" or boundary in late
    shallow = [slot for slot in late if slot != boundary]
    plain_columns = shallow + ([boundary] if boundary is not None else []) + answers
    # A transient boundary token is written last, where dropping it costs nothing; without a cache nothing is written.
    dropped = [boundary] if boundary is not None and not keep else []
    stored = [slot for slot in plain_columns if slot not in dropped] + dropped if cache is not None else plain_columns
    kept = len(stored) - len(dropped)
    new_hidden = set(late) - ({boundary} if spec.boundary == "keep" else set())
    column_slot = torch.cat(
        [area_slot[:, :anchors], torch.tensor([plain_columns], dtype=torch.long).reshape(1, -1).expand(batch, -1)], 1
    )
    keys = torch.tensor([old + stored], dtype=torch.long).reshape(1, -1).expand(batch, -1)
    padded = (keys >= prefix) & (keys - padding[:, None] < prefix)
    keys = torch.where(keys < prefix, keys + padding[:, None], keys)  # packets lie before the padding: undo its shift
    key_slot = torch.cat([area_slot, keys], 1)
    # An anchor that is also the boundary token stands twice in its row; the anchor's copy counts.
    twice = (keys - padding[:, None]) < count[:, None]
    key_seen = torch.cat([real & (area_slot < end), ~(twice | padded)], 1)
    unseen = hidden | new_hidden | set(dropped)
    key_answer = torch.tensor([True] * area + [slot not in unseen for slot in old + stored]).expand(batch, -1)
    order = None
    if stored != plain_columns:
        moved = [anchors + plain_columns.index(slot) for slot in stored]
        order = torch.tensor([*range(anchors), *moved])
    return DeepPlan(
        spec=spec,
        index=(column_slot - past).clamp(0, tokens - 1),
        keys=lambda: Keys(key_slot, key_seen, key_answer),
        padding=padding[:, None],
        query_slot=column_slot,
        plain=column_slot.shape[1] == 1 and spec.upper_attention == "causal" and not hidden and bool(key_seen.all()),
        order=order,
        kept=kept,
        anchors=anchors,
        arriving=arriving if anchors else None,
        valid=_valid(spec, column_slot, padding, prompt_end, arriving[:, :anchors]) if spec.gaps else None,
        new_slots=stored[:kept],
        new_anchor_only=new_hidden,
        area=(area, count, area_end),
        whole=not anchors and plain_columns == list(range(past, end)),
    )


def _valid(
    spec: SpeedSpec, column_slot: torch.Tensor, padding: torch.Tensor, prompt_end: int, arriving: torch.Tensor
) -> torch.Tensor | None:
    """Which columns of padded rows are columns in their own row (of the anchor area's: `arriving`); None: all."""
    slot = column_slot[:, arriving.shape[1] :]
    own = (slot >= prompt_end - 1) | (slot - padding[:, None] < spec.anchor_tokens)
    valid = torch.cat([arriving, own], 1)
    return None if bool(valid.all()) else valid
