# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The processes of one training run, through accelerate where there are several."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Processes"]


@dataclass
class Processes:
    """This process among those of the run.

    Attributes:
        index: its number, from 0.
        count: how many there are.
    """

    index: int = 0
    count: int = 1
    _accelerator: Any = None

    @classmethod
    def here(cls, model: nn.Module) -> Processes:
        """As `accelerate launch` or `torchrun` started this process (WORLD_SIZE); one where nothing says otherwise.

        Raises:
            ImportError: there are several and accelerate is missing.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        try:
            from accelerate import Accelerator
        except ImportError:
            raise ImportError(
                "several processes work together through accelerate, which is missing; "
                "pip install 'kvspeed[train]' (or accelerate)"
            ) from None
        ours = not dist.is_initialized()
        accelerator = Accelerator(cpu=next(model.parameters()).device.type == "cpu")
        if ours:
            atexit.register(_leave)
        return cls(accelerator.process_index, accelerator.num_processes, accelerator)

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def wait(self) -> None:
        """Until all are here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def add_up(self, tensor: torch.Tensor | None) -> None:
        """Replaces `tensor` in every process by the sum of all."""
        if self._accelerator is not None and tensor is not None:
            tensor.copy_(self._accelerator.reduce(tensor, reduction="sum"))

    def sum(self, value: float) -> float:
        """The sum of all processes' values."""
        if self._accelerator is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self._accelerator.device)
        return float(self._accelerator.reduce(tensor, reduction="sum"))


def _leave() -> None:
    """Gloo's threads must end before the interpreter does: otherwise a finished process now and then aborts
    ("terminate called without an active exception"), and its launcher takes the run for failed."""
    if dist.is_initialized():
        dist.destroy_process_group()
