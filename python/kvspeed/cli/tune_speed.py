# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed tune-speed`: a model that learns to read its prompts in the first k layers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

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
from kvspeed.cli.train_adapter import advice, bars, generated

__all__ = ["tune_speed"]


@guarded
def tune_speed(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder for the tuned weights, the curve, report.json and the checkpoint."),
    ],
    k: Annotated[
        int | None, typer.Option("--k", help="Layers that see the whole prompt; all for the control without SPEED.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", help="JSON Lines of samples (documents, question, answers) or of messages. May be repeated."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="Generated tasks instead, or as well: biography,niah,multihop,copying,...; =WEIGHT after one.",
        ),
    ] = None,
    contexts: Annotated[
        int, typer.Option("--contexts", min=1, help="Of generated tasks: sets of documents, each with some questions.")
    ] = 256,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Name of a datasets dataset with a column messages; NAME:CONFIG.")
    ] = None,
    dataset_split: Annotated[str, typer.Option("--dataset-split", help="Of --dataset.")] = "train",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many of --dataset.")] = None,
    dev_data: Annotated[
        Path | None, typer.Option("--dev-data", help="JSON Lines to choose the weights by; else a share is held out.")
    ] = None,
    dev: Annotated[float, typer.Option("--dev", help="Share of the data to hold out; 0 for none.")] = 0.05,
    model: ModelName = None,
    anchor_tokens: Annotated[
        int, typer.Option("--anchor-tokens", min=0, help="First tokens that live in every layer; 0: no anchor.")
    ] = 1,
    boundary: Annotated[
        str, typer.Option("--boundary", help="transient or keep: whether answers see the last prompt token above k.")
    ] = "transient",
    self_only: Annotated[
        bool, typer.Option("--self-only", help="Above k a token sees the anchor and itself only (ablation).")
    ] = False,
    method: Annotated[str, typer.Option("--method", help="lora, or full for all weights.")] = "lora",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the LoRA.")] = 16,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", help="The LoRA's scale is alpha / rank. Default: 2 x rank.", show_default=False),
    ] = None,
    loss: Annotated[
        str, typer.Option("--loss", help="ce: the answers; kl: the model's own distribution at full depth.")
    ] = "ce",
    labels: Annotated[
        str, typer.Option("--labels", help="given: the samples' answers; model: what the model writes at full depth.")
    ] = "given",
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="Highest learning rate. Default: 1e-3, with --method full 2e-5.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Answers a step.")] = 16,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the data.")] = 1,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps in all, instead of --epochs.")] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            "--evaluate-every",
            min=1,
            help="Steps between looks at the dev split. Default: a tenth of all steps.",
            show_default=False,
        ),
    ] = None,
    patience: Annotated[
        int | None, typer.Option("--patience", min=1, help="Looks at the dev split without a better loss; then stop.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Train these soft tokens too, for packets of depth k.")
    ] = None,
    new_adapter: Annotated[
        bool, typer.Option("--new-adapter", help="Train new soft tokens too (8 before, 8 after a document).")
    ] = False,
    adapter_lr: Annotated[float, typer.Option("--adapter-lr", help="Highest learning rate of soft tokens.")] = 5e-3,
    packet_share: Annotated[
        float, typer.Option("--packet-share", help="Share of contexts in packets, with soft tokens.")
    ] = 0.5,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="The most tokens of an answer with --labels model.")
    ] = 64,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=2, help="Conversations are cut off there; else refused if too long."),
    ] = None,
    micro_tokens: Annotated[
        int, typer.Option("--micro-tokens", min=1, help="Tokens of conversations that run at once.")
    ] = 4096,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing: less memory, slower.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Products in bfloat16.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the LoRA, generated samples and their order.")] = 0,
    teacher: Annotated[
        Path | None,
        typer.Option("--teacher", help="Folder for the model's own answers; runs with other k may share it."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the checkpoint in --out, or start anew.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    dtype: DType = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Tune a model for SPEED, by LoRA or whole: prompts then need the first k layers only.

    The folder can be given as --model everywhere. An interrupted run goes on where it was. On several processes:
    accelerate launch --num_processes 2 -m kvspeed tune-speed ...
    """
    from kvspeed.smollm2 import MODEL_NAME
    from kvspeed.speed.tuning import tune

    for option, value, allowed in (
        ("--method", method, ("lora", "full")),
        ("--loss", loss, ("ce", "kl")),
        ("--labels", labels, ("given", "model")),
        ("--boundary", boundary, ("transient", "keep")),
    ):
        if value not in allowed:
            raise Fault(f"{option}: got {value!r}, choose {' or '.join(allowed)}")
    check_folder("--out", out)
    check_folder("--teacher", teacher)
    if adapter is not None and new_adapter:
        raise Fault("--new-adapter: --adapter names soft tokens already; give one of them")
    given = _data(data or [], tasks, contexts, dataset, dataset_split, limit, seed)
    held: Any = _distinct(_read(dev_data, "--dev-data"), given) if dev_data is not None else dev
    network, tokenizer, name = load_model(model, dtype, device)
    check_depth(k, network)
    if name == MODEL_NAME:
        network.config._name_or_path = name  # not the folder where it lies on this machine
    soft = _adapter(network, adapter, new_adapter, seed)
    stepped = False

    def tell(what: str, *seen: Any) -> None:
        nonlocal stepped
        stepped = stepped or what == "train"
        progress(what, *seen)

    with advice(out), bars() as progress:
        report = tune(
            network,
            tokenizer,
            given,
            k=k,
            anchor_tokens=anchor_tokens,
            boundary=boundary,
            upper_attention="self" if self_only else "causal",
            method=method,  # type: ignore[arg-type]
            rank=rank,
            alpha=alpha,
            loss=loss,  # type: ignore[arg-type]
            labels=labels,  # type: ignore[arg-type]
            lr=lr,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            dev=held,
            patience=patience,
            evaluate_every=evaluate_every,
            adapter=soft,
            adapter_lr=adapter_lr,
            packet_share=packet_share,
            max_new_tokens=max_new_tokens,
            max_tokens=max_tokens,
            micro_tokens=micro_tokens,
            gradient_checkpointing=checkpointing,
            dtype="bf16" if bf16 else None,
            seed=seed,
            folder=out,
            teacher_folder=teacher,
            resume=resume,
            progress=tell,
        )
    if not stepped:
        note = f"{out} holds this run, done already: no step was taken; --no-resume starts anew"
        stderr().print(note, soft_wrap=True, markup=False)
    if as_json:
        facts = json.loads((out / "report.json").read_text(encoding="utf-8"))
        print(json.dumps({"model": name, "folder": str(out), **facts}, indent=2))
        return
    stdout().print(f"{name}: {report}", soft_wrap=True, markup=False)
    stdout().print(f"written  {out}", soft_wrap=True, markup=False)


def _data(
    files: list[Path],
    tasks: str | None,
    contexts: int,
    dataset: str | None,
    dataset_split: str,
    limit: int | None,
    seed: int,
) -> list[Any]:
    """Samples and conversations of all files, of generated tasks, and of a dataset."""
    from kvspeed.speed.tuning import dataset_messages

    if not files and not tasks and not dataset:
        raise Fault(
            "--data: no data; name a file of JSON Lines, generated tasks with --tasks, or a dataset with --dataset"
        )
    found: list[Any] = [entry for file in files for entry in _read(file, "--data")]
    if tasks:
        found += generated(tasks, contexts, seed)
    if dataset:
        found += dataset_messages(dataset, dataset_split, limit=limit)
    return _distinct(found)


def _distinct(found: list[Any], others: list[Any] | None = None) -> list[Any]:
    """`found`, its samples with ids of their own: those without one are named after file and line, and files of two
    folders may have one name."""
    from kvspeed.samples import Sample, distinct

    samples, before = ([one for one in some if isinstance(one, Sample)] for some in (found, others or []))
    renamed = iter(distinct(samples, before))
    return [next(renamed) if isinstance(one, Sample) else one for one in found]


def _read(file: Path, option: str) -> list[Any]:
    from kvspeed.speed.tuning.material import read_data

    if not file.is_file():
        raise Fault(f"{option}: there is no file {file}")
    return read_data(file)


def _adapter(network: Any, file: Path | None, new: bool, seed: int) -> Any:
    from kvspeed.packet import PacketAdapter

    if new:
        return PacketAdapter.for_model(network, seed=seed)
    if file is None:
        return None
    if not file.is_file():
        raise Fault(f"--adapter: {file} is not a file; give what PacketAdapter.save wrote")
    return PacketAdapter.load(file, network)
