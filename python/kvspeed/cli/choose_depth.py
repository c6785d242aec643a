# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed choose-depth`: the least depth at which a model keeps its score, for each task and for all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Debug,
    Device,
    DType,
    Fault,
    ModelName,
    check_file,
    guarded,
    load_model,
    seldom,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from kvspeed.eval.tasks import TaskSpec
    from kvspeed.rule import SpeedSpec
    from kvspeed.samples import Sample
    from kvspeed.speed.choice import DepthChoice, TaskDepth

__all__ = ["choose_depth"]


@guarded
def choose_depth(
    tasks: Annotated[
        str,
        typer.Option("--tasks", help="Separated by commas, as for kvspeed eval speed; samples:path=FILE for your own."),
    ] = "biography,niah,multihop,copying,arithmetic,instruction,code",
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            help="Samples of each task to choose by; a budget of 0.02 with a confidence of 0.8 needs 59.",
        ),
    ] = 60,
    held_out: Annotated[
        int, typer.Option("--held-out", min=0, help="Other samples of each task, to see what the choice costs there.")
    ] = 0,
    budget: Annotated[float, typer.Option("--budget", help="What a task may lose of its score, 0 to 1.")] = 0.02,
    confidence: Annotated[
        float, typer.Option("--confidence", help="With which it loses no more; 0: on average over the samples.")
    ] = 0.8,
    depths: Annotated[
        str, typer.Option("--k", help="Depths to choose from, separated by commas. Default: from half of the layers.")
    ] = "",
    anchor_tokens: Annotated[
        int | None,
        typer.Option("--anchor-tokens", min=0, help="Default: as the model was tuned, else 1.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the samples.")] = 0,
    model: ModelName = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="The most tokens of an answer. Default: by the tasks."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the choice there; an interrupted run goes on from FILE.records beside it."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the records of an earlier run.")] = False,
    save: Annotated[
        bool,
        typer.Option("--save", help='Write it into config.json of the folder --model: patch_model(model, "auto").'),
    ] = False,
    device: Device = None,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Find the depth at which a model keeps its score in every task, and how deep each task needs to go."""
    from kvspeed.eval.report import score_of
    from kvspeed.eval.tasks import split_specs
    from kvspeed.models import base_model
    from kvspeed.rule import SpeedSpec
    from kvspeed.speed import auto
    from kvspeed.tuned import remembered_spec

    if not 0 <= confidence < 1:
        raise Fault(f"--confidence: is {confidence}; give a number from 0 to below 1, 0 to go by the average")
    config = _config_of(model) if save else None
    check_file("--json", json_file)
    records = json_file.with_name(json_file.name + ".records") if json_file is not None else None
    check_file("--json", records)
    specs = split_specs(tasks)
    calibration, others, by_name = _samples(specs, samples, held_out, seed)
    network, tokenizer, name = load_model(model, dtype, device)
    rule = remembered_spec(network) or SpeedSpec(len(base_model(network).layers))  # type: ignore[arg-type]
    if anchor_tokens is not None:
        rule = replace(rule, anchor_tokens=anchor_tokens)
    options: dict[str, Any] = {
        "score": lambda sample, text: score_of(by_name[sample.task], sample, sample.prediction(text)),
        "max_new_tokens": max_new_tokens or max(spec.answer_tokens for spec in specs),
        "each": _teller(),
    }
    if records is not None:
        if restart:
            records.unlink(missing_ok=True)
        options["answers"] = _Kept(records, network, rule, options["max_new_tokens"])
    auto.prompts_of(network, tokenizer, others, options["max_new_tokens"])  # have room: the choice itself takes long
    try:
        choice = auto.choose_depth(
            network,
            tokenizer,
            calibration,
            budget=budget,
            confidence=confidence or None,
            rule=rule,
            depths=_depths(depths),
            **options,
        )
    except ValueError as error:  # in the words of the command line
        raise Fault(str(error).replace("confidence=None", "--confidence 0")) from error
    found = auto.held_out(network, tokenizer, others, choice, **options) if others else []
    report = {"model": name, **choice.as_dict(), "held_out": [asdict(one) for one in found]}
    if json_file is not None:
        _write(json_file, report)
    if config is not None:
        _write(config, {**json.loads(config.read_text(encoding="utf-8")), "kvspeed_auto": choice.as_dict()})
    _print(name, choice, found)
    for task in dict.fromkeys(one.task for one in choice.measured if one.full == 0):
        note = f"{task}: the score at full depth is 0, so that nothing can be lost; the depth found for it says nothing"
        stderr().print(note, markup=False, soft_wrap=True)


def _samples(
    specs: list[TaskSpec], count: int, held_out: int, seed: int
) -> tuple[list[Sample], list[Sample], dict[str, TaskSpec]]:
    """(samples to choose by, others, the tasks by name): `count` and `held_out` of each task.

    A generated task is called as it was written. Samples of a file keep their own task's name where they have one, and
    are taken in the file's order, the others after those to choose by.
    """
    chosen: list[Sample] = []
    others: list[Sample] = []
    by_name: dict[str, TaskSpec] = {}
    for spec in specs:
        if spec.name != "samples":
            by_name[spec.text] = spec
            chosen += [replace(one, task=spec.text) for one in spec.load(count, seed=seed, split="dev")]
            if held_out:
                others += [replace(one, task=spec.text) for one in spec.load(held_out, seed=seed, split="test")]
            continue
        groups: dict[str, list[Sample]] = {}
        for one in spec.load(sys.maxsize, seed=seed, split="dev"):
            name = one.task or spec.text
            groups.setdefault(name, []).append(replace(one, task=name))
        for name, group in groups.items():
            if name in by_name:
                raise Fault(f"--tasks: {name!r} is there twice; put a task's samples into one file, under one name")
            if held_out and len(group) <= count:
                raise Fault(
                    f"--held-out: {spec.text} has {len(group)} samples of {name!r}, and --samples {count} takes them "
                    "all to choose by; give fewer to --samples, or more in the file"
                )
            by_name[name] = spec
            chosen += group[:count]
            others += group[count : count + held_out]
    return chosen, others, by_name


def _depths(text: str) -> list[int] | None:
    try:
        return [int(part) for part in text.split(",") if part.strip()] or None
    except ValueError:
        raise Fault(f"--k: got {text!r}; give depths separated by commas, such as 22,24,26") from None


def _config_of(model: str | None) -> Path:
    config = Path(model or "").expanduser() / "config.json"
    if model is None or not config.is_file():
        raise Fault("--save: writes into a model's folder; give one as --model, or --json for a file")
    return config


def _write(path: Path, content: dict[str, Any]) -> None:
    from kvspeed.atomic import replacing

    with replacing(path) as part:
        part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Kept:
    """What the model wrote, in the records of an evaluation."""

    def __init__(self, path: Path, model: Any, rule: SpeedSpec, max_new_tokens: int) -> None:
        from kvspeed.eval.journal import Journal
        from kvspeed.fingerprint import model_fingerprint
        from kvspeed.models import base_model
        from kvspeed.samples import INSTRUCTION, SEPARATOR

        header = {
            "kind": "choose-depth",
            "model": model_fingerprint(model),
            "dtype": str(base_model(model).dtype).removeprefix("torch."),
            "rule": {name: value for name, value in asdict(rule).items() if name not in ("k", "gaps")},
            "prompt": [INSTRUCTION, SEPARATOR],
        }
        self.max_new_tokens = max_new_tokens
        self.journal = Journal(path, header)

    def get(self, sample: Sample, k: int) -> str | None:
        found = (self.journal.get(**self._key(sample, k)) or {}).get("text")
        return found if isinstance(found, str) else None

    def add(self, sample: Sample, k: int, text: str) -> None:
        self.journal.add({**self._key(sample, k), "text": text})

    def _key(self, sample: Sample, k: int) -> dict[str, Any]:
        from kvspeed.eval.runner import sample_digest

        key: dict[str, Any] = {"task": sample.task, "digest": sample_digest(sample), "method": f"k={k}"}
        return {**key, "adapter": None, "max_new_tokens": self.max_new_tokens}


def _teller() -> Callable[[str], None]:
    """Shows on stderr what is measured: one line that changes on a terminal, elsewhere a line now and then."""
    console = stderr()
    if console.is_terminal:
        return lambda what: console.print(what, end="\r", markup=False, soft_wrap=True)
    return seldom(console)


def _print(name: str, choice: DepthChoice, found: list[TaskDepth]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = stdout()
    for title, rows in (("chosen by", choice.measured), ("held out", found)):
        if not rows:
            continue
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left")
        for column in ("task", "k", "samples", "score at full depth", "at k", "lost at most", "within the budget"):
            table.add_column(column, justify="left" if column == "task" else "right")
        for one in rows:
            table.add_row(
                escape(one.task),
                str(one.k),
                str(one.samples),
                f"{one.full:.3f}",
                f"{one.score:.3f}",
                f"{one.bound:.3f}",
                "yes" if one.kept else "no",
            )
        console.print(table)
    each = ", ".join(f"{task} {k}" for task, k in choice.by_task.items())
    console.print(f"[bold]k = {choice.k} of {choice.layers}[/bold]: {escape(choice.reason)}.")
    console.print(f"by task: {escape(each)}", soft_wrap=True)
