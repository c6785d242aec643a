# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""From the address of a store to its place."""

from __future__ import annotations

import os
from typing import Any

from kvspeed.packet.store.backend import Backend
from kvspeed.packet.store.local import LocalBackend

__all__ = ["open_backend"]


def open_backend(url: str | os.PathLike[str], options: dict[str, Any] | None) -> Backend:
    """The place that `url` names: a path, or anything that fsspec knows ("s3://bucket/folder", "memory://x").

    Raises:
        TypeError: it is neither a string nor a path.
        ValueError: fsspec does not know it, or the package for it is missing.
    """
    if not isinstance(url, (str, os.PathLike)):
        raise TypeError(f"path_or_url: expected a path or a URL, got {type(url).__name__}")
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"path_or_url: got {text!r}; give a folder, or a URL such as s3://bucket/folder")
    protocol, separator, rest = text.partition("://")
    if not separator:
        return LocalBackend(text)
    if protocol in ("file", "local"):
        return LocalBackend(rest)
    from kvspeed.packet.store.remote import FsspecBackend

    return FsspecBackend(text, options or {})
