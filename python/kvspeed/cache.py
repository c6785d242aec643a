# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A KV cache made of segments: read-only runs that lie elsewhere, and one growing tail with spare capacity.

`KVCache` is a transformers `Cache`, so `generate` and plain forwards take it. Three things set it apart from
`DynamicCache`: appending never copies what is there already (no `torch.cat` a step), the prompt may lie in segments
that other caches share, and layers may hold different tokens: so SPEED keeps prompt KV out of the layers >= k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvspeed.devices import to_device
from kvspeed.rule import SpeedSpec
from kvspeed.segment import Segment, SegmentList
from kvspeed.segment_layer import SegmentLayer

__all__ = ["KVCache"]


class KVCache(DynamicCache):
    """KV of a decoder: segments read in place, a tail with spare capacity, and lengths that may differ by layer.

    Args:
        config: the model's (text) config; gives the number of layers.
        capacity: tail tokens to reserve at the first append; grows when exceeded.
        spec: how SPEED is applied; None for a cache that holds every token in every layer.

    A cache with a `spec` or with segments works only inside the model that is patched alike: elsewhere it would be read
    wrongly, so there it raises.
    """

    def __init__(self, config: Any, *, capacity: int | None = None, spec: SpeedSpec | None = None) -> None:
        layers: list[Any] = [SegmentLayer(capacity or 0, window) for window in _windows(config)]
        Cache.__init__(self, layers=layers)
        self.num_layers = len(layers)
        self._clear()
        self.spec = self._effective(spec)

    def _clear(self) -> None:
        self.assembled = 0  # positions that were assembled from packets, in either mode
        self.plan: Any = None  # of the forward that is running; set and cleared by the patched model
        self.prompt_end: int | None = None  # tokens from this absolute slot on are answer
        self.padding: torch.Tensor | None = None  # int64 [B]: left padding of each row
        self.deep_slots: list[int] = []  # slots of the tokens kept in layers >= k, in storage order, anchor area aside
        self.anchor_area = 0  # columns before them, one an anchor, where rows are padded or anchors were assembled
        self.anchor_count: torch.Tensor | None = None  # int64 [B]: tokens of that area a row has; None: no area
        self.anchor_end = 0  # the area holds anchors among the slots before this one
        self.anchor_only: set[int] = set()  # deep slots that only rows see in which they are anchors
        self.prefix_ids: list[int] | None = None  # token ids of an assembled prefix
        self.plain_mask = True  # whether the attention mask was left padding and nothing more
        self._before: list[int] = []  # tail lengths before the forward that is running
        self.observe: Callable[..., None] | None = None  # shown each layer < depth by the attention; see packet.press
        self._first: tuple[torch.Tensor, dict[tuple[torch.device, int], torch.Tensor]] | None = None

    def _effective(self, spec: SpeedSpec | None) -> SpeedSpec | None:
        return spec if spec is not None and spec.deep_layers(self.num_layers) else None

    @property
    def depth(self) -> int:
        """How many layers hold every token: under SPEED k, less its gaps, else all."""
        return len(self._shallow())

    def layer(self, index: int) -> SegmentLayer:
        """The KV of layer `index`."""
        return self._layers()[index]

    # ---- filling it with a prompt that exists already --------------------------------------------------------------

    def set_segments(
        self,
        per_layer: Sequence[Sequence[Segment]],
        length: int,
        survivors: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """View mode: use `per_layer[l]`, the segments of layer l < depth, in place; they cover `length` positions.

        `survivors` says of each segment of which tokens were removed where the others stood before, int32
        `[depth, H_kv, T]`, and is None for the other segments; empty where no segment lacks a token.

        Raises:
            ValueError: the wrong number of layers, or the cache is not empty.
        """
        self._check_empty("set_segments")
        self._check_no_gaps()
        if len(per_layer) != self.depth:
            raise ValueError(f"per_layer has {len(per_layer)} layers; this cache keeps prompts in {self.depth} layers")
        for layer, segments in zip(self._layers(), per_layer, strict=False):
            layer.segments = segments if isinstance(segments, SegmentList) else SegmentList(segments)
            layer.prefix, layer.survivors = length, survivors
        self.assembled = length

    def set_storage(self, keys: torch.Tensor, values: torch.Tensor, length: int, removed: int = 0) -> None:
        """Copy mode: take `keys`, `values` `[depth, H_kv, capacity, D]` as storage, filled for `length` positions.

        `removed` positions hold no token; tokens fill the first `length - removed` places. Layers with a sliding window
        cannot have that, since their queries ask for the position of every token.
        """
        self._check_empty("set_storage")
        self._check_no_gaps()
        if keys.shape[0] != self.depth or values.shape[0] != self.depth:
            raise ValueError(
                f"keys, values have {keys.shape[0]} and {values.shape[0]} layers; this cache keeps prompts in "
                f"{self.depth} layers"
            )
        for index, layer in enumerate(self._layers()[: self.depth]):
            layer.adopt(keys[index].unsqueeze(0), values[index].unsqueeze(0), length, removed)
        self.assembled = length

    def set_anchor(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """SPEED: the KV of the first tokens in each layer >= k, `[1, H_kv, anchor_tokens, D]` a layer (copied)."""
        if self.spec is None:
            raise ValueError("this cache has no SPEED depth, so it takes no anchor")
        self._check_no_gaps()
        if len(keys) != self.num_layers - self.spec.k:
            raise ValueError(f"keys have {len(keys)} layers; the anchor lives in {self.num_layers - self.spec.k}")
        for index, layer in enumerate(self._layers()[self.spec.k :]):
            layer.length = 0
            layer.update(keys[index], values[index])
        self.deep_slots = list(range(keys[0].shape[2]))

    def reserve(self, positions: int, answers: int | None = None) -> None:
        """Make room for `positions` in the layers that hold prompts, and for `answers` tokens in those that do not."""
        for index, layer in enumerate(self._layers()):
            if self.spec is None or not self.spec.is_deep(index):
                layer.reserve(positions - layer.prefix - layer.removed)
            else:
                anchors = min(self.spec.anchor_tokens, positions)
                layer.reserve(layer.length + anchors + 1 + (positions if answers is None else answers))

    def first(self, padding: torch.Tensor, device: torch.device, skip: int = 0) -> torch.Tensor:
        """`padding`, less `skip`, as int32 `[B]` on `device`; kept, so that a decoding step brings nothing there."""
        if self._first is None or self._first[0] is not padding:
            self._first = (padding, {})
        found = self._first[1].get((device, skip))
        if found is None:
            found = to_device((padding - skip).clamp_min(0).to(torch.int32), device)
            self._first[1][device, skip] = found
        return found

    # ---- turns -----------------------------------------------------------------------------------------------------

    def begin_turn(self, prompt_end: int) -> None:
        """Declare that tokens up to the absolute slot `prompt_end` are prompt, and those after it answer.

        `generate` of a patched model calls this; call it yourself before driving the model's forward by hand.

        Raises:
            ValueError: `prompt_end` is not beyond what the cache has seen.
        """
        seen = self.get_seq_length()
        if prompt_end <= seen:
            raise ValueError(
                f"the prompt ends at token {prompt_end} and the cache has seen {seen}; pass at least one new token"
            )
        self.prompt_end = prompt_end
        if self.spec is not None and self.spec.turns == "reset":
            shift = int(self.padding.max()) if self.padding is not None else 0
            places = [(slot, slot if slot < self.assembled else slot - shift) for slot in self.deep_slots]
            self._keep_deep([slot for slot, place in places if place < self.spec.anchor_tokens])
            self.anchor_only = set(self.deep_slots)

    def start_forward(self, plan: Any) -> None:
        """A patched model's forward begins: `plan` says what it appends."""
        for layer in self._shallow():
            layer.forget()  # now, so that going back, here or by `crop` after the forward, is a matter of lengths
        self.plan, self._before = plan, [layer.length for layer in self._layers()]

    def end_forward(self, completed: bool) -> None:
        """It ended: keep what it appended, or go back to what was there before."""
        if not completed:
            for layer, length in zip(self._layers(), self._before, strict=True):
                layer.length = length
        else:
            self.padding, self.plain_mask = self.plan.padding, self.plan.plain_mask
            if self.plan.deep is not None:
                self.plan.deep.remember(self)
        self.plan = None

    def snapshot(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What `restore` needs to undo turns, appended tokens and changes of the batch; nothing is copied but lists."""
        own = {**self.__dict__, "deep_slots": list(self.deep_slots)}
        return own, [dict(layer.__dict__) for layer in self._layers()]

    def restore(self, snapshot: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        """Go back to a `snapshot`."""
        own, layers = snapshot
        for layer, fields in zip(self._layers(), layers, strict=True):
            layer.__dict__.update(fields)
        self.__dict__.update(own)

    # ---- transformers' Cache interface -----------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layers()[layer_idx]
        if self.plan is None:
            if self.spec is not None:
                raise RuntimeError(
                    f"this cache was made under SPEED with k={self.spec.k}; use it with the model patched so, or "
                    "give the unpatched model a cache of its own"
                )
            if layer.segments:
                raise RuntimeError(
                    'this cache reads packets in place (mode="view"), which needs the patched model: call '
                    'kvspeed.patch_model(model) first, or assemble with mode="copy"'
                )
        elif self.spec is not None and self.spec.is_deep(layer_idx):
            return self.plan.deep.store(layer, key_states, value_states)
        return layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._layers()[layer_idx].get_seq_length()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the next token stands: also for a deep layer, whose own tokens are fewer. Masks are made by it."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        layer = self._layers()[layer_idx]
        if self.spec is not None and self.spec.is_deep(layer_idx):  # transformers asks the first layer of each kind
            alike = [other for other in self._shallow() if other.window == layer.window]
            layer = (alike or self._shallow())[-1]
        return layer.get_mask_sizes(query_length)

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens; zero or a negative number removes that many from the end."""
        seen = self.get_seq_length()
        target = seen + max_length if max_length <= 0 else max_length
        if target >= seen:
            return
        if target <= 0 and self._layers()[0].prefix == 0:
            self.reset()
            return
        for layer in self._shallow():
            layer.check_crop(target)
        for layer in self._shallow():
            layer.crop(target)
        self._keep_deep([slot for slot in self.deep_slots if slot < target])
        self._crop_rows(target)

    def reset(self) -> None:
        for layer in self._layers():
            layer.reset()
        self._clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(self._rows())[indices.cpu()] if indices.dtype == torch.bool else indices
        self._map_rows(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(torch.arange(self._rows()).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Nothing to do: every token is kept, so a rollback always finds its way."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for layer in self._layers():
            yield layer.keys, layer.values, None

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def has_tail(self) -> bool:
        """Whether any layer owns storage, whose rows a batch must match."""
        return any(layer._key is not None for layer in self._layers())

    @property
    def max_batch_size(self) -> int:
        return self._rows()

    # ---- accounting ------------------------------------------------------------------------------------------------

    def kv_bytes(self) -> int:
        """Bytes of the KV of stored tokens; a segment counts once, however many rows read it."""
        total = 0
        for layer in self._layers():
            tensors = [t for segment in layer.segments for t in (segment.key, segment.value)]
            tensors += [t for t in (layer.keys, layer.values) if t is not None]
            total += sum(t.numel() * t.element_size() for t in tensors)
        return total

    def allocated_bytes(self) -> int:
        """Bytes that are allocated for the tails, spare capacity included; segments belong to their packets."""
        storage = [t for layer in self._layers() for t in (layer._key, layer._value) if t is not None]
        return sum(t.numel() * t.element_size() for t in storage)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _layers(self) -> list[SegmentLayer]:
        return self.layers  # type: ignore[return-value]

    def _shallow(self) -> list[SegmentLayer]:
        """The layers that hold every token."""
        if self.spec is None:
            return self._layers()
        layers = self._layers()[: self.spec.k]
        return (
            [layer for index, layer in enumerate(layers) if index not in self.spec.gaps] if self.spec.gaps else layers
        )

    def _check_no_gaps(self) -> None:
        if self.spec is not None and self.spec.gaps:
            raise ValueError(
                f"packets hold the layers below a depth k without gaps, and this cache leaves out the layers "
                f"{list(self.spec.gaps)}; patch the model with k instead of deep_layers, or compute the prompt"
            )

    def _rows(self) -> int:
        for layer in self._layers():
            if layer._key is not None:
                return layer._key.shape[0]
        return 1

    def _map_rows(self, rows: torch.Tensor) -> None:
        for layer in self._layers():
            layer.map_rows(rows)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.padding.device))
        if self.anchor_count is not None:
            self.anchor_count = self.anchor_count.index_select(0, rows.to(self.anchor_count.device))

    def _check_empty(self, what: str) -> None:
        if self.get_seq_length() > 0:
            raise ValueError(f"{what} needs an empty cache; this one has seen {self.get_seq_length()} tokens")

    def _keep_deep(self, slots: list[int]) -> None:
        """Keep those deep tokens, which are the first of `deep_slots`."""
        self.deep_slots = slots
        self.anchor_only &= set(slots)
        if self.spec is not None:
            for index in self.spec.deep_layers(self.num_layers):
                layer = self.layer(index)
                layer.length = min(layer.length, self.anchor_area + len(slots))

    def _crop_rows(self, target: int) -> None:
        """What is known of single rows, after a crop to `target` tokens: a row may have lost anchors, or all it had."""
        if self.anchor_count is not None:
            padding = self.padding if self.padding is not None else torch.zeros_like(self.anchor_count)
            self.anchor_count = torch.minimum(self.anchor_count, (target - padding).clamp_min(0))
            self.anchor_end = min(self.anchor_end, target)
        if self.padding is not None:
            padding = self.padding.clamp(max=target - self.assembled)
            self.padding = padding if bool(padding.any()) else None
        if target == self.assembled:  # only packets are left, which are the same for any rows
            self.anchor_area, self.anchor_count, self.anchor_end = 0, None, 0


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, None for full attention; as transformers reads the config."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * (
        config.num_hidden_layers
    )
    return [window if kind == "sliding_attention" else None for kind in kinds]
