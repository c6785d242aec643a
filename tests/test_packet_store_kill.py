# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A process that is killed at any step of its work on a store leaves whole packets, and loses none."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest
from kvspeed.packet.store import PacketStore
from kvspeed.packet.store import local as local_module
from store_tools import (
    adapter,
    check_whole,
    die,
    files,
    in_child,
    model_and_tokenizer,
    open_store,
    some_texts,
    start_child,
    wait_for,
)

# every call into the system that a store makes while it writes or removes
STEPS = ("open", "replace", "fsync", "unlink", "close", "stat", "fstat", "utime", "rmdir")


@pytest.fixture(autouse=True)
def model_before_forks():
    model_and_tokenizer(), adapter(0), adapter(1)


def dying_at(step: int, action):
    """Run `action` in a child that is killed before its `step`-th call into the system; whether it came so far."""

    def run() -> None:
        calls = itertools.count()

        def watched(real):
            def call(*arguments, **options):
                if next(calls) == step:
                    die()
                return real(*arguments, **options)

            return call

        for name in STEPS:
            setattr(os, name, watched(getattr(os, name)))
        Path.mkdir = watched(Path.mkdir)
        action()

    return in_child(run) == -9


def in_pieces(monkeypatch):
    """Writes go out in small pieces, each of which is a step."""
    real = local_module.LocalBackend.write

    class Slow:
        def __init__(self, encoded):
            self.encoded = encoded

        def pieces(self):
            data = b"".join(self.encoded.pieces())
            for start in range(0, len(data), 5000):
                os.stat("/")  # a step
                yield data[start : start + 5000]

    monkeypatch.setattr(local_module.LocalBackend, "write", lambda self, name, encoded: real(self, name, Slow(encoded)))


def test_killed_at_every_step_of_adding(tmp_path, monkeypatch):
    in_pieces(monkeypatch)
    for step in itertools.count():
        folder = tmp_path / str(step)
        old, new = some_texts(1), some_texts(2, words=40)
        known = dict(zip(open_store(folder).add(old), old, strict=True)) if step % 3 else {}
        store = open_store(folder)
        wanted = {store.id_of(text): text for text in new}
        died = dying_at(step, lambda store=store, new=new: store.add(new))
        check_whole(folder, known, wanted)
        again = open_store(folder)
        there = len(again)
        assert again.add(new) == list(wanted)
        assert again.counters.built == len(known) + 2 - there and again.counters.rebuilt == 0
        again.gc(grace_s=0)
        left = {path.name for path in folder.rglob("*") if path.is_file()} - {path.name for path in files(folder)}
        assert left == {"kvspeed-store.json", "recipe.json"} and len(files(folder)) == len(known) + 2
        assert again.stats().unfinished == again.stats().unfinished_bytes == 0
        check_whole(folder, known | wanted, {})
        if not died:
            break
    assert step > 30, "the children were not killed in the middle of it"


def test_killed_at_every_step_of_making_room(tmp_path):
    texts = some_texts(4)
    for step in itertools.count(random.randrange(3), 3):
        folder = tmp_path / str(step)
        store = open_store(folder)
        ids = store.add(texts)
        size = files(folder)[0].stat().st_size

        def add(folder=folder, size=size):
            open_store(folder, disk_limit=4 * size + size // 2).add(some_texts(2))

        died = dying_at(step, add)
        assert open_store(folder).verify().ok
        assert len(files(folder)) >= 2 and set(ids[2:]) <= set(open_store(folder))
        if not died:
            break
    assert step > 20


def test_killed_at_every_step_of_tidying(tmp_path):
    for step in itertools.count():
        folder = tmp_path / str(step)
        text = some_texts(1)
        store = open_store(folder)
        ids = store.add(text)
        (id,) = open_store(folder, adapter=adapter()).add(text)
        del open_store(folder, adapter=adapter())[id]
        (folder / store.recipe.name / ".x-1-2.tmp").write_bytes(b"half")
        died = dying_at(step, lambda folder=folder: open_store(folder).gc(grace_s=0))
        check_whole(folder, dict(zip(ids, text, strict=True)), {})
        assert open_store(folder, adapter=adapter()).add(text) == [id], "an emptied folder is used again"
        if not died:
            break
    assert step > 7


def test_killed_at_any_moment(tmp_path):
    """The same by the clock."""
    folder, texts = tmp_path / "s", some_texts(60)
    survivors: set[str] = set()
    for _ in range(25):
        pid = start_child(lambda: open_store(folder).add(texts))
        time.sleep(random.random() * 0.12)
        os.kill(pid, 9)
        wait_for(pid)
        now = set(open_store(folder))
        assert survivors <= now, "a packet that was there is gone"
        survivors = now
        assert PacketStore(folder).verify().ok
    store = open_store(folder)
    ids = store.add(texts)
    assert len(store) == len(set(ids)) == 60 and store.counters.built == 60 - len(survivors)
    store.gc(grace_s=0)
    assert store.stats().unfinished == 0 and store.verify().ok
