# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What bench/gpu.py's stages for the kernels share.

Every contender of a case is run once before it is timed, and its result compared: `difference` is the largest one to
kvspeed's, over the largest number in that result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_clock import Run
from torch import Tensor

NOMINAL = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA A100-SXM4-80GB": 2.039e12}

Contender = Callable[[], object]


def nominal_bandwidth(run: Run) -> float | None:
    """The data sheet's bytes a second, where the card is one of those that docs/kernels.md has."""
    return NOMINAL.get(torch.cuda.get_device_name()) if run.backend == "cuda" else None


def inverse_frequencies(head_dim: int, device: torch.device) -> Tensor:
    return (500000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)).float().to(device)


def rotate_half(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), -1)


def difference(own: Any, other: Any) -> float:
    """The largest difference of two results, over the largest number of the first."""
    pairs = zip(own, other, strict=True) if isinstance(own, (tuple, list)) else [(own, other)]
    worst = 0.0
    for a, b in pairs:  # in pieces: float32 copies of everything would not fit beside large caches
        for x, y in zip(a.flatten(0, -3), b.flatten(0, -3), strict=True):
            size = max(float(x.abs().max()), 1e-30)
            worst = max(worst, float((x.float() - y.float()).abs().max()) / size)
    return worst


def line(what: str, result: dict[str, Any]) -> str:
    """A case in one line, for the log."""
    microseconds = 1e6 * result["times"]["kvspeed"]["seconds"]
    parts = [what, f"{microseconds:.1f} us", f"{result['bytes_a_second'] / 1e12:.2f} TB/s"]
    if "of_copy" in result:
        parts.append(f"{result['of_copy']:.2f} of the copy")
    parts += [f"{ratio:.2f}x {name}" for name, ratio in result["faster_than"].items()]
    return ", ".join([*parts, f"{result['launches']} launches, host {1e6 * result['host_seconds']:.1f} us"])
