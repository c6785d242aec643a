# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""How the packets of a store are made, and the names that follow from it: the same content has the same name.

A recipe is everything that a packet depends on besides its text. Packets of one recipe lie together in a folder of its
name, so that packets of another model, adapter, depth, press or dtype cannot be taken for them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import nn

from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import base_model
from kvspeed.packet.adapter import PacketAdapter, describe_model
from kvspeed.packet.build import stored_depth
from kvspeed.packet.packet import Packet
from kvspeed.state import state_of

__all__ = ["FORMAT", "Recipe", "is_id", "is_recipe_name"]

FORMAT = "kvspeed.recipe"
VERSION = 1

_ID_DIGITS = 32
_NAME_DIGITS = 16
_NOT_IN_NAME = ("model_name",)


@dataclass(frozen=True)
class Recipe:
    """What all packets of a folder have in common.

    Attributes:
        model_fingerprint: of the weights (`kvspeed.fingerprint`).
        model_name: for people; another name of the same weights is the same recipe.
        layers: decoder layers of the model.
        dtype: what the model computes in.
        storage: what keys and values are kept in.
        adapter_fingerprint: of the soft tokens, None without.
        header: soft tokens before each text.
        trailer: soft tokens after it.
        k: layers that are stored; None for all.
        anchor_tokens: tokens whose KV is kept in the layers from k on; 0 without k.
        press: how tokens are removed (`Press.describe`), None where none are.
    """

    model_fingerprint: str
    model_name: str
    layers: int
    dtype: str
    storage: str
    adapter_fingerprint: str | None = None
    header: int = 0
    trailer: int = 0
    k: int | None = None
    anchor_tokens: int = 0
    press: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        adapter: PacketAdapter | None,
        k: int | None,
        press: dict[str, Any] | None,
        storage: torch.dtype | None,
    ) -> Recipe:
        """The recipe by which `build_packet` works for these arguments now.

        Raises:
            TypeError, ValueError: an argument does not fit the model; see `build_packet`.
        """
        depth = stored_depth(model, k)
        if adapter is not None:
            adapter.check_model(model)
            adapter = adapter if adapter.tokens else None
        state = state_of(model)
        anchors = state.spec.anchor_tokens if state is not None and state.spec is not None else 1
        computed: torch.dtype = base_model(model).dtype  # type: ignore[assignment]
        kept = storage if storage is not None and storage.itemsize < computed.itemsize else computed
        return cls(
            model_fingerprint=model_fingerprint(model),
            model_name=describe_model(model).name,
            layers=len(base_model(model).layers),  # type: ignore[arg-type]
            dtype=_short(computed),
            storage=_short(kept),
            adapter_fingerprint=adapter.fingerprint() if adapter is not None else None,
            header=adapter.header.shape[0] if adapter is not None else 0,
            trailer=adapter.trailer.shape[0] if adapter is not None else 0,
            k=depth,
            anchor_tokens=anchors if depth is not None else 0,
            press=json.loads(json.dumps(press)) if press is not None else None,
        )

    @property
    def name(self) -> str:
        """The folder's name, 16 hex digits; the same recipe has the same on every machine."""
        return self._digest[:_NAME_DIGITS]

    def id_of(self, text: str, token_ids: tuple[int, ...]) -> str:
        """The name of the packet of `text`, whose tokens are `token_ids`: 32 hex digits."""
        digest = hashlib.sha256(self._digest.encode())
        digest.update(json.dumps([text, list(token_ids)]).encode())
        return digest.hexdigest()[:_ID_DIGITS]

    def difference(self, packet: Packet) -> str | None:
        """In words, how `packet` is not of this recipe; None where it is."""
        press = None if packet.press is None else self.press  # a press that removed nothing is not recorded
        for what, mine, its in (
            ("model", self.model_fingerprint[:16], packet.model_fingerprint[:16]),
            ("adapter", self.adapter_fingerprint, packet.adapter_fingerprint),
            ("soft tokens", (self.header, self.trailer), (packet.header, packet.trailer)),
            ("layers", self.layers, packet.layers),
            ("depth k", self.k, packet.k),
            ("dtype", self.dtype, _short(packet.dtype)),
            ("storage", self.storage, _short(packet.keys.dtype)),
            ("press", press, packet.press),
        ):
            if mine != its:
                return f"its {what} is {its}, not {mine}"
        return None

    def __str__(self) -> str:
        adapter = f"adapter {self.adapter_fingerprint[:8]}" if self.adapter_fingerprint else "no adapter"
        depth = f"k={self.k} of {self.layers} layers" if self.k is not None else f"{self.layers} layers"
        storage = self.storage if self.storage == self.dtype else f"{self.storage} for {self.dtype}"
        press = ""
        if self.press is not None:
            removed = self.press.get("ratio")
            percent = f"-{100 * removed:g}" if isinstance(removed, (int, float)) else ""
            press = f", press {self.press.get('name', '?')}{percent}"
        return f"{self.model_name} {self.model_fingerprint[:8]}, {adapter}, {depth}, {storage}{press}"

    def to_json(self) -> bytes:
        """As a file in the recipe's folder."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Recipe:
        """The recipe that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON ({error})") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError("no recipe")
        if found.pop("version", None) != VERSION:
            raise ValueError(f"a recipe of another version; this kvspeed reads version {VERSION}")
        if set(found) != {field.name for field in fields(cls)}:
            raise ValueError("a recipe with other fields")
        recipe = cls(**found)
        recipe._check()
        return recipe

    def _check(self) -> None:
        strings = (self.model_fingerprint, self.model_name, self.dtype, self.storage)
        numbers = (self.layers, self.header, self.trailer, self.anchor_tokens)
        if not all(isinstance(value, str) for value in strings) or not all(type(value) is int for value in numbers):
            raise ValueError("a recipe with fields of other types")
        if not isinstance(self.adapter_fingerprint, (str, type(None))) or type(self.k) not in (int, type(None)):
            raise ValueError("a recipe with fields of other types")
        if not isinstance(self.press, (dict, type(None))):
            raise ValueError("a recipe with fields of other types")

    @cached_property
    def _digest(self) -> str:
        described = {name: value for name, value in asdict(self).items() if name not in _NOT_IN_NAME}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def is_id(value: Any) -> bool:
    """Whether it has the form of a packet's name; only such strings become part of a path."""
    return _is_hex(value, _ID_DIGITS)


def is_recipe_name(value: Any) -> bool:
    """Whether it has the form of a recipe's name."""
    return _is_hex(value, _NAME_DIGITS)


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and set(value) <= set("0123456789abcdef")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
