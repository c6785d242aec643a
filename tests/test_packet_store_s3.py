# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Stores on S3, against a local server that speaks its protocol, and on S3s that cannot be reached."""

from __future__ import annotations

import random
import socket
import time
import uuid

import pytest
from kvspeed.packet import build_packet
from kvspeed.packet.store import DamagedPacketError, PacketStore
from packet_tools import assert_same_packet
from store_tools import adapter, model_and_tokenizer, open_store, some_texts, start_child, wait_for

pytest.importorskip("s3fs", reason="needs s3fs (pip install kvspeed[store])")
moto_server = pytest.importorskip("moto.server", reason="needs moto[server] (pip install kvspeed[test])")


@pytest.fixture(scope="module")
def server():
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield f"http://127.0.0.1:{running.get_host_and_port()[1]}"
    running.stop()


@pytest.fixture
def options(server):
    return {
        "key": "user",
        "secret": "secret",
        "endpoint_url": server,
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 20},
    }


@pytest.fixture
def url(options):
    import s3fs

    bucket = uuid.uuid4().hex
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return f"s3://{bucket}/some/store"


def test_in_and_out(url, options, tmp_path):
    store = open_store(url, storage_options=options, adapter=adapter())
    assert len(store) == 0
    texts = some_texts(11)
    ids = store.add(texts)
    assert store.add(texts) == ids and store.counters.built == 11 and sorted(ids) == list(store)
    again = open_store(url, storage_options=options, adapter=adapter(), cache=tmp_path)
    for packet, text in zip(again.load(ids), texts, strict=True):
        assert_same_packet(packet, build_packet(*model_and_tokenizer(), text, adapter()))
    assert again.counters.loaded == 11 and again.stats().cached_packets == 11
    assert again.stats().bytes == again.stats().cached_bytes > 11 * 4000
    assert again.verify().ok and PacketStore(url, storage_options=options).stats().recipes == 1
    del again[ids[3]]
    assert ids[3] not in store and len(store) == 10 and ids[3] not in again
    with pytest.raises(KeyError, match="there is no packet"):
        store[ids[3]]
    with pytest.raises(KeyError, match="there is no packet"):
        store.load(ids[2:5])
    plain = open_store(url, storage_options=options)
    assert len(plain) == 0
    with pytest.raises(KeyError, match="was made otherwise"):
        plain[ids[0]]


def test_what_others_add_is_seen_at_once(url, options):
    one, two = (open_store(url, storage_options=options) for _ in range(2))
    for _ in range(3):
        (id,) = one.add(some_texts(1))
        assert id in two and two[id] is not None and len(two) == len(one)
        (other,) = two.add(some_texts(1))
        assert other in one
        del one[id]
        assert id not in two and list(two) == list(one)


def test_damaged_objects(url, options):
    import s3fs

    store = open_store(url, storage_options=options)
    texts = some_texts(3)
    ids = store.add(texts)
    fs = s3fs.S3FileSystem(**options)
    name = f"{url.removeprefix('s3://')}/{store.recipe.name}/{{}}.packet.safetensors"
    data = bytearray(fs.cat_file(name.format(ids[0])))
    data[-9] ^= 1
    fs.pipe_file(name.format(ids[0]), bytes(data))
    fs.pipe_file(name.format(ids[1]), bytes(data[:-100]))
    store = open_store(url, storage_options=options)
    assert {problem.id for problem in store.verify().problems} == set(ids[:2])
    with pytest.warns(RuntimeWarning, match=f"{ids[0]}.*it is rebuilt now"):
        assert store[ids[0]].text == texts[0]
    with pytest.warns(RuntimeWarning, match=f"{ids[1]}.*truncated"):
        store.add(texts)
    assert store.verify().ok


def test_an_empty_object_is_a_damaged_one(url, options):
    import s3fs

    store = open_store(url, storage_options=options)
    texts = some_texts(2)
    ids = store.add(texts)
    fs = s3fs.S3FileSystem(**options)
    path = f"{url.removeprefix('s3://')}/{store.recipe.name}/{ids[0]}.packet.safetensors"
    fs.pipe_file(path, b"")
    with pytest.raises(DamagedPacketError, match="truncated"):
        open_store(url, storage_options=options)[ids[0]]
    with pytest.warns(RuntimeWarning, match="it is rebuilt now"):
        assert open_store(url, storage_options=options).add(texts) == ids
    assert open_store(url, storage_options=options)[ids[0]].text == texts[0]


def test_two_slashes_are_one(url, options):
    store = open_store(url.replace("/some/", "//some//"), storage_options=options)
    ids = store.add(some_texts(1))
    assert list(store) == ids == list(PacketStore(url, storage_options=options))


def test_processes_at_once(url, options):
    texts = some_texts(6)

    def work(seed: int) -> None:
        store = open_store(url, storage_options=options, adapter=adapter(seed % 2))
        order = random.Random(seed).sample(texts, len(texts))
        for packet, text in zip(store.load(store.add(order)), order, strict=True):
            assert packet.text == text and packet.adapter_fingerprint == adapter(seed % 2).fingerprint()

    model_and_tokenizer(), adapter(0), adapter(1)
    children = [start_child(lambda seed=seed: work(seed)) for seed in range(4)]
    assert [wait_for(pid) for pid in children] == [0] * 4
    store = PacketStore(url, storage_options=options)
    assert len(store) == 12 and store.verify().ok


def test_no_such_bucket(options):
    with pytest.raises(OSError, match=r"cannot write to s3://nowhere-\S+"):
        open_store(f"s3://nowhere-{uuid.uuid4().hex}/x", storage_options=options).add(some_texts(1))


def test_nobody_listens(options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    wrong = {**options, "endpoint_url": f"http://127.0.0.1:{port}"}
    with pytest.raises(OSError, match=r"cannot read s3://bucket/x .*: check the address, the network") as caught:
        open_store("s3://bucket/x", storage_options=wrong)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.monotonic() - start < 60


def test_the_server_goes_away_in_the_middle(url, options, monkeypatch):
    """What is stored stays; the message says how far it came; the same call goes on from there."""
    store = open_store(url, storage_options=options)
    texts = some_texts(4)
    real, count = store._shelf.backend.fs.pipe_file, 0

    def flaky(path, data, **kwargs):
        nonlocal count
        count += path.endswith(".safetensors")
        if count == 3:
            raise ConnectionResetError(104, "Connection reset by peer")
        return real(path, data, **kwargs)

    monkeypatch.setattr(store._shelf.backend.fs, "pipe_file", flaky)
    with pytest.raises(OSError, match=r"Connection reset by peer.*\(2 of 4 packets are stored; the same call again"):
        store.add(texts)
    assert len(store) == 2 and store.verify().ok
    assert store.add(texts) and store.counters.built == 2 + 1 + 2 and store.verify().ok
