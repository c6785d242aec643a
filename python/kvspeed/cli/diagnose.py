# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed diagnose`: where in depth a model reads its prompt, and which k to try first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Debug,
    Device,
    DType,
    Fault,
    MaxNewTokens,
    ModelName,
    check_file,
    counted,
    guarded,
    load_model,
    progress,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from kvspeed.eval.diagnose_prompts import TextPrompt
    from kvspeed.speed.diagnose import Diagnosis


@guarded
def diagnose(
    model: ModelName = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="JSONL with category, prompt and perhaps answer a line. Default: prompts that are made up.",
            show_default=False,
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(
            "--categories",
            help="Kinds of task, with commas between. Default: all. Built in: retrieval, copying, arithmetic, code, "
            "instruction.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="The most prompts of each kind.")] = 4,
    length: Annotated[int, typer.Option("--length", min=1, help="Words of a built-in prompt, about.")] = 300,
    seed: Annotated[int, typer.Option("--seed", help="Other built-in prompts.")] = 0,
    max_new_tokens: MaxNewTokens = 32,
    anchor_tokens: Annotated[
        int, typer.Option("--anchor-tokens", min=0, help="First tokens of a prompt that are not its content.")
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write all curves there. Prompts that the file holds already are not measured again."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG there (needs matplotlib).")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer too.")] = False,
    device: Device = None,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Measure, layer by layer, how a model attends to its prompt while it answers, and recommend a depth k for SPEED.

    The numbers say where tokens of the prompt are read and where the hidden states turn. The k is a rule of thumb: a
    model must be tuned for it, and scores decide. An interrupted run with --json can be repeated and goes on.
    """
    known = _outputs(json_file, plot)
    chosen = _prompts(prompts, _names(categories), samples, length, seed)
    network, tokenizer, name = load_model(model, dtype, device)
    found = _run(network, tokenizer, name, chosen, max_new_tokens, anchor_tokens, json_file, known)
    _print(found, layers)
    if json_file is not None:
        found.save(json_file)
        stdout().print(f"written  {json_file}", soft_wrap=True, markup=False)
    if plot is not None:
        from kvspeed.eval.diagnose_plot import plot_diagnosis

        stdout().print(f"written  {plot_diagnosis(found, plot)}", soft_wrap=True, markup=False)


def _outputs(json_file: Path | None, plot: Path | None) -> Diagnosis | None:
    """Refuse, before any work, what could not be written; returns an earlier diagnosis where there is one."""
    check_file("--json", json_file)
    check_file("--plot", plot)
    if plot is not None:
        from kvspeed.eval.diagnose_plot import check_plotting

        check_plotting()
    if json_file is None or not json_file.exists():
        return None
    from kvspeed.speed.diagnose import Diagnosis

    try:
        return Diagnosis.load(json_file)
    except ValueError as error:
        raise Fault(f"--json: {error}") from None


def _names(categories: str | None) -> list[str] | None:
    if categories is None:
        return None
    names = [name.strip() for name in categories.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise Fault(f"--categories: got {categories!r}; give names with commas between, each once")
    return names


def _prompts(file: Path | None, categories: list[str] | None, samples: int, length: int, seed: int) -> list[TextPrompt]:
    from kvspeed.eval.diagnose_prompts import CATEGORIES, builtin_prompts, read_prompts

    if file is None:
        other = next((name for name in categories or () if name not in CATEGORIES), None)
        if other is not None:
            raise Fault(
                f"--categories: {other!r} is not built in; choose from {', '.join(CATEGORIES)}, or add --prompts"
            )
        return builtin_prompts(categories, samples=samples, length=length, seed=seed)
    found = read_prompts(file)
    there = list(dict.fromkeys(one.category for one in found))
    other = next((name for name in categories or () if name not in there), None)
    if other is not None:
        raise Fault(f"--categories: {file} has no prompts of {other!r}; it has {', '.join(there)}")
    return [one for name in categories or there for one in [p for p in found if p.category == name][:samples]]


def _run(
    network: Any,
    tokenizer: Any,
    name: str,
    prompts: list[TextPrompt],
    max_new_tokens: int,
    anchor_tokens: int,
    json_file: Path | None,
    known: Diagnosis | None,
) -> Diagnosis:
    from kvspeed.eval.diagnose_prompts import token_prompts
    from kvspeed.fingerprint import model_fingerprint
    from kvspeed.models import base_model
    from kvspeed.speed.diagnose import Diagnosis
    from kvspeed.speed.diagnose import diagnose as measure

    layers = len(base_model(network).layers)  # type: ignore[arg-type]
    ours = Diagnosis(name, model_fingerprint(network), layers, anchor_tokens, max_new_tokens)
    if known is not None and known.settings() != ours.settings():
        raise Fault(
            f"--json: {json_file} holds a diagnosis of other weights ({known.model}) or with other settings "
            f"(--anchor-tokens {known.anchor_tokens}, --max-new-tokens {known.max_new_tokens}); give another file"
        )
    with progress(f"diagnosing {name}", len(prompts)) as advance:

        def each(so_far: Diagnosis, one: Any) -> None:
            if json_file is not None:
                so_far.save(json_file)
            advance(one.id)

        return measure(
            network,
            token_prompts(tokenizer, prompts),
            name=name,
            max_new_tokens=max_new_tokens,
            anchor_tokens=anchor_tokens,
            known=known,
            each=each,
        )


def _print(found: Diagnosis, layers: bool) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = stdout()
    advice = found.recommendation()
    tokens = sum(len(one.answer) for one in found.measured)
    console.print(
        f"{escape(found.model)}: {counted(found.layers, 'layer')}, {counted(len(found.measured), 'prompt')}, "
        f"{counted(tokens, 'answer token')} measured. Layers are counted from 0."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("task")
    for title in ("prompts", "way turns\nmost up to", "reads most\nat layer", "most sharply\nat layer"):
        table.add_column(title, justify="right")
    for title in ("content\nbelow k", "content\nfrom k on", "k alone"):
        table.add_column(title, justify="right")
    for category, one in advice.by_category.items():
        count = sum(entry.category == category for entry in found.measured)
        mass = [value or 0.0 for value in found.curve("content_mass", category)]
        below, above = mass[: advice.k], mass[advice.k :]
        table.add_row(
            escape(category),
            str(count),
            _layer(one.curvature_peak),
            _layer(one.mass_peak),
            _layer(one.entropy_minimum),
            f"{sum(below) / len(below):.0%}",
            f"{sum(above) / len(above):.0%}" if above else "-",
            str(one.k),
        )
    console.print(table)
    if layers:
        _print_layers(found)
    if advice.k < found.layers:
        console.print(
            f"[bold]k = {advice.k} of {found.layers} is the depth to try first[/bold]: {escape(advice.reason)}."
        )
    else:
        console.print(f"[bold]Every layer should see the prompt[/bold]: {escape(advice.reason)}.")
    if not found.complete:
        stderr().print("the diagnosis is not complete", markup=False)


def _print_layers(found: Diagnosis) -> None:
    """Means over all prompts."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    columns = {
        "layer": None,
        "mass": "mass",
        "content": "content_mass",
        "entropy": "entropy",
        "/ log n": "entropy_normalised",
        "content's entropy": "content_entropy",
        "/ log n ": "content_entropy_normalised",
        "curvature": "curvature",
    }
    for title in columns:
        table.add_column(title, justify="right")
    curves = [found.curve(metric) for metric in columns.values() if metric is not None]
    for layer, values in enumerate(zip(*curves, strict=True)):
        table.add_row(str(layer), *("-" if value is None else f"{value:.3f}" for value in values))
    stdout().print(table)


def _layer(number: int | None) -> str:
    return "-" if number is None else str(number)
