# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed train-adapter`: soft tokens for a model, from questions about documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Debug,
    Device,
    DType,
    Fault,
    ModelName,
    check_depth,
    check_folder,
    guarded,
    load_model,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from kvspeed.packet import PacketAdapter
    from kvspeed.packet.train import StepRecord
    from kvspeed.samples import Sample

# How generated tasks are asked for: many questions on the same documents, and haystacks of all sizes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "biography": {"questions_per_context": 6},
    "multihop": {"questions_per_context": 4},
    "niah": {"chunks": (2, 5), "chunk_tokens": (40, 120)},
    "niah-multikey": {"chunks": (2, 5), "chunk_tokens": (40, 120), "questions_per_context": 4},
    "copying": {"documents": (3, 5), "questions_per_context": 3},
    "arithmetic": {"documents": (2, 3), "questions_per_context": 6},
    "instruction": {"documents": (2, 3), "questions_per_context": 6},
    "code": {"questions_per_context": 6},
}


@guarded
def train_adapter(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder for adapter.safetensors, the curve, checkpoint and the teacher's answers."),
    ],
    samples: Annotated[
        list[Path] | None,
        typer.Option("--samples", help="JSON Lines with documents, question, answers. May be repeated."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="Generated tasks instead, or as well: biography,niah,niah-multikey,multihop; =WEIGHT after a name.",
        ),
    ] = None,
    contexts: Annotated[
        int, typer.Option("--contexts", min=1, help="Of generated tasks: sets of documents, each with some questions.")
    ] = 256,
    dev_samples: Annotated[
        Path | None, typer.Option("--dev-samples", help="JSON Lines to stop early by; else a share is held out.")
    ] = None,
    dev: Annotated[float, typer.Option("--dev", help="Share of the samples to hold out; 0 for none.")] = 0.1,
    model: ModelName = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Begin with these soft tokens, not with random ones.")
    ] = None,
    init: Annotated[
        str,
        typer.Option(
            "--init",
            help="Where soft tokens begin. random: the embeddings' statistics; preamble: the header as the last tokens "
            "before the documents, the trailer random.",
        ),
    ] = "random",
    header: Annotated[
        int | None, typer.Option("--header", min=0, help="Soft tokens before a document. Default: 8, or --adapter's.")
    ] = None,
    trailer: Annotated[
        int | None, typer.Option("--trailer", min=0, help="Soft tokens after it. Default: 8, or --adapter's.")
    ] = None,
    loss: Annotated[str, typer.Option("--loss", help="kl or ce.")] = "kl",
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate; 5e-4 suits models of 4B to 8B.")] = 5e-3,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples a step.")] = 16,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the samples.")] = 4,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps in all, instead of --epochs.")] = None,
    patience: Annotated[
        int | None, typer.Option("--patience", min=1, help="Looks at the dev split without a better loss; then stop.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="The most tokens of a teacher's answer.")
    ] = 64,
    k: Annotated[int | None, typer.Option("--k", help="SPEED depth at which the packets will be used.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Frozen layers' products in bfloat16.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Keep one document's activations at a time (less memory, slower).")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the soft tokens, generated samples and their order.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the checkpoint in --out, or start anew.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    dtype: DType = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Train packet adapters: soft tokens that make packets answer as the model does with all documents before it.

    The model's own answers are computed once and kept in --out; an interrupted run goes on where it was. On several
    processes: accelerate launch --num_processes 2 -m kvspeed train-adapter ... (on CPUs: torchrun --nproc_per_node 2)
    """
    from kvspeed import train_adapter as train
    from kvspeed.packet.train.initial import begin_with_preamble
    from kvspeed.samples import distinct

    if loss not in ("kl", "ce"):
        raise Fault(f"--loss: got {loss!r}, choose kl or ce")
    if init not in ("random", "preamble"):
        raise Fault(f"--init: got {init!r}, choose random or preamble")
    check_folder("--out", out)
    given = _samples(samples or [], tasks, contexts, seed)
    held: Any = dev if dev_samples is None else distinct(_read(dev_samples, "--dev-samples"), given)
    network, tokenizer, name = load_model(model, dtype, device)
    check_depth(k, network)
    soft = _adapter(network, adapter, header, trailer, seed)
    if init == "preamble" and adapter is None:
        begin_with_preamble(soft, network, tokenizer)
    if resume and (out / "checkpoint.safetensors").is_file():
        stderr().print(f"going on from {out / 'checkpoint.safetensors'} (--no-resume starts anew)", soft_wrap=True)
    with advice(out), bars() as progress:
        report = train(
            network,
            tokenizer,
            given,
            soft,
            dev=held,
            loss=loss,
            lr=lr,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            patience=patience,
            max_new_tokens=max_new_tokens,
            k=k,
            dtype="bf16" if bf16 else None,
            recompute=recompute,
            seed=seed,
            folder=out,
            resume=resume,
            progress=progress,
        )
    if as_json:
        print(json.dumps({"model": name, "adapter": str(out / "adapter.safetensors"), **asdict(report)}, indent=2))
        return
    stdout().print(f"{name}: {report}", soft_wrap=True, markup=False)
    stdout().print(f"written  {out / 'adapter.safetensors'}", soft_wrap=True, markup=False)


def _samples(files: list[Path], tasks: str | None, contexts: int, seed: int) -> list[Sample]:
    """The samples of all files, then the generated ones, tasks taking turns."""
    from kvspeed.samples import distinct

    if not files and not tasks:
        raise Fault("--samples: no samples; name a file of JSON Lines, or generated tasks with --tasks")
    found = [sample for file in files for sample in _read(file, "--samples")]
    return distinct(found + (generated(tasks, contexts, seed) if tasks else []))


def generated(tasks: str, contexts: int, seed: int, split: str = "train") -> list[Sample]:
    """`contexts` contexts of the tasks, evenly mixed, each with as many questions as is cheap.

    Args:
        tasks: names with commas between them, each with "=weight" after it where it is not 1.
        contexts: in all.
        seed: of the samples.
        split: "train", "dev" or "test".
    """
    from kvspeed.eval.tasks import GENERATED, SKILLS

    makers = {**GENERATED, **SKILLS}
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in tasks.split(","))):
        name, _, number = part.partition("=")
        if name not in makers or name in weights:
            raise Fault(f"--tasks: got {name!r}, choose from {', '.join(makers)}, each once")
        try:
            weights[name] = float(number or 1)
        except ValueError:
            weights[name] = 0.0
        if not 0 < weights[name] < float("inf"):
            raise Fault(f"--tasks: {part} has no weight above 0 after the =")
    if not weights:
        raise Fault(f"--tasks: names no task; choose from {', '.join(makers)}")
    placed: list[tuple[float, list[Sample]]] = []
    for name, weight in weights.items():
        options = _OPTIONS.get(name, {})
        questions = options.get("questions_per_context", 1)
        count = max(1, round(contexts * weight / sum(weights.values())))
        made = makers[name](count * questions, seed=seed, split=split, **options)
        for index in range(count):
            placed.append(((index + 0.5) / count, made[index * questions : (index + 1) * questions]))
    placed.sort(key=lambda pair: pair[0])
    return [sample for _, group in placed for sample in group]


def _read(file: Path, option: str) -> list[Sample]:
    from kvspeed.samples import read_samples

    if not file.is_file():
        raise Fault(f"{option}: there is no file {file}")
    return read_samples(file)


def _adapter(network: Any, file: Path | None, header: int | None, trailer: int | None, seed: int) -> PacketAdapter:
    from kvspeed.packet import PacketAdapter

    if file is None:
        numbers = (8 if number is None else number for number in (header, trailer))
        return PacketAdapter.for_model(network, *numbers, seed=seed)
    if not file.is_file():
        raise Fault(f"--adapter: {file} is not a file; give what PacketAdapter.save wrote")
    given = PacketAdapter.load(file, network)
    for option, asked, there in (("--header", header, given.header), ("--trailer", trailer, given.trailer)):
        if asked is not None and asked != there.shape[0]:
            raise Fault(f"{option}: asks for {asked} soft tokens, {file} has {there.shape[0]}; leave {option} out")
    return given


@contextmanager
def advice(out: Path) -> Iterator[None]:
    """Says what an interruption left, and gives advice in the words of the command line."""
    try:
        yield
    except KeyboardInterrupt:
        if (out / "checkpoint.safetensors").is_file():
            stderr().print(f"kept in {out}; the same command goes on from there", soft_wrap=True, markup=False)
        raise
    except ValueError as error:
        raise Fault(str(error).replace("resume=False", "--no-resume")) from error


@contextmanager
def bars() -> Iterator[Callable[[str, int, int, StepRecord | None], None]]:
    """A bar for the teacher, one for the steps; where stderr is no terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        rows = {"teacher": bar.add_task("teacher's answers", total=None)}
        last: dict[str, float] = {}

        def tell(what: str, done: int, total: int, record: StepRecord | None) -> None:
            if what == "teacher":
                bar.update(rows["teacher"], completed=done, total=total)
                if done in (1, total) or done % 50 == 0:
                    _line(f"teacher's answers: {done} of {total} contexts")
                return
            assert record is not None
            if "train" not in rows:
                rows["train"] = bar.add_task("training", total=total)
            last[what] = record.loss
            said = f", dev {last['dev']:.4f}" if "dev" in last else ""
            text = f"loss {last.get('train', record.loss):.4f}{said}, {record.tokens_per_s:.0f} tokens/s"
            bar.update(rows["train"], completed=done, total=total, description=text)
            if what == "dev":
                _line(f"step {done} of {total}: dev {record.loss:.4f} after {record.seconds:.0f} s")
            elif done % 10 == 0 or done == 1:
                _line(f"step {done} of {total}: loss {record.loss:.4f}, {record.tokens_per_s:.0f} tokens/s")

        def _line(text: str) -> None:
            if not console.is_terminal:
                console.print(text, soft_wrap=True, markup=False)

        yield tell
