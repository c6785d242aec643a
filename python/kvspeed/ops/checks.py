# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the ops accept, said once: every refusal names the argument, what was given, what is allowed and what to do.

Nothing here writes. Functions return what they checked, brought to the plain form that the kernels take.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from kvspeed.ops.device import cuda_refusal
from kvspeed.ops.native import DTYPE_CODES

__all__ = [
    "FACTOR_LIMIT",
    "INTEGER_LIMIT",
    "boolean",
    "empty_like",
    "finite",
    "has_own_dispatch",
    "head_stride",
    "integer",
    "inv_freq",
    "on_device",
    "optional_vector",
    "shape",
    "short",
    "tensor",
]

# Offsets and positions: below this, float64 angles are still accurate to float32, and int64 sums cannot overflow.
INTEGER_LIMIT = 2**31
# Factors of scores, which are kept in base 2: a little more overflows float32.
FACTOR_LIMIT = 1e38
_DTYPE_NAMES = "float32, bfloat16 or float16"


def tensor(name: str, value: Any, dtype: torch.dtype | None = None, dtype_of: str = "") -> Tensor:
    """A dense tensor where kernels can read it, of a dtype they take (or of exactly `dtype`, which `dtype_of` has)."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(
            f"{name} has layout {value.layout}; only dense (strided) tensors are supported: use .to_dense()"
        )
    if value.device.type != "cpu":
        _usable_device(name, value.device)
    if is_functorch_wrapped_tensor(value):
        raise RuntimeError(
            f"{name} is inside a transform of torch.func (vmap, jvp and the like), and this op has no rule for those; "
            "call it outside, with a batch as the tensors' first dimension"
        )
    given = value.dtype
    if dtype is not None:
        if given != dtype:
            eight = f" {_eight_bit_reason(name)}" if given.itemsize == 1 else ""
            need = f"like {dtype_of}" if dtype_of else "nothing else is read"
            raise TypeError(f"{name} has dtype {short(given)}; it must be {short(dtype)}, {need}{eight}")
    elif given not in DTYPE_CODES:
        reason = f" {_eight_bit_reason(name)}" if given.itemsize == 1 else ""
        raise TypeError(f"{name} has dtype {short(given)}; supported are {_DTYPE_NAMES}{reason}")
    if value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires grad, and this op has no backward; call it under torch.no_grad() or "
            "torch.inference_mode(), or give .detach()ed tensors"
        )
    if forward_ad._current_level >= 0 and _has_tangent(value):
        raise RuntimeError(
            f"{name} has a tangent (forward-mode autograd), and this op has no derivative; give the primal of "
            "torch.autograd.forward_ad.unpack_dual, or call it outside dual_level()"
        )
    if value.is_neg():
        raise TypeError(f"{name} is a lazily negated view; call .resolve_neg() first")
    if type(value) is Tensor:
        return value
    if has_own_dispatch(value):
        raise TypeError(f"{name} is a {type(value).__name__} among plain tensors; give tensors of one kind")
    return value.detach().as_subclass(Tensor)


def _has_tangent(value: Tensor) -> bool:
    return torch._C._is_fwd_grad_enabled() and forward_ad.unpack_dual(value).tangent is not None


def _usable_device(name: str, device: torch.device) -> None:
    if device.type == "meta":
        raise RuntimeError(f"{name} is on the meta device and holds no data; give a tensor with memory")
    if device.type != "cuda":
        raise RuntimeError(f"{name} is on {device}; there are kernels for CPUs and for CUDA: move the tensors to one")
    refusal = cuda_refusal(device.index or 0)
    if refusal is not None:
        raise RuntimeError(f"{name} is on {device}: {refusal}")


def on_device(name: str, value: Tensor, device: torch.device, of: str) -> Tensor:
    """The tensor is where `of` is, which is on `device`."""
    if value.device != device:
        raise RuntimeError(
            f"{name} is on {value.device} and {of} is on {device}; all tensors of a call must be on one device: move "
            f"{name} with .to({str(device)!r})"
        )
    return value


def has_own_dispatch(value: Any) -> bool:
    """Whether a tensor is of a subclass that handles operators itself (fake, functional, distributed tensors)."""
    kind = type(value)
    return kind is not Tensor and issubclass(kind, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def short(dtype: torch.dtype) -> str:
    """The name of a dtype without the module."""
    return str(dtype).removeprefix("torch.")


def _eight_bit_reason(name: str) -> str:
    return (
        "(8-bit keys and values mean nothing without their scales: rope_concat takes int8 and float8_e4m3fn with "
        f"key_scale and value_scale; else dequantise {name} first)"
    )


def shape(name: str, value: Tensor, expected: tuple[int | None, ...], names: str) -> Tensor:
    """The rank and the sizes of a tensor; None stands for any size. `names` describes them, as in "[B, H, S, D]"."""
    given = tuple(value.shape)
    if len(given) != len(expected):
        raise ValueError(f"{name} has {len(given)} dimensions, shape {list(given)}; it must be {names}")
    if any(want is not None and want != have for want, have in zip(expected, given, strict=True)):
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in expected) + "]"
        raise ValueError(f"{name} has shape {list(given)}; it must be {names} = {wanted}")
    return value


def head_stride(name: str, value: Tensor) -> Tensor:
    """The head dimension, the last one, is contiguous; everything else is free."""
    if value.shape[-1] > 1 and value.stride(-1) != 1 and value.numel():
        raise ValueError(
            f"{name} has stride {value.stride(-1)} along its last dimension, the head dimension, where it must be 1; "
            "call .contiguous()"
        )
    if value.data_ptr() == 0 and value.numel():
        raise RuntimeError(
            f"{name} has no memory to read (its storage was freed, or it is a wrapper); give a plain tensor"
        )
    return value


def empty_like(value: Tensor) -> Tensor:
    """An uninitialised output in the memory layout of `value`, the head dimension innermost in any case."""
    out = torch.empty_like(value)
    return out if out.stride(-1) == 1 else torch.empty_like(value, memory_format=torch.contiguous_format)


def integer(
    name: str,
    value: Any,
    low: int = -INTEGER_LIMIT,
    high: int = INTEGER_LIMIT,
    low_reason: str = "",
    high_reason: str = "",
) -> int:
    """A Python or numpy integer within [low, high]; bool and tensors are refused."""
    if isinstance(value, (bool, Tensor)) or not hasattr(type(value), "__index__"):
        hint = "; use .item() or .tolist()" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be an int, got {type(value).__name__}{hint}")
    number = operator.index(value)
    beyond = ": no context is that long, so look where the number comes from"
    if number < low:
        raise ValueError(f"{name} is {number}; it must be at least {low}{low_reason or (beyond if low < 0 else '')}")
    if number > high:
        raise ValueError(f"{name} is {number}; it must be at most {high}{high_reason or beyond}")
    return number


def finite(name: str, value: Any, low: float = -FACTOR_LIMIT, low_reason: str = "") -> float:
    """A real number that scores in float32 can be multiplied by, at least `low`."""
    if isinstance(value, (bool, Tensor, str)) or not (hasattr(type(value), "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it must be a finite number")
    if abs(number) > FACTOR_LIMIT:
        raise ValueError(f"{name} is {number:g}; it must be at most {FACTOR_LIMIT:g} in size, for scores to be finite")
    if number < low:
        raise ValueError(f"{name} is {number}; it must be at least {low:g}{low_reason}")
    return number


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def inv_freq(value: Any, head_dim: int, layers: int | None = None) -> Tensor:
    """float32 `[R/2]` with R <= head_dim, or `[layers, R/2]` where `layers` is given; returned with last stride 1."""
    name = "inv_freq"
    if isinstance(value, Tensor) and value.dtype != torch.float32:
        raise TypeError(
            f"{name} has dtype {short(value.dtype)}; give the model's own float32 inverse frequencies, computed anew "
            "where the model was cast (a half-precision copy turns keys by wrong angles)"
        )
    value = tensor(name, value, torch.float32)
    if value.ndim == 2 and layers is None:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; one layer's [R/2] is needed here: index it with the layer"
        )
    if value.ndim not in (1, 2):
        allowed = "[R/2]" if layers is None else "[R/2] or [L, R/2]"
        raise ValueError(f"{name} has {value.ndim} dimensions, shape {list(value.shape)}; it must be {allowed}")
    if value.ndim == 2 and value.shape[0] != layers:
        raise ValueError(f"{name} has shape {list(value.shape)}; its first size must be the number of layers, {layers}")
    if 2 * value.shape[-1] > head_dim:
        raise ValueError(
            f"{name} has {value.shape[-1]} frequencies, so it turns {2 * value.shape[-1]} dimensions; the head has "
            f"{head_dim}: give [R/2] values, R being the rotary dimension"
        )
    return value if value.shape[-1] <= 1 or value.stride(-1) == 1 else value.contiguous()


def optional_vector(name: str, value: Any, dtype: torch.dtype, size: int, meaning: str) -> Tensor | None:
    """None, or a tensor `[size]` of exactly `dtype`, returned contiguous."""
    if value is None:
        return None
    value = shape(name, tensor(name, value, dtype), (size,), meaning)
    return value.contiguous()
