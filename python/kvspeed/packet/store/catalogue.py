# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a place holds: the mark that makes it a store, a folder for each recipe, packets in these.

kvspeed-store.json
3f0c.../recipe.json
3f0c.../<id>.packet.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvspeed.packet.store.backend import ENDING, Backend, Entry
from kvspeed.packet.store.recipe import Recipe, is_id, is_recipe_name
from kvspeed.packet.store.tiers import all_entries
from kvspeed.packet.tensorfile import brief

__all__ = ["MARK", "RECIPE", "Catalogue"]

MARK, RECIPE = "kvspeed-store.json", "recipe.json"
FORMAT = "kvspeed.store"
VERSION = 1


class Catalogue:
    """The contents of `backend`.

    Raises:
        ValueError: there is something else than a store.
        StoreError: the place cannot be reached.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._recipes: dict[str, Recipe] = {}
        data = backend.read_small(MARK)
        if data is None and not backend.is_empty():
            data = backend.read_small(MARK)  # the mark is written first: another process may have just begun the store
            if data is None:
                raise ValueError(
                    f"{backend.place} holds other things and is no packet store (it has no {MARK}): give an empty or "
                    "new folder, or a store"
                )
        self.exists = data is not None
        if data is not None:
            self._check_mark(data)

    def _check_mark(self, data: bytes) -> None:
        try:
            found = json.loads(data)
            version = found["version"] if found["format"] == FORMAT else None
        except (ValueError, KeyError, TypeError, RecursionError):
            version = None
        if type(version) is not int:
            raise ValueError(f"{self.backend.place}/{MARK} is no mark of a packet store: remove it if this is one")
        if version != VERSION:
            raise ValueError(
                f"{self.backend.place} is a packet store of version {version}, and this kvspeed knows version "
                f"{VERSION}: update kvspeed, or use another folder"
            )

    def prepare(self, recipe: Recipe) -> None:
        """Make the place ready for packets of `recipe`.

        Raises:
            StoreError: it cannot be written.
        """
        if self.backend.read_small(MARK) is None:  # a new store, or one whose folder was removed since
            self.backend.write_small(MARK, json.dumps({"format": FORMAT, "version": VERSION}).encode())
            self.exists = True
        self.forget(recipe.name)  # another process that tidied may have removed it
        if self.recipe(recipe.name) is None:
            self.backend.write_small(f"{recipe.name}/{RECIPE}", recipe.to_json())
            self._recipes[recipe.name] = recipe

    def recipe(self, name: str) -> Recipe | None:
        """The recipe of a folder; None where there is none, it cannot be read, or was altered."""
        if name not in self._recipes:
            data = self.backend.read_small(f"{name}/{RECIPE}") if is_recipe_name(name) else None
            try:
                found = Recipe.from_json(data) if data is not None else None
            except ValueError:
                return None
            if found is None or found.name != name:  # packets are not held to what was not said of them
                return None
            self._recipes[name] = found
        return self._recipes[name]

    def forget(self, name: str) -> None:
        """Look at a recipe's folder anew."""
        self._recipes.pop(name, None)

    def recipes(self) -> dict[str, Recipe | None]:
        """All folders of packets, with what their packets have in common."""
        return {name: self.recipe(name) for name in self.backend.folders() if is_recipe_name(name)}

    def entries(self, recipe: Recipe | None) -> Iterator[Entry]:
        """The packets of one recipe, of all where it is None."""
        if recipe is None:
            return iter(all_entries(self.backend))
        return (entry for entry in self.backend.entries(recipe.name) if is_id(entry.id))

    def obstacles(self, recipe: Recipe | None) -> list[Entry]:
        """What is no file and has a packet's name, of one recipe, of all where it is None."""
        folders = [recipe.name] if recipe is not None else [*filter(is_recipe_name, self.backend.folders())]
        return [entry for folder in folders for entry in self.backend.obstacles(folder) if is_id(entry.id)]

    def find(self, id: str, recipe: Recipe | None) -> Entry | None:
        """The file of a packet, looked for under all recipes where `recipe` is None."""
        names = (
            [recipe.name] if recipe is not None else [name for name in self.backend.folders() if is_recipe_name(name)]
        )
        for name in names:
            entry = self.backend.entry(f"{name}/{id}{ENDING}")
            if entry is not None:
                return entry
        return None

    def missing(self, id: str, recipe: Recipe | None) -> str:
        """Why there is no packet `id` for `recipe`, in words."""
        elsewhere = self.find(id, None) if recipe is not None else None
        if elsewhere is not None and recipe is not None and elsewhere.folder != recipe.name:  # else just added again
            other = self.recipe(elsewhere.folder)
            return (
                f"packet {id} of {self.backend.place} was made otherwise ({brief(other)}) than this store makes them "
                f"({brief(recipe)}): open the store as it was made, or add the text here"
            )
        return f"there is no packet {id} in {self.backend.place}: it was never added, or removed since; add its text"
