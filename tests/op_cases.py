# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Random inputs for the ops, and the checks that every result must pass."""

from __future__ import annotations

import backends
import reference
import torch
from backends import ops
from kvspeed.segment import Segment
from poison import Embedded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = [0, 1, -1, 4096, 65535, 131071, -131071]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def frequencies(rotary_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(rotary_dim, 1))


def packets(lengths, *, layers=2, heads=2, head_dim=64, dtype=torch.bfloat16):
    def make(tokens):
        return torch.randn(layers, heads, tokens, head_dim).to(dtype)

    return [make(n) for n in lengths], [make(n) for n in lengths]


def check_keys(got, keys, offsets, inv_freq, interleaved=False):
    """Accuracy against truth, element by element, and against PyTorch's own; exactness where it is promised."""
    got, keys = got.cpu(), [key.cpu() for key in keys]
    truth, _ = reference.rope_concat(keys, keys, offsets, inv_freq, interleaved)
    own, _ = reference.rope_concat_torch(keys, keys, offsets, inv_freq, interleaved)
    reference.accept(got, truth, own, "keys")

    dtype, rotary_dim = got.dtype, 2 * inv_freq.shape[-1]
    given_keys = torch.cat(list(keys), 2)
    assert reference.same_bits(got[..., rotary_dim:], given_keys[..., rotary_dim:]), "dimensions beyond R changed"
    # Half a unit in the last place of the result, and a few float32 roundings of the pair it was made from.
    eps = torch.finfo(dtype).eps
    exponent = torch.floor(torch.log2(truth.abs().clamp_min(torch.finfo(dtype).tiny)))
    half_ulp = torch.exp2(exponent) * eps / 2
    size = given_keys.double().abs().amax(-1, keepdim=True)
    slack = size * 2**-22
    assert ((got.double() - truth).abs() <= half_ulp * (1 + 1e-6) + slack).all(), "a key is not rounded once"
    start = 0
    for key, offset in zip(keys, offsets, strict=True):
        part = got[:, :, start : start + key.shape[2]]
        if offset == 0:
            assert reference.same_bits(part, key), "keys with offset 0 changed"
        start += key.shape[2]


def run(keys, values, offsets, inv_freq, *, start=0, spare=3, interleaved=False, order=None, gap=1, shift=0):
    """Into contiguous-by-strides outputs with spare capacity, canaries all around."""
    layers, heads, _, head_dim = keys[0].shape
    total = sum(key.shape[2] for key in keys)
    shape = (layers, heads, start + total + spare, head_dim)
    out_keys = Embedded(shape, keys[0].dtype, order=order, gap=gap, shift=shift)
    out_values = Embedded(shape, keys[0].dtype, order=order, gap=gap + 1, shift=shift + 1)
    result = ops.rope_concat(
        keys, values, offsets, inv_freq, out_keys.view, out_values.view, start=start, interleaved=interleaved
    )
    assert result is None
    written = torch.zeros(shape, dtype=torch.bool)
    written[:, :, start : start + total] = True
    out_keys.check(written)
    out_values.check(written)
    got_keys, got_values = (out.view[:, :, start : start + total] for out in (out_keys, out_values))
    assert reference.same_bits(got_values, torch.cat(list(values), 2)), "values changed"
    check_keys(got_keys, keys, offsets, inv_freq, interleaved)
    return got_keys, got_values


def accept_attention(got, truth, own, arguments, scale=None):
    """Output and LSE against truth; a little slack, so that a lucky `own` does not fail a kernel.

    GPUs round the turned query once to the tensors' dtype, as PyTorch rounds each turned key: less error on average
    (half), but the same for all keys, where PyTorch's may by luck cancel to nearly nothing in the LSE.
    """
    query, segments, tail_key = arguments[:3]
    rounding = reference.score_rounding(query, segments, tail_key, scale)
    turned = 0.0
    if backends.is_gpu() and any(segment.offset for segment in segments):
        turned = rounding * 2**24 * torch.finfo(query.dtype).eps * query.shape[-1] ** -0.5 / 8
    reference.accept(got[0], truth[0], own[0], "output", slack=rounding * truth[0].abs().max().item())
    reference.accept(got[1], truth[1], own[1], "lse", slack=rounding + turned)


class Case:
    """Random inputs of one shape. Segments with `rows` have their own keys in each batch row, others share them."""

    def __init__(
        self,
        *,
        batch=2,
        heads=4,
        heads_kv=2,
        rows=1,
        head_dim=64,
        tail=5,
        lengths=(7, 9),
        dtype=None,
        size=1.0,
    ) -> None:
        dtype = backends.attention_dtype() if dtype is None else dtype
        self.batch, self.heads_kv, self.head_dim, self.dtype, self.size = batch, heads_kv, head_dim, dtype, size
        self.query = self.random(batch, heads, rows, head_dim)
        self.tail_key, self.tail_value = self.kv(tail), self.kv(tail)
        self.segments = [self.segment(n, 3 + 10 * i, shared=i % 2 == 0) for i, n in enumerate(lengths)]
        self.inv_freq = frequencies(head_dim)

    def random(self, *shape) -> torch.Tensor:
        return (self.size * torch.randn(shape)).to(self.dtype)

    def kv(self, tokens) -> torch.Tensor:
        return self.random(self.batch, self.heads_kv, tokens, self.head_dim)

    def segment(self, tokens, offset=0, *, shared=False, **options) -> Segment:
        shape = (self.heads_kv, tokens, self.head_dim) if shared else (self.batch, self.heads_kv, tokens, self.head_dim)
        return Segment(self.random(*shape), self.random(*shape), offset, **options)

    def run(self, **options):
        arguments = (self.query, self.segments, self.tail_key, self.tail_value)
        return ops.segment_attention(*arguments, inv_freq=self.inv_freq, return_lse=True, **options)

    def check(self, split_tokens=None, **options):
        """The op against truth and against PyTorch in the same dtype."""
        out, lse = self.run(split_tokens=split_tokens, **options)
        arguments = self._on_the_host()
        assert out.dtype == self.dtype and out.shape == self.query.shape and lse.dtype == torch.float32
        truth = reference.segment_attention(*arguments, inv_freq=self.inv_freq, **options)
        own = reference.segment_attention_torch(*arguments, inv_freq=self.inv_freq, **options)
        accept_attention((out, lse), truth, own, arguments, options.get("scale"))
        return out, lse

    def _on_the_host(self):
        """The tensors where the references compute; a test of huge strides has them on the GPU."""
        segments = [Segment(s.key.cpu(), s.value.cpu(), s.offset, start=s.start, first=s.first) for s in self.segments]
        return self.query.cpu(), segments, self.tail_key.cpu(), self.tail_value.cpu()

    def errors(self):
        """The largest error of the output, and PyTorch's own."""
        arguments = (self.query, self.segments, self.tail_key, self.tail_value)
        truth, _ = reference.segment_attention(*arguments, inv_freq=self.inv_freq)
        own, _ = reference.segment_attention_torch(*arguments, inv_freq=self.inv_freq)
        return [(x.double() - truth).abs().max().item() for x in (self.run()[0], own)]
