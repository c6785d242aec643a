# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""From records of answers to one JSON document and one Markdown table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from kvspeed.atomic import replacing
from kvspeed.eval.bootstrap import mean_interval, ratio_interval
from kvspeed.eval.checks import satisfied
from kvspeed.eval.fields import AVERAGE, ROW, SPEED_ROW, wrong_field
from kvspeed.eval.journal import Record
from kvspeed.eval.report_speed import averages, seconds_text, speed_tables
from kvspeed.eval.runner import FULL, Runner
from kvspeed.eval.score import copied, corpus_f1, exact_match, f1
from kvspeed.eval.tasks.spec import TaskSpec
from kvspeed.samples import Sample
from kvspeed.speed.loops import loop_rates

__all__ = ["KINDS", "markdown", "read_report", "report", "score_of", "write_text"]

KINDS = ("packets", "speed")
_PREFIX = "kvspeed.eval."
VERSION = 1


def report(runner: Runner, *, command: Sequence[str] = ()) -> dict[str, Any]:
    """What a run found, JSON-able.

    Args:
        runner: after `run` (or with the records of an earlier run).
        command: the words that start it again.
    """
    rows: list[dict[str, Any]] = []
    for task in runner.plan.tasks:
        records = runner.records(task)
        samples = {sample.id: sample for sample in runner.samples[task.text]}
        full = {record["sample"]: record for record in records.get(FULL, [])}
        rows += [_row(runner, task, name, found, full, samples) for name, found in records.items() if found]
    plan = runner.plan
    return {
        "kind": _PREFIX + runner.kind,
        "version": VERSION,
        "command": list(command),
        "model": runner.header["name"],
        "model_fingerprint": runner.header["model"],
        "dtype": runner.header["dtype"],
        "adapters": {name: adapter.fingerprint() for name, adapter in sorted(runner.adapters.items())},
        "weights": {
            name: {"fingerprint": weights.fingerprint(), "training": weights.training}
            for name, weights in sorted(runner.weights.items())
        },
        "seed": plan.seed,
        "split": plan.split,
        "samples": plan.samples,
        "questions_per_context": plan.questions_per_context,
        "machine": _machine(runner.model),
        "rows": rows,
        "averages": averages(rows) if runner.kind == "speed" else [],
    }


def score_of(task: TaskSpec, sample: Sample, said: str) -> float:
    """The one score of an answer that the task counts, 0 to 1."""
    if sample.checks:
        return float(satisfied(said, sample.checks))
    return float({"f1": f1, "em": exact_match, "copied": copied}[task.metric](said, sample.answers))


def _row(
    runner: Runner,
    task: TaskSpec,
    method: str,
    records: list[Record],
    full: Mapping[str, Record],
    samples: Mapping[str, Sample],
) -> dict[str, Any]:
    scores = [record["f1"] for record in records]
    groups = [record["group"] for record in records]
    row: dict[str, Any] = {
        "task": task.text,
        "category": task.category,
        "method": method,
        "questions": len(records),
        "contexts": len(set(groups)),
    }
    row["f1"], row["f1_interval"] = mean(scores), mean_interval(scores, groups)
    both = [record for record in records if record["sample"] in full]
    reference = [full[record["sample"]]["f1"] for record in both]
    row["f1_of_full"] = row["f1_of_full_interval"] = None
    if both and sum(reference):
        ours = [record["f1"] for record in both]
        row["f1_of_full"] = sum(ours) / sum(reference)
        row["f1_of_full_interval"] = ratio_interval(ours, reference, [record["group"] for record in both])
    counted = {record["sample"]: score_of(task, samples[record["sample"]], record["prediction"]) for record in records}
    row["score"], row["score_interval"] = mean(counted.values()), mean_interval(list(counted.values()), groups)
    lost = [counted[r["sample"]] - score_of(task, samples[r["sample"]], full[r["sample"]]["prediction"]) for r in both]
    row["over_full"] = mean(lost) if lost else None
    row["over_full_interval"] = mean_interval(lost, [record["group"] for record in both]) if lost else None
    loops = loop_rates([record["token_ids"] for record in records], ignore=runner.context.eos)
    row["loop_rate"], row["loop_span_rate"] = loops.unit_rate, loops.span_rate
    for name in ("em", "contains", "string_match"):
        row[name] = mean(record[name] for record in records)
    row["corpus_f1"] = corpus_f1(
        [record["prediction"] for record in records], [samples[record["sample"]].answers[0] for record in records]
    )
    for name in ("ttft_s", "step_s", "end_to_end_s"):
        # only questions that full recompute was timed on too, so that a ratio compares the same prompts
        found = [r for r in records if r.get(name) is not None]
        row[name] = median(float(r[name]) for r in found) if found else None
        row[name.replace("_s", "_questions")] = len(found)
        pairs = [(full[r["sample"]].get(name), r[name]) for r in found if r["sample"] in full]
        timed: list[tuple[float, float]] = [(a, b) for a, b in pairs if a is not None]
        row[name.replace("_s", "_speedup")] = (
            median(a for a, _ in timed) / median(b for _, b in timed) if timed else None
        )
    for name in ("flops", "kv_bytes", "stored_bytes", "prompt_tokens"):
        row[name] = round(mean(record[name] for record in records))
    row["seconds"] = mean(record["seconds"] for record in records)
    row["f1_each"] = [round(score, 4) for score in scores]
    if runner.kind == "speed":
        row["score_each"] = [round(score, 4) for score in counted.values()]
        row["groups"] = [list(dict.fromkeys(groups)).index(group) for group in groups]
        row["samples"] = [record["sample"] for record in records]
    return row


def markdown(found: Mapping[str, Any]) -> str:
    """The report's tables: one a task for packets; for SPEED scores by category and costs by length."""
    lines = [
        f"Model {found['model']}, {found['dtype']}; seed {found['seed']}, split {found['split']}; "
        f"{found['machine']['processor']}, {found['machine']['threads']} threads; brackets: 95 % bootstrap intervals.",
        "",
    ]
    if found["kind"] == _PREFIX + "speed":
        return "\n".join([*lines, *speed_tables(found)])
    for task in dict.fromkeys(row["task"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["task"] == task]
        lines += [
            f"**{task}** (questions: {_spread([row['questions'] for row in rows])}; "
            f"tokens: {_spread([row['prompt_tokens'] for row in rows])})",
            "",
            "| method | F1 | of full | EM | corpus F1 | TTFT | faster | end to end | FLOPs | KV |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in rows] + [""]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["f1_interval"]
    of_full = "-"
    if row["f1_of_full"] is not None:
        a, b = row["f1_of_full_interval"]
        of_full = f"{row['f1_of_full']:.2f} [{a:.2f}, {b:.2f}]"
    cells = [
        row["method"],
        f"{row['f1']:.3f} [{low:.3f}, {high:.3f}]",
        of_full,
        f"{row['em']:.3f}",
        f"{row['corpus_f1']:.3f}",
        seconds_text(row["ttft_s"]),
        "-" if row["ttft_speedup"] is None else f"{row['ttft_speedup']:.1f}x",
        seconds_text(row["end_to_end_s"]),
        _flops(row["flops"]),
        f"{row['kv_bytes'] / 2**20:.1f} MiB",
    ]
    return "| " + " | ".join(cells) + " |"


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A report that `kvspeed eval packets --json` or `kvspeed eval speed --json` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none, or of an unknown version, or lacks what its plots show.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no JSON ({error}); a file of kvspeed eval ... --json is expected") from None
    kinds = {_PREFIX + kind for kind in KINDS}
    if not isinstance(found, dict) or found.get("kind") not in kinds or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path}: is no report of kvspeed eval; give the file that --json wrote")
    if found.get("version") != VERSION:
        raise ValueError(f"{path}: is of version {found.get('version')!r}, this kvspeed reads {VERSION}")
    is_speed = found["kind"] == _PREFIX + "speed"
    for name, fields in (("rows", SPEED_ROW), ("averages", AVERAGE)) if is_speed else (("rows", ROW),):
        entries = found.get(name)
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            wrong = wrong_field(entry, fields) if isinstance(entry, dict) else "fields"
            if wrong is not None:
                raise ValueError(
                    f"{path}: entry {number} of its {name} lacks {wrong}, or has something else there; give the file "
                    "as --json wrote it"
                )
    return found


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file that appears whole or not at all, its folder made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def _machine(model: Any) -> dict[str, Any]:
    import torch
    import transformers

    from kvspeed import __version__, ops

    device = next(model.parameters()).device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "processor": gpu or _processor(),
        "threads": torch.get_num_threads(),
        "instruction_set": ops.current_isa(),
        "kvspeed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _spread(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _flops(value: float) -> str:
    return f"{value / 1e12:.2f} T" if value >= 1e12 else f"{value / 1e9:.1f} G"
