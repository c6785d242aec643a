# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A digest of a tensor's bits at the speed of memory, on the device where the tensor lies.

SHA-256 of gigabytes of weights takes seconds; a plain sum misses values that change places. Here the raw bits are read
as a matrix of 64-bit words, 1024 a row, and summed along both axes with wrap-around: any change of one element changes
a row sum and a column sum, and two elements that change places change one of the two unless they lie in the same word.
SHA-256 then goes over the sums, a thousandth of the data. Integer sums do not depend on their order, so CPU and CUDA
agree to the bit. This finds accidents and edits; it is no defence against someone who forges a collision.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["tensor_digest"]

_ROW_WORDS = 1024
_ROW_BYTES = 8 * _ROW_WORDS
_BLOCK_ROWS = 64  # half a MiB, which stays in a core's cache


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 (32 bytes) over a tensor's dtype, shape and the row and column sums of its raw bits.

    The same values give the same digest on every device and for every memory layout.

    Args:
        tensor: any dense tensor. Nothing is copied unless it is not contiguous or lies at an odd address.

    Raises:
        ValueError: the tensor holds no data (meta device), or its bits cannot be read (a packed tensor subclass).
    """
    tensor = tensor.detach()
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device has no data to digest: load the weights first")
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.numel():
        raw = _raw_bytes(tensor)
        rows = raw.numel() // _ROW_BYTES
        if rows:
            words = raw[: rows * _ROW_BYTES].view(torch.int64).view(rows, _ROW_WORDS)
            for sums in _row_and_column_sums(words):
                digest.update(sums.cpu().numpy().tobytes())
        digest.update(raw[rows * _ROW_BYTES :].cpu().numpy().tobytes())
    return digest.digest()


def _row_and_column_sums(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[rows]` and `[_ROW_WORDS]`, with wrap-around; on a CPU each block is read from memory once for both."""
    if words.device.type != "cpu":
        return words.sum(dim=1), words.sum(dim=0)
    rows, columns = torch.empty(words.shape[0], dtype=torch.int64), torch.zeros(_ROW_WORDS, dtype=torch.int64)
    for start in range(0, words.shape[0], _BLOCK_ROWS):
        block = words[start : start + _BLOCK_ROWS]
        torch.sum(block, dim=1, out=rows[start : start + _BLOCK_ROWS])
        columns += block.sum(dim=0)
    return rows, columns


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `tensor` as contiguous uint8, at an offset that allows a view as int64."""
    try:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"the bits of a {type(tensor).__name__} of {tensor.dtype} cannot be read: {error}") from error
    return raw if raw.storage_offset() % 8 == 0 else raw.clone()
