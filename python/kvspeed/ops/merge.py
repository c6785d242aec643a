# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`merge_states` on plain tensors: checks, then one call into the compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from kvspeed.ops import checks as check
from kvspeed.ops.device import gpu_of
from kvspeed.ops.native import _C, DTYPE_CODES, isa_variable

__all__ = ["run"]


def run(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See `kvspeed.ops.merge_states`."""
    out_a = check.shape("out_a", check.tensor("out_a", out_a), (None,) * 4, "[B, H, S, D]")
    shape = tuple(out_a.shape)
    out_b = check.shape("out_b", check.tensor("out_b", out_b), shape, "shaped like out_a")
    lse_a = check.shape("lse_a", check.tensor("lse_a", lse_a, torch.float32), shape[:3], "float32 [B, H, S]")
    lse_b = check.shape("lse_b", check.tensor("lse_b", lse_b, torch.float32), shape[:3], "float32 [B, H, S]")
    check.head_stride("out_a", out_a)
    check.head_stride("out_b", out_b)
    for name, given in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check.on_device(name, given, out_a.device, "out_a")

    out = check.empty_like(out_a)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=out_a.device)
    batch, heads, tokens, head_dim = shape
    if lse.numel() == 0:
        return out, lse
    arguments = (
        DTYPE_CODES[out_a.dtype],
        DTYPE_CODES[out_b.dtype],
        batch,
        heads,
        tokens,
        head_dim,
        out_a.data_ptr(),
        out_a.stride()[:3],
        lse_a.data_ptr(),
        lse_a.stride(),
        out_b.data_ptr(),
        out_b.stride()[:3],
        lse_b.data_ptr(),
        lse_b.stride(),
        out.data_ptr(),
        out.stride()[:3],
        lse.data_ptr(),
    )
    gpu = gpu_of(out_a)
    if gpu is None:
        _C.merge_states(*arguments, torch.get_num_threads(), isa_variable.get(), None)
    else:
        gpu.launch(gpu.module.merge_states, arguments)
    return out, lse
