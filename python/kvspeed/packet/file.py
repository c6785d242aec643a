# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets as files: one safetensors file a packet, with everything that decides whether it may be used inside.

Tensors: `keys`, `values`, and where a packet has them `anchor_keys`, `anchor_values`, `positions`. The description
(`header` in the metadata, see `tensorfile`) holds the other fields of `Packet`, the dtype and the number of tokens.
A file is untrusted until all of it was checked: structure, checksum, field by field, tensors against the description.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvspeed.packet.packet import Packet
from kvspeed.packet.tensorfile import TensorFileError, brief, read_tensor_file, write_tensor_file

__all__ = ["FORMAT", "VERSION", "load_packet", "save_packet"]

FORMAT = "kvspeed.packet"
VERSION = 1

_TENSORS = ("keys", "values", "anchor_keys", "anchor_values", "positions")
_FIELDS = tuple(field.name for field in fields(Packet) if field.name not in _TENSORS)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_packet(packet: Packet, path: str | os.PathLike[str]) -> None:
    """Write `packet` to `path`, atomically; an existing file is replaced.

    Raises:
        OSError: it cannot be written; what was at `path` is untouched.
    """
    header: dict[str, Any] = {name: getattr(packet, name) for name in _FIELDS}
    header["token_ids"] = list(packet.token_ids)
    header["dtype"] = str(packet.dtype).removeprefix("torch.")
    header["tensors"] = sorted(packet.tensors())
    write_tensor_file(path, FORMAT, VERSION, header, packet.tensors())


def load_packet(path: str | os.PathLike[str], *, verify: bool = True) -> Packet:
    """Read a packet; its tensors stay in the file, memory-mapped, until they are read.

    Args:
        path: the file.
        verify: compare the checksum, which reads the whole file once.

    Raises:
        FileNotFoundError: there is no such file.
        TensorFileError: the file is no packet, is truncated, altered, of an unknown version, or inconsistent.
    """
    header, tensors = read_tensor_file(path, FORMAT, VERSION, verify=verify)
    try:
        return _packet(header, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise TensorFileError(f"{Path(path)} is not a valid packet ({brief(error)}): build it anew") from error


def _packet(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Packet:
    expected = {*_FIELDS, "dtype", "tensors"}
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
    values.update(tensors)
    return Packet(**values)
