# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed eval speed`: SPEED, its ablations and its rivals; and the training that one of the rivals needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvspeed.cli.common import (
    Debug,
    Device,
    DType,
    Fault,
    ModelName,
    check_file,
    guarded,
    is_testbed,
    load_model,
    progress,
    stderr,
    stdout,
)
from kvspeed.cli.evaluate import AdapterFiles, Places, Seed, Split, app, by_name, carry_out, list_names, shard_of

__all__ = ["speed", "train_swiftkv"]

TASKS = "biography,niah,multihop,copying,arithmetic,instruction,code"
METHODS = "full,speed,cut"
_TUNED = ("speed-", "selfonly-", "answerfirst", "packet+speed-")
LOOPS = 64  # answers may be so long, or loops could not be seen


@app.command()
@guarded
def speed(
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="Separated by commas: those of kvspeed eval packets, and copying, arithmetic, instruction, code, "
            "long:tokens=4096. :samples=N asks fewer questions of one task.",
        ),
    ] = TASKS,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Separated by commas: full, packet, and at every --k speed, speed-noanchor, selfonly, cut, swiftkv, "
            "swiftkv-share2, pop, packet+speed; or with their depth, speed-22. METHOD@NAME takes the weights NAME.",
        ),
    ] = METHODS,
    depths: Annotated[str, typer.Option("--k", help="Depths, separated by commas: layers that see the prompt.")] = "",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Questions a task.")] = 100,
    seed: Seed = 0,
    split: Split = "test",
    model: ModelName = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weights",
            help="NAME=PATH: a folder of kvspeed tune-speed or a file of kvspeed eval train-swiftkv. A method called "
            "NAME uses it, others as METHOD@NAME. May be repeated.",
            show_default=False,
        ),
    ] = None,
    adapter: AdapterFiles = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Where the report goes; records lie beside it, and a second run goes on with them."
        ),
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Where the tables go.")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="A folder for plots (needs matplotlib).")] = None,
    timed: Annotated[int, typer.Option("--timed", min=0, help="Questions a task whose times are measured.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Decoding steps that are timed for each of them.")] = 8,
    questions_per_context: Annotated[
        int, typer.Option("--questions-per-context", min=1, help="Questions on the same documents; cheaper.")
    ] = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            help=f"The most tokens of an answer. Default: by the task, at least {LOOPS}, so that loops can be seen.",
        ),
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
    """Ask by SPEED, its ablations and its rivals at several depths; scores by category, times, memory and loops."""
    from kvspeed.eval.methods import SPEED_METHODS

    if listing:
        list_names(SPEED_METHODS, "a depth: layers that see the prompt; after share, layers of a group")
        return
    from kvspeed.eval.expand import expanded
    from kvspeed.eval.methods import get_method
    from kvspeed.eval.runner import Plan, Runner
    from kvspeed.eval.tasks import split_specs

    given = [name.strip() for name in methods.split(",") if name.strip()]
    plan = Plan(
        tasks=tuple(split_specs(tasks)),
        methods=expanded(given, _depths(depths), SPEED_METHODS),
        samples=samples,
        seed=seed,
        split=split,
        questions_per_context=questions_per_context,
        timed=timed,
        steps=steps,
        max_new_tokens=max_new_tokens,
        least_new_tokens=LOOPS,
        shard=shard_of(shard),
    )
    for method in plan.methods:
        get_method(method.partition("@")[0], SPEED_METHODS)  # before a model is loaded
    places = Places(json_file, markdown_file, plots, restart=restart, report_only=report_only)
    places.check(plan.shard[1])
    runner = _runner(Runner, plan, model, weights or [], adapter or [], dtype, device, places.journal)
    found = carry_out(runner, places)
    _print(found)


def _runner(
    make: Any,
    plan: Any,
    model: str | None,
    weights: list[str],
    adapters: list[str],
    dtype: str | None,
    device: str | None,
    journal: Path | None,
) -> Any:
    """The run's model, the weights and adapters that its methods ask for, and nothing else, loaded."""
    from kvspeed.eval.methods import SPEED_METHODS, get_method
    from kvspeed.eval.weights import load_weights
    from kvspeed.packet import PacketAdapter
    from kvspeed.patch import patch_model

    paths = by_name(weights, "--weights")
    files = by_name(adapters, "--adapter", default="")
    asked = {name.partition("@")[2] or name for name in plan.methods}
    for name in paths:
        if name not in asked:
            raise Fault(f"--weights: no method uses {name}; name one of --methods so, or write METHOD@{name}")
    network, tokenizer, shown = load_model(model, dtype, device)
    layers = network.config.num_hidden_layers
    loaded = {name: load_weights(path, network, dtype=network.dtype) for name, path in paths.items()}
    patch_model(network, layers)
    soft = {
        name for name in plan.methods if getattr(get_method(name.partition("@")[0], SPEED_METHODS), "adapter", False)
    }
    if is_testbed(model) and "" not in files and soft:
        from kvspeed.testbed import adapter_file

        files[""] = str(adapter_file(speed=model == "testbed-speed"))
    read = {name: PacketAdapter.load(path, network) for name, path in files.items()}
    for name in sorted(soft):
        source = name.partition("@")[2] or name
        if not {source, ""} & set(read) and getattr(loaded.get(source), "adapter", None) is None:
            raise Fault(f"--methods: {name} needs a trained adapter: give --adapter FILE, from kvspeed train-adapter")
    for name in plan.methods:
        if name.startswith("swiftkv") and (name.partition("@")[2] or name) not in loaded:
            stderr().print(
                f"{name} has no trained weights (--weights {name}=FILE): its costs hold, its scores do not",
                markup=False,
                soft_wrap=True,
            )
    from kvspeed.tuned import remembered_spec

    if remembered_spec(network) is None:
        for name in plan.methods:
            if name.startswith(_TUNED) and (name.partition("@")[2] or name) not in loaded:
                stderr().print(
                    f"{name} has no weights of its own (--weights {name}=FOLDER): it uses those of {shown}, which were "
                    "not tuned for SPEED",
                    markup=False,
                    soft_wrap=True,
                )
    return make(
        network,
        tokenizer,
        plan,
        adapters=read,
        weights=loaded,
        known=SPEED_METHODS,
        kind="speed",
        path=journal,
        model_name=shown,
    )


@app.command("train-swiftkv")
@guarded
def train_swiftkv(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the weights go; FILE.json says how they came.")],
    samples: Annotated[
        list[Path], typer.Option("--samples", help="JSON Lines of kvspeed eval samples; may be repeated.")
    ],
    k: Annotated[int, typer.Option("--k", min=1, help="Layers that the prompt runs through.")],
    share: Annotated[int, typer.Option("--share", min=1, help="Upper layers that use one layer's KV.")] = 1,
    dev: Annotated[float, typer.Option("--dev", help="Share of the samples held out to choose the best.")] = 0.1,
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 1e-3,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples a step.")] = 8,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the samples.")] = 1,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Stop after so many.", show_default=False)] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Frozen layers' products in bfloat16.")] = False,
    seed: Seed = 0,
    model: ModelName = None,
    device: Device = None,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Train SwiftKV's projections for a model, by its authors' loss, so that it can be compared."""
    from kvspeed.atomic import replacing
    from kvspeed.eval.swiftkv import SwiftKV
    from kvspeed.eval.swiftkv import train_swiftkv as train
    from kvspeed.samples import distinct, read_samples

    check_file("FILE", file)
    facts_file = file.with_name(file.name + ".json")
    check_file("FILE", facts_file)
    asked = distinct(sample for path in samples for sample in read_samples(path))
    network, tokenizer, name = load_model(model, dtype, device)
    weights = SwiftKV.for_model(network, k, share)
    with progress("training") as advance:

        def tell(what: str, done: int, total: int, record: Any) -> None:
            if what == "train":
                advance(f"{done} of {total}, loss {record.loss:.4f}")
            if what == "dev" or done % 20 == 0:
                text = f"step {done} of {total}: {what} {record.loss:.4f}"
                stderr().print(text, markup=False, soft_wrap=True)

        report = train(
            network,
            tokenizer,
            asked,
            weights,
            dev=dev or None,
            lr=lr,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            dtype="bf16" if bf16 else None,
            seed=seed,
            path=file,
            progress=tell,
        )
    facts = asdict(report)
    facts["records"] = [record for record in facts["records"] if record["split"] == "dev"]
    done = [record for record in report.records if record.split == "train"]
    tokens = sum(record.tokens_per_s for record in done) / max(1, len(done))
    with replacing(facts_file) as part:
        facts = {"model": name, "k": k, "share": share, "method": "swiftkv", "tokens_per_second": tokens, **facts}
        part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    stdout().print(f"{name}: {report}", soft_wrap=True, markup=False)
    stdout().print(f"written  {file}", soft_wrap=True, markup=False)


def _depths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise Fault(f"--k: got {part!r}, expected depths such as 20,22,24")
    return [int(part) for part in parts]


def _print(found: dict[str, Any]) -> None:
    """Scores by category, for the terminal."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    categories = list(dict.fromkeys(entry["category"] for entry in found["averages"]))
    cells = {(entry["method"], entry["category"]): entry for entry in found["averages"]}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("method", *categories, "over full", "loops"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for method in dict.fromkeys(entry["method"] for entry in found["averages"]):
        whole = cells[method, "all"]
        shown = [cells.get((method, category)) for category in categories]
        table.add_row(
            escape(method),
            *("-" if entry is None else f"{100 * entry['score']:.1f}" for entry in shown),
            "-" if whole["over_full"] is None else f"{100 * whole['over_full']:+.1f}",
            f"{100 * whole['loop_rate']:.1f} %",
        )
    stdout().print(table)
