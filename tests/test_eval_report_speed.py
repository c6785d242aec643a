# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Averages, tables and plots of `kvspeed eval speed` say what its rows say."""

from __future__ import annotations

import random

import pytest
from kvspeed.eval import plots_speed
from kvspeed.eval.bootstrap import average_interval, mean_interval
from kvspeed.eval.plots import plot_report
from kvspeed.eval.report import markdown
from kvspeed.eval.report_speed import averages, depth_of


def row(task: str, category: str, method: str, scores: list[float], **more) -> dict:
    return {
        "task": task,
        "category": category,
        "method": method,
        "questions": len(scores),
        "samples": [f"{task}-{n}" for n in range(len(scores))],
        "groups": list(range(len(scores))),
        "score_each": scores,
        "score": sum(scores) / len(scores),
        "score_interval": (0.1, 0.9),
        "over_full": 0.0,
        "em": 0.5,
        "f1": 0.5,
        "loop_rate": 0.25,
        "loop_span_rate": 0.5,
        "ttft_s": 0.5,
        "ttft_speedup": 1.0,
        "ttft_questions": 1,
        "step_s": 0.02,
        "step_speedup": 1.0,
        "kv_bytes": 2**20,
        "flops": 100,
        "prompt_tokens": 512,
        **more,
    }


ROWS = [
    row("a", "documents", "full", [1.0, 1.0, 0.0, 1.0]),
    row("a", "documents", "speed-2", [1.0, 0.0, 0.0, 1.0], ttft_s=0.25, kv_bytes=2**19, loop_rate=0.0),
    row("b", "documents", "full", [1.0, 0.0]),
    row("b", "documents", "speed-2", [1.0, 1.0], prompt_tokens=1024, ttft_s=None),
    row("c", "code", "full", [1.0] * 4),
    row("c", "code", "speed-2", [0.5, 0.5, 1.0, 0.0], step_s=None),
    row("c", "code", "speed-3", [1.0] * 4),
    row("c", "code", "pop-2@tuned", [0.0] * 4),
]


def report() -> dict:
    return {
        "kind": "kvspeed.eval.speed",
        "model": "tiny",
        "dtype": "float32",
        "seed": 0,
        "split": "test",
        "machine": {"processor": "x", "threads": 1},
        "rows": ROWS,
        "averages": averages(ROWS),
        "weights": {"speed-2": {"training": {"tokens_per_second": 1234.5, "peak_memory_bytes": 2**30}}},
    }


def test_a_method_splits_into_family_and_depth():
    assert depth_of("speed-22-noanchor") == ("speed-noanchor", 22)
    assert depth_of("swiftkv-22-share2") == ("swiftkv-share2", 22)
    assert depth_of("packet+speed-4") == ("packet+speed", 4)
    assert depth_of("full") == ("full", None)


def test_every_task_counts_the_same():
    entries = {(e["method"], e["category"]): e for e in averages(ROWS)}
    assert entries["full", "documents"]["score"] == pytest.approx((0.75 + 0.5) / 2)
    assert entries["full", "all"]["score"] == pytest.approx((0.75 + 0.5 + 1.0) / 3)
    speed = entries["speed-2", "all"]
    assert speed["score"] == pytest.approx((0.5 + 1.0 + 0.5) / 3) and speed["tasks"] == 3
    assert speed["over_full"] == pytest.approx((-0.25 + 0.5 - 0.5) / 3)
    assert speed["over_full_interval"][0] <= speed["over_full"] <= speed["over_full_interval"][1]
    assert speed["loop_rate"] == pytest.approx((0 * 4 + 0.25 * 2 + 0.25 * 4) / 10)
    assert ("speed-3", "documents") not in entries and entries["speed-3", "all"]["tasks"] == 1
    assert entries["full", "all"]["over_full_interval"] == (0.0, 0.0)


def test_without_full_there_is_nothing_to_compare_with():
    entries = averages([one for one in ROWS if one["method"] != "full"])
    assert all(entry["over_full"] is None for entry in entries)


def test_the_interval_of_one_part_is_that_of_its_mean():
    values = [random.random() for _ in range(30)]
    assert average_interval([(values, None)]) == mean_interval(values)
    low, high = average_interval([(values, None), ([0.5] * 9, None)])
    one_low, one_high = mean_interval(values)
    assert (low, high) == (pytest.approx((one_low + 0.5) / 2), pytest.approx((one_high + 0.5) / 2))
    with pytest.raises(ValueError, match="parts: got none"):
        average_interval([])


def test_tables():
    text = markdown(report())
    assert "| full | 62.5 | 100.0 | 75.0 | - | 25.0 % (50.0 %) |" in text
    assert "| speed-2 | 75.0 | 50.0 | 66.7 | -8.3 [" in text
    assert "| speed-2 | 250 ms | 1.00x | 20 ms | 1.00x | 0.5 MiB | 0.500 | 1.000 |" in text
    assert "**Costs, b**" in text and "| speed-2 | 1,234 | - | 1.00 GiB | - |" in text
    assert text.count("| pop-2@tuned |") == 3


def drawn(monkeypatch, name: str) -> list:
    figures = []
    monkeypatch.setattr(plots_speed, name, lambda plt, figure, *rest: figures.append(figure))
    return figures


def test_plots(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    written = plot_report(report(), tmp_path)
    assert [path.name for path in written] == ["score-depth.png", "costs-length.png", "loops.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)
    figures = drawn(monkeypatch, "with_legend")
    plots_speed.plot_depth(averages(ROWS), tmp_path / "x.png")
    documents, code, whole = figures[0].axes
    assert (documents.get_title(), code.get_title(), whole.get_title()) == ("documents", "code", "all tasks")
    points = {box.get_label(): box.lines[0].get_xydata().tolist() for box in code.containers}
    assert points == {"speed": [[2, 0.5], [3, 1.0]], "pop@tuned": [[2, 0.0]]}
    assert code.lines[0].get_ydata()[0] == 1.0  # full
    plots_speed.plot_lengths(ROWS, tmp_path / "x.png")
    ttft, step, kv = figures[1].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in ttft.lines}
    assert lines["full"] == [[512, 0.5]] * 3 and lines["speed-2"] == [[512, 0.25], [512, 0.5]]
    assert [line.get_label() for line in step.lines][:2] == ["full", "speed-2"]
    assert {line.get_label(): line.get_xydata().tolist() for line in kv.lines}["speed-2"][0] == [512, 0.5]
    figures = drawn(monkeypatch, "saved")
    plots_speed.plot_loops(averages(ROWS), tmp_path / "x.png")
    bars = [bar.get_width() for bar in figures[0].axes[0].patches]
    assert bars[:4] == [25.0, pytest.approx(15.0), 25.0, 25.0]
