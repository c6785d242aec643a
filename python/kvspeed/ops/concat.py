# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`rope_concat` on plain tensors: checks, then one call into the compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvspeed.ops import checks as check
from kvspeed.ops.device import gpu_of, host_frequencies
from kvspeed.ops.native import _C, DTYPE_CODES, isa_variable
from kvspeed.ops.overlap import overlaps_itself, share_memory

__all__ = ["run"]

# The numbers of kvspeed_storage in kvspeed.h; 0 is the output's dtype.
_STORAGE_CODES: dict[torch.dtype, int] = {torch.int8: 1, torch.float8_e4m3fn: 2}
_MAX_GPU_ROWS = 2**30 - 1  # a GPU's kernel counts rows in 32 bits
_MAX_GPU_FREQUENCIES = 3900  # a row of cosines and sines travels among the parameters of a launch


def run(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[int],
    inv_freq: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
    start: int,
    interleaved: bool,
    page_table: Tensor | None,
    key_scale: Sequence[Tensor] | None = None,
    value_scale: Sequence[Tensor] | None = None,
) -> None:
    """See `kvspeed.ops.rope_concat`."""
    keys, values, offsets = _lists(keys, values, offsets)
    out_keys, out_values = _outputs(out_keys, out_values, paged=page_table is not None)
    layers, head_dim = out_keys.shape[0], out_keys.shape[-1]
    if page_table is None:
        heads, capacity = out_keys.shape[1], out_keys.shape[2]
        pages, page_size = 0, 0
    else:
        _, pages, page_size, heads, _ = out_keys.shape
        page_table = check.tensor("page_table", page_table, torch.int32)
        check.on_device("page_table", page_table, out_keys.device, "out_keys")
        check.shape("page_table", page_table, (None,), "int32 [n], one entry a page")
        capacity = page_table.shape[0] * page_size

    inv_freq = check.inv_freq(inv_freq, head_dim, layers)
    check.boolean("interleaved", interleaved)
    start = check.integer("start", start, 0)
    scales = _scales(keys, key_scale, value_scale, out_keys, (layers, heads))
    stored = _storage(keys, out_keys.dtype, scales is not None)
    expected = (layers, heads, None, head_dim)
    packets, total = _packets(keys, values, offsets, stored, scales, out_keys, out_values, expected)
    if start + total > capacity:
        raise IndexError(
            f"{total} tokens from start {start} need a capacity of {start + total}, but out_keys holds {capacity}"
            + ("" if page_table is None else f" ({page_table.shape[0]} pages of {page_size})")
            + "; give a larger output or fewer tokens"
        )
    gpu = gpu_of(out_keys)
    if page_table is not None:
        if gpu is None:
            page_table = _used_pages(page_table, start, total, page_size, pages)
        else:  # the host does not look: the kernel drops tokens of pages that are out of range
            page_table = page_table.contiguous()
    if total == 0 or not out_keys.numel():
        return

    inv_freq = host_frequencies(inv_freq)  # under this name it lives as long as the call
    arguments = (
        DTYPE_CODES[out_keys.dtype],
        layers,
        heads,
        head_dim,
        2 * inv_freq.shape[-1],
        interleaved,
        packets,
        inv_freq.data_ptr(),
        inv_freq.stride(0) if inv_freq.ndim == 2 else 0,
        out_keys.data_ptr(),
        out_values.data_ptr(),
        _output_strides(out_keys),
        _output_strides(out_values),
        start,
        capacity,
        0 if page_table is None else page_table.data_ptr(),
        0 if page_table is None else page_table.shape[0],
        page_size,
        pages,
        _STORAGE_CODES.get(stored, 0),
    )
    if gpu is None:
        _C.rope_concat(*arguments, torch.get_num_threads(), isa_variable.get(), None)
    else:
        _check_gpu_sizes(layers * heads * total, inv_freq.shape[-1])
        gpu.launch(gpu.module.rope_concat, arguments)
    for output in (out_keys, out_values):  # what autograd saved from them is stale now, and must know
        if not output.is_inference():
            torch.autograd.graph.increment_version(output)


def _lists(keys: Any, values: Any, offsets: Any) -> tuple[list[Any], list[Any], list[Any]]:
    for name, given in (("keys", keys), ("values", values), ("offsets", offsets)):
        if isinstance(given, (Tensor, str, bytes, dict)) or not hasattr(given, "__len__"):
            what = "a list of ints" if name == "offsets" else "a list of tensors"
            raise TypeError(f"{name} must be {what}, one a packet; got {type(given).__name__}")
    if not len(keys) == len(values) == len(offsets):
        raise ValueError(
            f"keys, values and offsets must have one entry a packet each; got {len(keys)} keys, {len(values)} values "
            f"and {len(offsets)} offsets"
        )
    return list(keys), list(values), list(offsets)


def _outputs(out_keys: Any, out_values: Any, *, paged: bool) -> tuple[Tensor, Tensor]:
    names = "[L, pages, page_size, H_kv, D]" if paged else "[L, H_kv, S, D]"
    out_keys = check.shape("out_keys", check.tensor("out_keys", out_keys), (None,) * (5 if paged else 4), names)
    out_values = check.tensor("out_values", out_values, out_keys.dtype, "out_keys")
    check.shape("out_values", out_values, tuple(out_keys.shape), "shaped like out_keys")
    check.on_device("out_values", out_values, out_keys.device, "out_keys")
    for name, output in (("out_keys", out_keys), ("out_values", out_values)):
        check.head_stride(name, output)
        if overlaps_itself(output):
            raise ValueError(
                f"{name} overlaps itself: with shape {list(output.shape)} and strides {list(output.stride())} two "
                "elements share memory; give an output whose elements are distinct (not an expanded view)"
            )
    if share_memory(out_keys, out_values):
        raise ValueError("out_values overlaps out_keys: they share memory; give separate outputs")
    return out_keys, out_values


def _scales(
    keys: list[Tensor], key_scale: Any, value_scale: Any, out_keys: Tensor, expected: tuple[int, int]
) -> list[tuple[Tensor, Tensor]] | None:
    """The scales of 8-bit packets, keys' and values', one pair a packet; None where none are given."""
    if key_scale is None and value_scale is None:
        return None
    checked: list[list[Tensor]] = []
    for name, given in (("key_scale", key_scale), ("value_scale", value_scale)):
        if given is None:
            raise ValueError(f"{name} is missing; 8-bit packets need key_scale and value_scale")
        if isinstance(given, (Tensor, str, bytes, dict)) or not hasattr(given, "__len__"):
            raise TypeError(f"{name} must be a list of tensors, one a packet; got {type(given).__name__}")
        if len(given) != len(keys):
            raise ValueError(f"{name} has {len(given)} entries and keys has {len(keys)}; give one a packet")
        scales = []
        for i, scale in enumerate(given):
            scale = check.tensor(f"{name}[{i}]", scale, torch.float32)
            check.on_device(f"{name}[{i}]", scale, out_keys.device, "out_keys")
            scales.append(check.shape(f"{name}[{i}]", scale, expected, "float32 [L, H_kv]"))
        checked.append(scales)
    return list(zip(*checked, strict=True))


def _storage(keys: list[Any], dtype: torch.dtype, scaled: bool) -> torch.dtype:
    """The dtype of all packets: the output's, or an 8-bit one where there are scales."""
    if not scaled or not keys:
        return dtype
    given = getattr(keys[0], "dtype", None)
    if given == dtype:
        raise ValueError(
            f"key_scale and value_scale are given, but keys[0] has out_keys's dtype {check.short(dtype)}, which needs "
            "no scales: leave them out"
        )
    if given is not None and given not in _STORAGE_CODES:
        names = " or ".join(check.short(one) for one in _STORAGE_CODES)
        raise TypeError(f"keys[0] has dtype {check.short(given)}; packets with scales are {names}")
    return given if given is not None else dtype


def _check_gpu_sizes(rows: int, frequencies: int) -> None:
    if rows > _MAX_GPU_ROWS:
        raise ValueError(
            f"keys have {rows} tokens, counted in every layer and head; a GPU's kernel takes {_MAX_GPU_ROWS} in one "
            "call: give fewer packets a call, and start"
        )
    if frequencies > _MAX_GPU_FREQUENCIES:
        raise ValueError(
            f"inv_freq has {frequencies} frequencies; a GPU's kernel takes {_MAX_GPU_FREQUENCIES}: use the CPU"
        )


def _packets(
    keys: list[Tensor],
    values: list[Tensor],
    offsets: list[int],
    stored: torch.dtype,
    scales: list[tuple[Tensor, Tensor]] | None,
    out_keys: Tensor,
    out_values: Tensor,
    expected: tuple[int | None, ...],
) -> tuple[list[tuple[int, ...]], int]:
    """The packets' descriptors for the compiled code, and their tokens together. Packets are replaced in the lists."""
    packets, total = [], 0
    for i in range(len(keys)):
        of = "out_keys" if scales is None else "keys[0]"
        key = check.tensor(f"keys[{i}]", keys[i], stored, of)
        value = check.tensor(f"values[{i}]", values[i], stored, of)
        check.shape(f"keys[{i}]", key, expected, "[L, H_kv, T, D] with out_keys's L, H_kv and D")
        check.shape(f"values[{i}]", value, tuple(key.shape), f"shaped like keys[{i}]")
        offset = check.integer(f"offsets[{i}]", offsets[i])
        for name, source in ((f"keys[{i}]", key), (f"values[{i}]", value)):
            check.head_stride(name, source)
            check.on_device(name, source, out_keys.device, "out_keys")
            for output_name, output in (("out_keys", out_keys), ("out_values", out_values)):
                if share_memory(output, source):
                    raise ValueError(
                        f"{output_name} overlaps {name}: they share memory, and packets are read while the output is "
                        "written; give a separate output, or a slice of it that leaves the packet out"
                    )
        packet = (key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3], key.shape[2], offset)
        if scales is not None:
            key_scale, value_scale = scales[i]
            packet += (key_scale.data_ptr(), value_scale.data_ptr(), *key_scale.stride(), *value_scale.stride())
            _check_scales_apart(i, scales[i], out_keys, out_values)
        packets.append(packet)
        keys[i], values[i] = key, value
        total += key.shape[2]
    return packets, total


def _check_scales_apart(i: int, scales: tuple[Tensor, Tensor], out_keys: Tensor, out_values: Tensor) -> None:
    for name, scale in zip(("key_scale", "value_scale"), scales, strict=True):
        for output_name, output in (("out_keys", out_keys), ("out_values", out_values)):
            if share_memory(output, scale):
                raise ValueError(f"{output_name} overlaps {name}[{i}]: they share memory; give a separate output")


def _used_pages(page_table: Tensor, start: int, total: int, page_size: int, pages: int) -> Tensor:
    """Checks the entries of pages that will be written, and returns a contiguous table; no other entry is read."""
    if total == 0:
        return page_table
    first, last = start // page_size, (start + total - 1) // page_size
    used = page_table[first : last + 1]
    seen: dict[int, int] = {}
    for index, page in enumerate(used.tolist(), first):
        if not 0 <= page < pages:
            has = f"pages 0 to {pages - 1}" if pages else "no pages: give it some"
            raise IndexError(f"page_table[{index}] is {page}; out_keys has {has}")
        if page in seen:
            raise ValueError(
                f"page_table[{index}] and page_table[{seen[page]}] are both {page}; pages that are written must differ"
            )
        seen[page] = index
    if page_table.stride(0) == 1 or page_table.shape[0] == 1:
        return page_table
    packed = torch.zeros(page_table.shape[0], dtype=torch.int32)
    packed[first : last + 1] = used
    return packed


def _output_strides(output: Tensor) -> tuple[int, int, int, int]:
    """Layer, page, head and token strides."""
    if output.ndim == 4:
        layer, head, token, _ = output.stride()
        return layer, 0, head, token
    layer, page, token, head, _ = output.stride()
    return layer, page, head, token
