# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets at a URL, through fsspec: S3 and its like, memory://, and whatever else fsspec has a package for.

Object stores publish an object when all of it has arrived, so a packet is put under its name at once. On other file
systems it is put under a temporary name and moved.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import torch

from kvspeed.packet.store.backend import ENDING, Entry
from kvspeed.packet.store.errors import StoreError, reaching
from kvspeed.packet.tensorfile import Encoded, brief

__all__ = ["FsspecBackend"]

# protocols under which a written object appears whole or not at all
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "tos", "oci", "memory", "hf", "r2"}
_TEMPORARY = ".tmp"
_PARALLEL = 8  # packets fetched at once


class FsspecBackend:
    """See `backend.Backend` for the methods.

    Args:
        url: the root.
        options: for fsspec (`key`, `secret`, `endpoint_url`, ...).
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        import fsspec

        self.place = url
        try:
            # listings that fsspec keeps would hide what other processes do
            self.fs, root = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"path_or_url: {url} cannot be opened ({brief(error)}); give a folder, or a URL that fsspec knows"
            ) from error
        except Exception as error:
            raise StoreError(f"cannot open {url} ({brief(error)}): check the address and the options") from error
        self.root = re.sub("(?<!:)//+", "/", root.rstrip("/"))  # listings do not find what is below an empty name
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else tuple(self.fs.protocol)
        self._whole = bool(_WHOLE & set(protocols))
        self._fetched: dict[str, bytes] = {}

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    @contextmanager
    def _reaching(self, doing: str) -> Iterator[None]:
        with reaching(self.place, doing):
            yield

    # ---- small files and names ---------------------------------------------------------------------------------

    def read_small(self, name: str) -> bytes | None:
        try:
            with self._reaching("read"):
                return self.fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write_small(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def folders(self) -> list[str]:
        return sorted(_last(found["name"]) for found in self._list("") if found["type"] == "directory")

    def is_empty(self) -> bool:
        return all(_last(entry["name"]).endswith(_TEMPORARY) for entry in self._list(""))

    def entries(self, folder: str) -> Iterator[Entry]:
        for found in self._list(folder):
            name = _last(found["name"])
            if found["type"] == "file" and name.endswith(ENDING) and not name.startswith("."):
                yield Entry(f"{folder}/{name}", int(found["size"] or 0), _modified(found))

    def obstacles(self, folder: str) -> list[Entry]:
        return []  # what an object store calls a folder is in no object's way

    def entry(self, name: str) -> Entry | None:
        try:
            with self._reaching("read"):
                found = self.fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return Entry(name, int(found["size"] or 0), _modified(found)) if found["type"] == "file" else None

    def _list(self, folder: str) -> list[dict[str, Any]]:
        try:
            with self._reaching("read"):
                self.fs.invalidate_cache()
                found = self.fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        own = self._path(folder).strip("/")
        return [entry for entry in found if entry["name"].strip("/") != own]

    # ---- packets -----------------------------------------------------------------------------------------------

    def write(self, name: str, encoded: Encoded) -> None:
        self._put(name, b"".join(encoded.pieces()))

    def read(self, name: str) -> tuple[torch.Tensor, Any]:
        data = self._fetched.pop(name, None)
        if data is None:
            with self._reaching(f"read {name} of"):
                data = self.fs.cat_file(self._path(name))
        buffer = bytearray(data)
        return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8), None

    def read_start(self, name: str, count: int) -> bytes:
        with self._reaching(f"read {name} of"):
            try:
                return self.fs.cat_file(self._path(name), start=0, end=count)
            except FileNotFoundError:
                raise
            except Exception:
                if self.fs.info(self._path(name))["size"]:
                    raise
                return b""  # S3 refuses any range of an empty object

    def prefetch(self, names: list[str]) -> None:
        self._fetched.clear()
        paths = {self._path(name): name for name in names[:_PARALLEL]}
        if len(paths) < 2:
            return
        with suppress(Exception):  # whatever is wrong is said by `read`
            found = self.fs.cat(list(paths), on_error="omit")
            self._fetched = {paths[path]: data for path, data in found.items() if path in paths}

    def delete(self, name: str) -> bool:
        try:
            with self._reaching(f"remove {name} from"):
                if not self.fs.exists(self._path(name)):  # some object stores remove what is not there
                    return False
                self.fs.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def touch(self, name: str) -> bool:
        return True

    # ---- several processes -------------------------------------------------------------------------------------

    @contextmanager
    def claim(self, name: str, wait: bool) -> Iterator[bool]:
        yield True  # two processes may make the same packet, and either may stay

    def litter(self, grace_s: float) -> list[Entry]:
        newest = time.time_ns() - int(grace_s * 1e9)
        found = []
        for folder in self.folders() if not self._whole else []:
            for entry in self._list(folder):
                written = _modified(entry) or time.time_ns()
                if entry["type"] == "file" and _last(entry["name"]).endswith(_TEMPORARY) and written <= newest:
                    found.append(Entry(f"{folder}/{_last(entry['name'])}", int(entry["size"] or 0), written))
        return found

    def remove_litter(self, grace_s: float) -> list[Entry]:
        return [entry for entry in self.litter(grace_s) if self.delete(entry.name)]

    def remove_empty(self, folder: str) -> None:
        left = [_last(entry["name"]) for entry in self._list(folder)]
        if left and left != ["recipe.json"]:
            return
        # not all that is below, among which a packet may have come since
        with suppress(Exception):
            self.fs.rm_file(self._path(f"{folder}/recipe.json"))
        with suppress(Exception):
            self.fs.rmdir(self._path(folder))

    # ---- writing -----------------------------------------------------------------------------------------------

    def _put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._reaching("write to"):
            try:
                if self._whole:
                    self.fs.pipe_file(path, data)
                    return
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                temporary = f"{path}-{secrets.token_hex(4)}{_TEMPORARY}"
                try:
                    self.fs.pipe_file(temporary, data)
                    self.fs.mv(temporary, path)
                except BaseException:
                    with suppress(Exception):
                        self.fs.rm_file(temporary)
                    raise
            except FileNotFoundError as error:  # here it is no answer: the bucket is missing
                raise StoreError(f"cannot write to {self.place} ({brief(error)}): is there such a bucket?") from error


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _modified(found: dict[str, Any]) -> int:
    """When it was written, as far as the place says."""
    for key in ("LastModified", "mtime", "last_modified", "created", "updated"):
        value = found.get(key)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    return 0
