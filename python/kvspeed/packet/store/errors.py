# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What goes wrong with a place where packets are kept, each as one sentence that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from kvspeed.packet.tensorfile import TensorFileError, brief

__all__ = [
    "DamagedPacketError",
    "MissingPacketError",
    "NameTakenError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "reaching",
]


class StoreError(OSError):
    """The place cannot be read or written; nothing that it held was lost."""


class StoreFullError(StoreError):
    """There is no room: the disk is full, or `disk_limit` is."""


class StoreReadOnlyError(StoreError):
    """The place may be read and not written."""


class NameTakenError(StoreError):
    """Something that is not the store's, and that it does not remove, has the name of a packet."""


class MissingPacketError(KeyError):
    """There is no such packet for this store."""

    def __str__(self) -> str:  # KeyError would quote the sentence
        return str(self.args[0]) if self.args else ""


class DamagedPacketError(TensorFileError):
    """A packet's file is truncated or altered, or is another packet's, and could not be rebuilt from what it holds."""


@contextmanager
def reaching(place: str, doing: str) -> Iterator[None]:
    """Turns every error of the system or of a network client into a `StoreError` that names `place` and `doing`.

    FileNotFoundError passes, since a missing file is an answer; so do `StoreError`s, which say enough.
    """
    try:
        yield
    except (StoreError, FileNotFoundError, TensorFileError):
        raise
    except OSError as error:
        raise _worded(error, place, doing) from error
    except Exception as error:  # clients of object stores have exceptions of their own
        raise StoreError(
            f"cannot {doing} {place} ({_first(error)}): check the address, the network and the credentials"
        ) from error


def _worded(error: OSError, place: str, doing: str) -> StoreError:
    found: StoreError
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = StoreFullError(
            f"cannot {doing} {place}: there is no space left on it; free some, or give the store a disk_limit. What "
            "was stored before is whole"
        )
    elif error.errno == errno.EROFS or isinstance(error, PermissionError):
        found = StoreReadOnlyError(
            f"cannot {doing} {place}: it is read-only, or this user may not write there ({_first(error)})"
        )
    elif isinstance(error, (NotADirectoryError, FileExistsError)):
        found = StoreError(f"cannot {doing} {place}: a file is in the way where a folder is needed ({_first(error)})")
    else:
        found = StoreError(f"cannot {doing} {place} ({_first(error)}): check the address, the network and the disk")
    found.errno = error.errno
    return found


def _first(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return brief(text or type(error).__name__)
