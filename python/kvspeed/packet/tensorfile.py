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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvspeed.atomic import replacing
from kvspeed.digest import tensor_digest
from kvspeed.packet.container import ContainerError, map_file, parse_head, parse_tensors, write_head, write_pieces

__all__ = [
    "Encoded",
    "TensorFileError",
    "encode_tensor_file",
    "parse_description",
    "parse_tensor_file",
    "read_tensor_file",
    "write_tensor_file",
]

_METADATA = {"format", "version", "header", "checksum"}


class TensorFileError(ValueError):
    """The file is not what it should be: another format, truncated, altered, or of an unknown version."""


@dataclass(frozen=True)
class Encoded:
    """A file that is ready to be written; the tensors' bytes are not copied.

    Attributes:
        head: its first bytes.
        order: the tensors that follow.
        tensors: by name.
    """

    head: bytes
    order: list[str]
    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Its bytes, in order."""
        return _pieces(self.head, self.order, self.tensors)


def encode_tensor_file(format: str, version: int, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Encoded:
    """The bytes of a file, see `write_tensor_file`.

    Raises:
        TypeError, ValueError: `header` is not JSON-able or a dtype has no place in safetensors.
    """
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    checksum = _checksum(format, version, text, tensors)
    metadata = {"format": format, "version": str(version), "header": text, "checksum": checksum}
    head, order = write_head(metadata, tensors)
    return Encoded(head, order, tensors)


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
    with replacing(path) as part:
        encoded = encode_tensor_file(format, version, header, tensors)
        with open(part, "xb") as file:
            for piece in encoded.pieces():
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
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
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = map_file(file.fileno(), size, str(path))
    return parse_tensor_file(data, str(path), format, version, verify=verify)


def parse_tensor_file(
    data: torch.Tensor, source: str, format: str, version: int, *, verify: bool | Callable[[str], bool] = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`read_tensor_file` for a file that is in memory.

    Args:
        data: all bytes of the file, uint8 `[size]`; the tensors share its memory.
        source: what messages call it.
        format, version: as in `read_tensor_file`.
        verify: the same, or a function that is given the checksum in the file and says whether to compare it.

    Raises:
        TensorFileError: as in `read_tensor_file`.
    """
    try:
        head = parse_head(data.numpy().data)
        text, found_version = _check_metadata(source, head.metadata, format, version)
        tensors = parse_tensors(data, head)
    except ContainerError as error:
        raise TensorFileError(
            f"{source} is truncated, altered or no {format} file ({brief(error)}): build it anew"
        ) from error
    claimed = head.metadata["checksum"]
    wanted = verify(claimed) if callable(verify) else verify
    if wanted and _checksum(format, found_version, text, tensors) != claimed:
        raise TensorFileError(f"{source} was altered or damaged (its checksum does not match): build it anew")
    return _description(source, text), tensors


def parse_description(buffer: Any, source: str, format: str, version: int) -> tuple[dict[str, Any], int]:
    """`(header, bytes that the whole file must have)` from the first bytes of a file; the tensors may be damaged.

    Raises:
        TensorFileError: not even these bytes are as they should be.
    """
    try:
        head = parse_head(buffer)
    except ContainerError as error:
        raise TensorFileError(
            f"{source} is truncated, altered or no {format} file ({brief(error)}): build it anew"
        ) from error
    text, _ = _check_metadata(source, head.metadata, format, version)
    return _description(source, text), head.size


def _description(source: str, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(
            f"{source} has a description that cannot be read ({brief(error)}): build it anew"
        ) from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{source} has a description that is no mapping: build it anew")
    return header


def _check_metadata(path: str, metadata: dict[str, str], format: str, version: int) -> tuple[str, int]:
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


_pieces = write_pieces


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
