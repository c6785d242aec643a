# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Plots of a report: F1 against FLOPs, TTFT and compression, adapters against tasks; and of a training's loss.

They need matplotlib (`pip install 'kvspeed[plots]'`). Every function writes one PNG and returns its path.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvspeed.eval.drawing import COLOURS, MARKERS, panels_of, pyplot, saved, with_legend
from kvspeed.eval.plots_speed import plot_speed

__all__ = ["plot_against", "plot_compression", "plot_loss", "plot_matrix", "plot_report", "plot_sinks"]

_LABELS = {"flops": "FLOPs to the first token", "ttft_s": "time to first token, s"}
_PRESSED = re.compile(r"(?P<setup>[a-z-]+)\+(?P<press>[a-z]+)-(?P<percent>\d+)(?P<whole>-whole)?$")


def plot_report(found: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """All plots that a report has the rows for.

    Args:
        found: as `read_report` gives it.
        folder: made where it is missing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot()
    if str(found.get("kind", "")).endswith(".speed"):
        return plot_speed(found, folder)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = found["rows"]
    written = [
        plot_against(rows, cost, folder / f"f1-{name}.png")
        for cost, name in (("flops", "flops"), ("ttft_s", "ttft"))
        if sum(row[cost] is not None for row in rows) > 1
    ]
    if any(_PRESSED.match(row["method"]) for row in rows):
        written.append(plot_compression(rows, folder / "f1-compression.png"))
    if len({row["method"] for row in rows if "@" in row["method"]}) > 1:
        written.append(plot_matrix(rows, folder / "adapters.png"))
    return written


def plot_against(rows: Sequence[Mapping[str, Any]], cost: str, path: str | os.PathLike[str]) -> Path:
    """F1 over a cost on a logarithmic axis, one panel a task, one point a method, with 95 % intervals.

    Args:
        rows: of a report; those without this cost are left out.
        cost: "flops" or "ttft_s".
        path: of the PNG.
    """
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    kept = [row for row in rows if row[cost] is not None and not _PRESSED.match(row["method"])]
    tasks = list(dict.fromkeys(row["task"] for row in kept))
    methods = list(dict.fromkeys(row["method"] for row in kept))
    figure, panels = panels_of(plt, len(tasks))
    for panel, task in zip(panels, tasks, strict=True):
        for number, method in enumerate(methods):
            for row in kept:
                if (row["task"], row["method"]) == (task, method):
                    low, high = row["f1_interval"]
                    panel.errorbar(
                        row[cost],
                        row["f1"],
                        yerr=[[max(row["f1"] - low, 0.0)], [max(high - row["f1"], 0.0)]],
                        label=method,
                        **_style(number, method),
                    )
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_minor_formatter(NullFormatter())  # its labels would lie on each other
        panel.set_title(task, fontsize=10)
        panel.set_xlabel(_LABELS[cost])
        panel.set_ylim(-0.03, 1.05)
        panel.grid(True, alpha=0.25)
    panels[0].set_ylabel("F1")
    return with_legend(plt, figure, panels, path)


def plot_compression(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """F1 over the share of tokens removed, one panel a task, one line a press and set-up.

    Rows are named `packet+cur-30`, `packet+cur-30-whole` or `single+cur-30`; `packet` and `full` are the ends at 0.
    """
    plt = pyplot()
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        match = _PRESSED.match(row["method"])
        if match:
            name = f"{match['setup']}{match['whole'] or ''}, {match['press']}"
            lines.setdefault((row["task"], name), []).append((int(match["percent"]), row["f1"]))
    whole = {(row["task"], row["method"]): row["f1"] for row in rows}
    tasks = list(dict.fromkeys(task for task, _ in lines))
    presses = list(dict.fromkeys(name.rsplit(", ", 1)[1] for _, name in lines))
    figure, panels = panels_of(plt, len(tasks))
    for panel, task in zip(panels, tasks, strict=True):
        for (of, name), points in lines.items():
            if of != task:
                continue
            setup, press = name.rsplit(", ", 1)
            start = whole.get((task, "full" if setup == "single" else "packet"))
            points = sorted([*points, *([(0, start)] if start is not None else [])])
            panel.plot(
                *zip(*points, strict=True),
                label=name,
                color=COLOURS[presses.index(press) % len(COLOURS)],
                linestyle={"packet": "-", "packet-whole": ":", "single": "--"}.get(setup, "-."),
                marker=MARKERS[presses.index(press) % len(MARKERS)],
                markersize=4,
            )
        panel.set_title(task, fontsize=10)
        panel.set_xlabel("tokens removed, %")
        panel.set_ylim(-0.03, 1.05)
        panel.grid(True, alpha=0.25)
    panels[0].set_ylabel("F1")
    return with_legend(plt, figure, panels, path)


def plot_matrix(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """F1 of each adapter (rows `packet@NAME`, and `packet`) on each task."""
    plt = pyplot()
    chosen = [row for row in rows if row["method"].partition("@")[0] == "packet"]
    methods = list(dict.fromkeys(row["method"] for row in chosen))
    tasks = list(dict.fromkeys(row["task"] for row in chosen))
    cells = {(row["method"], row["task"]): row["f1"] for row in chosen}
    values = [[cells.get((method, task), float("nan")) for task in tasks] for method in methods]
    figure, panel = plt.subplots(figsize=(1.6 + 1.3 * len(tasks), 1.2 + 0.5 * len(methods)))
    panel.imshow(values, vmin=0.0, vmax=1.0, cmap="Blues", aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            text = "" if value != value else f"{value:.2f}"
            panel.text(x, y, text, ha="center", va="center", color="white" if value > 0.6 else "black")
    panel.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    panel.set_yticks(range(len(methods)), [method.partition("@")[2] or "packet" for method in methods])
    panel.set_xlabel("asked about")
    panel.set_ylabel("adapter trained on")
    return saved(plt, figure, path)


def plot_sinks(
    profiles: Mapping[str, Sequence[float]], borders: Mapping[str, Sequence[int]], path: str | os.PathLike[str]
) -> Path:
    """Attention of the question's tokens over the positions of the documents, one line a method.

    Args:
        profiles: name -> one share a position, as `kvspeed.eval.sinks` gives them.
        borders: name -> positions at which a document begins (they get a vertical line).
        path: of the PNG.
    """
    plt = pyplot()
    figure, panels = plt.subplots(len(profiles), 1, figsize=(8, 1.9 * len(profiles)), squeeze=False)
    for number, (name, shares) in enumerate(profiles.items()):
        panel = panels[number][0]
        panel.bar(range(len(shares)), shares, width=1.0, color=COLOURS[number % len(COLOURS)])
        panel.set_yscale("log")
        panel.set_ylabel("attention")
        panel.set_title(name, fontsize=9, loc="left")
        for border in borders[name]:
            panel.axvline(border - 0.5, color="black", linewidth=0.6, alpha=0.5)
    panels[-1][0].set_xlabel("position")
    return saved(plt, figure, path)


def plot_loss(curves: Mapping[str, str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Training and dev loss over steps.

    Args:
        curves: name -> a CSV with columns `step`, `loss` and, where there was a dev split, `dev_loss`.
        path: of the PNG.

    Raises:
        ValueError: a file has no such columns.
    """
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(6, 3.6))
    for number, (name, file) in enumerate(curves.items()):
        with open(file, newline="", encoding="utf-8") as lines:
            entries = list(csv.DictReader(lines))
        if not entries or not {"step", "loss"} <= set(entries[0]):
            raise ValueError(f"{file}: has no columns step and loss; give the curve.csv of kvspeed train-adapter")
        colour = COLOURS[number % len(COLOURS)]
        for column, style in (
            ("loss", {"alpha": 0.5, "linewidth": 1.0}),
            ("dev_loss", {"marker": "o", "markersize": 3}),
        ):
            points = [(int(entry["step"]), float(entry[column])) for entry in entries if entry.get(column)]
            if points:
                label = name if column == "loss" else f"{name}, dev"
                panel.plot(*zip(*points, strict=True), color=colour, label=label, **style)
    panel.set_xlabel("step")
    panel.set_ylabel("loss")
    panel.grid(True, alpha=0.25)
    panel.legend(fontsize=8)
    return saved(plt, figure, path)


def _style(number: int, method: str) -> dict[str, Any]:
    ours = method.partition("@")[0] == "packet"
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": "*" if ours else MARKERS[number % len(MARKERS)],
        "markersize": 13 if ours else 6,
        "linestyle": "none",
        "elinewidth": 0.8,
        "capsize": 2,
    }
