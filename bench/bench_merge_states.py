# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""merge_states against torch and memcpy.

python -m pytest bench/bench_merge_states.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvspeed import ops
from limits import memcpy
from torch import Tensor


def torch_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_merge_states(compare: Callable[..., object], dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    batch, heads, tokens, dim = 4, 32, 512, 128
    out_a, out_b = (torch.randn(batch, heads, tokens, dim).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(batch, heads, tokens) for _ in range(2))
    target = torch.empty_like(out_a)
    functions = {
        "kvspeed": lambda: ops.merge_states(out_a, lse_a, out_b, lse_b),
        "memcpy of one state": lambda: memcpy(target, out_a),
        "torch": lambda: torch_merge(out_a, lse_a, out_b, lse_b),
    }
    case = {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": dim}
    compare(f"merge_states_{request.node.callspec.id}", functions, case=case, rounds=21)
