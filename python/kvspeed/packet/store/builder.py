# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""How a store makes packets: model, tokenizer, adapter, depth, press and dtype in one place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.build import build_packet, max_positions
from kvspeed.packet.outliers import tell_drowned
from kvspeed.packet.packet import Packet
from kvspeed.packet.press import as_press
from kvspeed.packet.quantise import quantise, storage_dtype
from kvspeed.packet.store.recipe import Recipe
from kvspeed.prompt import encode

__all__ = ["Builder"]


class Builder:
    """Makes packets by one recipe, for as long as the model and the adapter stay what they were at first.

    Raises:
        TypeError, ValueError: an argument is wrong or does not fit the model; see `PacketStore`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        adapter: PacketAdapter | None,
        k: int | None,
        press: Any,
        dtype: str | torch.dtype | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if adapter is not None and not isinstance(adapter, PacketAdapter):
            raise TypeError(f"adapter: expected a PacketAdapter or None, got {type(adapter).__name__}")
        self.model, self.tokenizer, self.adapter = model, tokenizer, adapter
        self._press = as_press(press) if press is not None else None
        self._k, self._dtype = k, storage_dtype(dtype)
        self._told = False
        self.recipe = self._recipe_now()

    def _recipe_now(self) -> Recipe:
        press = self._press.describe() if self._press is not None else None
        return Recipe.of(self.model, self.adapter, self._k, press, self._dtype)

    def unchanged(self) -> bool:
        """Whether a packet that is made now is one of the recipe."""
        return self._recipe_now() == self.recipe

    def make(self, text: str) -> Packet:
        """The packet of `text`, as it is stored."""
        k = self.recipe.k if self.recipe.k is not None else self.recipe.layers
        packet = build_packet(self.model, self.tokenizer, text, self.adapter, k=k, press=self._press)
        if self._dtype is None:
            return packet
        small = quantise(packet, self._dtype)
        if self._dtype == torch.int8 and not self._told:
            told = tell_drowned(packet, small)
            if told is not None:  # said once: it is the model's way, and other texts do not change it
                self._told = True
                warnings.warn(told, RuntimeWarning, stacklevel=5)
        return small

    def token_ids(self, name: str, text: Any) -> tuple[int, ...]:
        """Ids of `text`, which messages call `name`.

        Raises:
            TypeError, ValueError: it is no string, or empty.
        """
        if not isinstance(text, str):
            raise TypeError(f"{name}: expected a string, got {type(text).__name__}")
        if not text.strip():
            raise ValueError(f"{name}: is empty; a packet needs some text")
        return encode(self.tokenizer, text, name)

    def ids_of(self, texts: Iterable[str]) -> list[tuple[str, str]]:
        """`(id, text)` of each text.

        Raises:
            TypeError, ValueError: a text is no string, empty, or longer than the model.
        """
        if isinstance(texts, (str, bytes)):
            raise TypeError("texts: expected several texts, got one: write [text]")
        try:
            given = list(texts)
        except TypeError:
            raise TypeError(f"texts: expected a sequence of strings, got {type(texts).__name__}") from None
        limit = max_positions(self.model)
        soft = self.recipe.header + self.recipe.trailer
        found = []
        for index, text in enumerate(given):
            ids = self.token_ids(f"texts[{index}]", text)
            if limit is not None and len(ids) + soft > limit:
                raise ValueError(
                    f"texts[{index}]: is {len(ids) + soft} tokens long with soft tokens, and the model has {limit} "
                    "positions: split the text"
                )
            found.append((self.recipe.id_of(text, ids), text))
        return found
