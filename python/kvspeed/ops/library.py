# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The ops under `torch.ops.kvspeed`, for torch.compile, export, fake tensors and dispatch modes.

Registered by `torch.library.Library`, whose calls cost about half of what the `custom_op` decorator's do. A list of
segments is flattened into parallel lists, since a schema knows only tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvspeed.ops import attention, concat, merge
from kvspeed.ops import checks as check
from kvspeed.segment import Segment

__all__ = ["must_dispatch"]

_library = torch.library.Library("kvspeed", "DEF")
_library.define(
    "rope_concat(Tensor[] keys, Tensor[] values, SymInt[] offsets, Tensor inv_freq, Tensor(a!) out_keys, "
    "Tensor(b!) out_values, SymInt start=0, bool interleaved=False, Tensor? page_table=None, "
    "Tensor[]? key_scale=None, Tensor[]? value_scale=None) -> ()"
)
_library.define(
    "segment_attention(Tensor query, Tensor[] keys, Tensor[] values, SymInt[] offsets, SymInt[] starts, "
    "Tensor?[] firsts, Tensor tail_key, Tensor tail_value, Tensor? inv_freq, float? scale=None, float softcap=0.0, "
    "SymInt? window=None, SymInt? tail_start=None, Tensor? tail_first=None, Tensor? sinks=None, "
    "bool interleaved=False, bool return_lse=False, SymInt? split_tokens=None, Tensor?[]? page_tables=None, "
    "SymInt[]? tokens=None, Tensor? tail_length=None) -> (Tensor, Tensor)"
)
_library.define("merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)")


def must_dispatch(*tensors: Any) -> bool:
    """Whether something other than the plain kernels must see the call: a mode, or a tensor of its own kind."""
    if torch._C._len_torch_dispatch_stack():
        return True
    for tensor in tensors:  # a plain loop: this runs at every call
        if type(tensor) is not Tensor and check.has_own_dispatch(tensor):
            return True
    return False


def _segment_attention(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    offsets: list[int],
    starts: list[int],
    firsts: list[Tensor | None],
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    *options, page_tables, tokens, tail_length = _defaults(rest)
    none = [None] * len(keys)
    lists: dict[str, Sequence[Any]] = {
        "values": values,
        "offsets": offsets,
        "starts": starts,
        "firsts": firsts,
        "page_tables": none if page_tables is None else page_tables,
        "tokens": none if tokens is None else [None if n < 0 else n for n in tokens],
    }
    for name, given in lists.items():
        if len(given) != len(keys):
            raise ValueError(f"{name} has {len(given)} entries and keys has {len(keys)}; give one a segment")
    segments = [
        Segment(key, value, offset, start=start, first=first, page_table=table, tokens=length)
        for key, value, offset, start, first, table, length in zip(keys, *lists.values(), strict=True)
    ]
    result = attention.run(query, segments, *options, tail_length)
    return result if isinstance(result, tuple) else (result, query.new_empty(0, dtype=torch.float32))


# After the segments: tail_key, tail_value, inv_freq, then these. The dispatcher leaves out trailing defaults.
_OPTIONS: tuple[Any, ...] = (None, 0.0, None, None, None, None, False, False, None, None, None, None)
_RETURN_LSE = 10  # where return_lse is among the arguments after the segments


def _defaults(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return rest + _OPTIONS[len(rest) - 3 :]


def _segment_attention_fake(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    offsets: list[int],
    starts: list[int],
    firsts: list[Tensor | None],
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    torch._check(query.ndim == 4, lambda: f"query has {query.ndim} dimensions; it must be [B, H_q, S_q, D]")
    return_lse = _defaults(rest)[_RETURN_LSE]
    lse = query.new_empty(query.shape[:3] if return_lse else (0,), dtype=torch.float32)
    return check.empty_like(query), lse


def _rope_concat(
    keys: list[Tensor],
    values: list[Tensor],
    offsets: list[int],
    inv_freq: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
    start: int = 0,
    interleaved: bool = False,
    page_table: Tensor | None = None,
    key_scale: list[Tensor] | None = None,
    value_scale: list[Tensor] | None = None,
) -> None:
    scales = (key_scale, value_scale)
    concat.run(keys, values, offsets, inv_freq, out_keys, out_values, start, interleaved, page_table, *scales)


def _rope_concat_fake(*arguments: Any) -> None:
    return None


def _merge_states_fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    torch._check(out_a.ndim == 4, lambda: f"out_a has {out_a.ndim} dimensions; it must be [B, H, S, D]")
    return check.empty_like(out_a), out_a.new_empty(out_a.shape[:3], dtype=torch.float32)


# The same functions for both devices: they look where the tensors are.
for _key in ("CPU", "CUDA"):
    _library.impl("rope_concat", _rope_concat, _key)
    _library.impl("segment_attention", _segment_attention, _key)
    _library.impl("merge_states", merge.run, _key)
torch.library.register_fake("kvspeed::rope_concat", _rope_concat_fake, lib=_library)
torch.library.register_fake("kvspeed::segment_attention", _segment_attention_fake, lib=_library)
torch.library.register_fake("kvspeed::merge_states", _merge_states_fake, lib=_library)
