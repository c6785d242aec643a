# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The safetensors layout, written and read in memory: 8 bytes of length, a JSON head, the tensors' bytes without gaps.

Reading checks everything that the head claims before a tensor is made, and makes tensors that share the file's memory;
of a mapped file nothing is read until a tensor is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ContainerError", "Head", "map_file", "parse_head", "parse_tensors", "write_head", "write_pieces"]

_ALIGNMENT = 64
_MOST_HEAD = 100_000_000  # bytes; the limit of the safetensors library
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class ContainerError(ValueError):
    """The bytes are not laid out as safetensors."""


class Head:
    """What stands before the tensors.

    Attributes:
        metadata: strings by name.
        entries: `(dtype, shape, start, end)` by tensor, in bytes from the first tensor.
        start: bytes before the first tensor.
        size: bytes of the whole.
    """

    def __init__(
        self, metadata: dict[str, str], entries: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]], start: int
    ) -> None:
        self.metadata = metadata
        self.entries = entries
        self.start = start
        self.size = start + max((end for *_, end in entries.values()), default=0)


# ---- writing -------------------------------------------------------------------------------------------------------


def write_head(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """The first bytes of a file, and the names of the tensors in the order in which their bytes follow.

    The largest tensor begins at a multiple of 64 bytes, so that kernels read it from a mapped file as from memory.

    Raises:
        ValueError: a dtype has no place in safetensors.
    """
    # wide elements first, so that each tensor is aligned to its element without gaps, which safetensors forbids
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    largest = max(order, key=lambda name: tensors[name].nbytes, default=None)
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = before = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise ValueError(f"tensor {name}: {tensor.dtype} cannot be stored in safetensors")
        if name == largest:
            before = end
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head) + before) % _ALIGNMENT)
    return len(head).to_bytes(8, "little") + head, order


def write_pieces(head: bytes, order: list[str], tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The file's bytes in order."""
    yield head
    for name in order:
        tensor = tensors[name].detach().cpu().contiguous().view(-1)
        if tensor.numel():
            yield tensor.view(torch.uint8).numpy().data


# ---- reading -------------------------------------------------------------------------------------------------------


def map_file(descriptor: int, size: int, path: str) -> torch.Tensor:
    """The `size` bytes of an open file as uint8 `[size]`, memory-mapped, private to this process.

    What a caller writes to them never reaches the file. No descriptor stays open, so that there may be more mapped
    files than a process may have open.

    Raises:
        OSError: the file cannot be mapped.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # by descriptor where the system has a name for that: the path may be another file by now
    name = f"/proc/self/fd/{descriptor}"
    try:
        storage: Any = torch.UntypedStorage.from_file(name if os.path.exists(name) else path, False, size)
    except RuntimeError as error:
        raise OSError(f"{path} cannot be mapped into memory ({error})") from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def parse_head(buffer: Any) -> Head:
    """The head of a file whose first bytes are `buffer`, checked in itself; the tensors need not be there.

    Raises:
        ContainerError: it is none.
    """
    prefix = bytes(buffer[:9])
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 9 or prefix[8:] != b"{":
        raise ContainerError("it does not begin like one")
    if length > _MOST_HEAD or 8 + length > len(buffer):
        raise ContainerError(f"its head claims {length} bytes")
    try:
        found = json.loads(bytes(buffer[8 : 8 + length]), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"its head is no JSON: {error}") from error
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(_is_text(value) for value in metadata.values()):
        raise ContainerError("its metadata is no mapping of strings")
    entries = {name: _entry(name, entry) for name, entry in found.items()}
    expected = 0
    for name, (_, _, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != expected:
            raise ContainerError(f"tensor {name} begins at {start}, not at {expected}")
        expected = end
    return Head(metadata, entries, 8 + length)


def parse_tensors(data: torch.Tensor, head: Head) -> dict[str, torch.Tensor]:
    """The tensors of a whole file, uint8 `[size]`, whose memory they share (a misaligned one is copied).

    Raises:
        ContainerError: the file is shorter or longer than its head says.
    """
    if len(data) != head.size:
        raise ContainerError(f"it has {len(data)} bytes and its head describes {head.size}")
    tensors = {}
    for name, (dtype, shape, start, end) in head.entries.items():
        piece = data[head.start + start : head.start + end]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(dtype).view(shape)
    return tensors


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ContainerError(f"tensor {name} is not described by dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise ContainerError(f"tensor {name} has the unknown dtype {code!r}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ContainerError(f"tensor {name} has no shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int and at >= 0 for at in offsets):
        raise ContainerError(f"tensor {name} has no place")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ContainerError(f"tensor {name} has {offsets[1] - offsets[0]} bytes, too many or few for {shape}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can hold, without half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
