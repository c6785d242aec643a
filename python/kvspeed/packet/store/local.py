# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A folder of packets on this machine or a mounted file system, safe under several processes that may be killed.

A packet is written under a temporary name beside its place, made durable and renamed: its name exists with all of its
bytes or not at all. A writer holds an advisory lock (flock) on what it writes; the system drops the lock with the
process, so that what a killed writer left can be told from what is being written. Files are never changed in place:
whoever has mapped one keeps it, whatever happens to the name. The time of modification is when a packet was last used.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from kvspeed.packet.container import map_file
from kvspeed.packet.store.backend import ENDING, Entry
from kvspeed.packet.store.errors import StoreError, reaching
from kvspeed.packet.store.obstacles import obstacle, remove
from kvspeed.packet.tensorfile import Encoded, TensorFileError

try:
    import fcntl
except ImportError:  # Windows: no claims, and litter is told by its age alone
    fcntl = None  # type: ignore[assignment]

__all__ = ["LocalBackend"]

_TEMPORARY, _CLAIM = ".tmp", ".lock"
_POLL_S = 0.05
_ATTEMPTS = 5

Result = TypeVar("Result")


class LocalBackend:
    """See `backend.Backend` for the methods.

    Args:
        path: the root; made when the first packet is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.root = Path(path).expanduser().absolute()
        except RuntimeError as error:  # ~name of nobody
            raise ValueError(f"{path}: {error} Give another folder") from None
        self.place = str(self.root)
        with reaching(self.place, "read"):
            if self.root.exists() and not self.root.is_dir():
                raise NotADirectoryError(20, "Not a directory", self.place)

    # ---- small files and names ---------------------------------------------------------------------------------

    def read_small(self, name: str) -> bytes | None:
        try:
            with reaching(self.place, f"read {name} of"), open(self.root / name, "rb", opener=_open_at_once) as file:
                return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
        except FileNotFoundError:
            return None
        except StoreError:
            if (self.root / name).is_dir():
                return b""
            raise

    def write_small(self, name: str, data: bytes) -> None:
        self._write(self.root / name, lambda: [data])

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self._scan(self.root) if _is_folder(entry))

    def is_empty(self) -> bool:
        # hidden files do not count: another process may be making the store at this moment, or was killed at it
        return all(entry.name.startswith(".") for entry in self._scan(self.root))

    def entries(self, folder: str) -> Iterator[Entry]:
        for found in self._named(folder):
            with suppress(OSError):  # removed by another process since, or a link that leads nowhere
                status = found.stat()
                if stat.S_ISREG(status.st_mode):
                    yield Entry(f"{folder}/{found.name}", status.st_size, status.st_mtime_ns)

    def obstacles(self, folder: str) -> list[Entry]:
        with reaching(self.place, "read"):
            found = [entry.name for entry in self._named(folder) if obstacle(Path(entry.path)) is not None]
        return [Entry(f"{folder}/{name}", 0) for name in found]

    def _named(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """All that has a packet's name."""
        found = self._scan(self.root / folder)
        return (entry for entry in found if entry.name.endswith(ENDING) and not entry.name.startswith("."))

    def entry(self, name: str) -> Entry | None:
        path = self.root / name
        try:
            with reaching(self.place, "read"):
                try:
                    status = os.stat(path)
                except OSError:
                    if obstacle(path) is None:
                        raise
                    return None
        except FileNotFoundError:
            return None
        return Entry(name, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None

    def _scan(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        try:
            with reaching(self.place, "read"), os.scandir(folder) as found:
                entries = list(found)
        except FileNotFoundError:
            return
        yield from entries

    # ---- packets -----------------------------------------------------------------------------------------------

    def write(self, name: str, encoded: Encoded) -> None:
        self._write(self.root / name, encoded.pieces)

    def read(self, name: str) -> tuple[torch.Tensor, Any]:
        with self._opened(name) as file:
            status = os.fstat(file.fileno())
            data = map_file(file.fileno(), status.st_size, str(self.root / name))
        return data, (status.st_dev, status.st_ino, status.st_size)

    def read_start(self, name: str, count: int) -> bytes:
        with self._opened(name) as file:
            return file.read(count)

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        path = self.root / name
        with reaching(self.place, f"read {name} of"):
            try:
                file = open(path, "rb", opener=_open_at_once)
            except OSError:
                self._refuse_obstacle(path)
                raise
            with file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    self._refuse_obstacle(path)
                yield file

    @staticmethod
    def _refuse_obstacle(path: Path) -> None:
        what = obstacle(path)
        if what is not None:
            raise TensorFileError(f"{path} is {what}, where a packet's file belongs")

    def prefetch(self, names: list[str]) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        for name in names:
            with suppress(OSError):
                descriptor = _open_at_once(str(self.root / name), os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    def delete(self, name: str) -> bool:
        try:
            with reaching(self.place, f"remove {name} from"):
                remove(self.root / name)
        except FileNotFoundError:
            return False
        return True

    def touch(self, name: str) -> bool:
        now = time.time_ns()  # the kernel's own stamps are as coarse as its ticks
        try:
            os.utime(self.root / name, ns=(now, now))
        except FileNotFoundError:
            return False
        except OSError:  # read-only: then nothing is evicted from it either
            pass
        return True

    # ---- several processes -------------------------------------------------------------------------------------

    @contextmanager
    def claim(self, name: str, wait: bool) -> Iterator[bool]:
        path = self._beside(self.root / name, _CLAIM)
        with self._writing():
            descriptor = _again(lambda: self._lock(path, wait))
        if descriptor is None:
            yield False
            return
        try:
            yield True
        finally:
            # unlinked while it is locked, so that nobody can hold a lock on a name that is gone: see _lock
            with suppress(OSError):
                os.unlink(path)
            os.close(descriptor)

    def _lock(self, path: Path, wait: bool) -> int | None:
        """A descriptor of the locked file at `path`, or None where another has it and `wait` is False."""
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not _try_lock(descriptor):
                    locked = False
                else:
                    # the one who had it may have removed the name between our open and our lock
                    locked = _is_same_file(descriptor, path)
                    if locked:
                        return descriptor
                    os.close(descriptor)
                    continue
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if not wait:
                return None
            time.sleep(_POLL_S)

    def litter(self, grace_s: float) -> list[Entry]:
        return [entry for entry, _ in self._litter(grace_s, remove=False)]

    def remove_litter(self, grace_s: float) -> list[Entry]:
        return [entry for entry, removed in self._litter(grace_s, remove=True) if removed]

    def _litter(self, grace_s: float, *, remove: bool) -> Iterator[tuple[Entry, bool]]:
        newest = time.time_ns() - int(grace_s * 1e9)
        for folder in [self.root, *(self.root / name for name in self.folders())]:
            for found in self._scan(folder):
                if not (found.name.startswith(".") and found.name.endswith((_TEMPORARY, _CLAIM))):
                    continue
                try:
                    status = found.stat()
                    descriptor = os.open(found.path, os.O_RDWR)
                except OSError:  # gone, or not ours
                    continue
                try:
                    # whoever writes holds the lock; a moment passes between making a file and locking it
                    if status.st_mtime_ns > newest or not _try_lock(descriptor):
                        continue
                    removed = False
                    if remove and _is_same_file(descriptor, Path(found.path)):
                        with suppress(OSError):
                            os.unlink(found.path)
                            removed = True
                    name = str(Path(found.path).relative_to(self.root))
                    yield Entry(name, status.st_size, status.st_mtime_ns), removed
                finally:
                    os.close(descriptor)

    def remove_empty(self, folder: str) -> None:
        path = self.root / folder
        left = [entry.name for entry in self._scan(path)]
        recipe, kept = path / "recipe.json", b""
        if left == [recipe.name]:
            with suppress(OSError):
                kept = recipe.read_bytes()
                recipe.unlink()
        try:
            path.rmdir()
        except OSError:  # another process is using it
            if kept:
                self._write(recipe, lambda: [kept])

    # ---- writing -----------------------------------------------------------------------------------------------

    def _write(self, path: Path, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        with self._writing():
            _again(lambda: self._write_once(path, pieces()))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with reaching(self.place, "write to"):
                yield
        except FileNotFoundError as error:  # here it is no answer: the folder could not be made, however often tried
            found = StoreError(
                f"cannot write to {self.place} ({error.strerror}: {error.filename}): no folder can be made there; "
                "give another folder"
            )
            found.errno = error.errno
            raise found from error

    def _write_once(self, path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._beside(path, f"-{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            with open(temporary, "xb") as file:
                _try_lock(file.fileno())
                for piece in pieces:
                    file.write(piece)
                file.flush()
                now = time.time_ns()
                os.utime(temporary, ns=(now, now))
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    @staticmethod
    def _beside(path: Path, ending: str) -> Path:
        return path.parent / f".{path.name.removesuffix(ENDING)}{ending}"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where this user may not look
        return False


def _open_at_once(path: str, flags: int) -> int:
    """For `open`: a pipe in the place of a file must not make anyone wait."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _again(action: Callable[[], Result]) -> Result:
    """Run `action`, and again where a folder vanished below it, as another process tidies up.

    A folder that vanishes while it is made looks to `mkdir` like a file in its place.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError, FileExistsError):
            return action()
    return action()


def _try_lock(descriptor: int) -> bool:
    """Lock a file for this process; False where another has it. Where nothing can be locked, all is free."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system can."""
    with suppress(OSError):  # some network file systems
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
