# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed demo`: one table, five methods, the same questions about the same documents."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Debug,
    DType,
    Fault,
    MaxNewTokens,
    check_adapter_file,
    check_depth,
    counted,
    guarded,
    is_testbed,
    load_model,
    progress,
    soft_tokens,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from kvspeed.data import Document, Question
    from kvspeed.eval.compare import Comparison, MethodResult, Tuned

_SAID = {
    "all": "All is trained: the packet adapter for this model; for rows with SPEED the same model tuned to depth {k}, "
    "and soft tokens with it.",
    "adapter": "The packet adapter was trained for this model, the SPEED weights (the model's own) were not: rows with "
    "SPEED are timed, not judged.",
    "none": "The packet adapters (8 + 8 soft tokens, drawn from the statistics of the embeddings) and the SPEED "
    "weights (the model's own) are untrained: those rows are timed, not judged.",
}
_PEOPLE = 6  # documents of the testbed's demo; its adapter was trained on 2 to 7


@guarded
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A folder with a transformers model, a hub id, or smollm2, asked about texts that ship with kvspeed. "
            "Default: the testbed, SmolLM2 tuned to short questions, asked about invented people.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Trained soft tokens for --model (kvspeed train-adapter).")
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="SPEED depth: layers that compute the prompt. Default: 22 of 30, else 4 of 5 layers."),
    ] = None,
    questions: Annotated[int, typer.Option("--questions", min=1, help="How many of the ten questions to ask.")] = 4,
    max_new_tokens: MaxNewTokens = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Answer questions about documents that ship with kvspeed, by five methods, and print one table."""
    from kvspeed import data
    from kvspeed.eval.compare import METHODS, Comparison

    invented = model is None or is_testbed(model)
    if adapter is not None and invented:
        raise Fault("--adapter: the testbed has its own; give --model with it")
    check_adapter_file(adapter)
    documents, asked = _invented() if invented else (data.documents(), data.questions())
    if questions > len(asked):
        raise Fault(f"--questions: {questions} asked for, {len(asked)} ship with kvspeed")
    asked = asked[:questions]
    network, tokenizer, name = load_model("testbed" if invented else model, dtype)
    check_depth(k, network)
    soft = soft_tokens(adapter, "testbed" if invented else model, network)
    tuned, depth = _tuned(dtype) if invented else (None, max(1, round(0.8 * network.config.num_hidden_layers)))
    comparison = Comparison(
        network,
        tokenizer,
        documents,
        k=k if k is not None else depth,
        adapter=soft,
        max_new_tokens=max_new_tokens,
        tuned=tuned,
    )
    if not stderr().is_terminal:  # no bar then, and it takes a minute
        stderr().print(
            f"{name}: {counted(len(documents), 'document')} to pack, {counted(questions, 'question')} to ask"
        )
    with progress("packing documents", 3 * len(documents)) as advance:
        comparison.pack(advance)
    with progress("asking", len(METHODS) * len(asked)) as advance:
        results = comparison.ask(asked, advance)
    trained = "all" if tuned is not None else "adapter" if soft is not None else "none"
    report = _report(name, comparison, asked, results, _SAID[trained].format(k=depth), soft is not None)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)


def _invented() -> tuple[list[Document], list[Question]]:
    """Biographies of invented people that no training saw, and ten questions about them."""
    from kvspeed.data import Document, Question
    from kvspeed.eval.tasks import biography

    samples = biography(10, seed=7, split="test", documents=_PEOPLE, questions_per_context=10)
    documents = [Document(" ".join(text.split()[:2]), text) for text in samples[0].documents]
    return documents, [Question(documents[one.gold[0]].name, one.question, one.answers) for one in samples]


def _tuned(dtype: str | None) -> tuple[Tuned, int]:
    """The testbed that was tuned for SPEED, and its depth."""
    from kvspeed.eval.compare import Tuned
    from kvspeed.tuned import remembered_spec

    network, _, _ = load_model("testbed-speed", dtype)
    soft, spec = soft_tokens(None, "testbed-speed", network), remembered_spec(network)
    assert soft is not None and spec is not None
    return Tuned(network, soft), spec.k


def _report(
    name: str, comparison: Comparison, asked: list[Any], results: list[MethodResult], said: str, trained: bool
) -> dict[str, Any]:
    import torch
    import transformers

    from kvspeed import __version__, ops

    layers = comparison.shape.layers
    plain = next(iter(comparison.packets.values()))
    return {
        "model": name,
        "dtype": str(comparison.model.dtype).removeprefix("torch."),
        "layers": layers,
        "k": comparison.k or layers,
        "training": said,
        "adapter_trained": trained,
        "documents": [
            {"name": document.name, "tokens": len(packet.token_ids)}
            for document, packet in zip(comparison.documents, plain, strict=True)
        ],
        "questions": [{"question": one.question, "accepted": list(one.answers)} for one in asked],
        "max_new_tokens": comparison.max_new_tokens,
        "build_s": comparison.build_s,
        "threads": torch.get_num_threads(),
        "instruction_set": ops.current_isa(),
        "versions": {
            "kvspeed": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": [result.row(results[0]) for result in results],
    }


def _print_table(report: dict[str, Any]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = stdout()
    tokens = sum(document["tokens"] for document in report["documents"])
    console.print(
        f"{escape(report['model'])}, {report['dtype']}, {counted(report['layers'], 'layer')}, SPEED to k = "
        f"{report['k']}; {counted(len(report['documents']), 'document')}, {tokens} tokens; "
        f"{counted(report['threads'], 'thread')}, "
        f"{report['instruction_set']}"
    )
    for number, question in enumerate(report["questions"], 1):
        console.print(f"  {number}. {escape(question['question'])} [dim]({escape(question['accepted'][0])})[/dim]")
    console.print(f"[bold]{report['training']}[/bold]")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("method")
    for title in ("TTFT", "per token", "KV", "FLOPs", "right"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(
            _title(row, report),
            _with_ratio(_seconds(row["ttft_s"]), row["ttft_ratio"]),
            _with_ratio(_seconds(row["time_per_token_s"]), row["time_per_token_ratio"]),
            _with_ratio(f"{row['kv_bytes'] / 2**20:.1f} MiB", row["kv_ratio"]),
            _with_ratio(_flops(row["flops"]), row["flops_ratio"]),
            f"{sum(row['correct'])} of {len(row['correct'])}",
        )
    console.print(table)
    marks = ("✗", "✓") if console.encoding.startswith("utf") else ("wrong", "right")
    for row in report["rows"]:
        console.print(f"[bold]{_title(row, report)}[/bold]")
        for number, (answer, correct) in enumerate(zip(row["answers"], row["correct"], strict=True), 1):
            mark = f"[{'green' if correct else 'red'}]{marks[correct]}[/]"
            console.print(f"  {number} {mark} {escape(answer) or '(nothing)'}")
    console.print(
        "\nMedians over the questions (FLOPs: mean of an answer); below each number its ratio to full recompute. TTFT "
        "includes tokenising the question and assembling the packets, which were built beforehand in "
        f"{_seconds(report['build_s']['packets'])} (to depth k: {_seconds(report['build_s']['packets + SPEED'])})."
    )


def _title(row: dict[str, Any], report: dict[str, Any]) -> str:
    """The method's name for people, who shall not take random soft tokens for trained ones."""
    if report["adapter_trained"]:
        return str(row["method"])
    return str(row["method"]).replace("packets", "packets (untrained adapter)")


def _with_ratio(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text}\n[dim]{ratio:.2f}x[/dim]"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms" if value >= 0.01 else f"{1e3 * value:.1f} ms"


def _flops(value: float) -> str:
    return f"{value / 1e12:.2f} T" if value >= 1e12 else f"{value / 1e9:.1f} G"
