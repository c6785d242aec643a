# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the beginning of a packet's file tells, damaged or not: its text, which the id confirms or refutes."""

from __future__ import annotations

from typing import Any

from kvspeed.packet.store.backend import Entry
from kvspeed.packet.store.fetch import Reader
from kvspeed.packet.store.recipe import Recipe
from kvspeed.packet.tensorfile import TensorFileError

__all__ = ["check_head", "text_in_head"]


def text_in_head(reader: Reader, recipe: Recipe | None, id: str, name: str) -> tuple[str, tuple[int, ...]] | None:
    """`(text, token ids)` of the file at `name`, None where they are not the ones that `id` was made from.

    Raises:
        FileNotFoundError, TensorFileError: it is not there, or not even its beginning is whole.
        StoreError: the place cannot be read.
    """
    return _confirmed(reader.description(name)[0], recipe, id)


def check_head(reader: Reader, recipe: Recipe | None, id: str, entry: Entry) -> None:
    """Refuse a file that could not be rebuilt when its numbers are read: a cut one, or one that lost its text.

    Only its beginning is read. Whatever else is damaged is found, and rebuilt from the text, by who reads the whole.

    Raises:
        FileNotFoundError, StoreError: as in `text_in_head`.
        TensorFileError: it is such a file.
    """
    source = f"{reader.backend.place.rstrip('/')}/{entry.name}"
    header, size = reader.description(entry.name)
    if size != entry.size:
        raise TensorFileError(f"{source} is truncated")
    if _confirmed(header, recipe, id) is None:
        raise TensorFileError(f"{source} was altered or damaged (its text is not the one of its name)")


def _confirmed(header: dict[str, Any], recipe: Recipe | None, id: str) -> tuple[str, tuple[int, ...]] | None:
    text, ids = header.get("text"), header.get("token_ids")
    if recipe is None or not isinstance(text, str) or not isinstance(ids, list):
        return None
    return (text, tuple(ids)) if recipe.id_of(text, tuple(ids)) == id else None
