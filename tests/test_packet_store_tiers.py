# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Limits of memory and disk, who is let go first, and bytes that add up."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from kvspeed.packet.store import PacketStore, StoreReadOnlyError
from store_tools import adapter, damage, file_of, files, open_store, some_texts


def memory_of(packet) -> int:
    return sum(tensor.nbytes for tensor in packet.tensors().values())


# --- memory ---


def test_memory_holds_the_most_recently_used(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(5)
    ids = store.add(texts)
    one = memory_of(store[ids[0]])
    store = open_store(tmp_path, memory_limit=3 * one)
    for id in (*ids[:3], ids[0], ids[3]):  # 1 goes
        store[id]
    assert store.counters.loaded == 4 and store.counters.hits == 1
    assert store.stats().memory_packets == 3 and store.stats().memory_bytes == 3 * one
    for id, hit in ((ids[0], True), (ids[2], True), (ids[3], True), (ids[1], False), (ids[0], False)):
        before = store.counters.hits
        store[id]
        assert (store.counters.hits > before) == hit
        assert store.stats().memory_bytes <= 3 * one
    del store[ids[0]]
    assert store.stats().memory_bytes == 2 * one


def test_memory_limits_at_the_edges(tmp_path):
    ids = open_store(tmp_path).add(some_texts(3))
    none, small, endless = (open_store(tmp_path, memory_limit=limit) for limit in (0, 100, None))
    for store, held in ((none, 0), (small, 0), (endless, 3)):
        for id in ids * 2:
            assert store[id] is not None
        assert store.stats().memory_packets == held
        assert store.stats().memory_bytes == (sum(memory_of(store[id]) for id in ids) if held else 0)


def test_full_packets_count_too(tmp_path):
    store = open_store(tmp_path, dtype="int8")
    (id,) = store.add(some_texts(1))
    small = memory_of(store[id])
    whole = memory_of(store._shelf.full(id, store[id]))
    assert whole > 3 * small and store.stats().memory_bytes == small + whole
    del store[id]
    assert store.stats().memory_bytes == 0


# --- disk ---


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def test_disk_keeps_the_most_recently_used(tmp_path):
    store = open_store(tmp_path)
    ids = store.add(some_texts(4))
    size = file_of(store, ids[0]).stat().st_size
    limit = 4 * size + size // 2
    store = open_store(tmp_path, disk_limit=limit)
    _ = store[ids[0]], store[ids[2]]  # 1 is now the least recently used, then 3
    (new,) = store.add(some_texts(1))
    assert set(store) == {ids[0], ids[2], ids[3], new} and store.counters.evicted == 1
    store.add(some_texts(1))
    assert ids[3] not in store and ids[0] in store and size_of(tmp_path) <= limit
    with pytest.raises(KeyError, match="never added, or removed since; add its text"):
        store[ids[1]]


def test_what_is_in_memory_counts_as_used(tmp_path):
    """Packets that are always at hand are never read from the disk, and must not be the first to go there."""
    store = open_store(tmp_path)
    hot, cold = store.add(some_texts(2))
    size = file_of(store, hot).stat().st_size
    store = open_store(tmp_path, disk_limit=3 * size + size // 2)
    _ = store[hot], store[cold]
    for _ in range(6):  # a flood of new texts
        assert store[hot]
        store.add(some_texts(1))
        assert hot in store and size_of(tmp_path) <= store._shelf.disk.limit
    assert cold not in store and store.counters.loaded == 2
    # adding what is there is a use as well
    store.add(some_texts(1))
    texts = some_texts(1)
    (id,) = store.add(texts)
    for _ in range(6):
        store.add(texts)
        store.add(some_texts(1))
        assert id in store


def test_packets_of_one_call_do_not_push_each_other_out(tmp_path):
    texts = some_texts(6)
    size = None
    for count in (1, 3):
        store = open_store(tmp_path / str(count))
        store.add(some_texts(1))
        size = files(tmp_path / str(count))[0].stat().st_size
        store = open_store(tmp_path / str(count), disk_limit=count * size + size // 2)
        with pytest.raises(OSError, match=rf"disk_limit: is .*\({count} of 6 packets are stored") as caught:
            store.add(texts)
        assert "\n" not in str(caught.value)
        assert set(store) == {store.id_of(text) for text in texts[:count]}
        assert size_of(tmp_path / str(count)) <= store._shelf.disk.limit and store.verify().ok
    store = open_store(tmp_path / "none", disk_limit=size // 2)
    with pytest.raises(OSError, match="disk_limit"):
        store.add(texts)
    assert len(store) == 0
    assert open_store(tmp_path / "zero", disk_limit=0).add([]) == []


def test_the_limit_counts_all_recipes(tmp_path):
    mine, other = open_store(tmp_path), open_store(tmp_path, adapter=adapter())
    texts = some_texts(3)
    ids = mine.add(texts)
    others = other.add(texts)
    total = size_of(tmp_path)
    other = open_store(tmp_path, adapter=adapter(), disk_limit=total)
    _ = [other[id] for id in others]
    other.add(some_texts(1))
    assert len(other) == 4 and ids[0] not in mine and size_of(tmp_path) <= total
    assert mine.stats().all_bytes == size_of(tmp_path) == PacketStore(tmp_path).stats().bytes


def test_tidying_to_a_limit(tmp_path):
    store = open_store(tmp_path)
    ids = store.add(some_texts(5))
    sizes = [file_of(store, id).stat().st_size for id in ids]
    _ = store[ids[0]]
    assert store.gc().evicted == 0 and len(store) == 5
    tidied = store.gc(limit=sum(sizes) - 1)
    assert tidied.evicted == 1 and tidied.evicted_bytes == sizes[1] and ids[1] not in store
    tidied = store.gc(limit=sizes[0])
    assert tidied.evicted == 3 and set(store) == {ids[0]} and tidied.folders == 0
    assert store.stats().memory_packets == 1
    tidied = store.gc(limit=0)
    assert tidied.evicted == 1 and tidied.folders == 1 and store.stats().memory_bytes == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["kvspeed-store.json"]
    with pytest.raises(ValueError, match="limit: got"):
        store.gc(limit="lots")


def test_a_clock_that_stands_still(tmp_path):
    """Equal times of use: any order, and no error."""
    store = open_store(tmp_path)
    ids = store.add(some_texts(4))
    for id in ids:
        os.utime(file_of(store, id), ns=(5, 5))
    size = file_of(store, ids[0]).stat().st_size
    store.gc(limit=2 * size + size // 2)
    assert len(store) == 2 and store.verify().ok


# --- copies of what is far away ---


def test_the_cache_of_a_url(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    plain = open_store(url)
    texts = some_texts(4)
    ids = plain.add(texts)
    assert plain.stats().cached_packets == 0
    store = open_store(url, cache=tmp_path, memory_limit=0)
    assert [packet.text for packet in store.load(ids)] == texts
    assert store.stats().cached_packets == 4 and store.stats().cached_bytes == store.stats().bytes == size_of(tmp_path)
    with open("/proc/self/maps") as maps:
        packet = store[ids[0]]
        assert str(tmp_path) in maps.read(), "copies are mapped"
    # another process finds the copies, and does not ask for the objects
    again = open_store(url, cache=tmp_path, memory_limit=0)
    real = again._shelf.backend.read
    again._shelf.reader.backend.read = lambda name: pytest.fail("it was fetched again")
    assert [packet.text for packet in again.load(ids)] == texts
    again._shelf.reader.backend.read = real
    del again[ids[0]]
    assert again.stats().cached_packets == 3 and packet.text == texts[0]
    assert store.stats().packets == 3


def test_the_limit_of_a_cache(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    texts = some_texts(5)
    ids = open_store(url).add(texts)
    one = open_store(url).stats().bytes // 5
    store = open_store(url, cache=tmp_path, disk_limit=2 * one + one // 2, memory_limit=0)
    for id in (*ids[:2], ids[0], ids[2]):
        assert store[id]
    assert {path.name[:32] for path in files(tmp_path)} == {ids[0], ids[2]}
    assert [packet.text for packet in store.load(ids)] == texts and size_of(tmp_path) <= 2.5 * one
    assert len(store) == 5, "the objects themselves are not limited"
    tiny = open_store(url, cache=tmp_path / "b", disk_limit=10)
    assert [packet.text for packet in tiny.load(ids)] == texts and tiny.stats().cached_packets == 0
    store.gc()
    assert len(store) == 5


def test_a_cache_on_a_full_disk(tmp_path, monkeypatch):
    from kvspeed.packet.store.local import LocalBackend

    url = f"memory://{uuid.uuid4().hex}"
    texts = some_texts(2)
    ids = open_store(url).add(texts)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalBackend, "_write_once", full)
    store = open_store(url, cache=tmp_path)
    assert [packet.text for packet in store.load(ids)] == texts and files(tmp_path) == []


def test_a_copy_that_another_reader_evicts(tmp_path, monkeypatch):
    """Between its being written and its being read: the packet itself is at hand."""
    from kvspeed.packet.store.local import LocalBackend

    url = f"memory://{uuid.uuid4().hex}"
    texts = some_texts(2)
    ids = open_store(url).add(texts)
    real = LocalBackend.write

    def evicted(self, name, encoded):
        real(self, name, encoded)
        self.delete(name)

    monkeypatch.setattr(LocalBackend, "write", evicted)
    assert [packet.text for packet in open_store(url, cache=tmp_path).load(ids)] == texts


def test_a_damaged_copy_that_cannot_be_removed(tmp_path, monkeypatch):
    from kvspeed.packet.store.local import LocalBackend

    url = f"memory://{uuid.uuid4().hex}"
    texts = some_texts(1)
    ids = open_store(url).add(texts)
    open_store(url, cache=tmp_path).load(ids)
    damage(files(tmp_path)[0])

    def refuse(*_):
        raise StoreReadOnlyError("cannot: it is read-only")

    monkeypatch.setattr(LocalBackend, "delete", refuse)
    monkeypatch.setattr(LocalBackend, "write", refuse)
    assert open_store(url, cache=tmp_path)[ids[0]].text == texts[0]


def test_a_cache_is_no_other_store(tmp_path):
    open_store(tmp_path).add(some_texts(1))
    with pytest.raises(ValueError, match=r"cache: .* is a packet store, and copies would push out its packets"):
        open_store(f"memory://{uuid.uuid4().hex}", cache=tmp_path)
