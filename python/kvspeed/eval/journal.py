# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Records of an evaluation on disk, one JSON line each, so that an interrupted run goes on where it stopped.

The first line says what the records were made with (model, adapters, prompt). A line that was cut off by a kill is
dropped; every other line that is no record is an error. Several processes may append to one file: a line is one write.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvspeed.eval.fields import Fields, wrong_field

__all__ = ["Journal", "Record"]

Record = dict[str, Any]
_KEY = ("task", "digest", "method", "adapter", "max_new_tokens")


class Journal:
    """A file of records.

    Args:
        path: the file; made with the first record.
        header: JSON-able; what all records have in common. A file with another header is refused.
        fields: what every record must hold beside its key.

    Raises:
        ValueError: the file belongs to another run or is damaged; the message names the difference or the line.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any], fields: Fields | None = None) -> None:
        self.path, self.header, self.fields = Path(path), json.loads(json.dumps(header)), fields or {}
        self._records: dict[tuple[Any, ...], Record] = {}
        if self.path.exists():
            for record in self._read():
                self._records[self._key(record)] = record

    def get(self, **key: Any) -> Record | None:
        """The record of a task, sample digest, method, adapter and max_new_tokens; None where there is none."""
        return self._records.get(self._key(key))

    def add(self, record: Record) -> None:
        """Appends a record, on disk when this returns; it replaces one with the same key.

        Raises:
            OSError: it cannot be written; the file is as it was, or has half a line that the next reader drops.
        """
        key = self._key(record)
        with _locked(self.path) as file:
            lines = json.dumps(record, ensure_ascii=False) + "\n"
            size = os.fstat(file).st_size
            if size and b"\n" not in os.pread(file, size, 0):  # a header that was cut off
                os.ftruncate(file, 0)
                size = 0
            if size == 0:
                lines = json.dumps({"header": self.header}, ensure_ascii=False) + "\n" + lines
            elif os.pread(file, 1, size - 1) != b"\n":  # half a line of a process that was killed
                lines = "\n" + lines
            data = lines.encode()
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        self._records[key] = record

    def __len__(self) -> int:
        return len(self._records)

    @staticmethod
    def _key(record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record[name] for name in _KEY)

    def _read(self) -> Iterator[Record]:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        lines = text.split("\n")
        if len(lines) == 1:
            return  # not even the header is whole
        for number, line in enumerate(lines, 1):
            if number > 1 and not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                if number > 1 and (number == len(lines) or line.startswith("{")):
                    continue  # cut off in the middle; that question is asked again
                entry = None
            if number == 1:
                self._check(entry)
            elif _is_record(entry, self.fields):
                yield entry
            else:
                raise ValueError(
                    f"{self.path}, line {number}: is no record of an evaluation; move the file away or name another"
                )

    def _check(self, entry: Any) -> None:
        found = entry.get("header") if isinstance(entry, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"{self.path}, line 1: is no header of an evaluation; move the file away or name another")
        for name in sorted(set(found) | set(self.header)):
            if found.get(name) != self.header.get(name):
                raise ValueError(
                    f"{self.path} belongs to another run: its {name} is {found.get(name)!r:.120}, and now it is "
                    f"{self.header.get(name)!r:.120}; name another file, or start anew with --restart"
                )


def _is_record(entry: Any, fields: Fields) -> bool:
    """Whether a line has its key, and what is made of records."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name, []), (str, int, type(None))) for name in _KEY):
        return False
    return wrong_field(entry, fields) is None


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)
