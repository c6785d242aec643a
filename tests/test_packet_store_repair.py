# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Adding repairs what reading cannot: damaged texts at a URL and packets under a limit."""

from __future__ import annotations

import uuid
import warnings

import fsspec
import pytest
from kvspeed.packet import build_packet
from kvspeed.packet.store import DamagedPacketError, PacketStore, StoreFullError
from packet_tools import assert_same_packet
from store_tools import damage, file_of, files, model_and_tokenizer, open_store, some_texts

TEXT = "w120 w121 w122 w123"


def same(packet, text: str) -> None:
    assert_same_packet(packet, build_packet(*model_and_tokenizer(), text))


# --- the head of an object at a URL ---


def alter(store: PacketStore, id: str, old: bytes, new: bytes) -> None:
    """Replace bytes of an object at memory:// by as many others."""
    fs = fsspec.filesystem("memory")
    name = f"{store.place.removeprefix('memory:/')}/{store.recipe.name}/{id}.packet.safetensors"
    data = fs.cat_file(name)
    assert old in data and len(old) == len(new)
    fs.pipe_file(name, data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"w120 w121", b"w120 w129"),  # another text
        (b"[120,121,", b"[120,129,"),  # other token ids
        (b'\\"text\\"', b'\\"test\\"'),  # no text at all
        (b"[120,121,", b"{120,121,"),  # a description that is no JSON
    ],
)
def test_a_damaged_head_at_a_url_is_rebuilt_by_adding(old, new):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    (id, other) = store.add([TEXT, *some_texts(1)])
    alter(store, id, old, new)
    store = open_store(store.place)
    with pytest.raises(DamagedPacketError, match=f"{id}.*its text is lost with it: add the text again"):
        store[id]
    check = store.verify(rebuild=True)
    assert {problem.id: problem.done for problem in check.problems} == {id: "found"} and not check.ok
    assert "its text is lost with it: add the text again" in check.problems[0].reason
    with pytest.warns(RuntimeWarning, match=f"{id}.*; it is rebuilt now"):
        assert store.add([TEXT]) == [id]
    assert store.counters.rebuilt == store.counters.built == 1
    same(open_store(store.place)[id], TEXT)
    assert store.verify().ok and other in store


def test_damaged_numbers_at_a_url_are_rebuilt_at_the_next_reading():
    """Adding asks an object store for the beginning of an object only; whoever reads the rest finds the damage."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    (id,) = store.add([TEXT])
    tail = fsspec.filesystem("memory").cat_file(
        f"{store.place.removeprefix('memory:/')}/{store.recipe.name}/{id}.packet.safetensors"
    )[-40:]
    alter(store, id, tail, bytes([tail[0] ^ 4]) + tail[1:])
    store = open_store(store.place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.add([TEXT]) == [id]
    with pytest.warns(RuntimeWarning, match="rebuilt now from its text"):
        same(store[id], TEXT)
    assert store.verify().ok


# --- a limit of the disk ---


@pytest.fixture
def tight(tmp_path):
    """`(folder, id, size)` of a damaged packet in a folder of its own."""
    store = open_store(tmp_path)
    (id,) = store.add([TEXT])
    path = file_of(store, id)
    damage(path)
    return tmp_path, id, path.stat().st_size


@pytest.mark.parametrize("way", ["read", "add", "verify"])
def test_a_damaged_packet_is_rebuilt_within_the_limit(tight, way):
    folder, id, size = tight
    store = open_store(folder, disk_limit=size + 10)
    if way == "read":
        with pytest.warns(RuntimeWarning, match="it is rebuilt now from its text"):
            same(store[id], TEXT)
    elif way == "add":
        with pytest.warns(RuntimeWarning, match="it is rebuilt now"):
            assert store.add([TEXT]) == [id]
    else:
        assert [problem.done for problem in store.verify(rebuild=True).problems] == ["rebuilt"]
    assert PacketStore(folder).verify().ok and store.counters.evicted == 0
    same(open_store(folder)[id], TEXT)


def test_rebuilding_removes_others_only_as_far_as_it_grows(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(3)
    ids = store.add(texts)
    path = file_of(store, ids[1])
    size = path.stat().st_size
    damage(path)
    store = open_store(tmp_path, disk_limit=3 * size + 30)
    with pytest.warns(RuntimeWarning, match="rebuilt"):
        same(store[ids[1]], texts[1])
    assert set(store) == set(ids)
    data = path.read_bytes()
    path.write_bytes(data[: size // 2])
    store = open_store(tmp_path, disk_limit=sum(file.stat().st_size for file in files(tmp_path)) + 30)
    with pytest.warns(RuntimeWarning, match="truncated"):
        store.add([texts[1]])
    assert set(store) == {ids[1], ids[2]} and store.counters.evicted == 1, "the least recently used one made room"


def test_a_full_store_serves_what_it_cannot_write(tight):
    folder, id, size = tight
    store = open_store(folder, disk_limit=size - 10)
    with pytest.warns(RuntimeWarning, match=r"it is rebuilt now from its text, and not stored \(disk_limit: is"):
        same(store[id], TEXT)
    same(store[id], TEXT)
    with pytest.warns(RuntimeWarning, match="rebuilt now"), pytest.raises(StoreFullError, match="disk_limit: is"):
        store.add([TEXT])
    check = store.verify(rebuild=True)
    assert [problem.done for problem in check.problems] == ["found"] and not check.ok, "what is not stored is damaged"
    assert "disk_limit: is" in check.problems[0].reason


def test_a_full_disk_serves_what_it_cannot_write(tight, monkeypatch):
    from kvspeed.packet.store.local import LocalBackend

    folder, id, _ = tight

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalBackend, "_write_once", full)
    store = open_store(folder)
    with pytest.warns(RuntimeWarning, match=r"rebuilt now from its text, and not stored \(.*there is no space left"):
        same(store[id], TEXT)
