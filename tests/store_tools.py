# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the tests of stores share: one tiny model, texts, places, children that can be killed."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kvspeed.packet import PacketAdapter
from kvspeed.packet.store import PacketStore
from packet_tools import random_text, tiny_tokenizer
from tiny_models import tiny_model


@functools.cache
def model_and_tokenizer(seed: int = 0) -> tuple[Any, Any]:
    """A model of 3 layers, never patched, and its tokenizer."""
    return tiny_model("llama", layers=3, seed=seed), tiny_tokenizer()


@functools.cache
def adapter(seed: int = 0) -> PacketAdapter:
    return PacketAdapter.for_model(model_and_tokenizer()[0], header=2, trailer=1, seed=seed)


def open_store(place: Any, **options: Any) -> PacketStore:
    """A store of the tiny model at `place`."""
    model, tokenizer = model_and_tokenizer()
    return PacketStore(place, **{"model": model, "tokenizer": tokenizer, **options})


def some_texts(count: int, words: int = 12) -> list[str]:
    """Different texts, new ones in every test."""
    first = random.randrange(10**9)
    return [random_text(words, first + index) for index in range(count)]


def files(folder: Path) -> list[Path]:
    """All packet files below `folder`."""
    return sorted(folder.glob("*/*.packet.safetensors"))


def file_of(store: PacketStore, id: str) -> Path:
    return Path(store.place) / store.recipe.name / f"{id}.packet.safetensors"


def damage(path: Path, *, at: float = 0.7) -> None:
    """Flip one bit of a file, under a new inode, as a restored backup would."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.unlink()
    path.write_bytes(data)


def in_child(action: Callable[[], Any]) -> int:
    """Run `action` in a forked process and wait: 0, 1 after an exception, or minus the signal that ended it."""
    return wait_for(start_child(action))


def start_child(action: Callable[[], Any]) -> int:
    """The pid of a forked process that runs `action`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's OpenMP threads did not come along, and a child would wait for them
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wait_for(pid: int, seconds: float = 300) -> int:
    end = time.monotonic() + seconds
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"a child process was still running after {seconds:.0f} s")
        time.sleep(0.001)
    status = found[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def die() -> None:
    """As if the power went: no handler, no `finally`."""
    os.kill(os.getpid(), signal.SIGKILL)


def check_whole(folder: Path, known: dict[str, str], wanted: dict[str, str]) -> None:
    """All packets that were there are there, all others are whole or absent, and the sum of bytes is exact."""
    store = open_store(folder)
    assert store.verify().ok, store.verify()
    assert set(known) <= set(store) <= set(known) | set(wanted)
    for id, text in known.items():
        assert store[id].text == text
    assert store.stats().bytes == sum(path.stat().st_size for path in files(folder))
