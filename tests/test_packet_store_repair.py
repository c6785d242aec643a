# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Adding repairs what reading cannot: damaged texts at a URL, packets under a limit, things in a packet's place."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path

import fsspec
import pytest
from kvspeed.packet import build_packet
from kvspeed.packet.store import DamagedPacketError, PacketStore, StoreError, StoreFullError
from kvspeed.packet.store.local import LocalBackend
from packet_tools import assert_same_packet
from store_tools import damage, file_of, files, in_child, model_and_tokenizer, open_store, some_texts

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


# --- things in a packet's place ---


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [loop, nowhere, pipe, Path.mkdir], ids=["loop", "nowhere", "pipe", "folder"])
def test_what_is_no_file_is_named_and_repaired_by_adding(tmp_path, make):
    store = open_store(tmp_path)
    texts = [TEXT, *some_texts(1)]
    id, other = store.add(texts)
    path = file_of(store, id)
    path.unlink()
    make(path)
    for looked in (open_store(tmp_path), PacketStore(tmp_path)):
        assert list(looked) == [other] and id not in looked and looked.stats().packets == 1
        check = looked.verify()
        assert {problem.id: problem.done for problem in check.problems} == {id: "found"} and not check.ok
        assert check.packets == 1 and str(path) in check.problems[0].reason and "\n" not in str(check)
    store = open_store(tmp_path)
    for read in (lambda: store[id], lambda: store.load([id, other])):
        with pytest.raises(DamagedPacketError, match=f"{id}.*: add the text again"):
            read()
    assert [problem.done for problem in store.verify(rebuild=True).problems] == ["found"]
    with pytest.warns(RuntimeWarning, match=f"{id}.*; it is rebuilt now"):
        assert store.add(texts) == [id, other]
    assert path.is_file() and not path.is_symlink() and store.verify().ok and store.counters.built == 1
    same(open_store(tmp_path)[id], TEXT)


@pytest.mark.parametrize("make", [loop, nowhere, pipe, Path.mkdir], ids=["loop", "nowhere", "pipe", "folder"])
def test_what_is_no_file_can_be_removed(tmp_path, make):
    store = open_store(tmp_path)
    ids = store.add(some_texts(2))
    for id in ids:
        file_of(store, id).unlink()
        make(file_of(store, id))
    del store[ids[0]]
    assert [problem.done for problem in PacketStore(tmp_path).verify(remove=True).problems] == ["removed"]
    assert not os.path.lexists(file_of(store, ids[0])) and not os.path.lexists(file_of(store, ids[1]))


def test_a_folder_that_is_not_empty_stays_and_is_named(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(2)
    (id,) = store.add(texts[:1])
    path = file_of(store, id)
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("x")
    store = open_store(tmp_path)
    message = f"{path} is a folder with something in it, where a packet belongs: move it elsewhere"
    for action in (lambda: store.add(texts), lambda: store.__delitem__(id)):
        with pytest.raises(StoreError, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)
    assert store.counters.built == 0, "it is said before anything is computed"
    check = store.verify(remove=True)
    assert [problem.done for problem in check.problems] == ["found"] and message in check.problems[0].reason
    assert (path / "mine").read_text() == "x"


def test_a_loop_among_the_folders_of_recipes(tmp_path):
    store = open_store(tmp_path)
    (id,) = store.add([TEXT])
    loop(tmp_path / ("0" * 16))
    store = open_store(tmp_path, disk_limit="1MB")
    assert store.stats().recipes == 1 and store.verify().ok and PacketStore(tmp_path)[id].text == TEXT
    assert store.gc(grace_s=0).folders == 0 and len(store.add(some_texts(1))) == 1


def test_a_pipe_does_not_make_anyone_wait(tmp_path):
    """Packets are asked for before they are read, which must not open a pipe for good."""
    store = open_store(tmp_path)
    ids = store.add(some_texts(2))
    file_of(store, ids[1]).unlink()
    os.mkfifo(file_of(store, ids[1]))

    def load() -> None:
        import signal

        signal.alarm(20)
        with pytest.raises(DamagedPacketError):
            open_store(tmp_path).load(ids)

    assert in_child(load) == 0


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["kvspeed-store.json", "recipe.json"])
def test_a_strange_thing_where_a_description_belongs(tmp_path, name, make):
    store = open_store(tmp_path)
    texts = some_texts(2)
    ids = store.add(texts)
    path = tmp_path / name if name == "kvspeed-store.json" else tmp_path / store.recipe.name / name
    path.unlink()
    make(path)

    def use() -> None:
        import signal

        signal.alarm(20)
        if name == "recipe.json":
            assert open_store(tmp_path)[ids[0]].text == texts[0]
            assert PacketStore(tmp_path).recipes() == {store.recipe.name: None} and PacketStore(tmp_path).verify().ok
        else:
            with pytest.raises(ValueError, match="is no mark of a packet store"):
                PacketStore(tmp_path)

    assert in_child(use) == 0


def test_a_folder_that_vanishes_while_it_is_made(tmp_path, monkeypatch):
    """`mkdir` finds it there and then not, as another process tidies up, and calls that a file in the way."""
    store = open_store(tmp_path)
    real, times = LocalBackend._write_once, [2]

    def vanishing(self, path, pieces):
        if times[0]:
            times[0] -= 1
            raise FileExistsError(17, "File exists", str(path.parent))
        return real(self, path, pieces)

    monkeypatch.setattr(LocalBackend, "_write_once", vanishing)
    assert len(store.add(some_texts(1))) == 1 and times == [0]


def test_a_strange_thing_among_the_copies_of_a_url(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    store = open_store(url, cache=tmp_path)
    texts = some_texts(2)
    ids = store.add(texts)
    store.load(ids)
    for path in files(tmp_path):
        path.unlink()
        path.mkdir()
    (files(tmp_path)[0] / "mine").write_text("x")
    store = open_store(url, cache=tmp_path)
    assert [packet.text for packet in store.load(ids)] == texts and store.stats().cached_packets == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, where no folder can be made")
def test_a_place_where_no_folder_can_be_made():
    with pytest.raises(StoreError, match=r"cannot write to /proc/x/y .*: .*give another folder") as caught:
        open_store("/proc/x/y").add([TEXT])
    assert "\n" not in str(caught.value)
