# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""rope_concat against memcpy, HF-style torch code, and the best torch code that we could write.

    python -m pytest bench/bench_rope_concat.py

16 layers x 8 heads x 8 packets of 512 tokens x 128. Outputs are reused in every version that has one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvspeed import ops
from limits import memcpy
from torch import Tensor

LAYERS, HEADS, PACKETS, TOKENS, DIM = 16, 8, 8, 512, 128


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rivals(
    keys: list[Tensor], values: list[Tensor], cos: Tensor, sin: Tensor, out_keys: Tensor, out_values: Tensor
) -> dict[str, Callable[[], object]]:
    """The same job in torch; cos and sin are [packets, D] in the model's dtype, as transformers has them."""
    tokens = keys[0].shape[2]
    cos_all, sin_all = cos.repeat_interleave(tokens, 0), sin.repeat_interleave(tokens, 0)
    layers, half = range(keys[0].shape[0]), keys[0].shape[3] // 2

    def huggingface() -> list[tuple[Tensor, Tensor]]:  # cat, then apply_rotary_pos_emb
        result = []
        for layer in layers:
            key = torch.cat([k[layer] for k in keys], 1)
            value = torch.cat([v[layer] for v in values], 1)
            result.append((key * cos_all + rotate_half(key) * sin_all, value))
        return result

    def rotate_then_cat() -> list[tuple[Tensor, Tensor]]:  # packets are small enough to stay in the cache
        return [
            (
                torch.cat([k[layer] * cos[i] + rotate_half(k[layer]) * sin[i] for i, k in enumerate(keys)], 1),
                torch.cat([v[layer] for v in values], 1),
            )
            for layer in layers
        ]

    def preallocated() -> None:  # in place, no temporary of full size
        for layer in layers:
            for i, key in enumerate(keys):
                rows = slice(i * tokens, (i + 1) * tokens)
                out_values[layer, :, rows].copy_(values[i][layer])
                x, y = key[layer, ..., :half], key[layer, ..., half:]
                to, c, s = out_keys[layer, :, rows], cos[i, :half], sin[i, :half]
                torch.mul(x, c, out=to[..., :half])
                to[..., :half].addcmul_(y, s, value=-1)
                torch.mul(y, c, out=to[..., half:])
                to[..., half:].addcmul_(x, s)

    return {"torch, HF style": huggingface, "torch, rotate then cat": rotate_then_cat, "torch, in place": preallocated}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def test_rope_concat(compare: Callable[..., object], dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    shape = (LAYERS, HEADS, TOKENS, DIM)
    keys = [torch.randn(shape).to(dtype) for _ in range(PACKETS)]
    values = [torch.randn(shape).to(dtype) for _ in range(PACKETS)]
    offsets = [17 + i * TOKENS for i in range(PACKETS)]
    inv_freq = 500000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
    angles = torch.tensor(offsets, dtype=torch.float64)[:, None] * inv_freq.double()
    cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
    sin = torch.cat([angles.sin()] * 2, -1).to(dtype)
    out = [torch.zeros(LAYERS, HEADS, PACKETS * TOKENS, DIM, dtype=dtype) for _ in range(2)]
    copy = [torch.zeros_like(x) for x in out]

    def limit() -> None:
        memcpy(copy[0], out[0])
        memcpy(copy[1], out[1])

    def torch_copy() -> None:
        copy[0].copy_(out[0])
        copy[1].copy_(out[1])

    functions = {
        "kvspeed": lambda: ops.rope_concat(keys, values, offsets, inv_freq, out[0], out[1]),
        "memcpy": limit,
        "torch copy_": torch_copy,
        **rivals(keys, values, cos, sin, copy[0], copy[1]),
    }
    case = {"layers": LAYERS, "heads": HEADS, "packets": PACKETS, "tokens": TOKENS, "head_dim": DIM}
    compare(f"rope_concat_{request.node.callspec.id}", functions, case=case, limit="memcpy", rounds=11)


def test_rope_concat_fresh_output(compare: Callable[..., object]) -> None:
    """Page faults: the same job into outputs made anew each time, with small and with huge pages."""
    shape = (LAYERS, HEADS, TOKENS, DIM)
    packets = [torch.randn(shape).to(torch.bfloat16) for _ in range(PACKETS)]
    offsets = [17 + i * TOKENS for i in range(PACKETS)]
    inv_freq = 500000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
    total = (LAYERS, HEADS, PACKETS * TOKENS, DIM)

    def run(make: Callable[[], Tensor]) -> None:
        ops.rope_concat(packets, packets, offsets, inv_freq, make(), make())

    reused = [torch.zeros(total, dtype=torch.bfloat16) for _ in range(2)]
    functions = {
        "kvspeed, reused output": lambda: ops.rope_concat(packets, packets, offsets, inv_freq, reused[0], reused[1]),
        "kvspeed, ops.empty_huge": lambda: run(lambda: ops.empty_huge(total, torch.bfloat16)),
        "kvspeed, torch.empty": lambda: run(lambda: torch.empty(total, dtype=torch.bfloat16)),
    }
    compare("rope_concat_fresh_output", functions, case={"bytes": 4 * reused[0].numel()}, rounds=9)
