# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What all plots share: colours, panels in a row, a legend beside them, a PNG that appears whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvspeed.atomic import replacing

__all__ = ["COLOURS", "MARKERS", "panels_of", "pyplot", "saved", "with_legend"]

COLOURS = (
    "#1b6ca8",
    "#d1495b",
    "#2e933c",
    "#e08e0b",
    "#6a4c93",
    "#00808a",
    "#8c564b",
    "#555555",
    "#b5179e",
    "#7a8b00",
)
MARKERS = "osD^vP*X<>"


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'kvspeed[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def panels_of(plt: Any, count: int, *, share: bool = True) -> tuple[Any, list[Any]]:
    """(figure, its panels in a row); `share`: with one y axis."""
    figure, panels = plt.subplots(
        1, max(count, 1), figsize=(1.2 + 3.3 * max(count, 1), 3.8), sharey=share, squeeze=False
    )
    return figure, list(panels[0])


def with_legend(plt: Any, figure: Any, panels: Sequence[Any], path: str | os.PathLike[str]) -> Path:
    """`saved`, with one legend for all panels on the right."""
    names: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            names.setdefault(label, handle)
    figure.legend(names.values(), names.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    return saved(plt, figure, path)


def saved(plt: Any, figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write the figure as PNG, close it, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.tight_layout()
        with replacing(path) as part:
            figure.savefig(part, format="png", dpi=120, bbox_inches="tight")
    finally:
        plt.close(figure)
    return path
