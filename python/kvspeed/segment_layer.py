# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The KV of one decoder layer: segments that lie elsewhere, and a tail that grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvspeed import ops
from kvspeed.segment import Segment, SegmentList

__all__ = ["SegmentLayer"]

_GROWTH = 256  # tokens: the least by which a full tail grows
_ROLLBACK = 64  # tokens that a sliding layer keeps beyond its window, for assisted decoding to take back


class SegmentLayer(CacheLayerMixin):
    """The KV of one layer: `segments` (shared, never written) and a tail `[B, H_kv, capacity, D]`.

    With a `window` the layer forgets tokens that no later query can see; `start` of them are gone from the front.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, capacity: int = 0, window: int | None = None) -> None:
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self.segments = SegmentList()
        self.survivors: Sequence[torch.Tensor | None] = ()  # see KVCache.set_segments
        self.dense: Any = None  # see kvspeed.removed
        self.prefix = 0  # positions that the segments cover
        self.removed = 0  # positions of an adopted prompt that hold no token; they count as if they came first
        self.adopted = 0  # positions of such a prompt
        self.start = 0  # tokens that were forgotten before them
        self.length = 0  # tokens in the tail
        self.capacity = capacity
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = False

    def __repr__(self) -> str:
        return f"SegmentLayer(prefix={self.prefix}, length={self.length})"

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The tail's keys `[B, H_kv, length, D]`, or None before the first token."""
        return None if self._key is None else self._key[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """The tail's values `[B, H_kv, length, D]`, or None before the first token."""
        return None if self._value is None else self._value[:, :, : self.length]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key = _empty(key_states, max(self.capacity, key_states.shape[2]))
        self._value = _empty(value_states, max(self.capacity, key_states.shape[2]))
        self.is_initialized = True

    def adopt(self, key: torch.Tensor, value: torch.Tensor, length: int, removed: int = 0) -> None:
        """Take `key`, `value` `[B, H_kv, capacity, D]` as the tail's storage, filled for `length` positions.

        `removed` of these hold no token: the others are the first `length - removed` tokens of the storage.
        """
        self._key, self._value, self.length, self.capacity = key, value, length - removed, key.shape[2]
        self.removed, self.adopted = removed, length if removed else 0
        self.window, self.is_sliding = None, False  # all layers share the storage: forgetting would free nothing
        self.dtype, self.device, self.is_initialized = key.dtype, key.device, True

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tail tokens, so that later appends do not move what is there."""
        if self.window is not None:
            capacity = min(capacity, 2 * self._keep())
        self.capacity = max(self.capacity, capacity)
        if self._key is not None and self._value is not None and self._key.shape[2] < self.capacity:
            self._key = _moved(self._key, 0, self.length, self.capacity)
            self._value = _moved(self._value, 0, self.length, self.capacity)

    def open(self, room: int) -> None:
        """Fix where the next `room` tokens go, which are written there by index; nothing is forgotten."""
        assert self._key is not None and self._value is not None
        length, capacity = self.length, self._key.shape[2]
        if capacity < length + room:
            self.capacity = length + room
        elif not self._key.is_inference() or torch.is_inference_mode_enabled():
            return
        self._key = _moved(self._key, 0, length, max(capacity, length + room))
        self._value = _moved(self._value, 0, length, max(capacity, length + room))

    def forget(self) -> None:
        """Drop what lies before the window, now and then: each call that does moves one window of tokens."""
        if self.window is None or self._key is None or self._value is None or self.length < 2 * self._keep():
            return
        dropped = self.length - self._keep()
        self.capacity = 2 * self._keep()
        self._key = _moved(self._key, dropped, self._keep(), self.capacity)
        self._value = _moved(self._value, dropped, self._keep(), self.capacity)
        self.start, self.length = self.start + dropped, self._keep()

    def check_crop(self, target: int) -> None:
        """Raise where going back to `target` positions would need tokens that are gone."""
        if target < self.prefix:
            raise ValueError(f"cannot crop to {target} tokens: the first {self.prefix} lie in shared packets")
        if target < self.adopted:
            raise ValueError(
                f"cannot crop to {target} tokens: the first {self.adopted} come from packets with removed tokens"
            )
        kept = target - self.prefix - self.start
        if self.start > 0 and self.window is not None and kept < self.window - 1:
            raise ValueError(
                f"cannot crop to {target} tokens: a sliding-window layer has forgotten its first {self.start}; crop "
                f"at most {max(0, self.length - self.window + 1)} tokens"
            )

    def crop(self, target: int) -> None:
        """Keep the first `target` positions."""
        self.length = min(self.length, target - self.prefix - self.removed - self.start)

    def _keep(self) -> int:
        assert self.window is not None
        return self.window - 1 + _ROLLBACK

    def write(self, key: torch.Tensor, value: torch.Tensor, at: int) -> None:
        """Write `[B, H_kv, n, D]` at tail token `at` without changing `length`."""
        if self._key is None or self._value is None:
            self.lazy_initialization(key, value)
        elif self.length == 0 and at == 0 and self._key.shape[0] not in (1, key.shape[0]):
            self.lazy_initialization(key, value)  # emptied, and now used for another batch
        elif self._key.is_inference() and not torch.is_inference_mode_enabled():
            self._key, self._value = self._key.clone(), self._value.clone()  # torch forbids writing to the old ones
        end = at + key.shape[2]
        assert self._key is not None and self._value is not None
        if end > self._key.shape[2]:
            self.capacity = max(end + _GROWTH, end + end // 4)
            self._key = _moved(self._key, 0, self.length, self.capacity)
            self._value = _moved(self._value, 0, self.length, self.capacity)
        if self._key.shape[0] == 1 and key.shape[0] > 1:  # one assembled prompt, a batch of questions
            self.map_rows(torch.zeros(key.shape[0], dtype=torch.long))
        if key.shape[0] != self._key.shape[0]:
            raise ValueError(
                f"this cache holds {self._key.shape[0]} rows and the model was given {key.shape[0]}; continue a batch "
                "with as many rows as it began with"
            )
        self._key[:, :, at:end] = key
        self._value[:, :, at:end] = value

    def view(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tail tokens, `[B, H_kv, length, D]` each."""
        assert self._key is not None and self._value is not None
        return self._key[:, :, :length], self._value[:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.forget()
        self.write(key_states, value_states, self.length)
        self.length += key_states.shape[2]
        return self.view(self.length)

    def get_seq_length(self) -> int:
        return self.prefix + self.removed + self.start + self.length

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        count = query_length if isinstance(query_length, int) else query_length.shape[0]  # 4.57: cache_position
        self.forget()  # `update` would, after the mask was made
        return self.prefix + self.length + count, self.removed + self.start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5

    def reset(self) -> None:
        self.segments, self.survivors, self.dense = SegmentList(), (), None
        self.prefix, self.removed, self.adopted, self.start, self.length = 0, 0, 0, 0, 0

    def map_rows(self, rows: torch.Tensor) -> None:
        """Replace the batch by `rows` of it (int64 `[B']`); the segments are shared and stay."""
        if self._key is not None and self._value is not None:
            self._key = _rows(self._key, self.length, rows)
            self._value = _rows(self._value, self.length, rows)
        self.segments = SegmentList.adopt(_segment_rows(segment, rows) for segment in self.segments)


def _empty(like: torch.Tensor, tokens: int) -> torch.Tensor:
    return ops.empty_huge((like.shape[0], like.shape[1], tokens, like.shape[3]), like.dtype, like.device)


def _moved(old: torch.Tensor, begin: int, length: int, capacity: int) -> torch.Tensor:
    """Tokens `begin` to `begin + length` of `old`, at the front of storage for `capacity` tokens."""
    new = _empty(old, capacity)
    new[:, :, :length] = old[:, :, begin : begin + length]
    return new


def _rows(old: torch.Tensor, length: int, rows: torch.Tensor) -> torch.Tensor:
    new = old.new_empty((rows.numel(), *old.shape[1:]))
    new[:, :, :length] = old[:, :, :length].index_select(0, rows.to(old.device))
    return new


def _segment_rows(segment: Segment, rows: torch.Tensor) -> Segment:
    key, value, first = segment.key, segment.value, segment.first
    if key.ndim == 4 and key.shape[0] > 1:
        key, value = key.index_select(0, rows.to(key.device)), value.index_select(0, rows.to(value.device))
    if first is not None:
        first = first.index_select(0, rows.to(first.device))
    return Segment(key, value, segment.offset, start=segment.start, first=first)
