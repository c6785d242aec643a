# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""bench/gpu.py's stage for rope_concat: against a device copy of as many bytes, and against torch's own ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_backend import active
from gpu_clock import Clock, Run, cases, summary
from gpu_kernels import Contender, difference, inverse_frequencies, line, nominal_bandwidth, rotate_half
from kvspeed import ops
from torch import Tensor


@dataclass(frozen=True)
class Concat:
    """One call: packets of `tokens` each, all layers."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    packets: int = 8
    tokens: int = 512
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 0  # 0: contiguous
    stored: torch.dtype | None = None  # 8-bit packets


CONCAT = {
    "1 packet of 128 tokens": Concat(packets=1, tokens=128),
    "8 packets of 128 tokens": Concat(tokens=128),
    "8 packets of 512 tokens": Concat(),
    "32 packets of 1024 tokens": Concat(packets=32, tokens=1024),
    "33 ragged packets": Concat(packets=33, tokens=0),
    "8 packets of 512 tokens, head_dim 64": Concat(layers=16, head_dim=64),
    "8 packets of 512 tokens, float32": Concat(dtype=torch.float32),
    "8 packets of 512 tokens, pages of 16": Concat(page_size=16),
    "8 packets of 512 tokens, int8": Concat(stored=torch.int8),
    "8 packets of 512 tokens, fp8": Concat(stored=torch.float8_e4m3fn),
}
DRY_CONCAT = {
    "2 packets of 9 tokens": Concat(2, 2, 64, 2, 9),
    "3 ragged packets": Concat(1, 1, 128, 3, 0),
    "2 packets of 9 tokens, pages of 4": Concat(2, 2, 64, 2, 9, page_size=4),
    "2 packets of 9 tokens, int8": Concat(2, 2, 64, 2, 9, stored=torch.int8),
}


def rope_concat(run: Run) -> None:
    """One launch for all layers and packets, against a device copy of as many bytes and against torch's own ways."""
    clock = Clock(run)
    shapes = DRY_CONCAT if run.dry else CONCAT
    with active(run):
        cases(run, {name: (1.0, partial(_rope_concat, run, clock, shape)) for name, shape in shapes.items()})
        run.raise_failures()


def _rope_concat(run: Run, clock: Clock, shape: Concat, result: dict[str, Any]) -> None:
    device = run.device
    lengths = [shape.tokens] * shape.packets
    if not shape.tokens:
        lengths = torch.randint(1, 12 if run.dry else 1024, (shape.packets,)).tolist()
    total, offsets = sum(lengths), [17 + sum(lengths[:i]) for i in range(len(lengths))]
    sizes = [(shape.layers, shape.heads, n, shape.head_dim) for n in lengths]
    plain = [[torch.randn(size, dtype=shape.dtype, device=device) for size in sizes] for _ in range(2)]
    inv_freq = inverse_frequencies(shape.head_dim, device)
    given: dict[str, Any] = {}
    packets = plain
    if shape.stored is not None:
        scales = [[torch.rand(shape.layers, shape.heads, device=device) / 64 for _ in lengths] for _ in range(2)]
        packets = [
            [
                torch.randint(-127, 128, size, device=device, dtype=torch.int8)
                if shape.stored is torch.int8
                else torch.randn(size, device=device).to(shape.stored)
                for size in sizes
            ]
            for _ in range(2)
        ]
        given = {"key_scale": scales[0], "value_scale": scales[1]}
        plain = [
            [(x.float() * s[:, :, None, None]).to(shape.dtype) for x, s in zip(part, scale, strict=True)]
            for part, scale in zip(packets, scales, strict=True)
        ]
    out_shape: tuple[int, ...] = (shape.layers, shape.heads, total, shape.head_dim)
    own = [torch.empty(out_shape, dtype=shape.dtype, device=device) for _ in range(2)]
    results = own
    if shape.page_size:
        pages = -(-total // shape.page_size)
        pool = (shape.layers, pages, shape.page_size, shape.heads, shape.head_dim)
        own = [torch.empty(pool, dtype=shape.dtype, device=device) for _ in range(2)]
        table = torch.randperm(pages).int().to(device)
        given["page_table"] = table
        results = own
    copies = [torch.empty(out_shape, dtype=shape.dtype, device=device) for _ in range(2)]
    rope = _Rotation(lengths, offsets, inv_freq, shape.dtype)

    def kvspeed() -> list[Tensor]:
        ops.rope_concat(packets[0], packets[1], offsets, inv_freq, own[0], own[1], **given)
        return results

    sources = [torch.cat(part, 2) for part in plain]

    def copy() -> None:  # as many bytes, without the rotation: K and V each read once and written once
        copies[0].copy_(sources[0])
        copies[1].copy_(sources[1])

    def torch_cat() -> list[Tensor]:  # as transformers' users do it, layer by layer
        return _by_layer(shape.layers, lambda layer: rope.cat(*([p[layer] for p in part] for part in plain)))

    contenders: dict[str, Contender] = {"kvspeed": kvspeed, "device copy": copy, "torch, cat and rotate": torch_cat}
    kvspeed()
    run.sync()
    found = list(results)
    if shape.page_size:  # [L, pages, page, H, D] back to [L, H, T, D]
        found = [x[:, table.long()].flatten(1, 2)[:, :total].transpose(1, 2) for x in own]
    result["difference"] = difference(rope.truth(plain), found)
    result["values_equal"] = bool((found[1] == sources[1]).all()) if shape.stored is None else None
    del found
    times = clock.compare(contenders, seconds=1.0)
    result |= summary(times, "kvspeed")
    stored = packets[0][0].element_size()
    element = own[0].element_size()
    moved = 2 * shape.layers * shape.heads * total * shape.head_dim * (stored + element)
    copied = 2 * shape.layers * shape.heads * total * shape.head_dim * 2 * element
    seconds = times["kvspeed"].median
    result |= {
        "bytes": moved,
        "bytes_a_second": moved / seconds,
        "copy_bytes_a_second": copied / times["device copy"].median,
        "of_copy": (moved / seconds) / (copied / times["device copy"].median),
        "launches": clock.launches(kvspeed),
        "host_seconds": clock.host_seconds(kvspeed, 50),
    }
    if (peak := nominal_bandwidth(run)) is not None:
        result["of_nominal_bandwidth"] = moved / seconds / peak
    run.say(line(f"{moved / 1e6:.0f} MB", result))


class _Rotation:
    """The rotation of every token of the concatenation, for torch's contenders."""

    def __init__(self, lengths: list[int], offsets: list[int], inv_freq: Tensor, dtype: torch.dtype) -> None:
        each = torch.tensor([float(o) for o, n in zip(offsets, lengths, strict=True) for _ in range(n)])
        angles = each.double()[:, None].to(inv_freq.device) * inv_freq.double()
        self.cos, self.sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        self.low_cos, self.low_sin = self.cos.to(dtype), self.sin.to(dtype)

    def cat(self, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        key = torch.cat(keys, 1)
        return key * self.low_cos + rotate_half(key) * self.low_sin, torch.cat(values, 1)

    def truth(self, plain: list[list[Tensor]]) -> list[Tensor]:
        """K in float32 with float64's angles, and V."""
        cos, sin = self.cos.float(), self.sin.float()
        key = torch.cat(plain[0], 2).float()
        return [(key * cos).add_(rotate_half(key) * sin), torch.cat(plain[1], 2)]


def _by_layer(layers: int, function: Callable[[int], Any]) -> Any:
    last = None
    for layer in range(layers):
        last = function(layer)  # freed as transformers would: one layer's temporaries at a time
    return last
