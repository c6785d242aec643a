# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Products in bfloat16 while weights that learn stay float32: twice as fast on a CPU that has such instructions.

Of a LoRA the frozen layer's product and the two thin ones are one operation with a gradient of its own: peft's own
forward makes three of them, and scales and adds matrices as large as the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kvspeed.models import base_model

__all__ = ["bfloat16_work"]


@contextmanager
def bfloat16_work(model: nn.Module, method: str, enabled: bool) -> Iterator[None]:
    """Products in bfloat16: of frozen layers and LoRAs, or by autocast where the weights themselves are trained.

    Args:
        model: bare, or wrapped by PEFT.
        method: "lora" or "full".
        enabled: whether to do anything.
    """
    with ExitStack() as stack:
        if enabled and method == "lora":
            stack.enter_context(_frozen_products(model))
        elif enabled:
            stack.enter_context(torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16))
        yield


@contextmanager
def _frozen_products(model: nn.Module) -> Iterator[None]:
    """Frozen linear layers of the decoder with weights in bfloat16; what is trained stays float32."""
    layers: Any = base_model(model).layers
    linears = [
        part
        for part in layers.modules()
        if isinstance(part, nn.Linear) and not part.weight.requires_grad and part.weight.dtype == torch.float32
    ]
    before = [part.weight.data for part in linears]
    frozen = {id(part) for part in linears}
    fused = [part for part in layers.modules() if _plain_lora(part) and id(part.base_layer) in frozen]
    try:
        for part in linears:
            part.weight.data = part.weight.data.bfloat16()
            part.forward = partial(_linear, part)  # type: ignore[method-assign]
        for part in fused:
            part.forward = partial(_with_lora, part)
        yield
    finally:
        for part in fused:
            part.__dict__.pop("forward", None)
        for part, weight in zip(linears, before, strict=True):
            part.weight.data = weight
            part.__dict__.pop("forward", None)


def _plain_lora(part: Any) -> bool:
    """Whether `part` is a layer of peft with one ordinary LoRA in float32 on a linear layer."""
    if not (hasattr(part, "lora_A") and isinstance(getattr(part, "base_layer", None), nn.Linear)):
        return False
    active = list(part.active_adapters)
    if (
        len(active) != 1
        or active[0] not in part.lora_A
        or part.merged
        or active[0] in getattr(part, "lora_variant", {})
    ):
        return False
    a, b = part.lora_A[active[0]], part.lora_B[active[0]]
    dropout = part.lora_dropout[active[0]]
    return (
        isinstance(dropout, nn.Identity)
        and a.bias is None
        and b.bias is None
        and a.weight.dtype == b.weight.dtype == torch.float32
    )


def _linear(part: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = nn.functional.linear(x.bfloat16(), part.weight).to(x.dtype)
    return product if part.bias is None else product + part.bias


def _with_lora(part: Any, x: torch.Tensor) -> torch.Tensor:
    if part.disable_adapters:
        return part.base_layer(x)
    (name,) = part.active_adapters
    product = _LoraProduct.apply(
        x, part.base_layer.weight, part.lora_A[name].weight, part.lora_B[name].weight, part.scaling[name]
    )
    return product if part.base_layer.bias is None else product + part.base_layer.bias


class _LoraProduct(torch.autograd.Function):
    """`x W' + scale (x A') B'` in bfloat16, with the gradients of x, A and B; W is frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        low, thin, wide = x.reshape(-1, x.shape[-1]).bfloat16(), a.bfloat16(), (b * scale).bfloat16()
        inner = low @ thin.T
        product = torch.addmm(low @ weight.T, inner, wide.T)
        ctx.save_for_backward(low, inner, weight, thin, wide)
        ctx.scale, ctx.dtype = scale, x.dtype
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        low, inner, weight, thin, wide = ctx.saved_tensors
        (grad,) = grads
        high = grad.reshape(-1, grad.shape[-1]).bfloat16()
        of_inner = high @ wide
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.addmm(high @ weight, of_inner, thin).to(ctx.dtype).view(*grad.shape[:-1], -1)
        return of_x, None, (of_inner.T @ low).float(), (high.T @ inner).float() * ctx.scale, None
