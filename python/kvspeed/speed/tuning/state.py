# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The state of a tuning run in one file, written whole or not at all, so that it goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvspeed.packet.tensorfile import TensorFileError, read_tensor_file, write_tensor_file
from kvspeed.speed.tuning.report import TuneRecord, TuneReport

__all__ = ["Kept", "State"]

FORMAT = "kvspeed.tuning"
VERSION = 1

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Kept:
    """What a checkpoint holds beside weights and moments."""

    best: dict[str, torch.Tensor]
    report: TuneReport
    waited: int


@dataclass
class State:
    """A checkpoint file.

    Attributes:
        path: the file.
        settings: everything that decides how the run goes on; a run with other settings does not go on from it.
    """

    path: Path
    settings: dict[str, Any]

    def save(
        self,
        weights: dict[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        best: dict[str, torch.Tensor],
        report: TuneReport,
        waited: int,
    ) -> None:
        """Keep the state after `report.steps` steps; `waited`: looks at the dev split since the best one."""
        tensors = {f"best.{name}": tensor for name, tensor in best.items()}
        for name, weight in weights.items():
            tensors[f"now.{name}"] = weight.detach()
            for moment in _MOMENTS:
                if moment in optimizer.state.get(weight, {}):
                    tensors[f"{moment}.{name}"] = optimizer.state[weight][moment]
        facts = {**asdict(report), "records": [list(asdict(one).values()) for one in report.records]}
        header = {"settings": self.settings, "report": facts, "waited": waited, "names": sorted(weights)}
        write_tensor_file(self.path, FORMAT, VERSION, header, tensors)

    def restore(self, weights: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Kept | None:
        """Put a kept state into `weights` and `optimizer`; None where there is no file.

        Raises:
            ValueError: the file is of a run with other settings (they are named), or is damaged; nothing is changed.
        """
        if not self.path.is_file():
            return None
        try:
            header, tensors = read_tensor_file(self.path, FORMAT, VERSION)
        except TensorFileError as error:
            raise ValueError(f"{error}; or remove it to tune from the start") from error
        kept = {"model": self.settings.get("model"), **header["settings"]}  # older files do not say it
        other = next((name for name in self.settings if kept.get(name) != self.settings[name]), None)
        if other is not None:
            raise ValueError(
                f"{self.path} is of a run with another {other} ({kept.get(other)!r:.60}, now "
                f"{self.settings[other]!r:.60}): give another folder, or resume=False to tune from the start"
            )
        if header["names"] != sorted(weights):
            raise ValueError(f"{self.path} is of a run that trained other weights; give another folder")
        if any(tensors[f"now.{name}"].shape != weight.shape for name, weight in weights.items()):
            raise ValueError(f"{self.path} is of a model with weights of other shapes; give another folder")
        for name, weight in weights.items():
            weight.data.copy_(tensors[f"now.{name}"])
            state = {m: tensors[f"{m}.{name}"].clone() for m in _MOMENTS if f"{m}.{name}" in tensors}
            if state:
                device = weight.device
                optimizer.state[weight] = {m: t if m == "step" else t.to(device) for m, t in state.items()}
        facts = {**header["report"], "records": [TuneRecord(*row) for row in header["report"]["records"]]}
        best = {name[5:]: tensor.clone() for name, tensor in tensors.items() if name.startswith("best.")}
        return Kept(best, TuneReport(**facts), header["waited"])
