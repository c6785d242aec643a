# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Stores under several processes and threads, and on places that are full or read-only: nothing lost or mixed."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
from kvspeed.packet.store import PacketStore
from kvspeed.packet.store import local as local_module
from kvspeed.packet.store.fetch import Reader
from kvspeed.packet.store.local import LocalBackend
from kvspeed.packet.tensorfile import TensorFileError
from store_tools import (
    adapter,
    check_whole,
    damage,
    die,
    file_of,
    files,
    in_child,
    model_and_tokenizer,
    open_store,
    some_texts,
    start_child,
    wait_for,
)


@pytest.fixture(autouse=True)
def model_before_forks():
    model_and_tokenizer(), adapter(0), adapter(1)


def test_processes_share_the_work(tmp_path):
    texts = some_texts(24, words=60)

    def work(seed: int) -> None:
        store = open_store(tmp_path / "s")
        order = random.Random(seed).sample(texts, len(texts))
        ids = dict(zip(order, store.add(order), strict=True))
        assert all(store[ids[text]].text == text for text in texts)
        (tmp_path / f"{seed}.json").write_text(json.dumps(store.counters.built))

    children = [start_child(lambda seed=seed: work(seed)) for seed in range(3)]
    assert [wait_for(pid) for pid in children] == [0, 0, 0]
    built = [json.loads((tmp_path / f"{seed}.json").read_text()) for seed in range(3)]
    assert sum(built) == 24, f"each text once in all, not {built}"
    assert sorted(built)[-1] < 24, "one did it all"
    store = open_store(tmp_path / "s")
    assert len(store) == 24 and store.verify().ok and store.stats().unfinished == 0


def test_store_begun_by_another_while_it_is_looked_at(tmp_path, monkeypatch):
    """Empty at the first look, begun and filled by another process before any second one."""
    texts, look = some_texts(1), local_module.LocalBackend.is_empty

    def empty_then_filled(self):
        found = look(self)
        if found:
            monkeypatch.setattr(local_module.LocalBackend, "is_empty", look)
            open_store(tmp_path / "s").add(texts)
        return found

    monkeypatch.setattr(local_module.LocalBackend, "is_empty", empty_then_filled)
    store = open_store(tmp_path / "s")
    assert store[store.add(texts)[0]].text == texts[0] and store.verify().ok


def test_two_adapters_in_one_store(tmp_path):
    """They add the same texts at the same time, and neither ever gets the other's packets."""
    texts = some_texts(8)
    adapters = [adapter(0), adapter(1), None]

    def work(which: int) -> None:
        own = adapters[which]
        for round in range(3):
            store = open_store(tmp_path / "s", adapter=own)
            ids = store.add(texts)
            for packet in store.load(ids):
                assert packet.adapter_fingerprint == (own.fingerprint() if own is not None else None)
            assert len(store) == len(texts) or round < 2
            if round < 2:
                for id in random.sample(ids, 3):
                    del store[id]

    children = [start_child(lambda which=which: work(which)) for which in range(3)]
    assert [wait_for(pid) for pid in children] == [0, 0, 0]
    assert len(PacketStore(tmp_path / "s")) == 3 * len(texts) and PacketStore(tmp_path / "s").verify().ok


def test_adding_removing_and_tidying_at_once(tmp_path):
    """Whatever others do, a packet that is got is whole, and nothing else than a missing packet may be said."""
    texts = some_texts(10)

    def churn(seed: int, limit: str | None) -> None:
        rng = random.Random(seed)
        store = open_store(tmp_path / "s", disk_limit=limit, adapter=adapter(seed % 2))
        for _ in range(40):
            what = rng.randrange(5)
            chosen = rng.sample(texts, 3)
            if what < 2:
                store.add(chosen)
            elif what == 2:
                store.gc(grace_s=rng.choice([0, 60]))
            else:
                for text in chosen:
                    id = store.id_of(text)
                    try:
                        if what == 3:
                            del store[id]
                        else:
                            assert store[id].text == text
                    except KeyError as error:
                        assert str(error).startswith("there is no packet")

    for limit in (None, "160kB"):
        children = [start_child(lambda seed=seed, limit=limit: churn(seed, limit)) for seed in range(4)]
        assert [wait_for(pid) for pid in children] == [0, 0, 0, 0]
        store = PacketStore(tmp_path / "s")
        store.gc(grace_s=0)
        assert store.verify().ok and store.stats().unfinished == 0
        assert store.stats().bytes == sum(path.stat().st_size for path in files(tmp_path / "s"))


def test_a_packet_that_another_process_adds_again_is_not_said_to_be_made_otherwise(tmp_path, monkeypatch):
    """It was missing when it was read for, and is there when the reason is looked for."""
    store = open_store(tmp_path)
    (id,) = store.add(some_texts(1))

    def gone(*_):
        raise FileNotFoundError

    monkeypatch.setattr(store._shelf.reader, "read", gone)
    with pytest.raises(KeyError, match=f"there is no packet {id}"):
        store[id]


def test_tidying_leaves_what_is_being_written(tmp_path, monkeypatch):
    """Another process is in the middle of a packet; its unfinished file is not litter, however old."""
    store = open_store(tmp_path)
    store.add(some_texts(1))
    ready, go_on = os.pipe(), os.pipe()
    real = os.fsync

    def paused(descriptor):
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        real(descriptor)

    text = some_texts(1)

    def add() -> None:
        local_module.os.fsync = paused
        open_store(tmp_path).add(text)

    pid = start_child(add)
    os.read(ready[0], 1)
    try:
        unfinished = list(tmp_path.glob("*/.*"))
        assert len(unfinished) == 2  # the packet, and the claim
        assert store.gc(grace_s=0).unfinished == 0 and list(tmp_path.glob("*/.*")) == unfinished
        assert len(store) == 1 and store.stats().unfinished == 0
    finally:
        os.write(go_on[1], b"xxxx")
    assert wait_for(pid) == 0 and store.id_of(text[0]) in store
    # one that died there is
    pid = start_child(
        lambda: (setattr(local_module.os, "fsync", lambda _: die()), open_store(tmp_path).add(some_texts(1)))
    )
    assert wait_for(pid) == -9
    assert store.stats().unfinished == 2 and store.stats().unfinished_bytes > 1000
    assert store.gc().unfinished == 0, "too young"
    tidied = store.gc(grace_s=0)
    assert tidied.unfinished == 2 and tidied.unfinished_bytes > 1000 and not list(tmp_path.glob("*/.*"))


def test_a_claim_of_a_dead_process_does_not_hold(tmp_path):
    text = some_texts(1)
    store = open_store(tmp_path)

    def die_while_claiming() -> None:
        local_module.os.fsync = lambda _: die()
        open_store(tmp_path).add(text)

    assert in_child(die_while_claiming) == -9
    start = time.monotonic()
    assert store.add(text) == [store.id_of(text[0])] and time.monotonic() - start < 20


def test_threads_share_a_store(tmp_path):
    store = open_store(tmp_path, memory_limit="60kB")
    texts = some_texts(6)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for _ in range(15):
                chosen = rng.sample(texts, 3)
                for id, text in zip(store.add(chosen), chosen, strict=True):
                    assert store[id].text == text
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert store.counters.built == 6 and store.stats().memory_bytes <= 60_000


def test_more_packets_in_use_than_files_may_be_open(tmp_path):
    import resource

    store = open_store(tmp_path)
    ids = store.add(some_texts(40, words=3))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 15, limits[1]))
    try:
        packets = open_store(tmp_path).load(ids)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len({packet.text for packet in packets}) == 40


# --- places that do not take it ---


class Full:
    """Stands in for a disk: `room` bytes in all, then ENOSPC."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.room = room
        real_open = open

        def opened(path, mode="r", *arguments, **options):
            file = real_open(path, mode, *arguments, **options)
            return Limited(file, self) if "x" in mode or "w" in mode else file

        monkeypatch.setattr(local_module, "open", opened, raising=False)


class Limited:
    def __init__(self, file, disk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        size = len(data)
        self.file.write(data[: self.disk.room])
        self.disk.room -= size
        if self.disk.room < 0:
            raise OSError(28, "No space left on device")


def test_a_full_disk(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    old = some_texts(2)
    known = dict(zip(store.add(old), old, strict=True))
    size = files(tmp_path)[0].stat().st_size
    new = some_texts(5)
    with monkeypatch.context() as patch:
        Full(patch, int(2.6 * size))
        with pytest.raises(OSError, match=r"no space left on it.*\(3 of 6 packets are stored; the same call") as caught:
            open_store(tmp_path).add([old[0], *new])
        assert caught.value.errno == 28 and "\n" not in str(caught.value)
    assert len(store) == 4 and store.stats().unfinished == 0
    check_whole(tmp_path, known, {store.id_of(text): text for text in new})
    assert store.add(new) and store.counters.built == 2 + 3


def test_a_really_full_disk(tmp_path):
    """On a file system of a few pages, where this user may make one."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=200k tmpfs {place} 2>/dev/null") != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        store = open_store(place / "s")
        texts = some_texts(30)
        with pytest.raises(OSError, match="no space left on it"):
            store.add(texts)
        stored = len(store)
        assert 0 < stored < 30 and store.verify().ok and store.stats().unfinished == 0
        for id in list(store)[:2]:
            del store[id]
        assert store.add(texts[:1])
        limited = open_store(place / "s", disk_limit=store.stats().bytes)
        for text in texts:
            limited.add([text])
        assert limited.verify().ok and limited.counters.evicted > 0 and store.id_of(texts[-1]) in limited
    finally:
        os.system(f"umount -l {place}")  # mapped packets keep it busy


def test_a_store_that_may_only_be_read(tmp_path):
    place = tmp_path / "s"
    store = open_store(place)
    texts = some_texts(2)
    ids = store.add(texts)
    if os.geteuid() == 0:
        if os.system(f"mount --bind {place} {place} && mount -o remount,ro,bind {place}") != 0:
            pytest.skip("root may write everywhere, and may not mount here")
    else:
        os.system(f"chmod -R a-w {place}")
    try:
        again = open_store(place)
        assert again[ids[0]].text == texts[0] and len(again) == 2 and again.verify().ok
        assert again.add(texts) == ids and again.counters.built == 0
        with pytest.raises(OSError, match=r"cannot write to .*it is read-only"):
            again.add([*texts, *some_texts(1)])
        assert again.counters.built == 0, "said before the work, not after it"
        with pytest.raises(OSError, match=r"cannot remove .*it is read-only"):
            del again[ids[1]]
        assert again.gc(grace_s=0).evicted == 0 and len(again) == 2
        with pytest.raises(OSError, match="read-only"):
            again.gc(limit=0)
        with pytest.raises(OSError, match="cannot"):
            open_store(place / "deeper").add(texts)
    finally:
        os.system(f"umount -l {place} 2>/dev/null; chmod -R u+w {place}")
    assert file_of(store, ids[1]).exists()


def test_removing_damage_spares_what_another_has_rebuilt(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    texts = some_texts(3)
    ids = store.add(texts)
    for id in ids[:2]:
        damage(file_of(store, id))
    read = Reader.read

    def read_slowly(self, name, *, verify=False):
        """Another process rebuilds the first packet while it is found damaged."""
        try:
            return read(self, name, verify=verify)
        except TensorFileError:
            if verify and ids[0] in name:
                assert in_child(lambda: open_store(tmp_path)[ids[0]]) == 0
            raise

    monkeypatch.setattr(Reader, "read", read_slowly)
    check = PacketStore(tmp_path).verify(remove=True)
    assert {problem.id: problem.done for problem in check.problems} == {ids[1]: "removed"}
    assert set(open_store(tmp_path)) == {ids[0], ids[2]} and PacketStore(tmp_path).verify().ok


@pytest.mark.parametrize("when", ["before the claim", "while it looks"])
def test_tidying_an_empty_folder_that_is_about_to_be_used(tmp_path, monkeypatch, when):
    """Packets never lie without the description of how they were made."""
    store, text = open_store(tmp_path), some_texts(1)
    del store[store.add(text)[0]]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    if when == "before the claim":
        claim = LocalBackend.claim
        monkeypatch.setattr(
            LocalBackend,
            "claim",
            lambda self, *given: (in_child(lambda: PacketStore(tmp_path).gc()), claim(self, *given))[1],
        )
        store.add(text)
    else:
        unlink = Path.unlink

        def used_meanwhile(self, **options):
            if self.name == "recipe.json":
                (folder / ".claimed.lock").touch()
            unlink(self, **options)

        monkeypatch.setattr(Path, "unlink", used_meanwhile)
        PacketStore(tmp_path).gc()
        assert not list(folder.glob(".*.tmp"))
    assert PacketStore(tmp_path).recipes() == {folder.name: store.recipe}
