# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A packet: the keys and values of one document, computed alone, immutable, usable at any position."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvspeed.packet.rotation import validate_rotation

__all__ = ["Packet"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALED = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False, repr=False)
class Packet:
    """KV of one block (a document, or the preamble), rotated for positions from 0, and what it may be used with.

    Token t of the block is the t-th of header soft tokens, text tokens, trailer soft tokens. Nothing in a packet may be
    written to: caches read it in place, and a loaded one may be a memory-mapped file.

    Attributes:
        keys: `[layers stored, H_kv, T, D]`, float32, bfloat16 or float16; or int8 or float8_e4m3fn, with scales.
        values: the same shape and dtype.
        token_ids: ids of the text's tokens, soft tokens not included.
        header: soft tokens before the text.
        trailer: soft tokens after it.
        text: what was tokenised.
        layers: decoder layers of the model.
        k: layers that are stored, those below k; None for all.
        anchor_keys: `[layers - k, H_kv, n, D]`, KV of the first n tokens in the layers from k on, which SPEED needs of
            the block that comes first; None without k.
        anchor_values: the same shape.
        positions: int32 `[layers stored, H_kv, T]`, the position that each stored token was rotated for, where tokens
            were removed; None where all are there.
        model_fingerprint: of the weights that made it (`kvspeed.fingerprint`).
        model_name: for messages.
        adapter_fingerprint: of the soft tokens (`PacketAdapter.fingerprint`), None where there are none.
        rope: how the keys are rotated (`packet.rotation.describe_rotation`).
        press: how tokens were removed, None where none were.
        compute_dtype: what the model computes in, where keys and values are kept in fewer bits (`packet.quantise`);
            None where they are in it themselves. Anchors are always in it.
        key_scale: float32 `[layers stored, H_kv]`, by which 8-bit keys are multiplied; None for others.
        value_scale: the same for values.

    Raises:
        ValueError, TypeError: the parts do not fit each other.
    """

    keys: torch.Tensor
    values: torch.Tensor
    token_ids: tuple[int, ...]
    layers: int
    model_fingerprint: str
    rope: dict[str, Any]
    text: str = ""
    header: int = 0
    trailer: int = 0
    k: int | None = None
    anchor_keys: torch.Tensor | None = None
    anchor_values: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    model_name: str = ""
    adapter_fingerprint: str | None = None
    press: dict[str, Any] | None = None
    compute_dtype: torch.dtype | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_tensors()
        self._check_origin()

    # ---- what it is -----------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Positions the packet takes, removed tokens included."""
        return self.header + len(self.token_ids) + self.trailer

    @property
    def depth(self) -> int:
        """Layers whose KV is stored."""
        return self.keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in; `keys.dtype` may be smaller."""
        return self.keys.dtype if self.compute_dtype is None else self.compute_dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def kv_bytes(self) -> int:
        """Bytes of the stored keys and values, anchors and scales included."""
        return sum(t.numel() * t.element_size() for name, t in self.tensors().items() if name != "positions")

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one stored layer, `[H_kv, T, D]` each, where and as they lie."""
        return self.keys[index], self.values[index]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    def __repr__(self) -> str:
        soft = f" ({self.header} + {self.trailer} soft)" if self.header or self.trailer else ""
        depth = f", k={self.k}" if self.k is not None else ""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.compute_dtype is not None:
            dtype += f" in {str(self.keys.dtype).removeprefix('torch.')}"
        return (
            f"Packet({_shorten(self.text)!r}, {self.length} tokens{soft}, {self.depth} of {self.layers} layers{depth}, "
            f"{dtype}, model {self.model_name or '?'} {self.model_fingerprint[:8]})"
        )

    # ---- where it is ----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Packet:
        """The packet on `device`; itself where it is there already."""
        if torch.device(device) == self.device:
            return self
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def to_depth(self, k: int, anchor_tokens: int = 1) -> Packet:
        """The packet's first `k` layers, read where they lie, for a request that goes less deep; see `packet.depth`."""
        from kvspeed.packet.depth import to_depth

        return to_depth(self, k, anchor_tokens)

    def full(self) -> Packet:
        """The packet with keys and values in `dtype`; itself where they are. What fewer bits lost stays lost."""
        from kvspeed.packet.quantise import full

        return full(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the packet to `path` (safetensors), atomically; see `kvspeed.packet.file`."""
        from kvspeed.packet.file import save_packet

        save_packet(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Packet:
        """Read a packet, memory-mapped; see `kvspeed.packet.file.load_packet` for what is refused."""
        from kvspeed.packet.file import load_packet

        return load_packet(path, verify=verify)

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _check_numbers(self) -> None:
        for name, least in (("layers", 1), ("header", 0), ("trailer", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: expected an integer from {least}, got {value!r}")
        if self.k is not None and (type(self.k) is not int or not 0 < self.k < self.layers):
            raise ValueError(f"k: expected None or an integer from 1 to {self.layers - 1} (layers - 1), got {self.k!r}")
        if not isinstance(self.token_ids, tuple) or not all(type(i) is int and i >= 0 for i in self.token_ids):
            raise ValueError("token_ids: expected a tuple of integers that are not negative")
        if not self.token_ids:
            raise ValueError("token_ids: a packet needs at least one token of text")

    def _check_tensors(self) -> None:
        for name, tensor in self.tensors().items():
            if tensor.requires_grad:
                raise ValueError(f"{name}: must not require gradients")
        if not isinstance(self.keys, torch.Tensor) or not isinstance(self.values, torch.Tensor):
            raise TypeError("keys, values: expected tensors")
        stored = self.k if self.k is not None else self.layers
        if self.keys.ndim != 4 or self.keys.shape[0] != stored or min(self.keys.shape) < 1:
            raise ValueError(f"keys: expected [{stored}, H_kv, T, D], none empty, got {list(self.keys.shape)}")
        self._check_storage(stored)
        self._check_like("values", self.values, self.keys.shape, self.keys.dtype)
        tokens, head_dim = self.keys.shape[2:]
        if self.positions is None:
            if tokens != self.length:
                raise ValueError(f"keys: hold {tokens} tokens, and header, text and trailer are {self.length}")
        else:
            self._check_positions(self.positions, tokens)
        anchors = (self.anchor_keys, self.anchor_values)
        if self.k is None and anchors != (None, None):
            raise ValueError("anchor_keys, anchor_values: only a packet with a depth k has anchors")
        if (anchors[0] is None) != (anchors[1] is None):
            raise ValueError("anchor_keys, anchor_values: give both or none")
        if self.anchor_keys is not None and self.anchor_values is not None:
            count = self.anchor_keys.shape[2] if self.anchor_keys.ndim == 4 else 0
            if not 1 <= count <= self.length:
                raise ValueError(
                    f"anchor_keys: must hold 1 to {self.length} tokens, got {list(self.anchor_keys.shape)}"
                )
            shape = (self.layers - stored, self.keys.shape[1], count, head_dim)
            self._check_like("anchor_keys", self.anchor_keys, shape, self.dtype)
            self._check_like("anchor_values", self.anchor_values, shape, self.dtype)

    def _check_storage(self, stored: int) -> None:
        """dtype of keys, what it stands for, and the scales that it needs."""
        kept, scales = self.keys.dtype, (self.key_scale, self.value_scale)
        if kept not in _FLOATS and kept not in _SCALED:
            raise ValueError(f"keys: expected float32, bfloat16 or float16, or int8 or float8_e4m3fn, got {kept}")
        if self.compute_dtype is not None and (self.compute_dtype not in _FLOATS or self.compute_dtype == kept):
            raise ValueError(
                f"compute_dtype: expected float32, bfloat16 or float16, and not that of the keys ({kept}), got "
                f"{self.compute_dtype!r}"
            )
        if kept not in _SCALED:
            if scales != (None, None):
                raise ValueError(f"key_scale, value_scale: only 8-bit keys and values have scales, these are {kept}")
            return
        if self.compute_dtype is None:
            raise ValueError(f"compute_dtype: a packet of {kept} must say what it is used in")
        for name, scale in zip(("key_scale", "value_scale"), scales, strict=True):
            if not isinstance(scale, torch.Tensor):
                raise ValueError(f"{name}: 8-bit keys and values need their scales")
            self._check_like(name, scale, (stored, self.keys.shape[1]), torch.float32)
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise ValueError(f"{name}: expected finite numbers above 0")

    def _check_like(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype or tensor.device != self.keys.device:
            raise ValueError(
                f"{name}: is {tensor.dtype} on {tensor.device}, expected {dtype} on {self.keys.device}, where the keys "
                "are"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the head dimension must have stride 1")

    def _check_positions(self, positions: torch.Tensor, tokens: int) -> None:
        if positions.dtype != torch.int32 or positions.shape != self.keys.shape[:3]:
            raise ValueError(
                f"positions: expected int32 {list(self.keys.shape[:3])}, got {positions.dtype} {list(positions.shape)}"
            )
        if tokens > self.length or int(positions.min()) < 0 or int(positions.max()) >= self.length:
            raise ValueError(f"positions: expected values from 0 to {self.length - 1}, at most one a position")
        if bool((positions.sort(-1).values.diff(dim=-1) == 0).any()):
            raise ValueError("positions: two stored tokens of a head have the same position")

    def _check_origin(self) -> None:
        for name, value in (("text", self.text), ("model_name", self.model_name)):
            if not isinstance(value, str):
                raise TypeError(f"{name}: expected a string, got {type(value).__name__}")
        if not _is_fingerprint(self.model_fingerprint):
            raise ValueError("model_fingerprint: expected 64 hexadecimal digits")
        if self.adapter_fingerprint is not None and not _is_fingerprint(self.adapter_fingerprint):
            raise ValueError("adapter_fingerprint: expected None or 64 hexadecimal digits")
        if (self.adapter_fingerprint is None) and (self.header or self.trailer):
            raise ValueError("adapter_fingerprint: a packet with soft tokens must name the adapter they come from")
        if (self.press is None) != (self.positions is None):
            raise ValueError("press, positions: a packet has both or neither")
        if self.press is not None and not isinstance(self.press, dict):
            raise TypeError(f"press: expected a mapping, got {type(self.press).__name__}")
        validate_rotation(self.rope, self.layers, self.keys.shape[3])


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _shorten(text: str, limit: int = 32) -> str:
    text = " ".join(text[: 4 * limit].split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
