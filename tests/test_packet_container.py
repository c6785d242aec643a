# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The safetensors layout: what the library writes is read, what it refuses is refused, and tensors share the buffer."""

from __future__ import annotations

import json
import random

import pytest
import torch
from kvspeed.packet.container import ContainerError, map_file, parse_head, parse_tensors, write_head, write_pieces
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


def random_tensors() -> dict[str, torch.Tensor]:
    tensors = {}
    for index in range(random.randrange(6)):
        shape = [random.randrange(5) for _ in range(random.randrange(4))]
        dtype = random.choice(DTYPES)
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (count,), dtype=torch.uint8)
        tensors[random.choice("äöxyz ") + str(index)] = bits.view(dtype).view(shape)
    return tensors


def parse(data: bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    head = parse_head(data)
    return head.metadata, parse_tensors(as_tensor(data), head)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        other = b[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape
        if tensor.numel():
            raw = (one.contiguous().view(-1).view(torch.uint8) for one in (tensor, other))
            assert torch.equal(*raw)


def test_both_directions_agree_with_the_library(tmp_path):
    for _ in range(60):
        tensors = random_tensors()
        metadata = {"a": "é🥊\0", "b": ""} if random.random() < 0.5 else {}
        found, read = parse(save(tensors, metadata or None))
        same(tensors, read)
        assert found == metadata
        head, order = write_head(metadata, tensors)
        data = b"".join(write_pieces(head, order, tensors))
        (tmp_path / "x").write_bytes(data)
        with safe_open(tmp_path / "x", "pt") as file:
            same(tensors, {name: file.get_tensor(name) for name in file.keys()})
            assert (file.metadata() or {}) == metadata
        same(tensors, parse(data)[1])


def test_the_largest_tensor_is_aligned():
    for _ in range(40):
        tensors = random_tensors() | {"big": torch.zeros(random.randrange(1000, 2000), dtype=random.choice(DTYPES))}
        head, order = write_head({"x": "y" * random.randrange(64)}, tensors)
        start = len(head) + sum(tensors[name].nbytes for name in order[: order.index("big")])
        assert start % 64 == 0


def test_nothing_is_read_that_the_library_refuses():
    """Heads changed at random, one byte or one value at a time: never more lenient than the reference."""
    refused = 0
    for _ in range(400):
        data = bytearray(save(random_tensors() | {"w": torch.zeros(3)}, {"k": "v"}))
        length = int.from_bytes(data[:8], "little")
        for _ in range(random.choice((1, 1, 2))):
            place = random.randrange(8 + length)
            data[place] = random.choice(
                (data[place] ^ (1 << random.randrange(8)), ord(random.choice('0123456789,:[]{}" ')))
            )
        if random.random() < 0.2:
            data = data[: random.randrange(len(data) + 1)]
        try:
            deserialize(bytes(data))
            accepted = True
        except (SafetensorError, UnicodeDecodeError):
            accepted = False
        try:
            parse(bytes(data))
            assert accepted, bytes(data)
        except ContainerError as error:
            assert "\n" not in str(error)[:60]
            refused += 1
    assert refused > 100


def head_of(entries) -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "does not begin like one"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        (b'{"__metadata__": {"a": "\\ud800"}}', "no mapping of strings"),
        ({"__metadata__": {"a": 1}}, "no mapping of strings"),
        ({"__metadata__": ["a"]}, "no mapping of strings"),
        ({"a": 3}, "not described"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "not described"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}}, "not described"),
        ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "no shape"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "no shape"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "no shape"),
        ({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, "no shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, "no place"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "no place"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "too many or few"),
        ({"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]}}, "too many or few"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "begins at 4, not at 0"),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            "begins at 2, not at 4",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "describes"),
    ],
)
def test_wrong_heads_are_refused(entries, message):
    with pytest.raises(ContainerError, match=message):
        parse(head_of(entries))


def test_sizes_that_are_claimed_are_not_believed():
    for length in (2**63, 2**64 - 1, 100_000_001, 50):
        with pytest.raises(ContainerError, match="its head claims"):
            parse(length.to_bytes(8, "little") + b"{" + b" " * 20)
    with pytest.raises(ContainerError, match="no JSON"):
        parse(head_of(b"{" + b'"a":{' * 100_000))


def test_tensors_share_the_memory():
    data = save({"a": torch.arange(8, dtype=torch.int32)})
    memory = as_tensor(data)
    tensors = parse_tensors(memory, parse_head(data))
    tensors["a"][3] = 77
    assert parse(bytes(memory.tolist()))[1]["a"][3] == 77


def test_a_misaligned_tensor_is_read(tmp_path):
    entries = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    values = torch.tensor([1.5, -2.0])
    data = head_of(entries) + b"abc" + values.numpy().tobytes()
    assert torch.equal(parse(data)[1]["b"], values)


def test_mapped_files_need_no_descriptors(tmp_path):
    """More packets may be in use than a process may have files open."""
    import os

    paths = []
    for index in range(40):
        paths.append(tmp_path / str(index))
        paths[-1].write_bytes(save({"a": torch.full((2000,), float(index))}))
    before = len(os.listdir("/proc/self/fd"))
    mapped = []
    for path in paths:
        with open(path, "rb") as file:
            mapped.append(map_file(file.fileno(), path.stat().st_size, str(path)))
    assert len(os.listdir("/proc/self/fd")) == before
    for index, data in enumerate(mapped):
        assert (parse_tensors(data, parse_head(data.numpy().data))["a"] == index).all()
