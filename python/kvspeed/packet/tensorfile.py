# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tensors and their description in one safetensors file: written atomically, checked before use, read by mmap.

A file is plain safetensors; its metadata has four entries: `format` (e.g. "kvspeed.packet"), `version`, `header` (the
description, JSON) and `checksum` (SHA-256 over all of it, tensors by `digest.tensor_digest`). Tensors begin at a
multiple of 64 bytes, so that kernels read a memory-mapped file as they read memory of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvspeed.digest import tensor_digest

__all__ = ["TensorFileError", "read_tensor_file", "write_tensor_file"]

_ALIGNMENT = 64
_METADATA = {"format", "version", "header", "checksum"}
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


class TensorFileError(ValueError):
    """The file is not what it should be: another format, truncated, altered, or of an unknown version."""


def write_tensor_file(
    path: str | os.PathLike[str], format: str, version: int, header: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write `header` and `tensors` to `path` in one step: a reader, or a crash, sees the old file or the whole new one.

    Args:
        path: the file; its folder must exist. An existing file is replaced.
        format: the kind of file.
        version: of that kind.
        header: JSON-able description.
        tensors: by name, on any device, of any strides.

    Raises:
        OSError: the file cannot be written; what was there is untouched.
        TypeError, ValueError: `header` is not JSON-able or a dtype has no place in safetensors.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give the name of a file")
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    metadata = {
        "format": format,
        "version": str(version),
        "header": text,
        "checksum": _checksum(format, version, text, tensors),
    }
    temporary = path.parent / f".kvspeed-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            for piece in _pieces(metadata, tensors):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_tensor_file(
    path: str | os.PathLike[str], format: str, version: int, *, verify: bool = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read what `write_tensor_file` wrote; the tensors are memory-mapped and must not be written to.

    Args:
        path: the file.
        format: the kind that is expected.
        version: the newest version that the caller understands; files of version 1 to this one are accepted.
        verify: compare the checksum, which reads all tensors once. Without it, structure is still checked.

    Returns:
        `(header, tensors)`.

    Raises:
        FileNotFoundError: there is no such file.
        TensorFileError: it is not such a file, or is truncated or altered.
    """
    path = Path(path)
    if path.is_dir():
        raise TensorFileError(f"{path} is a folder, not a {format} file")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if not path.is_file():  # a pipe or a device, which opening could wait for
        raise TensorFileError(f"{path} is no regular file, and so no {format} file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            text, found_version = _check_metadata(path, metadata, format, version)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise TensorFileError(
            f"{path} is truncated, altered or no {format} file ({brief(error)}): build it anew"
        ) from error
    if verify and _checksum(format, found_version, text, tensors) != metadata["checksum"]:
        raise TensorFileError(f"{path} was altered or damaged (its checksum does not match): build it anew")
    try:
        header = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(
            f"{path} has a description that cannot be read ({brief(error)}): build it anew"
        ) from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{path} has a description that is no mapping: build it anew")
    return header, tensors


def _check_metadata(path: Path, metadata: dict[str, str], format: str, version: int) -> tuple[str, int]:
    """The header's text and the version of a file whose metadata is as it should be."""
    if "format" not in metadata:
        raise TensorFileError(f"{path} is a safetensors file, but not a {format} file")
    if metadata["format"] != format:
        raise TensorFileError(f"{path} is a {brief(metadata['format'])!r} file; a {format!r} file was expected")
    if set(metadata) != _METADATA:
        wrong = ", ".join(sorted(set(metadata) ^ _METADATA))
        raise TensorFileError(f"{path} has unknown or missing metadata ({brief(wrong)}): build it anew")
    text = metadata["version"]
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise TensorFileError(f"{path} has version {brief(text)!r}, which is no number: build it anew")
    if not 1 <= int(text) <= version:
        raise TensorFileError(
            f"{path} is version {text} of {format}; this kvspeed reads versions 1 to {version}: "
            "update kvspeed, or build the file anew"
        )
    return metadata["header"], int(text)


def brief(text: object, limit: int = 160) -> str:
    """What a file says, on one line and cut to `limit` characters, fit for a message."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _checksum(format: str, version: int, text: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(f"{format}\0{version}\0{text}\0".encode())
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensor_digest(tensors[name]))
    return digest.hexdigest()


def _pieces(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The file's bytes in order."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    # wide elements first, so that each tensor is aligned to its element without gaps, which safetensors forbids
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    end = integers = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise ValueError(f"tensor {name}: {tensor.dtype} cannot be stored in safetensors")
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        integers += 0 if tensor.dtype.is_floating_point else end - start
    head = json.dumps(entries, separators=(",", ":")).encode()
    # what stands before the keys (8 bytes, this head, the few integers) fills whole lines of 64 bytes
    head += b" " * (-(8 + len(head) + integers) % _ALIGNMENT)
    yield len(head).to_bytes(8, "little")
    yield head
    for name in order:
        tensor = tensors[name].detach().cpu().contiguous().view(-1)
        if tensor.numel():
            yield tensor.view(torch.uint8).numpy().data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # e.g. Windows
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems
        pass
    finally:
        os.close(descriptor)
