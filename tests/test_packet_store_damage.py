# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Damaged packets in a store: found, named, rebuilt; and never used."""

from __future__ import annotations

import os
import random
import uuid
import warnings

import fsspec
import pytest
import torch
from kvspeed.packet import build_packet
from kvspeed.packet.store import DamagedPacketError, PacketStore
from packet_tools import assert_same_packet
from store_tools import adapter, damage, file_of, files, model_and_tokenizer, open_store, some_texts
from tiny_models import tiny_model


def same(packet, text: str) -> None:
    assert_same_packet(packet, build_packet(*model_and_tokenizer(), text))


@pytest.mark.parametrize("at", [0.5, 0.75, 0.999])
def test_damaged_numbers_are_rebuilt_on_reading(tmp_path, at):
    store = open_store(tmp_path)
    texts = some_texts(3)
    ids = store.add(texts)
    path = file_of(store, ids[1])
    damage(path, at=at)
    store = open_store(tmp_path)
    with pytest.warns(RuntimeWarning, match=f"{ids[1]}.* was altered or damaged .*; it is rebuilt now from its text"):
        same(store[ids[1]], texts[1])
    assert store.counters.rebuilt == store.counters.built == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = open_store(tmp_path)
        for id, text in zip(ids, texts, strict=True):
            same(again[id], text)
    assert PacketStore(tmp_path).verify().ok and len(again) == 3


def test_truncated_is_rebuilt(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(1)
    (id,) = store.add(texts)
    path = file_of(store, id)
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    for size in (head, head + 1, (head + len(data)) // 2, len(data) - 1):
        path.unlink()
        path.write_bytes(data[:size])
        with pytest.warns(RuntimeWarning, match="is truncated"):
            same(open_store(tmp_path)[id], texts[0])
        assert path.read_bytes() == data


def test_a_damaged_head_is_named_and_rebuilt_by_adding(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(1)
    (id,) = store.add(texts)
    path = file_of(store, id)
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    for damaged in (b"", b"\0", data[: head - 1], b"\xff" * 8 + data[8:], data[:8] + b"x" * (head - 8) + data[head:]):
        path.unlink()
        path.write_bytes(damaged)
        again = open_store(tmp_path)
        with pytest.raises(DamagedPacketError, match=f"{id}.*its text is lost with it: add the text again"):
            again[id]
        with pytest.raises(DamagedPacketError):
            again.assemble([id])
        with pytest.warns(RuntimeWarning, match=f"{id}.*; it is rebuilt now"):
            assert again.add(texts) == [id]
        same(again[id], texts[0])
        assert path.read_bytes() == data and again.counters.rebuilt == 1


def test_every_flipped_bit_is_found(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(1, words=3)
    (id,) = store.add(texts)
    path = file_of(store, id)
    data = path.read_bytes()
    rebuilt = 0
    for _ in range(60):
        place = random.randrange(len(data))
        damaged = bytearray(data)
        damaged[place] ^= 1 << random.randrange(8)
        path.unlink()
        path.write_bytes(damaged)
        again = open_store(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                same(again[id], texts[0])
                rebuilt += again.counters.rebuilt
            except DamagedPacketError:
                assert place < 8 + int.from_bytes(data[:8], "little")
    assert rebuilt > 5


def test_a_changed_text_is_not_believed(tmp_path):
    """The head still parses, and tells another text: the id says that it is not the one."""
    store = open_store(tmp_path)
    (id,) = store.add(["w120 w121 w122"])
    path = file_of(store, id)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b"w120 w121", b"w120 w129"))
    with pytest.raises(DamagedPacketError, match="text is lost"):
        open_store(tmp_path)[id]


def test_without_a_model_damage_is_named(tmp_path):
    ids = open_store(tmp_path).add(some_texts(2))
    damage(files(tmp_path)[0])
    damaged = files(tmp_path)[0].name[:32]
    store = PacketStore(tmp_path)
    with pytest.raises(DamagedPacketError, match=f"{damaged}.*a store that is opened with the model rebuilds it"):
        store[damaged]
    assert store[next(id for id in ids if id != damaged)]


def test_verify(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(6)
    ids = store.add(texts)
    assert store.verify().ok and str(store.verify()).endswith("all whole")
    numbers, head, gone = file_of(store, ids[0]), file_of(store, ids[1]), file_of(store, ids[2])
    _ = [store[id] for id in ids]  # at hand, and known to be whole
    damage(numbers)
    damage(head, at=0.01)
    gone.unlink()
    seen = []
    check = store.verify(progress=lambda done, total: seen.append((done, total)))
    assert not check.ok and check.packets == 5 and seen == [(n, 5) for n in range(1, 6)]
    assert check.bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert {p.id: p.done for p in check.problems} == {ids[0]: "found", ids[1]: "found"}
    for problem in check.problems:
        assert problem.id in problem.reason and str(tmp_path) in problem.reason and problem.id in str(check)
    check = store.verify(rebuild=True)
    assert {p.id: p.done for p in check.problems} == {ids[0]: "rebuilt", ids[1]: "found"} and not check.ok
    check = store.verify(remove=True)
    assert {p.id: p.done for p in check.problems} == {ids[1]: "removed"} and check.ok
    assert store.verify().ok and len(store) == 4 and ids[0] in store and ids[1] not in store
    same(store[ids[0]], texts[0])


def test_in_place_damage_is_found_by_verify(tmp_path):
    """A bit that flips on the disk does not change the file's identity: `verify` reads it all the same."""
    store = open_store(tmp_path, memory_limit=0)
    (id,) = store.add(some_texts(1))
    assert store[id]
    with open(file_of(store, id), "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert [problem.id for problem in store.verify().problems] == [id]
    with pytest.warns(RuntimeWarning, match="rebuilt"):
        open_store(tmp_path, checksums="always")[id]


def test_when_checksums_are_compared(tmp_path, monkeypatch):
    from kvspeed.packet import tensorfile

    store = open_store(tmp_path)
    ids = store.add(some_texts(2))
    compared = []
    real = tensorfile._checksum
    monkeypatch.setattr(tensorfile, "_checksum", lambda *a: compared.append(1) or real(*a))
    for checksums, first, later in (("once", 2, 0), ("always", 2, 2), ("never", 0, 0)):
        store = open_store(tmp_path, checksums=checksums, memory_limit=0)
        for expected in (first, later):
            compared.clear()
            _ = [store[id] for id in ids]
            assert len(compared) == expected, checksums
    # structure and names are looked at in any case
    path = file_of(store, ids[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="truncated"):
        open_store(tmp_path, checksums="never")[ids[0]]


def test_a_changed_model_does_not_rebuild(tmp_path):
    model = tiny_model("llama", layers=3)
    store = open_store(tmp_path, model=model)
    (id,) = store.add(some_texts(1))
    damage(file_of(store, id))
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(DamagedPacketError, match="cannot be rebuilt, since the model or the adapter changed"):
        store[id]


def test_a_read_only_store_serves_what_it_cannot_write(tmp_path, monkeypatch):
    from kvspeed.packet.store.local import LocalBackend

    store = open_store(tmp_path)
    texts = some_texts(1)
    (id,) = store.add(texts)
    damage(file_of(store, id))

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(LocalBackend, "_write_once", refuse)
    store = open_store(tmp_path)
    with pytest.warns(RuntimeWarning, match="rebuilt"):
        same(store[id], texts[0])
    same(store[id], texts[0])
    assert not PacketStore(tmp_path).verify().ok


def test_objects_at_a_url(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    store = open_store(url, adapter=adapter())
    texts = some_texts(3)
    ids = store.add(texts)
    fs = fsspec.filesystem("memory")
    name = f"{url.removeprefix('memory:/')}/{store.recipe.name}/{{}}.packet.safetensors"
    data = bytearray(fs.cat_file(name.format(ids[0])))
    data[-7] ^= 64
    fs.pipe_file(name.format(ids[0]), bytes(data))
    fs.pipe_file(name.format(ids[1]), bytes(data[:-1000]))
    store = open_store(url, adapter=adapter(), cache=tmp_path)
    assert {problem.id for problem in store.verify().problems} == set(ids[:2])
    with pytest.warns(RuntimeWarning, match="rebuilt now from its text"):
        assert store[ids[0]].text == texts[0]
    with pytest.warns(RuntimeWarning, match=f"{ids[1]}.*truncated; it is rebuilt now"):
        assert store.add(texts) == ids
    assert store.verify().ok and [packet.text for packet in store.load(ids)] == texts
    # a damaged copy is fetched anew, without a word
    copy = next(path for path in files(tmp_path) if ids[2] in path.name)
    damage(copy)
    store = open_store(url, adapter=adapter(), cache=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store[ids[2]].text == texts[2] and store.counters.built == 0
    assert store.stats().cached_packets == 2  # that one, and one that was loaded before


def test_what_an_error_left_of_a_loading_is_not_read_later():
    """Objects are fetched ahead; where one of them is missing, the others are not kept to be taken for the place's."""
    url = f"memory://{uuid.uuid4().hex}"
    store = open_store(url)
    first, second = store.add(some_texts(2))
    missing = open_store(url).id_of(some_texts(1)[0])
    store = open_store(url)
    with pytest.raises(KeyError, match="there is no packet"):
        store.load([missing, first, second])
    fs = fsspec.filesystem("memory")
    name = f"{url.removeprefix('memory:/')}/{store.recipe.name}/{first}.packet.safetensors"
    fs.pipe_file(name, fs.cat_file(name)[:-1000])
    assert [problem.id for problem in store.verify().problems] == [first]
