# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a report of `kvspeed eval speed` says beyond its rows: averages by category and over all; its tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from kvspeed.eval.bootstrap import average_interval

__all__ = ["ALL", "averages", "depth_of", "seconds_text", "speed_tables"]

ALL = "all"
_DEPTH = re.compile(r"(?P<before>[a-z+]+)-(?P<k>\d+)(?P<after>.*)$")


def depth_of(method: str) -> tuple[str, int | None]:
    """("speed-noanchor", 22) of "speed-22-noanchor"; a method without a depth has None."""
    found = _DEPTH.match(method)
    return (found["before"] + found["after"], int(found["k"])) if found else (method, None)


def averages(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each method's score by category and over all tasks, every task with the same weight.

    Only tasks that a method answered are in its averages; `over_full` compares the same questions.

    Args:
        rows: of a report, with their scores one by one.
    """
    found = []
    categories = [*dict.fromkeys(row["category"] for row in rows), ALL]
    full = {
        row["task"]: dict(zip(row["samples"], row["score_each"], strict=True))
        for row in rows
        if row["method"] == "full"
    }
    for method in dict.fromkeys(row["method"] for row in rows):
        for category in categories:
            own = [row for row in rows if row["method"] == method and category in (row["category"], ALL)]
            if not own:
                continue
            entry: dict[str, Any] = {
                "method": method,
                "category": category,
                "tasks": len(own),
                "questions": sum(row["questions"] for row in own),
                "score": mean(row["score"] for row in own),
                "score_interval": average_interval([(row["score_each"], row["groups"]) for row in own]),
                "over_full": None,
                "over_full_interval": None,
            }
            pairs = [_lost(row, full.get(row["task"], {})) for row in own]
            if all(values for values, _ in pairs):
                entry["over_full"] = mean(mean(values) for values, _ in pairs)
                entry["over_full_interval"] = average_interval(pairs)
            asked = sum(row["questions"] for row in own)
            for name in ("loop_rate", "loop_span_rate"):
                entry[name] = sum(row[name] * row["questions"] for row in own) / asked
            found.append(entry)
    return found


def _lost(row: Mapping[str, Any], full: Mapping[str, float]) -> tuple[list[float], list[Any]]:
    both = [
        (score - full[sample], group)
        for sample, score, group in zip(row["samples"], row["score_each"], row["groups"], strict=True)
        if sample in full
    ]
    return [value for value, _ in both], [group for _, group in both]


def speed_tables(found: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: scores by category, costs of each timed task, training, scores by task."""
    return [*_categories(found["averages"]), *_costs(found["rows"]), *_training(found), *_tasks(found["rows"])]


def _categories(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    categories = list(dict.fromkeys(entry["category"] for entry in entries))
    cells = {(entry["method"], entry["category"]): entry for entry in entries}
    lines = [
        "**Scores by category** (points of 100; each task counts the same) and answers that end in a loop",
        "",
        "| method | " + " | ".join(categories) + " | over full | loops |",
        "|---" * (len(categories) + 3) + "|",
    ]
    for method in dict.fromkeys(entry["method"] for entry in entries):
        line = [method]
        for category in categories:
            entry = cells.get((method, category))
            line.append("-" if entry is None else f"{100 * entry['score']:.1f}")
        whole = cells[method, ALL]
        lost = "-"
        if whole["over_full"] is not None and method != "full":
            low, high = whole["over_full_interval"]
            lost = f"{100 * whole['over_full']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        line += [lost, f"{100 * whole['loop_rate']:.1f} % ({100 * whole['loop_span_rate']:.1f} %)"]
        lines.append("| " + " | ".join(line) + " |")
    return [*lines, ""]


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task and row["ttft_s"] is not None]
        if not own:
            continue
        full = next((row for row in own if row["method"] == "full"), None)
        lines += [
            f"**Costs, {task}** (tokens: {min(row['prompt_tokens'] for row in own)} and more; "
            f"questions timed: {min(row['ttft_questions'] for row in own)})",
            "",
            "| method | TTFT | faster | a token | faster | KV | of full | FLOPs of full |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in own:
            ratios = ["-" if full is None else f"{row[name] / full[name]:.3f}" for name in ("kv_bytes", "flops")]
            cells = [
                row["method"],
                seconds_text(row["ttft_s"]),
                _times(row["ttft_speedup"]),
                seconds_text(row["step_s"]),
                _times(row["step_speedup"]),
                f"{row['kv_bytes'] / 2**20:.1f} MiB",
                *ratios,
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def _training(found: Mapping[str, Any]) -> list[str]:
    known = {name: entry["training"] for name, entry in found["weights"].items() if entry["training"]}
    if not known:
        return []
    lines = ["**Training**", "", "| weights | tokens/s | tokens | peak memory | seconds |", "|---|---|---|---|---|"]
    for name, entry in known.items():
        memory = entry.get("peak_memory_bytes")
        cells = [
            name,
            _number(entry.get("tokens_per_second")),
            _number(entry.get("trained_tokens")),
            "-" if not memory else f"{memory / 2**30:.2f} GiB",
            _number(entry.get("seconds")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _tasks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        lines += [
            f"**{task}** ({own[0]['category']})",
            "",
            "| method | questions | score | over full | EM | F1 | loops |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in own:
            low, high = row["score_interval"]
            lost = "-" if row["over_full"] is None else f"{100 * row['over_full']:+.1f}"
            cells = [
                row["method"],
                str(row["questions"]),
                f"{100 * row['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}]",
                lost,
                f"{row['em']:.3f}",
                f"{row['f1']:.3f}",
                f"{100 * row['loop_rate']:.1f} %",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def seconds_text(value: float | None) -> str:
    """A time with its unit; "-" for none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms" if value >= 0.01 else f"{1e3 * value:.1f} ms"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
