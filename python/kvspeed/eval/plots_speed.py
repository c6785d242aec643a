# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Plots of a report of `kvspeed eval speed`: scores against depth, costs against the prompt's length, loops."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvspeed.eval.drawing import COLOURS, MARKERS, panels_of, pyplot, saved, with_legend
from kvspeed.eval.report_speed import ALL, depth_of

__all__ = ["plot_depth", "plot_lengths", "plot_loops", "plot_speed"]

_COSTS = (
    ("ttft_s", "time to first token, s", 1.0),
    ("step_s", "time per token, ms", 1e3),
    ("kv_bytes", "KV of the prompt, MiB", 2**-20),
)


def plot_speed(found: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """All plots that the report has the numbers for.

    Args:
        found: as `read_report` gives it.
        folder: made where it is missing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if any(depth_of(_bare(entry["method"]))[1] is not None for entry in found["averages"]):
        written.append(plot_depth(found["averages"], folder / "score-depth.png"))
    if any(row["ttft_s"] is not None for row in found["rows"]):
        written.append(plot_lengths(found["rows"], folder / "costs-length.png"))
    if found["averages"]:
        written.append(plot_loops(found["averages"], folder / "loops.png"))
    return written


def plot_depth(entries: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Score over k, one panel a category, one line a method with 95 % intervals; methods without a depth are level."""
    plt = pyplot()
    categories = list(dict.fromkeys(entry["category"] for entry in entries))
    families = list(dict.fromkeys(_line(entry["method"])[0] for entry in entries))
    depths = sorted({k for entry in entries if (k := _line(entry["method"])[1]) is not None})
    figure, panels = panels_of(plt, len(categories))
    for panel, category in zip(panels, categories, strict=True):
        panel.set_xticks(depths)  # layers are whole
        own = [entry for entry in entries if entry["category"] == category]
        for number, family in enumerate(families):
            points = []
            for entry in own:
                name, k = _line(entry["method"])
                if name == family and k is not None:
                    points.append((k, entry["score"], *entry["score_interval"]))
                elif name == family:
                    panel.axhline(entry["score"], label=family, color=COLOURS[number % len(COLOURS)], linewidth=1)
            if points:
                depth, score, low, high = zip(*sorted(points), strict=True)
                panel.errorbar(
                    depth,
                    score,
                    yerr=[
                        [max(s - a, 0.0) for s, a in zip(score, low, strict=True)],
                        [max(b - s, 0.0) for s, b in zip(score, high, strict=True)],
                    ],
                    label=family,
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=5,
                    linewidth=1.2,
                    elinewidth=0.7,
                    capsize=2,
                )
        panel.set_title("all tasks" if category == ALL else category, fontsize=10)
        panel.set_xlabel("layers that see the prompt, k")
        panel.set_ylim(-0.03, 1.05)
        panel.grid(True, alpha=0.25)
    panels[0].set_ylabel("score")
    return with_legend(plt, figure, panels, path)


def plot_lengths(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """TTFT, time per token and KV over the tokens of the prompt, one line a method, one point a timed task."""
    plt = pyplot()
    timed = [row for row in rows if row["ttft_s"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in timed))
    figure, panels = panels_of(plt, len(_COSTS), share=False)
    for panel, (name, title, scale) in zip(panels, _COSTS, strict=True):
        for number, method in enumerate(methods):
            points = sorted(
                (row["prompt_tokens"], scale * row[name])
                for row in timed
                if row["method"] == method and row[name] is not None
            )
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    label=method,
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=4,
                    linewidth=1.2,
                )
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("tokens of the prompt")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
        panel.grid(True, alpha=0.25)
        panel.set_ylim(bottom=0)
    return with_legend(plt, figure, panels, path)


def plot_loops(entries: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Share of answers that end in a loop, over all tasks, by both readings of the rule."""
    plt = pyplot()
    own = [entry for entry in entries if entry["category"] == ALL]
    figure, panel = plt.subplots(figsize=(6, 0.8 + 0.32 * len(own)))
    places = range(len(own))
    for shift, (name, label) in enumerate((("loop_rate", "unit of 12 tokens"), ("loop_span_rate", "12 tokens in all"))):
        panel.barh(
            [place + 0.38 * shift for place in places],
            [100 * entry[name] for entry in own],
            height=0.36,
            label=label,
            color=COLOURS[shift],
        )
    panel.set_yticks([place + 0.19 for place in places], [entry["method"] for entry in own], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("answers that end in a loop, %")
    panel.grid(True, axis="x", alpha=0.25)
    panel.legend(fontsize=8)
    return saved(plt, figure, path)


def _line(method: str) -> tuple[str, int | None]:
    """The line that a method's point belongs to, and its depth: weights of another name make a line of their own."""
    family, k = depth_of(_bare(method))
    weights = method.partition("@")[2]
    return (f"{family}@{weights}" if weights and depth_of(weights)[0] != family else family), k


def _bare(method: str) -> str:
    """A method without the weights it was given: `speed-24@tuned` is on the line of "speed"."""
    return method.partition("@")[0]
