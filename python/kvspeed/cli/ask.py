# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed ask`: a question to the packets in a folder or a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Debug,
    Fault,
    MaxNewTokens,
    ModelName,
    check_depth,
    counted,
    guarded,
    load_model,
    progress,
    stderr,
    warn_untuned,
)
from kvspeed.cli.stored import is_store, stored_packets
from kvspeed.cli.texts import packet_files

if TYPE_CHECKING:
    from kvspeed.packet import Packet

_SHIPPED = {"kvspeed-testbed": "testbed", "kvspeed-testbed-speed": "testbed-speed"}  # what packets call it: --model


@guarded
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    packets: Annotated[
        str, typer.Option("--packets", help="Folder that `kvspeed pack` wrote to, or a store (folder or URL).")
    ],
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", help="Of a store: this packet (the first digits do); may be repeated. Default: all."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Of a store: the packets made this way (see kvspeed store ls).")
    ] = None,
    model: ModelName = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="SPEED depth; the packets' own or less. Default: that of the least deep packet."),
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="view: read packets in place; copy: put them into one cache.")
    ] = "view",
    max_new_tokens: MaxNewTokens = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16. Default: the packets' own.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Answer a question from all packets of a folder, in the order of their file names, or from those of a store.

    Only the question and the answer are computed. Packets of another model or adapter are refused, and those that
    are less deep than is asked for. Without --model, packets of the testbed are given to it, others to SmolLM2.
    """
    from kvspeed import patch_model

    if not question.strip():
        raise Fault("the question is empty; ask something")
    if mode not in ("view", "copy"):
        raise Fault(f"--mode: got {mode!r}, choose view or copy")
    if is_store(packets):
        files, loaded = stored_packets(packets, ids or [], recipe)
    elif ids or recipe is not None:
        raise Fault(
            f"--id, --recipe: name packets of a store, and {packets} is none; leave it out to use all of its packets"
        )
    else:
        files = packet_files(Path(packets))
        loaded = _load(files)
    _check_asked_depth(files, loaded, k)
    _check_asked_dtype(files, loaded, dtype)
    _check_one_adapter(files, loaded)
    first = loaded[0]
    model = model if model is not None else _SHIPPED.get(first.model_name)
    network, tokenizer, name = load_model(model, dtype or str(first.dtype).removeprefix("torch."))
    check_depth(k, network)
    least = min((packet.k for packet in loaded if packet.k is not None), default=None)
    depth = k if k is not None or first.layers != network.config.num_hidden_layers else least
    patch_model(network, network.config.num_hidden_layers if depth is None else depth)
    _check(files, loaded, network)
    warn_untuned(network, depth, name)
    report = _answer(network, tokenizer, question, loaded, mode, max_new_tokens)
    report |= {"model": name, "k": depth, "packets": [file.name for file in files]}
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(report["answer"])
    per_token = report["time_per_token_s"]
    stderr().print(
        f"[dim]{counted(len(files), 'packet')}, {report['prefix_tokens']} tokens read, "
        f"{report['question_tokens']} computed; "
        f"first token after {report['ttft_s']:.2f} s"
        + (f", then {1e3 * per_token:.0f} ms a token" if per_token else "")
        + f"; {report['kv_bytes'] / 2**20:.1f} MiB of KV at the end[/dim]"
    )


def _load(files: list[Path]) -> list[Packet]:
    from kvspeed.packet import Packet

    found = []
    with progress("reading packets", len(files)) as advance:
        for file in files:
            found.append(Packet.load(file))
            advance(file.name)
    return found


def _check_asked_depth(files: list[Path], packets: list[Packet], k: int | None) -> None:
    """Refuses a `--k` beyond a packet's own, before a model is loaded."""
    for file, packet in zip(files, packets, strict=True):
        if k is not None and packet.depth < k <= packet.layers:
            raise Fault(
                f"{file.name} was packed {_how(packet)}, and --k asks for k={k}: leave --k out, ask for --k "
                f"{packet.depth} or less, or pack anew with --k {k}"
            )


def _how(packet: Packet) -> str:
    layers = packet.layers
    return f"without --k (all {layers} layers)" if packet.k is None else f"with k={packet.k} of {layers} layers"


def _check_asked_dtype(files: list[Path], packets: list[Packet], dtype: str | None) -> None:
    """Refuses a `--dtype` that is not the packets' own, before a model is loaded; an unknown one is left to that."""
    if dtype not in ("float32", "bfloat16", "float16"):
        return
    for file, packet in zip(files, packets, strict=True):
        held = str(packet.dtype).removeprefix("torch.")
        if held != dtype:
            raise Fault(
                f"{file.name} was packed in {held}, and --dtype asks for {dtype}: leave --dtype out, or pack anew with "
                f"--dtype {dtype}"
            )


def _check_one_adapter(files: list[Path], packets: list[Packet]) -> None:
    """Refuses packets with other soft tokens than the first one has, by their file's name."""

    def how(packet: Packet) -> str:
        fingerprint = packet.adapter_fingerprint
        return "without an adapter" if fingerprint is None else f"with the adapter {fingerprint[:16]}"

    for file, packet in zip(files, packets, strict=True):
        if packet.adapter_fingerprint != packets[0].adapter_fingerprint:
            raise Fault(
                f"{file.name} was packed {how(packet)}, and {files[0].name} {how(packets[0])}: packets that are used "
                "together share one adapter; pack them anew with one"
            )


def _check(files: list[Path], packets: list[Packet], model: Any) -> None:
    """Refuses packets that do not belong to `model` as it is patched, by their file's name."""
    from kvspeed.packet.belongs import check_blocks

    for file, packet in zip(files, packets, strict=True):
        try:
            check_blocks([packet], None, model)
        except ValueError as error:
            raise Fault(f"{file.name}: {str(error).removeprefix('packet 0: ')}") from error


def _answer(
    model: Any, tokenizer: Any, question: str, packets: list[Packet], mode: str, max_new_tokens: int
) -> dict[str, Any]:
    from kvspeed import generate
    from kvspeed.eval.compare import INSTRUCTION, SEPARATOR

    with progress("answering"):
        answer, stats = generate(
            model,
            tokenizer,
            question,
            packets,
            preamble=INSTRUCTION,
            separator=SEPARATOR,
            mode=mode,
            max_new_tokens=max_new_tokens,
            return_stats=True,
        )
    return {
        "question": question,
        "answer": answer.strip(),
        "mode": mode,
        "prefix_tokens": stats.prefix_tokens,
        "question_tokens": stats.question_tokens[0],
        "new_tokens": stats.new_tokens[0],
        "ttft_s": stats.ttft_s,
        "time_per_token_s": stats.time_per_token_s or None,
        "kv_bytes": stats.kv_bytes,
    }
