# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Self-checks of the three kernels on the machine at hand, against oracles in float64 written out here.

Small and quick on purpose (a second in all): they show that the installed build computes the right thing on this
processor, for each instruction set and dtype, and on each GPU that it can use. The test suite is the thorough check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvspeed import ops
from kvspeed.ops.device import cuda_refusal
from kvspeed.segment import Segment

__all__ = ["CHECKS", "KernelCheck", "count_checks", "run_checks"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error allowed, relative to the largest value: a few roundings of the output's dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@dataclass(frozen=True)
class KernelCheck:
    """One kernel, place and dtype.

    Attributes:
        isa: an instruction set of the processor, or a GPU, such as "cuda:0".
        error: largest difference from float64 relative to the largest value; inf where bits that must be equal differ.
        fault: what went wrong instead of a number, or "".
    """

    kernel: str
    isa: str
    dtype: str
    error: float
    tolerance: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault and self.error <= self.tolerance  # a NaN is not


def run_checks(seed: int = 0) -> Iterator[KernelCheck]:
    """Every kernel on every instruction set that this processor runs and every GPU, in every dtype there is for it."""
    for place, dtype, kernel in _combinations():
        rng = torch.Generator().manual_seed(seed)
        error, fault = float("inf"), ""
        on_gpu = place.startswith("cuda")
        try:
            with ops.cpu_isa("auto" if on_gpu else place), torch.no_grad():
                error = CHECKS[kernel](dtype, rng, torch.device(place if on_gpu else "cpu"))
        except Exception as problem:
            fault = f"{type(problem).__name__}: {problem}"
        yield KernelCheck(kernel, place, str(dtype).removeprefix("torch."), error, TOLERANCE[dtype], fault)


def count_checks() -> int:
    """How many `run_checks` makes."""
    return len(_combinations())


def _combinations() -> list[tuple[str, torch.dtype, str]]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    places = [*ops.cpu_isas(), *(f"cuda:{index}" for index in range(gpus) if cuda_refusal(index) is None)]
    return [
        (place, dtype, kernel)
        for place in places
        for dtype in DTYPES
        for kernel in CHECKS
        if not (place.startswith("cuda") and (kernel, dtype) == ("segment_attention", torch.float32))
    ]


def check_rope_concat(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> float:
    """Three packets, one of them unmoved, into a poisoned cache with a free end; head_dim 80, of which 64 rotate."""
    layers, heads, dim, rotary, offsets, lengths = 2, 3, 80, 64, [0, 517, 90211], [5, 33, 1]
    inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
    keys, values = ([_random((layers, heads, n, dim), dtype, rng) for n in lengths] for _ in range(2))
    out = [torch.full((layers, heads, 45, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    there = [[tensor.to(device) for tensor in tensors] for tensors in (keys, values)]
    ops.rope_concat(there[0], there[1], offsets, inv_freq, out[0], out[1], start=2)
    out = [tensor.cpu() for tensor in out]
    truth = torch.cat([_rotate(k, offset, inv_freq) for k, offset in zip(keys, offsets, strict=True)], dim=2)
    used = slice(2, 2 + sum(lengths))
    untouched = all(bool(t[:, :, :2].isnan().all() and t[:, :, used.stop :].isnan().all()) for t in out)
    exact = (
        torch.equal(out[1][:, :, used], torch.cat(values, dim=2))
        and torch.equal(out[0][:, :, 2:7], keys[0])
        and torch.equal(out[0][:, :, used, rotary:], torch.cat(keys, dim=2)[..., rotary:])
    )
    return _error(out[0][:, :, used], truth) if exact and untouched else float("inf")


def check_segment_attention(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> float:
    """Two moved packets and a causal tail with left padding (poisoned), 6 query heads on 2 KV heads, 2 rows."""
    dim, kv, heads, steps, tail = 64, 2, 6, 4, 9
    inv_freq = 100000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    query = _random((2, heads, steps, dim), dtype, rng)
    blocks = [
        (_random((kv, n, dim), dtype, rng), _random((kv, n, dim), dtype, rng), at) for n, at in ((70, 0), (3, 811))
    ]
    tail_key, tail_value = (_random((2, kv, tail, dim), dtype, rng) for _ in range(2))
    first = torch.tensor([0, 5], dtype=torch.int32)
    clean = tail_key.clone(), tail_value.clone()
    tail_key[1, :, :5] = tail_value[1, :, :5] = float("nan")
    segments = [Segment(key.to(device), value.to(device), offset) for key, value, offset in blocks]
    query_there, tail_key, tail_value, first = (t.to(device) for t in (query, tail_key, tail_value, first))
    out, lse = ops.segment_attention(
        query_there, segments, tail_key, tail_value, inv_freq=inv_freq, tail_first=first, return_lse=True
    )
    out, lse = out.cpu(), lse.cpu()
    moved = [_rotate(key, offset, inv_freq) for key, _, offset in blocks]
    key = torch.cat([*(m.expand(2, -1, -1, -1) for m in moved), clean[0].double()], dim=2)
    value = torch.cat([*(v.double().expand(2, -1, -1, -1) for _, v, _ in blocks), clean[1].double()], dim=2)
    before = key.shape[2] - tail
    seen = torch.ones(2, steps, key.shape[2], dtype=torch.bool)
    seen[:, :, before:] = torch.ones(steps, tail, dtype=torch.bool).tril(tail - steps)
    seen[1, :, before : before + 5] = False
    truth, truth_lse = _attention(query, key, value, seen)
    return max(_error(out, truth), _error(lse, truth_lse) if dtype == torch.float32 else 0.0)


def check_merge_states(dtype: torch.dtype, rng: torch.Generator, device: torch.device) -> float:
    """Attention over two halves, merged, against attention over both; one row saw nothing in either."""
    shape = (2, 3, 5, 64)
    parts = [_random(shape, dtype, rng) for _ in range(2)]
    lses = [3 * torch.randn(shape[:3], generator=rng) for _ in range(2)]
    lses[0][0, 0, 0] = lses[1][0, 0, 0] = float("-inf")
    a, lse_a, b, lse_b = (tensor.to(device) for tensor in (parts[0], lses[0], parts[1], lses[1]))
    out, lse = (tensor.cpu() for tensor in ops.merge_states(a, lse_a, b, lse_b))
    weights = torch.stack(lses).double().softmax(0).nan_to_num(0.0)[..., None]
    truth = weights[0] * parts[0].double() + weights[1] * parts[1].double()
    truth_lse = torch.stack(lses).double().logsumexp(0)
    empty = bool((out[0, 0, 0] == 0).all()) and lse[0, 0, 0] == float("-inf")
    finite = truth_lse.isfinite()
    return max(_error(out, truth), _error(lse[finite], truth_lse[finite])) if empty else float("inf")


CHECKS: dict[str, Callable[[torch.dtype, torch.Generator, torch.device], float]] = {
    "rope_concat": check_rope_concat,
    "segment_attention": check_segment_attention,
    "merge_states": check_merge_states,
}


def _random(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng).to(dtype)


def _rotate(keys: Tensor, offset: int, inv_freq: Tensor) -> Tensor:
    """Half-split RoPE by `offset` in float64."""
    keys, half = keys.double(), inv_freq.numel()
    cos, sin = (offset * inv_freq.double()).cos(), (offset * inv_freq.double()).sin()
    a, b = keys[..., :half], keys[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, keys[..., 2 * half :]], dim=-1)


def _attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped attention in float64: query [B, H_q, S, D], key and value [B, H_kv, N, D], seen [B, S, N]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query.double() @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _error(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest value; NaN where `found` holds one."""
    return float((found.double() - truth).abs().max() / truth.abs().max())
