# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""bench/gpu.py's stages for segment_attention: decode against a device copy's rate, and both against torch's flash."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_backend import active
from gpu_clock import Clock, Run, cases, summary
from gpu_kernels import Contender, difference, inverse_frequencies, line, nominal_bandwidth, rotate_half
from kvspeed import Segment, ops
from torch import Tensor


@dataclass(frozen=True)
class Attend:
    """One call over `segments` packets and a tail, `context` keys in all beside the query's own tokens."""

    context: int
    query: int = 1
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    segments: int = 0
    dtype: torch.dtype = torch.bfloat16


DECODE = {
    "1 x 4k": Attend(4096),
    "1 x 16k": Attend(16384),
    "1 x 32k": Attend(32768),
    "1 x 128k": Attend(131072),
    "8 x 16k": Attend(16384, batch=8),
    "32 x 4k": Attend(4096, batch=32),
    "1 x 32k in 32 packets": Attend(32768, segments=32),
    "1 x 128k in 32 packets": Attend(131072, segments=32),
    "1 x 32k, float16": Attend(32768, dtype=torch.float16),
    "1 x 32k, Qwen2.5-7B (28 / 4 heads)": Attend(32768, heads=28, kv_heads=4),
    "1 x 32k, head_dim 64 (9 / 3 heads)": Attend(32768, heads=9, kv_heads=3, head_dim=64),
    "1 x 32k, head_dim 256 (16 / 8 heads)": Attend(32768, heads=16, head_dim=256),
}
PREFILL = {
    "prompt of 1k": Attend(0, 1024),
    "prompt of 4k": Attend(0, 4096),
    "prompt of 16k": Attend(0, 16384),
    "question of 64 over 4k in 8 packets": Attend(4096, 64, segments=8),
    "question of 64 over 32k in 32 packets": Attend(32768, 64, segments=32),
    "question of 64 over 128k in 32 packets": Attend(131072, 64, segments=32),
    "question of 256 over 32k in 32 packets": Attend(32768, 256, segments=32),
    "question of 1024 over 32k in 32 packets": Attend(32768, 1024, segments=32),
    "question of 16 over 32k in 32 packets": Attend(32768, 16, segments=32),
    "prompt of 4k, head_dim 64": Attend(0, 4096, head_dim=64),
    "prompt of 4k, head_dim 256": Attend(0, 4096, heads=16, head_dim=256),
}
DRY_DECODE = {
    "1 x 70": Attend(70, heads=4, kv_heads=2, head_dim=64),
    "2 x 70 in 2 packets": Attend(70, batch=2, heads=4, kv_heads=2, head_dim=64, segments=2),
}
DRY_PREFILL = {
    "prompt of 20": Attend(0, 20, heads=4, kv_heads=2, head_dim=64),
    "question of 18 over 40 in 2 packets": Attend(40, 18, heads=4, kv_heads=2, head_dim=64, segments=2),
}


def decode(run: Run) -> None:
    """One query token: bytes a second of K and V against a device copy's, and torch's flash attention."""
    clock = Clock(run)
    with active(run):
        shapes = DRY_DECODE if run.dry else DECODE
        rate = _copy_rate(run, clock)
        run.note("device copy, bytes a second", rate)
        cases(run, {name: (1.0, partial(_attend, run, clock, shape, rate)) for name, shape in shapes.items()})
        run.raise_failures()


def prefill(run: Run) -> None:
    """Prompts and questions: operations a second against torch's flash attention."""
    clock = Clock(run)
    with active(run):
        shapes = DRY_PREFILL if run.dry else PREFILL
        cases(run, {name: (1.5, partial(_attend, run, clock, shape, None)) for name, shape in shapes.items()})
        run.raise_failures()


def _copy_rate(run: Run, clock: Clock) -> float:
    """Bytes read and written a second by the best device copy that torch offers, in this very run."""
    size = (1 << 20) if run.dry else (2 << 30)
    source = torch.empty(size, dtype=torch.uint8, device=run.device).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / clock.compare({"copy": lambda: target.copy_(source)}, rounds=20)["copy"].median


def _attend(run: Run, clock: Clock, shape: Attend, rate: float | None, result: dict[str, Any]) -> None:
    device, dtype, group = run.device, shape.dtype, shape.heads // shape.kv_heads
    decoding = shape.query == 1
    inv_freq = inverse_frequencies(shape.head_dim, device)
    keys = shape.context + (0 if decoding and not shape.segments else shape.query)
    whole = [
        torch.randn(shape.batch, shape.kv_heads, keys, shape.head_dim, dtype=dtype, device=device) for _ in range(2)
    ]
    query = torch.randn(shape.batch, shape.heads, shape.query, shape.head_dim, dtype=dtype, device=device)

    # Segments hold their keys rotated back, as packets that were computed at 0: `whole` is what they stand for.
    segments, lengths = [], _cut(shape.context, shape.segments)
    for begin, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        key, value = (x[:, :, begin : begin + length].clone() for x in whole)
        segments.append(Segment(_turn(key, -begin, inv_freq), value, begin))
    tail = [x[:, :, sum(lengths) :] for x in whole]

    def kvspeed() -> Tensor:
        return ops.segment_attention(query, segments, tail[0], tail[1], inv_freq=inv_freq)

    contenders: dict[str, Contender] = {"kvspeed": kvspeed}
    contenders |= _torch_attention(run, query, whole[0], whole[1], causal=not decoding)
    if decoding:
        packed = query.view(shape.batch, shape.kv_heads, group, shape.head_dim)
        for name, function in _torch_attention(run, packed, whole[0], whole[1], causal=False).items():
            contenders[f"{name}, groups packed"] = partial(_unpack, function, query.shape)
    own = kvspeed()
    run.sync()
    differences, usable = {}, {"kvspeed": kvspeed}
    for name, function in contenders.items():
        if name == "kvspeed":
            continue
        try:
            differences[name] = difference(own, function())
            usable[name] = function
        except RuntimeError as error:  # torch has no such kernel for this shape
            result.setdefault("not_available", {})[name] = str(error).splitlines()[0][:200]
    result["difference"] = differences
    times = clock.compare(usable, seconds=1.2)
    result |= summary(times, "kvspeed")
    seconds = times["kvspeed"].median
    read = 2 * shape.batch * shape.kv_heads * keys * shape.head_dim * whole[0].element_size()
    pairs = shape.query * (keys - shape.query) + shape.query * (shape.query + 1) // 2 if not decoding else keys
    operations = 4 * shape.batch * shape.heads * shape.head_dim * pairs
    result |= {
        "bytes": read,
        "bytes_a_second": read / seconds,
        "operations": operations,
        "operations_a_second": operations / seconds,
        "launches": clock.launches(kvspeed),
        "host_seconds": clock.host_seconds(kvspeed),
    }
    if rate is not None:
        result["of_copy"] = read / seconds / rate
    if (peak := nominal_bandwidth(run)) is not None:
        result["of_nominal_bandwidth"] = read / seconds / peak
    what = f"{read / 1e6:.0f} MB, {operations / seconds / 1e12:.1f} TFLOP/s"
    run.say(line(what, result))


def _cut(tokens: int, parts: int) -> list[int]:
    if not parts:
        return []
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]


def _turn(key: Tensor, offset: int, inv_freq: Tensor) -> Tensor:
    """Keys rotated by `offset` positions in float32, rounded to their own type."""
    angle = offset * inv_freq.double()
    cos, sin = (torch.cat([f(angle)] * 2, -1).float() for f in (torch.cos, torch.sin))
    x = key.float()
    return (x * cos + rotate_half(x) * sin).to(key.dtype)


def _unpack(function: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
    return function().view(shape)


def _torch_attention(run: Run, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> dict[str, Any]:
    """torch's attentions over contiguous K and V, causal from the bottom right: flash, and cuDNN's where it has one."""
    grouped = query.shape[1] != key.shape[1]
    square = query.shape[2] == key.shape[2]
    mask: Any = None
    if causal and not square:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(query.shape[2], key.shape[2])

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and square, enable_gqa=grouped
        )

    if run.backend != "cuda":
        return {"torch": attend}
    from torch.nn.attention import SDPBackend

    return {
        "torch flash": partial(_with_backend, SDPBackend.FLASH_ATTENTION, attend),
        "torch cuDNN": partial(_with_backend, SDPBackend.CUDNN_ATTENTION, attend),
    }


def _with_backend(backend: Any, function: Callable[[], Tensor]) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        return function()
