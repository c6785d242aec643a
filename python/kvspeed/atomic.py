# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Writing a file so that a reader sees the old one or the new one, and never a part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write to; at the end of the block that file takes the place of `path`.

    Where the block fails the new file goes, and what was at `path` stays.

    Raises:
        OSError: the folder is missing or cannot be written, or `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {target}: it is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no folder {target.parent}")
    part = target.parent / f".kvspeed-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        yield part
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
