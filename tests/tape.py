# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph does, on a CPU: record the operations of one run, and do the same to the same memory again.

Everything the host decided while it was recorded stays as it was: numbers, shapes, addresses, Python's control flow. So
what only works because the host looks again at each step (a length, a position, a new tensor) goes wrong here as it
would in a graph, and what a capture forbids (reading device memory on the host) is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Tape"]

_HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_to_cpu", "unique")


class Tape(TorchDispatchMode):
    """Record inside a `with` block, which runs the operations too; then `replay`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        assert not any(read in name for read in _HOST_READS), f"{name} reads device memory on the host"
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        inputs = {_memory(one) for value in (*args, *kwargs.values()) for one in _tensors(value)}
        only_views = bool(outputs) and all(_memory(one) in inputs for one in outputs)
        if func._schema.is_mutable or not only_views:
            self.calls.append((func, args, kwargs, outputs))
        return result

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for one in result or () if isinstance(one, torch.Tensor)] if isinstance(result, list | tuple) else []
