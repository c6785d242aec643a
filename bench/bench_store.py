# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A store of packets against what the files allow: loading by memory map, and adding a thousand.

    python -m pytest bench/bench_store.py

Packets have the KV of SmolLM2-135M (30 layers, 3 KV heads of 64, bfloat16) from a model that is small otherwise, so
that computing them takes little time. Loading ends when every byte of the packets was read, by comparing checksums (the
first time) or by a plain read after mapping; its limit is reading the same files into memory that is there already.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvspeed.packet import Packet
from kvspeed.packet.store import PacketStore
from limits import read
from timing import Comparison, Timing, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from packet_tools import random_text, tiny_tokenizer
from tiny_models import tiny_model

PACKETS, TOKENS = 64, 256
MANY, FEW_TOKENS = 1000, 32


@pytest.fixture(scope="module")
def model() -> Any:
    geometry = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}
    return tiny_model("llama", layers=30, dtype=torch.bfloat16, **geometry)


@pytest.fixture(scope="module")
def open_store(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., PacketStore]]:
    """Opens a store in a folder of this run; KVSPEED_BENCH_FOLDER names the disk."""
    base = os.environ.get("KVSPEED_BENCH_FOLDER")
    root = Path(base) / f"kvspeed-bench-{os.getpid()}" if base else tmp_path_factory.mktemp("stores")
    tokenizer = tiny_tokenizer()

    def run(name: str, **options: Any) -> PacketStore:
        return PacketStore(root / name, model=model, tokenizer=tokenizer, **options)

    yield run


def files_of(store: PacketStore) -> list[Path]:
    return [Path(store.place) / entry.name for entry in store.entries()]


@pytest.mark.parametrize("dtype", [None, "int8"], ids=["bf16", "int8"])
def test_load(compare: Callable[..., Comparison], open_store: Callable[..., PacketStore], dtype: str | None) -> None:
    store = open_store("load", dtype=dtype, memory_limit=0)
    ids = store.add(random_text(TOKENS, seed) for seed in range(PACKETS))
    files = files_of(store)
    buffer = memoryview(bytearray(sum(file.stat().st_size for file in files)))
    buffer[:] = bytes(len(buffer))  # its pages are there

    def read_all(packets: list[Packet]) -> None:
        read(*(tensor for packet in packets for tensor in (packet.keys, packet.values)))

    def load_first() -> None:
        # a store object of its own, which has compared no checksum yet; comparing reads every byte
        open_store("load", dtype=dtype).load(ids)

    def load_unchecked() -> None:
        read_all(open_store("load", dtype=dtype, checksums="never").load(ids))

    def load_later() -> None:
        read_all(store.load(ids))  # its files were compared in the warm-up

    def read_files() -> None:
        at = 0
        for file in files:
            with open(file, "rb", buffering=0) as opened:
                at += opened.readinto(buffer[at:])

    functions = {
        "kvspeed, first time": load_first,
        "kvspeed, later": load_later,
        "kvspeed, no checksums": load_unchecked,
        "reading the files": read_files,
    }
    case = {"packets": PACKETS, "tokens": TOKENS, "bytes": len(buffer), "storage": dtype or "bf16"}
    compare(f"store_load_{dtype or 'bf16'}", functions, case=case, limit="reading the files", rounds=9)


def test_add(open_store: Callable[..., PacketStore], threads: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand packets, once: the whole, the model's share of it, and writing as many bytes as safely by hand."""
    from kvspeed.packet import build_packet

    store = open_store("add")
    texts = [random_text(FEW_TOKENS, seed) for seed in range(MANY)]
    builder = store._shelf.builder
    timings = {name: Timing() for name in ("adding", "adding again", "computing alone", "writing alone")}

    def timed(name: str, action: Callable[[], object]) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        action()
        timings[name].wall.append(time.perf_counter() - begin)
        timings[name].cpu.append(time.process_time() - cpu)
        timings[name].clean.append(False)

    timed("adding", lambda: store.add(texts))
    timed("adding again", lambda: open_store("add").add(texts))
    timed("computing alone", lambda: [build_packet(builder.model, builder.tokenizer, text) for text in texts])
    files = files_of(store)
    data = files[0].read_bytes()
    folder = Path(store.place).with_name("by-hand")
    folder.mkdir()

    def write() -> None:
        for index in range(MANY):
            with open(folder / f"{index}.tmp", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(folder / f"{index}.tmp", folder / str(index))

    timed("writing alone", write)
    assert len(files) == len(store) == MANY and store.counters.built == MANY
    comparison = Comparison(timings, threads)
    own = comparison.seconds("adding")
    ratios = {name: comparison.seconds(name) / own for name in timings if name != "adding"}
    case = {"packets": MANY, "tokens": FEW_TOKENS, "bytes": store.stats().bytes, "threads": threads}
    save("store_add", comparison, case=case, ratios=ratios)
    with capsys.disabled():
        print(f"\nstore_add  {case}\n{comparison.table('adding')}")
