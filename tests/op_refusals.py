# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Valid arguments of the ops, and functions that expect a call with one of them spoilt to be refused."""

from __future__ import annotations

import pytest
import torch
from kvspeed import ops
from kvspeed.segment import Segment, SegmentList

FLOATS = [torch.float64, torch.int32, torch.complex64, torch.bool]
EIGHT_BITS = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]


def concat_arguments(dtype=torch.float32, paged=False):
    """Valid arguments of rope_concat, by name: two packets of 3 and 2 tokens, a capacity of 8."""
    shape = (2, 4, 2, 3, 16) if paged else (2, 3, 8, 16)
    return {
        "keys": [torch.randn(2, 3, n, 16, dtype=dtype) for n in (3, 2)],
        "values": [torch.randn(2, 3, n, 16, dtype=dtype) for n in (3, 2)],
        "offsets": [1, 2],
        "inv_freq": torch.rand(8),
        "out_keys": torch.full(shape, 7.0, dtype=dtype),
        "out_values": torch.full(shape, 7.0, dtype=dtype),
        "start": 1,
        "page_table": torch.tensor([3, 0, 2, 1], dtype=torch.int32) if paged else None,
    }


def refuse_concat(error, *words, paged=False, edit=None, **changes):
    arguments = concat_arguments(paged=paged)
    arguments.update(changes)
    if edit is not None:
        edit(arguments)
    with pytest.raises(error) as caught:
        ops.rope_concat(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
    for name in ("out_keys", "out_values"):
        out = arguments[name]
        if isinstance(out, torch.Tensor) and out.is_cpu and not out.is_sparse:
            assert (out.detach().float() == 7).all(), f"{name} was written"


def attention_arguments(dtype=torch.float32):
    def make(*shape):
        return torch.randn(shape).to(dtype)

    return {
        "query": make(2, 4, 3, 16),
        "segments": [Segment(make(2, 5, 16), make(2, 5, 16), 3), Segment(make(2, 2, 6, 16), make(2, 2, 6, 16), 0)],
        "tail_key": make(2, 2, 4, 16),
        "tail_value": make(2, 2, 4, 16),
        "inv_freq": torch.rand(8),
    }


def refuse_attention(error, *words, edit=None, **changes):
    """Refused with segments in a list, and with the same words where they are prepared, and were used before."""
    good = attention_arguments()
    arguments = {**good, **changes}
    if edit is not None:
        edit(arguments)
    message = _attention_message(error, arguments)
    for word in words:
        assert word in message, f"{word!r} is not in {message}"
    segments = arguments["segments"]
    if type(segments) is list and all(isinstance(segment, Segment) for segment in segments):
        prepared = SegmentList(segments)
        if edit is None and segments is good["segments"]:
            ops.segment_attention(**{**good, "segments": prepared})
        assert _attention_message(error, {**arguments, "segments": prepared}) == message


def _attention_message(error, arguments):
    with pytest.raises(error) as caught:
        ops.segment_attention(**arguments)
    return str(caught.value)


def set_item(name, index, value):
    def edit(arguments):
        arguments[name][index] = value

    return edit


_FIXED: dict[str, object] = {}


def attention_arguments_with(**changes):
    if not _FIXED:
        _FIXED.update(attention_arguments())
    return {**_FIXED, **changes}


def refuse_merge(error, *words, **changes):
    arguments = {
        "out_a": torch.randn(2, 3, 4, 8),
        "lse_a": torch.randn(2, 3, 4),
        "out_b": torch.randn(2, 3, 4, 8),
        "lse_b": torch.randn(2, 3, 4),
    }
    arguments.update(changes)
    with pytest.raises(error) as caught:
        ops.merge_states(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
