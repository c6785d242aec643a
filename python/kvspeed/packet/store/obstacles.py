# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What may lie under a packet's name in a folder besides a file: a folder, a link that leads nowhere, a pipe.

Such a thing is no packet and hides none, so that it is never counted; checking names it, and adding replaces it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvspeed.packet.store.errors import NameTakenError

__all__ = ["obstacle", "remove"]


def obstacle(path: Path) -> str | None:
    """What is at `path`, in words, where that is neither nothing nor a file, nor a link to one.

    Raises:
        OSError: the folder around it cannot be read.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISLNK(mode):
        try:
            mode = os.stat(path).st_mode
        except OSError as error:  # it leads to nothing, to itself, or to where this user may not look
            return f"a link that cannot be followed ({error.strerror})"
        return None if stat.S_ISREG(mode) else "a link to something that is no file"
    return None if stat.S_ISREG(mode) else "no regular file"


def remove(path: Path) -> None:
    """Remove what has a packet's name, a packet or not; a folder only if it is empty, since it is not the store's.

    Raises:
        FileNotFoundError: there is nothing.
        NameTakenError: it is a folder with something in it.
        OSError: it cannot be removed.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise NameTakenError(
            f"{path} is a folder with something in it, where a packet belongs: move it elsewhere, or empty it"
        ) from error
