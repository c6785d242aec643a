# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets as files: one safetensors file a packet, with everything that decides whether it may be used inside.

Tensors: `keys`, `values`, and where a packet has them `anchor_keys`, `anchor_values`, `positions`, `key_scale`,
`value_scale`. The description (`header` in the metadata, see `tensorfile`) holds the other fields of `Packet`, the
dtype of the keys and the number of tokens. Version 2 adds `compute_dtype` for packets that are kept in fewer bits;
others are written as version 1. A file is untrusted until all of it was checked: structure, checksum, field by field,
tensors against the description.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvspeed.packet.packet import Packet
from kvspeed.packet.tensorfile import (
    Encoded,
    TensorFileError,
    brief,
    encode_tensor_file,
    parse_tensor_file,
    read_tensor_file,
    write_tensor_file,
)

__all__ = ["FORMAT", "VERSION", "encode_packet", "load_packet", "parse_packet", "save_packet"]

FORMAT = "kvspeed.packet"
VERSION = 2

_TENSORS = ("keys", "values", "anchor_keys", "anchor_values", "positions", "key_scale", "value_scale")
_FIELDS = tuple(field.name for field in fields(Packet) if field.name not in (*_TENSORS, "compute_dtype"))
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def save_packet(packet: Packet, path: str | os.PathLike[str]) -> None:
    """Write `packet` to `path`, atomically; an existing file is replaced.

    Raises:
        OSError: it cannot be written; what was at `path` is untouched.
    """
    version, header = _describe(packet)
    write_tensor_file(path, FORMAT, version, header, packet.tensors())


def encode_packet(packet: Packet) -> Encoded:
    """The bytes of the file that `save_packet` writes."""
    version, header = _describe(packet)
    return encode_tensor_file(FORMAT, version, header, packet.tensors())


def _describe(packet: Packet) -> tuple[int, dict[str, Any]]:
    header: dict[str, Any] = {name: getattr(packet, name) for name in _FIELDS}
    header["token_ids"] = list(packet.token_ids)
    header["dtype"] = str(packet.keys.dtype).removeprefix("torch.")
    header["tensors"] = sorted(packet.tensors())
    if packet.compute_dtype is None:
        return 1, header  # which every kvspeed reads
    header["compute_dtype"] = str(packet.compute_dtype).removeprefix("torch.")
    return VERSION, header


def load_packet(path: str | os.PathLike[str], *, verify: bool = True) -> Packet:
    """Read a packet; its tensors stay in the file, memory-mapped, until they are read.

    Args:
        path: the file.
        verify: compare the checksum, which reads the whole file once.

    Raises:
        FileNotFoundError: there is no such file.
        TensorFileError: the file is no packet, is truncated, altered, of an unknown version, or inconsistent.
    """
    return _checked(str(Path(path)), *read_tensor_file(path, FORMAT, VERSION, verify=verify))


def parse_packet(data: torch.Tensor, source: str, *, verify: bool | Callable[[str], bool] = True) -> Packet:
    """`load_packet` for the bytes of a file, see `tensorfile.parse_tensor_file`."""
    return _checked(source, *parse_tensor_file(data, source, FORMAT, VERSION, verify=verify))


def _checked(source: str, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Packet:
    try:
        return _packet(header, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise TensorFileError(f"{source} is not a valid packet ({brief(error)}): build it anew") from error


def _packet(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Packet:
    reduced = header.get("compute_dtype")
    expected = {*_FIELDS, "dtype", "tensors"} | ({"compute_dtype"} if reduced is not None else set())
    if set(header) != expected:
        raise ValueError(f"unknown or missing fields: {', '.join(sorted(set(header) ^ expected))}")
    if header["tensors"] != sorted(tensors) or not {"keys", "values"} <= set(tensors) <= set(_TENSORS):
        raise ValueError(f"unknown or missing tensors: it has {', '.join(sorted(tensors)) or 'none'}")
    dtype = header["dtype"]
    if not isinstance(dtype, str) or _DTYPES.get(dtype) != tensors["keys"].dtype:
        raise ValueError(f"keys are {tensors['keys'].dtype}, the description says {dtype!r}")
    values: dict[str, Any] = {name: header[name] for name in _FIELDS}
    if not isinstance(values["token_ids"], list):
        raise ValueError("token_ids: expected a list")
    values["token_ids"] = tuple(values["token_ids"])
    if reduced is not None:
        if not isinstance(reduced, str) or reduced not in _DTYPES:
            raise ValueError(f"compute_dtype: {reduced!r} is none of {', '.join(_DTYPES)}")
        values["compute_dtype"] = _DTYPES[reduced]
    values.update(tensors)
    return Packet(**values)
