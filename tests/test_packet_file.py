# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets and adapters as files: bit-exact round trips, atomic writes, and one clear sentence for every bad file."""

from __future__ import annotations

import json
import os
import random
import stat

import pytest
import torch
from kvspeed.packet import tensorfile
from kvspeed.packet.packet import Packet
from kvspeed.packet.tensorfile import TensorFileError, read_tensor_file, write_tensor_file
from packet_tools import assert_same_packet, changed, random_packet, random_rope
from safetensors import safe_open
from safetensors.torch import save_file

VARIANTS = {
    "plain": dict(),
    "bf16": dict(dtype=torch.bfloat16, head_dim=8, tokens=7),
    "f16 odd": dict(dtype=torch.float16, head_dim=5, tokens=3, heads=1),
    "soft": dict(soft=(8, 3)),
    "depth": dict(k=3, soft=(1, 0)),
    "depth without anchor": dict(k=1, anchors=0),
    "anchors": dict(k=2, anchors=4),
    "removed": dict(tokens=9, kept=4, dtype=torch.bfloat16),
    "removed, depth": dict(tokens=9, kept=4, k=2, head_dim=3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bit_exact(tmp_path, variant):
    packet = random_packet(**VARIANTS[variant])
    bits = packet.keys.view(torch.uint8)
    bits[..., : bits.shape[-1] // 2].random_(0, 256)  # NaN payloads, infinities, -0.0
    packet.save(tmp_path / "p.safetensors")
    assert_same_packet(packet, Packet.load(tmp_path / "p.safetensors"))
    assert_same_packet(packet, Packet.load(str(tmp_path / "p.safetensors"), verify=False))


def test_any_text_round_trips(tmp_path):
    for text in ("", "\0\n\x1b", "\ud800 lone", '"\\"', "é漢🥊" * 1000):
        packet = random_packet(text=text, model_name=text)
        packet.save(tmp_path / "p")
        assert_same_packet(packet, Packet.load(tmp_path / "p"))


def test_strided_tensors_round_trip(tmp_path):
    packet = random_packet(tokens=6)
    strided = changed(packet, keys=packet.keys.transpose(1, 2).contiguous().transpose(1, 2))
    assert not strided.keys.is_contiguous()
    strided.save(tmp_path / "p")
    assert_same_packet(packet, Packet.load(tmp_path / "p"))


def test_loaded_tensors_are_mapped_and_aligned(tmp_path):
    path = tmp_path / "p"
    for options in (dict(), dict(kept=3, dtype=torch.bfloat16), dict(k=2)):
        random_packet(tokens=9, **options).save(path)
        loaded = Packet.load(path)
        assert loaded.keys.data_ptr() % 64 == 0
        with open("/proc/self/maps") as maps:
            assert str(path) in maps.read(), "the file is not memory-mapped"
        before = path.read_bytes()
        loaded.keys.zero_()
        assert path.read_bytes() == before, "writing to a loaded packet must never reach the file"
        del loaded


def test_survives_replacement_of_the_file(tmp_path):
    first, second = random_packet(), random_packet()
    first.save(tmp_path / "p")
    loaded = Packet.load(tmp_path / "p")
    second.save(tmp_path / "p")
    assert_same_packet(loaded, first)
    assert_same_packet(Packet.load(tmp_path / "p"), second)


def test_other_readers_can_open_it(tmp_path):
    packet = random_packet()
    packet.save(tmp_path / "p.safetensors")
    with safe_open(tmp_path / "p.safetensors", "pt") as file:
        assert file.metadata()["format"] == "kvspeed.packet"
        assert torch.equal(file.get_tensor("values"), packet.values)


# --- nothing half-written ---


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "p"
    old = random_packet()
    old.save(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                random_packet().save(path)
        assert os.listdir(tmp_path) == ["p"]
        assert_same_packet(Packet.load(path), old)


def test_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(head, order, tensors):
        yield b"half"
        raise KeyboardInterrupt

    monkeypatch.setattr(tensorfile, "_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        random_packet().save(tmp_path / "p")
    assert os.listdir(tmp_path) == []


def test_refused_header_writes_nothing(tmp_path):
    for header in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((TypeError, ValueError)):
            write_tensor_file(tmp_path / "p", "t", 1, header, {})
    with pytest.raises(ValueError, match="complex64"):
        write_tensor_file(tmp_path / "p", "t", 1, {}, {"x": torch.zeros(2, dtype=torch.complex64)})
    assert os.listdir(tmp_path) == []


def test_file_mode_follows_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        random_packet().save(tmp_path / "p")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / "p").st_mode) == 0o644


def test_bad_places_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        random_packet().save(tmp_path / "nowhere" / "p")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        random_packet().save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*missing"):
        Packet.load(tmp_path / "missing")
    with pytest.raises(TensorFileError, match="is a folder"):
        Packet.load(tmp_path)
    assert os.listdir(tmp_path) == []


# --- untrusted files ---


def one_sentence(error: BaseException, path) -> None:
    text = str(error)
    assert str(path) in text and "\n" not in text and len(text) < 600, text[:600]


def test_truncated_anywhere_is_refused(tmp_path):
    path = tmp_path / "p"
    random_packet(layers=2, tokens=3, head_dim=8, k=1).save(path)
    data = path.read_bytes()
    for size in sorted({*range(0, len(data), 64), *range(12), len(data) - 1, len(data) - 63}):
        path.write_bytes(data[:size])
        with pytest.raises(TensorFileError) as caught:
            Packet.load(path)
        one_sentence(caught.value, path)
    path.write_bytes(data + b"\0")
    with pytest.raises(TensorFileError):
        Packet.load(path)


def test_flipped_bits_are_found(tmp_path):
    path = tmp_path / "p"
    packet = random_packet(layers=2, tokens=3, head_dim=8, k=1, soft=(1, 1))
    packet.save(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(0)
    places = [*range(0, start, 3), *(rng.randrange(start, len(data)) for _ in range(200))]
    found = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = Packet.load(path)
        except TensorFileError as error:
            one_sentence(error, path)
            found += 1
        else:  # only white space of the head may change without harm
            assert place < start
            assert_same_packet(loaded, packet)
    assert found > 0.9 * len(places)
    assert found >= 200


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "p"
    for data in (b"", b"hello", b"\x93NUMPY" + bytes(100), b"GGUF" + bytes(4000), os.urandom(5000), b"\xff" * 300):
        path.write_bytes(data)
        with pytest.raises(TensorFileError) as caught:
            Packet.load(path)
        one_sentence(caught.value, path)
    save_file({"keys": torch.zeros(3)}, path)
    with pytest.raises(TensorFileError, match=r"not a kvspeed\.packet file"):
        Packet.load(path)
    write_tensor_file(path, "kvspeed.adapter", 1, {}, {})
    with pytest.raises(TensorFileError, match=r"'kvspeed\.adapter' file; a 'kvspeed\.packet' file was expected"):
        Packet.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "3"}, "reads versions 1 to 2"),
        ({"version": "0"}, "reads versions 1 to 2"),
        ({"version": "-1"}, "no number"),
        ({"version": "1.0"}, "no number"),
        ({"version": "9" * 5000}, "no number"),
        ({"extra": "x"}, "unknown or missing metadata"),
        ({"checksum": None}, "unknown or missing metadata"),
        ({"checksum": "0" * 64}, "checksum does not match"),
        ({"format": "kvspeed.other"}, "was expected"),
    ],
)
def test_wrong_metadata_is_refused(tmp_path, change, message):
    path = tmp_path / "p"
    random_packet().save(path)
    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), **change}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_file(tensors, path, metadata={name: value for name, value in metadata.items() if value is not None})
    with pytest.raises(TensorFileError, match=message) as caught:
        Packet.load(path)
    one_sentence(caught.value, path)


def rewrite(path, packet: Packet, change: dict, tensors: dict | None = None) -> None:
    """A file with a right checksum and wrong contents, as a hostile writer makes it."""
    packet.save(path)
    header, found = read_tensor_file(path, "kvspeed.packet", 1)
    header |= change
    header = {name: value for name, value in header.items() if value != "REMOVE"}
    write_tensor_file(path, "kvspeed.packet", 1, header, {**found, **(tensors or {})})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": 3}, "text"),
        ({"text": "REMOVE"}, "unknown or missing fields: text"),
        ({"code": "x"}, "unknown or missing fields: code"),
        ({"dtype": "bfloat16"}, "the description says 'bfloat16'"),
        ({"dtype": None}, "dtype|description"),
        ({"layers": 5}, "expected"),
        ({"layers": -4}, "layers"),
        ({"layers": True}, "layers"),
        ({"layers": 10**30}, "keys: expected"),
        ({"k": 2}, "keys: expected"),
        ({"k": 0}, "k: expected"),
        ({"k": 4}, "k: expected"),
        ({"k": "1"}, "k: expected"),
        ({"header": 10**12}, "hold 5 tokens"),
        ({"header": -1}, "header"),
        ({"header": 0.0}, "header"),
        ({"header": 1, "token_ids": [1, 2, 3, 4]}, "must name the adapter"),
        ({"token_ids": []}, "at least one token"),
        ({"token_ids": [1, 2, 3]}, "hold 5 tokens"),
        ({"token_ids": [1, 2, 3, 4, -5]}, "token_ids"),
        ({"token_ids": [1, 2, 3, 4, 5.0]}, "token_ids"),
        ({"token_ids": "abcde"}, "token_ids"),
        ({"model_fingerprint": "short"}, "model_fingerprint"),
        ({"model_fingerprint": None}, "model_fingerprint"),
        ({"adapter_fingerprint": "x" * 64}, "adapter_fingerprint"),
        ({"rope": None}, "rope"),
        ({"rope": {}}, "rope"),
        ({"rope": {**random_rope(4, 16), "rotary_dim": 18}}, "rope"),
        ({"rope": {**random_rope(4, 16), "row": [0, 0, 0, 7]}}, "rope"),
        ({"rope": {**random_rope(4, 16), "row": [0, 0, 0, -1]}}, "rope"),
        ({"rope": {**random_rope(4, 16), "interleaved": 1}}, "rope"),
        ({"press": {"name": "x"}}, "press, positions"),
        ({"tensors": ["keys"]}, "tensors"),
        ({"tensors": 7}, "tensors"),
    ],
)
def test_inconsistent_description_is_refused(tmp_path, change, message):
    path = tmp_path / "p"
    rewrite(path, random_packet(), change)
    with pytest.raises(TensorFileError, match=message) as caught:
        Packet.load(path)
    one_sentence(caught.value, path)


def test_inconsistent_tensors_are_refused(tmp_path):
    path = tmp_path / "p"
    packet = random_packet(tokens=5)
    full = ["keys", "values"]
    for tensors, names, message in (
        ({"keys": torch.randn(4, 2, 6, 16)}, full, "values: expected"),
        ({"keys": torch.randn(4, 2, 5, 16).double()}, full, "the description says"),
        ({"keys": torch.zeros(4, 2, 5, 16, dtype=torch.int32)}, full, "the description says"),
        ({"values": torch.randn(4, 2, 5, 16).bfloat16()}, full, "values: is torch.bfloat16"),
        ({"values": torch.randn(4, 2, 16, 5)}, full, "values: expected"),
        ({"keys": torch.randn(4, 2, 5), "values": torch.randn(4, 2, 5)}, full, "keys: expected"),
        ({"other": torch.zeros(1)}, [*full, "other"], "unknown or missing tensors"),
        ({"anchor_keys": torch.zeros(1)}, [*full, "anchor_keys"], "anchor"),
        ({"positions": torch.arange(5).int().expand(4, 2, 5)}, [*full, "positions"], "press, positions"),
    ):
        rewrite(path, packet, {"tensors": sorted(names)}, tensors)
        with pytest.raises(TensorFileError, match=message) as caught:
            Packet.load(path)
        one_sentence(caught.value, path)


def test_positions_out_of_range_are_refused(tmp_path):
    packet = random_packet(tokens=8, kept=4)
    for value in (-1, 8, 2**31 - 1):
        positions = packet.positions.clone()
        positions[1, 1, 2] = value
        rewrite(tmp_path / "p", packet, {}, {"positions": positions})
        with pytest.raises(TensorFileError, match="positions"):
            Packet.load(tmp_path / "p")


def test_deep_description_is_refused(tmp_path):
    path = tmp_path / "p"
    text = "[" * 200_000 + "]" * 200_000
    checksum = tensorfile._checksum("kvspeed.packet", 1, text, {})
    save_file({}, path, metadata={"format": "kvspeed.packet", "version": "1", "header": text, "checksum": checksum})
    with pytest.raises(TensorFileError):
        Packet.load(path)
    for text in ("[]", "3", json.dumps({"a": float("inf")})):
        checksum = tensorfile._checksum("kvspeed.packet", 1, text, {})
        save_file({}, path, metadata={"format": "kvspeed.packet", "version": "1", "header": text, "checksum": checksum})
        with pytest.raises(TensorFileError):
            Packet.load(path)


# --- Packet itself ---


def test_packet_is_immutable_and_says_what_it_is():
    packet = random_packet(k=2, soft=(8, 8), text="The Danube rises in the Black Forest and flows east.")
    with pytest.raises(AttributeError):
        packet.k = 3
    text = repr(packet)
    for part in ("The Danube rises in the Black", "21 tokens (8 + 8 soft)", "2 of 4 layers, k=2", "tiny", "abababab"):
        assert part in text
    assert packet.length == 21 and packet.depth == 2
    assert packet.kv_bytes == 4 * 2 * 2 * 16 * (2 * 21 + 2 * 1)


def test_packet_refuses_wrong_parts():
    packet = random_packet(k=2)
    with pytest.raises(ValueError, match="gradients"):
        changed(packet, keys=packet.keys.clone().requires_grad_())
    with pytest.raises(ValueError, match="stride 1"):
        changed(packet, values=torch.randn(2, 2, 16, 5).transpose(2, 3))
    with pytest.raises(ValueError, match="give both or none"):
        changed(packet, anchor_values=None)
    with pytest.raises(ValueError, match="only a packet with a depth"):
        random_packet(anchor_keys=packet.anchor_keys, anchor_values=packet.anchor_values)
    with pytest.raises(TypeError, match="keys"):
        changed(packet, keys=None)


def test_to_the_same_device_is_itself():
    packet = random_packet()
    assert packet.to("cpu") is packet
