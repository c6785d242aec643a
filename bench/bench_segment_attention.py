# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""segment_attention against SDPA, eager attention, and the speed at which memory can be read.

    python -m pytest bench/bench_segment_attention.py

Keys and values rotate between copies, so that no case finds them in a cache that a real model would not leave them in.
`SDPA, packed` folds the heads of a group into query tokens: the best plain torch offers for one query token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from kvspeed import ops
from kvspeed.segment import Segment
from limits import read
from torch import Tensor

Pair = tuple[Tensor, Tensor]
COLD_BYTES = 160 << 20


def copies(heads: int, tokens: int, dim: int, dtype: torch.dtype, cold_bytes: int = COLD_BYTES) -> list[Pair]:
    """Enough copies of keys and values [1, heads, tokens, dim] that together they exceed `cold_bytes`."""
    count = max(1, -(-cold_bytes // (2 * heads * tokens * dim * dtype.itemsize)))
    return [
        (torch.randn(1, heads, tokens, dim).to(dtype), torch.randn(1, heads, tokens, dim).to(dtype))
        for _ in range(count)
    ]


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """transformers' eager attention for a query that sees everything."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    weights = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(weights, -1, dtype=torch.float32).to(query.dtype), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_decode(
    compare: Callable[..., object], tokens: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """One query token, 32 heads over 8 KV heads of 128; the segment is re-offset, so queries are rotated too."""
    heads, heads_kv, dim = 32, 8, 128
    pairs = copies(heads_kv, tokens, dim, dtype)
    segments = [[Segment(key, value, 1000)] for key, value in pairs]
    query, empty = torch.randn(1, heads, 1, dim).to(dtype), torch.empty(1, heads_kv, 0, dim, dtype=dtype)
    inv_freq = 1e4 ** (-torch.arange(0, dim, 2).float() / dim)
    next_pair, next_segment = cycle(pairs), cycle(segments)
    packed = query.view(1, heads_kv, heads // heads_kv, dim)
    functions: dict[str, Callable[[], object]] = {
        "kvspeed": lambda: ops.segment_attention(query, next(next_segment), empty, empty, inv_freq=inv_freq),
        "read": lambda: read(*next(next_pair)),
        "SDPA, packed": lambda: F.scaled_dot_product_attention(packed, *next(next_pair)),
        "SDPA, enable_gqa": lambda: F.scaled_dot_product_attention(query, *next(next_pair), enable_gqa=True),
    }
    if tokens == 4096:
        functions["eager"] = lambda: eager(query, *next(next_pair))
    case = {"heads": heads, "heads_kv": heads_kv, "head_dim": dim, "tokens": tokens, "query_tokens": 1}
    compare(f"segment_attention_decode_{request.node.callspec.id}", functions, case=case, limit="read", rounds=11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("query_tokens", [1, 30])
def test_small_model(
    compare: Callable[..., object], query_tokens: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """SmolLM2's shape, 9 heads over 3 KV heads of 64: a decoding step and a question over 2k tokens of packets."""
    heads, heads_kv, dim, tokens = 9, 3, 64, 2048
    pairs = copies(heads_kv, tokens, dim, dtype, 32 << 20)
    segments = [
        [Segment(k, v, 5) for k, v in zip(key.chunk(4, 2), value.chunk(4, 2), strict=True)] for key, value in pairs
    ]
    query = torch.randn(1, heads, query_tokens, dim).to(dtype)
    tail_key, tail_value = (torch.randn(1, heads_kv, query_tokens, dim).to(dtype) for _ in range(2))
    inv_freq = 1e5 ** (-torch.arange(0, dim, 2).float() / dim)
    joined = [(torch.cat([key, tail_key], 2), torch.cat([value, tail_value], 2)) for key, value in pairs]
    next_joined: Iterator[Pair] = cycle(joined)
    next_segment = cycle(segments)
    rows = torch.arange(query_tokens)[:, None] + tokens >= torch.arange(tokens + query_tokens)[None]
    mask = None if query_tokens == 1 else rows[None, None]
    functions: dict[str, Callable[[], object]] = {
        "kvspeed": lambda: ops.segment_attention(query, next(next_segment), tail_key, tail_value, inv_freq=inv_freq),
        "SDPA, enable_gqa": lambda: F.scaled_dot_product_attention(
            query, *next(next_joined), attn_mask=mask, enable_gqa=True
        ),
        "eager": lambda: eager(query, *next(next_joined)),
    }
    if query_tokens == 1:
        packed = query.view(1, heads_kv, heads // heads_kv, dim)
        functions["SDPA, packed"] = lambda: F.scaled_dot_product_attention(packed, *next(next_joined))
    case = {"heads": heads, "heads_kv": heads_kv, "head_dim": dim, "tokens": tokens, "query_tokens": query_tokens}
    compare(f"segment_attention_small_{request.node.callspec.id}", functions, case=case, rounds=31)
