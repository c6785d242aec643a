# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed store add | ls | rm | verify | gc`: packets by content, in a folder or at a URL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Adapter,
    Debug,
    DType,
    Fault,
    ModelName,
    check_adapter_file,
    check_depth,
    counted,
    guarded,
    load_model,
    progress,
    soft_tokens,
    stderr,
    stdout,
)
from kvspeed.cli.stored import chosen_entries
from kvspeed.cli.texts import read_texts

if TYPE_CHECKING:
    from kvspeed.packet.store import PacketStore
    from kvspeed.packet.store.backend import Entry
    from kvspeed.packet.store.reports import StoreCheck

__all__ = ["app"]

app = typer.Typer(
    help="Packets by content: each text computed once, in a folder or at a URL (s3://..., with the settings of the "
    "environment).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Place = Annotated[str, typer.Argument(metavar="STORE", help="A folder, or a URL such as s3://bucket/folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Depth = Annotated[int | None, typer.Option("--k", help="Layers to compute and store (SPEED).")]
PressName = Annotated[
    str | None,
    typer.Option(
        "--press", help="Remove tokens: random-30, tova-30, cur-30, leverage-30 (per cent); -whole: soft ones too."
    ),
]
Storage = Annotated[
    str | None, typer.Option("--storage", help="Keep numbers as bf16, f16, int8 or fp8. Default: as computed.")
]


@app.command()
@guarded
def add(
    store: Place,
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8, one packet each.", show_default=False)],
    model: ModelName = None,
    k: Depth = None,
    adapter: Adapter = None,
    press: PressName = None,
    storage: Storage = None,
    disk_limit: Annotated[
        str | None, typer.Option("--disk-limit", help="E.g. 2GiB: the least recently used packets make room.")
    ] = None,
    as_json: AsJson = False,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Compute the packets of text files that are not in the store yet; an interrupted run can be repeated."""
    texts = read_texts(files)
    _check_place(store, disk_limit)
    opened, document_text = _open_with_model(store, model, dtype, k, adapter, press, storage, disk_limit)
    documents = [document_text(text.text) for text in texts]
    before = {opened.id_of(document) for document in documents} & set(opened)
    with _bar("packing") as report:
        ids = opened.add(documents, progress=report)
    lines = [
        {"id": id, "file": str(text.path), "state": "kept" if id in before else "written"}
        for id, text in zip(ids, texts, strict=True)
    ]
    if as_json:
        print(json.dumps({"store": opened.place, "packets": lines, **asdict(opened.counters)}, indent=2))
        return
    for line in lines:
        stdout().print(f"{line['state']}  {line['id']}  {line['file']}", soft_wrap=True, markup=False)


@app.command()
@guarded
def ls(
    store: Place,
    recipes: Annotated[bool, typer.Option("--recipes", help="Only how packets are made, not each packet.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the packets, by how they were made (model, adapter, depth, press, dtype), with their bytes."""
    opened = _open(store)
    found = opened.recipes()
    by_recipe: dict[str, list[Entry]] = {name: [] for name in found}
    for entry in opened.entries():
        by_recipe.setdefault(entry.folder, []).append(entry)
    stats = opened.stats()
    report: dict[str, Any] = {"store": opened.place, "packets": stats.packets, "bytes": stats.bytes}
    report |= {"unfinished": stats.unfinished, "unfinished_bytes": stats.unfinished_bytes, "recipes": []}
    for name, entries in sorted(by_recipe.items()):
        recipe = found.get(name)
        made = asdict(recipe) if recipe is not None else None
        size = sum(entry.size for entry in entries)
        kept: dict[str, Any] = {"name": name, "made": made, "packets": len(entries), "bytes": size}
        if not recipes:
            kept["list"] = [_row(opened, entry) for entry in sorted(entries, key=lambda e: (-e.used, e.name))]
        report["recipes"].append(kept)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_list(report, {name: str(recipe or "of an unknown making") for name, recipe in found.items()})


@app.command()
@guarded
def rm(
    store: Place,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Packets: their ids, or enough of the first digits.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="All packets of this recipe (see ls); with ids, only those.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Remove packets. All are looked for before the first is removed."""
    opened = _open(store)
    chosen = chosen_entries(opened, ids or [], recipe)
    if not ids and recipe is None:
        raise Fault("name the packets to remove by their ids, or a recipe with --recipe")
    size = 0
    for entry in chosen:
        if opened.remove(entry):  # else another process was faster
            size += entry.size
    opened.gc()
    stdout().print(f"removed {counted(len(chosen), 'packet')}, {_size(size)}")


@app.command()
@guarded
def verify(
    store: Place,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make damaged packets of this model (and adapter, k, ...) anew.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged packets that are not rebuilt.")] = False,
    model: ModelName = None,
    k: Depth = None,
    adapter: Adapter = None,
    press: PressName = None,
    storage: Storage = None,
    as_json: AsJson = False,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Read every packet whole and compare it with its checksum and its name; exit code 1 where one stays damaged."""
    if not rebuild and any(value is not None for value in (model, k, adapter, press, storage, dtype)):
        raise Fault("--model, --k, --adapter, --press, --storage and --dtype say how to rebuild: add --rebuild")
    _open(store)
    if rebuild:
        opened, _ = _open_with_model(store, model, dtype, k, adapter, press, storage, None)
    else:
        opened = _open(store)
    with _bar("checking") as report:
        check = opened.verify(rebuild=rebuild, remove=remove, progress=report)
    if as_json:
        print(json.dumps({**asdict(check), "ok": check.ok}, indent=2))
    else:
        for problem in check.problems:
            stdout().print(f"{problem.done}  {problem.id}  {problem.reason}", soft_wrap=True, markup=False)
        stdout().print(f"{counted(check.packets, 'packet')}, {_size(check.bytes)}: {_verdict(check)}")
    if not check.ok:
        raise typer.Exit(1)


@app.command()
@guarded
def gc(
    store: Place,
    limit: Annotated[
        str | None, typer.Option("--limit", help="E.g. 2GiB: remove the least recently used packets beyond it.")
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for which unfinished files are left alone.")
    ] = 60.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tidy up: what killed processes left, packets beyond a limit, recipes without packets."""
    opened = _open(store)
    tidied = opened.gc(limit=limit, grace_s=grace)
    if as_json:
        print(json.dumps(asdict(tidied), indent=2))
        return
    stdout().print(
        f"removed {counted(tidied.unfinished, 'unfinished file')} ({_size(tidied.unfinished_bytes)}), "
        f"{counted(tidied.evicted, 'packet')} ({_size(tidied.evicted_bytes)}), "
        f"{counted(tidied.folders, 'empty recipe')}"
    )


# ---- inside ----------------------------------------------------------------------------------------------------------


def _open(place: str) -> PacketStore:
    """The store at `place`, to be looked at.

    Raises:
        Fault: there is none.
    """
    from kvspeed.packet.store import PacketStore

    opened = PacketStore(place)
    if not opened.exists:
        raise Fault(f"{place}: there is no packet store; make one with kvspeed store add {place} FILES")
    return opened


def _check_place(place: str, disk_limit: str | None) -> None:
    """Refuses what is no store, and no place for one, before a model is loaded."""
    from kvspeed.packet.store import PacketStore

    PacketStore(place, disk_limit=disk_limit)


def _open_with_model(
    place: str,
    model: str | None,
    dtype: str | None,
    k: int | None,
    adapter: Path | None,
    press: str | None,
    storage: str | None,
    disk_limit: str | None,
) -> tuple[PacketStore, Callable[[str], str]]:
    """The store, with the model that makes its packets; and what makes a document of a text."""
    from kvspeed import patch_model
    from kvspeed.packet.press import press_from_name
    from kvspeed.packet.quantise import storage_dtype
    from kvspeed.packet.store import PacketStore
    from kvspeed.samples import document_text

    chosen = press_from_name(press) if press is not None else None
    try:
        storage_dtype(storage)
    except ValueError as error:
        raise Fault(f"--storage: {str(error).removeprefix('dtype: ')}") from error
    check_adapter_file(adapter)
    network, tokenizer, _ = load_model(model, dtype)
    check_depth(k, network)
    soft = soft_tokens(adapter, model, network)
    patch_model(network, k)
    options: dict[str, Any] = {"adapter": soft, "press": chosen, "dtype": storage, "disk_limit": disk_limit}
    return PacketStore(place, model=network, tokenizer=tokenizer, **options), document_text


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for what reports (done, total)."""
    with progress(what) as advance:
        last = 0

        def report(done: int, total: int) -> None:
            nonlocal last
            for number in range(last + 1, done + 1):
                advance(f"{number} of {total}")
            last = done

        yield report


def _verdict(check: StoreCheck) -> str:
    """How a store stands after it was checked: "1 packet rebuilt", "all whole"."""
    done = [problem.done.replace("found", "damaged") for problem in check.problems]
    return ", ".join(f"{counted(done.count(what), 'packet')} {what}" for what in sorted(set(done))) or "all whole"


def _row(opened: PacketStore, entry: Entry) -> dict[str, Any]:
    """One packet for people; a damaged one says so."""
    from kvspeed.packet.tensorfile import TensorFileError, brief

    row: dict[str, Any] = {"id": entry.id, "bytes": entry.size, "used": entry.used / 1e9 if entry.used else None}
    try:
        described = opened.describe(entry.id)
        tokens = described["header"] + len(described["token_ids"]) + described["trailer"]
        return row | {"tokens": tokens, "text": brief(described["text"], 60)}
    except (KeyError, TypeError, TensorFileError):
        return row | {"tokens": None, "text": "damaged: see kvspeed store verify"}


def _print_list(report: dict[str, Any], names: dict[str, str]) -> None:
    out = stdout()
    for kept in report["recipes"]:
        head = f"{kept['name']}  {names.get(kept['name'], '')}: {counted(kept['packets'], 'packet')}, "
        out.print(head + _size(kept["bytes"]), soft_wrap=True, markup=False)
        for row in kept.get("list", []):
            used = datetime.fromtimestamp(row["used"]).strftime("%Y-%m-%d %H:%M") if row["used"] else ""
            tokens = f"{row['tokens']} tokens" if row["tokens"] is not None else ""
            line = f"  {row['id']}  {tokens:>12}  {_size(row['bytes']):>9}  {used:16}  {_printable(row['text'])}"
            out.print(line, soft_wrap=True, markup=False)
    out.print(f"{counted(report['packets'], 'packet')}, {_size(report['bytes'])}")
    if report["unfinished"]:
        stderr().print(
            f"and {counted(report['unfinished'], 'unfinished file')}, {_size(report['unfinished_bytes'])}: being "
            "written, or left by a killed process (kvspeed store gc removes those)",
            soft_wrap=True,
        )


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "�" for char in text)


def _size(count: float) -> str:
    from kvspeed.packet.store.size import show_size

    return show_size(count)
