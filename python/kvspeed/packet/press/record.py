# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Letting a press look at each layer while a packet is computed, and taking the survivors out of its KV."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvspeed.models import attention_modules
from kvspeed.packet.press.base import LayerKV, Press, survivors
from kvspeed.rope import RopeSpec

__all__ = ["Recorder"]


class Recorder:
    """The survivors of every layer of one packet.

    Within `watching`, the attention of a forward calls the recorder layer by layer; `compressed` then gathers.
    """

    def __init__(
        self, press: Press, rope: RopeSpec, token_ids: tuple[int, ...], kept: int, protected: Tensor | None
    ) -> None:
        """`kept` tokens stay in each head, those of `protected` (bool `[T]`) among them."""
        self.press = press
        self._rope = rope
        self._token_ids = token_ids
        self._kept = kept
        self._protected = protected
        self._positions: dict[int, Tensor] = {}
        self._given: tuple[Any, dict[str, Any]] | None = None  # of the module that runs: hidden states, keywords
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Ready for one forward of `model` in this thread."""
        handles = []
        modules = attention_modules(model) if self.press.needs_hidden else []
        before = [set(module.__dict__) for module in modules]
        try:
            self.press.begin(model)
            for module in modules:
                handles.append(module.register_forward_pre_hook(self._note, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, names in zip(modules, before, strict=True):
                for name in set(module.__dict__) - names:
                    del module.__dict__[name]

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:  # another thread may run the same model
            hidden = args[0] if args else kwargs["hidden_states"]
            self._given = (hidden, {**kwargs, "hidden_states": hidden})

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float,
        window: int | None,
    ) -> None:
        """One layer: query `[1, H_q, T, D]`, key and value `[1, H_kv, T, D]`, rotated for positions 0 to T - 1."""
        index: int = module.layer_idx  # type: ignore[assignment]
        hidden, arguments = self._given if self._given is not None else (None, None)
        layer = LayerKV(
            index=index,
            keys=key[0],
            values=value[0],
            query=query[0, :, -1],
            scale=scale,
            softcap=softcap,
            window=window,
            inv_freq=self._rope.layer(index),
            interleaved=self._rope.interleaved,
            token_ids=self._token_ids,
            module=module,
            hidden=hidden,
            arguments=arguments,
        )
        scores = self.press.scores(layer)
        if tuple(scores.shape) != tuple(key.shape[1:3]):
            raise ValueError(
                f"press: {self.press.name or type(self.press).__name__} gave scores {list(scores.shape)} for layer "
                f"{index} instead of {list(key.shape[1:3])}"
            )
        self._positions[index] = survivors(scores, self._kept, self._protected)

    def compressed(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The survivors of `keys` and `values` `[L, H_kv, T, D]`, and their positions, int32 `[L, H_kv, kept]`."""
        positions = torch.stack([self._positions[index].to(keys.device) for index in range(keys.shape[0])])
        rows = positions.long()[..., None].expand(*positions.shape, keys.shape[3])
        return keys.gather(2, rows), values.gather(2, rows), positions
