# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The plot of a diagnosis: attention to the prompt, its entropy and the curvature, layer by layer and kind by kind."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvspeed.atomic import replacing
from kvspeed.speed.diagnose import Diagnosis

__all__ = ["check_plotting", "plot_diagnosis"]

_PANELS = (
    ("content_mass", "attention on the prompt's content", None),
    ("content_entropy_normalised", "entropy of that attention / log(length)", None),
    ("mass", "attention on the prompt, anchor included", None),
    ("curvature", "curvature of the hidden states' way", "radians"),
)
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#e08e0b", "#6a4c93", "#00808a", "#8c564b", "#555555")


def check_plotting() -> None:
    """Before any work: can there be a plot?

    Raises:
        ImportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError(
            "a plot needs matplotlib, which is not installed: pip install 'kvspeed[plots]' (or matplotlib), or leave "
            "the plot out"
        )


def plot_diagnosis(found: Diagnosis, path: str | os.PathLike[str]) -> Path:
    """Write one PNG, atomically; bands are standard errors over prompts, the line is the recommended k.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing was measured.
        OSError: the file cannot be written.
    """
    check_plotting()
    if not found.measured:
        raise ValueError("the diagnosis holds no prompts; measure at least one")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no windows, nothing global
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    advice = found.recommendation()
    for axes, (metric, title, unit) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for number, category in enumerate(found.categories):
            _draw(axes, found, metric, category, _COLOURS[number % len(_COLOURS)])
        if advice.k < found.layers:
            axes.axvline(advice.k - 0.5, color="black", linestyle="--", linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("layer")
        axes.set_xlim(-0.5, found.layers - 0.5)
        axes.set_ylabel(unit or "")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    where = f"k = {advice.k} to try first" if advice.k < found.layers else "no cut recommended"
    name = found.model or "model"
    figure.suptitle(f"{name.replace('$', chr(92) + '$')}: {len(found.measured)} prompts; {where} (dashed: a heuristic)")
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=130)
    return Path(path)


def _draw(axes: Any, found: Diagnosis, metric: str, category: str, colour: str) -> None:
    values = [math.nan if value is None else value for value in found.curve(metric, category)]
    errors = [value or 0.0 for value in found.error(metric, category)]
    layers = range(found.layers)
    axes.plot(layers, values, color=colour, marker=".", linewidth=1.2, label=category)
    low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(layers, low, high, color=colour, alpha=0.15, linewidth=0)
