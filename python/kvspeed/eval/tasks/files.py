# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Entries of datasets' own files (a JSON array, JSON Lines) and of the `datasets` library, with the place of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvspeed.eval.tasks.names import check_split, rng_of
from kvspeed.samples import Sample, read_text

__all__ = ["HINT", "STEPS", "drawn", "entries_of", "text_of", "texts_of"]

_HUB_SPLIT = {"train": "train", "dev": "validation", "test": "validation"}

HINT = " Answer with a few words."
STEPS = " Think in short steps, then write 'Answer:' and the answer in a few words."

Place = tuple[str, dict[str, Any]]  # where an entry stands, for messages; the entry


def entries_of(path: str | None, name: str | None, config: str | None, split: str) -> Iterator[Place]:
    """Entries of the dataset's own file, or of a dataset's split in the `datasets` library.

    Raises:
        ImportError, OSError, ValueError: as `wanted_file`, `file_entries` and `hub_entries`.
    """
    file = wanted_file(path, name)
    check_split(split)
    return file_entries(file) if file is not None else hub_entries(str(name), config, _HUB_SPLIT[split])


def wanted_file(path: str | None, name: str | None) -> Path | None:
    """The file, or None where a dataset's name is given instead.

    Raises:
        ValueError: both or none are given.
    """
    if (path is None) == (name is None):
        raise ValueError("give either path= (the dataset's own file) or name= (of the datasets library)")
    return None if path is None else Path(path).expanduser()


def file_entries(path: Path) -> Iterator[Place]:
    """Entries of a JSON array or of JSON Lines, whichever the file is.

    Raises:
        OSError: it cannot be read.
        ValueError: it is neither; the message names the line.
    """
    text = read_text(path, "JSON is expected")
    if text.lstrip()[:1] == "[":
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: is no JSON ({error.msg})") from None
        except RecursionError:
            raise ValueError(f"{path}: is nested too deeply to be a dataset") from None
        places = iter([(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1)])
    else:
        places = _lines(path, text)
    for where, entry in places:
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(entry).__name__}")
        yield where, entry


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: is no JSON ({error.msg})") from None
            except RecursionError:
                raise ValueError(f"{path}, line {number}: is nested too deeply to be an entry") from None


def hub_entries(name: str, config: str | None, split: str) -> Iterator[Place]:
    """Entries of a dataset of the `datasets` library: from a folder, its cache or the hub.

    Raises:
        ImportError: the library is not installed.
        ValueError: it cannot load that dataset.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(
            "name= needs the datasets library, which is not installed: pip install datasets, or give path= with the "
            "dataset's own file"
        ) from None
    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise ValueError(f"name: the datasets library cannot load {name!r}, split {split!r} ({words})") from error
    for number, row in enumerate(rows):
        yield f"{name} {split}, row {number}", row


def drawn(
    entries: Iterable[Place], make: Callable[[dict[str, Any], str], Sample | None], count: int, *key: object
) -> list[Sample]:
    """`count` samples of all entries, drawn without replacement; more of them begin with the same ones.

    Args:
        entries: with the place of each.
        make: a sample of an entry and a name for it; None leaves it out (questions without an answer).
        count: how many, or as many as there are.
        *key: decides which and in what order.

    Raises:
        ValueError: an entry has the wrong format, or none is left; the message names the place.
    """
    samples: list[Sample] = []
    for number, (where, entry) in enumerate(entries):
        try:
            sample = make(entry, f"{number:06d}")
        except (ValueError, TypeError, KeyError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{where}: {reason}") from None
        if sample is not None:
            samples.append(sample)
    if not samples:
        raise ValueError("the dataset holds no questions with an answer")
    rng_of(*key).shuffle(samples)
    return samples[:count]


def text_of(entry: dict[str, Any], field: str) -> str:
    """A string field that is not empty."""
    value = entry[field]
    if not isinstance(value, str):
        raise TypeError(f"{field}: expected a string, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{field}: is empty")
    return value


def texts_of(value: Any, what: str) -> list[str]:
    """A list of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{what}: expected a list of strings, got {value!r:.60}")
    return list(value)
