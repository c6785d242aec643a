# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed eval`: packets and their rivals on question answering, and plots of what was found.

`kvspeed eval speed` is in `evaluate_speed`; both carry out a run by `carry_out`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
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
    check_folder,
    counted,
    guarded,
    is_testbed,
    load_model,
    progress,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from kvspeed.eval.runner import Runner
    from kvspeed.packet import PacketAdapter

__all__ = ["AdapterFiles", "Places", "Seed", "Split", "app", "by_name", "carry_out", "list_names", "shard_of"]

app = typer.Typer(
    name="eval", help="Measure what methods answer and what they cost.", no_args_is_help=True, add_completion=False
)

METHODS = "full,none,nocache,packet"

AdapterFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        help="A file of kvspeed train-adapter for the method packet, or NAME=FILE for packet@NAME; may be repeated.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the questions.")]
Split = Annotated[str, typer.Option("--split", help="train, dev or test.")]


@app.command()
@guarded
def packets(
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="Separated by commas: biography, niah, niah-multikey, multihop, hotpotqa:path=FILE, "
            "musique:path=FILE, samples:path=FILE. Options follow a colon: niah:depth=0.5:chunks=8, "
            "biography:documents=20:shuffle=1.",
        ),
    ] = "biography,niah,multihop",
    methods: Annotated[
        str, typer.Option("--methods", help="Separated by commas; --list shows all, packet@NAME takes another adapter.")
    ] = METHODS,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Questions a task.")] = 100,
    seed: Seed = 0,
    split: Split = "test",
    model: ModelName = None,
    adapter: AdapterFiles = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Where the report goes; records lie beside it, and a second run goes on with them."
        ),
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Where the table goes.")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="A folder for plots (needs matplotlib).")] = None,
    timed: Annotated[int, typer.Option("--timed", min=0, help="Questions a task whose times are measured.")] = 20,
    end_to_end: Annotated[
        int, typer.Option("--end-to-end", min=0, help="Questions a task that are timed from files as well.")
    ] = 5,
    questions_per_context: Annotated[
        int, typer.Option("--questions-per-context", min=1, help="Questions on the same documents; cheaper.")
    ] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="The most tokens of an answer. Default: by the task.")
    ] = None,
    shard: Annotated[
        str, typer.Option("--shard", help="I/N: this process does the I-th (from 0) of N parts; they may run at once.")
    ] = "0/1",
    restart: Annotated[bool, typer.Option("--restart", help="Drop the records of an earlier run.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Ask nothing: report what the records of --json hold.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print the tasks and methods, and stop.")] = False,
    device: Device = None,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Ask questions about documents by several methods; score the answers and measure what they cost."""
    if listing:
        from kvspeed.eval.methods import METHODS as known

        list_names(known, "a percentage, and a number of tokens for epic")
        return
    from kvspeed.eval.runner import Plan, Runner
    from kvspeed.eval.tasks import split_specs

    plan = Plan(
        tasks=tuple(split_specs(tasks)),
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        samples=samples,
        seed=seed,
        split=split,
        questions_per_context=questions_per_context,
        timed=timed,
        end_to_end=end_to_end,
        max_new_tokens=max_new_tokens,
        shard=shard_of(shard),
    )
    place = Places(json_file, markdown_file, plots, restart=restart, report_only=report_only)
    place.check(plan.shard[1])
    network, tokenizer, name, adapters = _load(model, adapter, dtype, device, plan.methods)
    runner = Runner(network, tokenizer, plan, adapters=adapters, path=place.journal, model_name=name)
    _print(carry_out(runner, place))


@app.command("samples")
@guarded
def write(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON Lines to write.")],
    tasks: Annotated[str, typer.Option("--tasks", help="As for kvspeed eval packets; one after the other.")],
    count: Annotated[int, typer.Option("--samples", min=1, help="Questions a task.")] = 256,
    seed: Seed = 0,
    split: Split = "train",
    questions_per_context: Annotated[
        int,
        typer.Option("--questions-per-context", min=1, help="Questions on the same documents; cheaper to train on."),
    ] = 1,
    debug: Debug = False,
) -> None:
    """Write a task's questions to a file, for kvspeed train-adapter or to look at."""
    from kvspeed.eval.tasks import split_specs
    from kvspeed.samples import distinct, write_samples

    check_file("FILE", file)
    made = [
        sample
        for spec in split_specs(tasks)
        for sample in spec.load(count, seed=seed, split=split, questions_per_context=questions_per_context)
    ]
    write_samples(file, distinct(made))
    stderr().print(f"wrote {file}, {counted(len(made), 'question')}", markup=False, soft_wrap=True)


@app.command()
@guarded
def plot(
    report_file: Annotated[
        Path,
        typer.Argument(metavar="REPORT", help="A file of kvspeed eval packets --json or kvspeed eval speed --json."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the plots go.")],
    loss: Annotated[
        list[str] | None,
        typer.Option("--loss", help="NAME=FILE: a curve.csv of kvspeed train-adapter; may be repeated."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw the plots of a report again."""
    from kvspeed.eval.plots import plot_loss
    from kvspeed.eval.report import read_report

    _check_matplotlib()
    check_folder("FOLDER", folder)
    _plot(read_report(report_file), folder)
    if loss:
        curves = by_name(loss, "--loss")
        _say(plot_loss(curves, folder / "loss.png"))


@app.command()
@guarded
def sinks(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The PNG to write; FILE.json holds the numbers.")],
    task: Annotated[str, typer.Option("--task", help="As for kvspeed eval packets.")] = "biography:documents=2",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Prompts that are averaged over.")] = 8,
    seed: Seed = 0,
    split: Split = "test",
    model: ModelName = None,
    adapter: AdapterFiles = None,
    device: Device = None,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Draw where the question looks, with and without adapters: mean attention over positions."""
    from kvspeed.eval.plots import plot_sinks
    from kvspeed.eval.report import write_text
    from kvspeed.eval.sinks import attention_profile
    from kvspeed.eval.tasks import TaskSpec
    from kvspeed.install import unpatch_model

    _check_matplotlib()
    check_file("FILE", file, makes_folder=True)
    numbers = file.with_name(file.name + ".json")
    check_file("FILE", numbers, makes_folder=True)
    asked = TaskSpec.parse(task).load(samples, seed=seed, split=split)
    network, tokenizer, name, adapters = _load(model, adapter, dtype, device, ("packet",))
    unpatch_model(network)
    settings: dict[str, dict[str, Any]] = {
        "full attention": {"alone": False},
        "documents alone, no adapter": {},
        "packets with adapter": {"adapter": adapters[""]},
    }
    found: dict[str, Any] = {}
    with progress("looking", len(settings) * len(asked)) as advance:
        for title, options in settings.items():
            profiles = []
            for sample in asked:
                profiles.append(attention_profile(network, tokenizer, sample, **options))
                advance(title)
            found[title] = {
                "first_tokens": sum(one.on_first_tokens() for one in profiles) / len(profiles),
                "soft_tokens": sum(one.on_soft_tokens() for one in profiles) / len(profiles),
                "first_sample": profiles[0].shares,
                "blocks": profiles[0].blocks,
            }
    shown = {title: entry["first_sample"] for title, entry in found.items()}
    write_text(numbers, json.dumps({"model": name, "task": task, **found}) + "\n")
    _say(plot_sinks(shown, {title: [b for b, _ in entry["blocks"]] for title, entry in found.items()}, file))
    for title, entry in found.items():
        stdout().print(
            f"{title}: {100 * entry['first_tokens']:.1f} % of the question's attention on documents' first tokens, "
            f"{100 * entry['soft_tokens']:.1f} % on soft tokens",
            markup=False,
            soft_wrap=True,
        )


def _load(
    model: str | None, files: list[str] | None, dtype: str | None, device: str | None, methods: tuple[str, ...]
) -> tuple[Any, Any, str, dict[str, PacketAdapter]]:
    """(model, tokenizer, name, adapters by name); the model patched for its kernels."""
    from kvspeed.eval.methods import get_method
    from kvspeed.packet import PacketAdapter
    from kvspeed.patch import patch_model

    paths = by_name(files or [], "--adapter", default="")
    asks = {name.partition("@")[2] for name in methods if getattr(get_method(name.partition("@")[0]), "adapter", False)}
    network, tokenizer, name = load_model(model, dtype, device)
    if is_testbed(model):
        from kvspeed.testbed import adapter_file, specialists

        shipped = {"": adapter_file(speed=model == "testbed-speed"), **specialists()}
        paths = {**{key: str(path) for key, path in shipped.items() if key in asks}, **paths}
    for missing in sorted(asks - set(paths)):
        title = f"packet@{missing}" if missing else "packet"
        example = f"{missing}=FILE" if missing else "FILE"
        raise Fault(f"--methods: {title} needs a trained adapter: give --adapter {example}, from kvspeed train-adapter")
    patch_model(network, network.config.num_hidden_layers)  # whatever it was tuned for
    return network, tokenizer, name, {key: PacketAdapter.load(path, network) for key, path in paths.items()}


def by_name(entries: list[str], option: str, default: str | None = None) -> dict[str, str]:
    """Name -> file of the entries of an option, each name once."""
    found: dict[str, str] = {}
    for entry in entries:
        name, path = named(entry, option, default)
        if name in found:
            called = f"one name, {name}" if name else "no name"
            raise Fault(f"{option}: {found[name]} and {path} have {called}; write NAME=FILE with a name for each")
        found[name] = path
    return found


def named(entry: str, option: str, default: str | None = None) -> tuple[str, str]:
    """NAME=FILE, or FILE alone where there is a default name."""
    name, equals, path = entry.partition("=")
    if not equals and default is not None:
        return default, entry
    if not equals or not name or not path:
        raise Fault(f"{option}: got {entry!r}, expected NAME=FILE")
    return name, path


@dataclass(frozen=True)
class Places:
    """Where an evaluation's results go, and what is done with those that are there."""

    json_file: Path | None
    markdown_file: Path | None
    plots: Path | None
    restart: bool = False
    report_only: bool = False

    @property
    def journal(self) -> Path | None:
        """Records lie beside the report."""
        return self.json_file.with_name(self.json_file.name + ".records") if self.json_file is not None else None

    def check(self, parts: int = 1) -> None:
        """Refuse what cannot be done before a model is loaded, and drop records where that is asked for.

        Args:
            parts: how many processes share the records.
        """
        check_file("--json", self.json_file, makes_folder=True)
        check_file("--json", self.journal, makes_folder=True)
        check_file("--markdown", self.markdown_file, makes_folder=True)
        check_folder("--plots", self.plots)
        if self.restart and self.report_only:
            raise Fault("--restart: drops the records that --report-only reports; give one of them")
        if self.restart and parts > 1:
            raise Fault(
                f"--restart: drops what the other shards answer; remove {self.journal or 'the records'} once, then "
                "start the shards without it"
            )
        if self.journal is not None and self.restart:
            self.journal.unlink(missing_ok=True)
        if self.report_only and (self.journal is None or not self.journal.is_file()):
            raise Fault("--report-only: there are no records; give the --json file of an earlier run")
        if self.plots is not None:
            _check_matplotlib()


def carry_out(runner: Runner, places: Places) -> dict[str, Any]:
    """Ask what is missing, write what is wanted; the report."""
    from kvspeed.eval.report import markdown, report, write_text

    try:
        if not places.report_only:
            with progress("asking", runner.steps()) as advance:
                runner.run(advance)
    except KeyboardInterrupt:
        if places.journal is not None:
            stderr().print(
                f"{counted(len(runner.journal or ()), 'answer')} kept in {places.journal}; the same command goes on"
            )
        raise
    found = report(runner, command=["kvspeed", *sys.argv[1:]])
    parts = runner.plan.shard[1]
    if places.report_only and not found["rows"]:
        raise Fault(
            f"--report-only: none of the {len(runner.journal or ())} answers in {places.journal} is to these tasks, "
            "samples, methods and adapters; give those of the run"
        )
    if places.json_file is not None and parts == 1:
        write_text(places.json_file, json.dumps(found, indent=1) + "\n")
    if places.markdown_file is not None:
        write_text(places.markdown_file, markdown(found))
    if places.plots is not None:
        _plot(found, places.plots)
    if parts > 1:
        stderr().print("part of a run: when all parts are done, the same command without --shard writes the report")
    return found


def shard_of(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal():
        raise Fault(f"--shard: got {text!r}, expected I/N, such as 0/2 and 1/2 for two processes")
    return int(index), int(count)


def _check_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise Fault("plots need matplotlib, which is not installed: pip install 'kvspeed[plots]'")


def _plot(found: dict[str, Any], folder: Path) -> None:
    from kvspeed.eval.plots import plot_report

    for path in plot_report(found, folder):
        _say(path)


def _say(path: Path) -> None:
    stderr().print(f"wrote {path}", markup=False, soft_wrap=True)


def list_names(known: dict[str, Any], numbers: str) -> None:
    """Print tasks and methods, a line a method, and what `<n>` stands for."""
    from kvspeed.eval.tasks import TASKS

    print("tasks: " + ", ".join(TASKS))
    for name, make in known.items():
        lines = (getattr(make, "func", make).__doc__ or "").strip().splitlines()
        print(f"{name:24} {lines[0] if lines else ''}".rstrip())
    print(f"<n> is {numbers}")


def _print(found: dict[str, Any]) -> None:
    """The table for the terminal: fewer columns than the Markdown one."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = stdout()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("task", "method", "questions", "F1", "of full", "EM", "TTFT", "s/question"):
        table.add_column(title, justify="left" if title in ("task", "method") else "right")
    last = None
    for row in found["rows"]:
        low, high = row["f1_interval"]
        table.add_row(
            escape(row["task"]) if row["task"] != last else "",
            escape(row["method"]),
            str(row["questions"]),
            f"{row['f1']:.3f} ({low:.2f}-{high:.2f})",
            "-" if row["f1_of_full"] is None else f"{row['f1_of_full']:.2f}",
            f"{row['em']:.3f}",
            "-" if row["ttft_s"] is None else f"{row['ttft_s']:.3f} s",
            f"{row['seconds']:.2f}",
        )
        last = row["task"]
    console.print(table)
