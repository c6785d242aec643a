# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Where a model's layers run, and bringing small tensors there without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvspeed.models import base_model

__all__ = ["layer_devices", "to_device"]


def layer_devices(model: nn.Module) -> list[torch.device]:
    """The device that each decoder layer computes on; layers may differ (`device_map`)."""
    layers: Any = base_model(model).layers
    return [_device(layer) for layer in layers]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; itself where it is there already.

    A plain `.to` from pageable host memory makes the host wait until all that is queued on the device is done. From
    pinned memory the copy is queued like a kernel; torch keeps the pinned memory until it has happened.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.is_cpu and type(tensor) is torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _device(layer: nn.Module) -> torch.device:
    for module in layer.modules():
        hook: Any = getattr(module, "_hf_hook", None)  # accelerate: offloaded weights are on the meta device till used
        execution = getattr(hook, "execution_device", None)
        if execution is not None:
            return torch.device("cuda", execution) if isinstance(execution, int) else torch.device(execution)
    return next(layer.parameters()).device
