# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The state of a training run in one file, so that an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.tensorfile import TensorFileError, read_tensor_file, write_tensor_file
from kvspeed.packet.train.report import StepRecord, TrainReport

__all__ = ["START", "Checkpoint"]

FORMAT = "kvspeed.training"
VERSION = 1

START = "adapter to begin with"

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_PARTS = ("header", "trailer")


@dataclass
class Checkpoint:
    """A file that holds a run's state; written whole or not at all.

    Attributes:
        path: the file.
        settings: everything that decides how the run goes on; a run with other settings does not go on from it.
    """

    path: Path
    settings: dict[str, Any]

    def save(
        self,
        adapter: PacketAdapter,
        optimizer: torch.optim.Optimizer,
        best: dict[str, torch.Tensor],
        report: TrainReport,
        waited: int,
    ) -> None:
        """Keep the state after `report.steps` steps; `waited`: looks at the dev split since the best one."""
        tensors = {f"best.{name}": tensor for name, tensor in best.items()}
        for name in _PARTS:
            weight = getattr(adapter, name)
            tensors[name] = weight.detach()
            for moment in _MOMENTS:
                if moment in optimizer.state.get(weight, {}):
                    tensors[f"{name}.{moment}"] = optimizer.state[weight][moment]
        facts = {**asdict(report), "records": [list(asdict(one).values()) for one in report.records]}
        header = {"settings": self.settings, "report": facts, "waited": waited}
        write_tensor_file(self.path, FORMAT, VERSION, header, tensors)

    def restore(
        self, adapter: PacketAdapter, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, torch.Tensor], TrainReport, int] | None:
        """Put a kept state into `adapter` and `optimizer`; returns `(best, report, waited)`, None without a file.

        Raises:
            ValueError: the file is of a run with other settings (they are named), or is damaged.
        """
        if not self.path.is_file():
            return None
        try:
            header, tensors = read_tensor_file(self.path, FORMAT, VERSION)
        except TensorFileError as error:
            raise ValueError(f"{error}; or remove it to train from the start") from error
        kept = header["settings"]
        other = [name for name in self.settings if kept.get(name) != self.settings[name]]
        # the caller's adapter may be where the run began, or where it left off: it was trained in place
        if START in other and adapter.fingerprint() in _fingerprints(adapter, tensors):
            other.remove(START)
        if other:
            name = other[0]
            raise ValueError(
                f"{self.path} is of a run with another {name} ({kept.get(name)!r:.60}, now "
                f"{self.settings[name]!r:.60}): "
                "give another folder, or resume=False to train from the start"
            )
        for name in _PARTS:
            weight = getattr(adapter, name)
            weight.data.copy_(tensors[name])
            state = {m: tensors[f"{name}.{m}"].clone() for m in _MOMENTS if f"{name}.{m}" in tensors}
            if state:
                device = weight.device
                optimizer.state[weight] = {m: t if m == "step" else t.to(device) for m, t in state.items()}
        facts = {**header["report"], "records": [StepRecord(*row) for row in header["report"]["records"]]}
        best = {name: tensors[f"best.{name}"].clone() for name in _PARTS}
        return best, TrainReport(**facts), header["waited"]


def _fingerprints(adapter: PacketAdapter, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Of the soft tokens of a checkpoint: those that were being trained, and the best so far."""
    found = set()
    for prefix in ("", "best."):
        copied = copy.deepcopy(adapter)
        with torch.no_grad():
            for name in _PARTS:
                getattr(copied, name).copy_(tensors[f"{prefix}{name}"])
        found.add(copied.fingerprint())
    return found
