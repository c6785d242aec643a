# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""PacketStore: content-addressed, the same on a folder and on a URL, and one sentence for every wrong use."""

from __future__ import annotations

import os
import random
import shutil
import uuid

import kvspeed
import pytest
import torch
from kvspeed.packet import PacketAdapter, TensorFileError, build_packet, build_preamble
from kvspeed.packet.press import press_from_name
from kvspeed.packet.quantise import quantise
from kvspeed.packet.store import PacketStore
from kvspeed.packet.store.size import parse_size, show_size
from packet_tools import assert_same_packet, cached_logits, random_text, tiny_tokenizer
from store_tools import adapter, file_of, files, model_and_tokenizer, open_store, some_texts
from tiny_models import tiny_model


@pytest.fixture(params=["folder", "file url", "memory"])
def place(request, tmp_path):
    if request.param == "folder":
        return tmp_path / "a" / "store"
    if request.param == "file url":
        return f"file://{tmp_path}/store"
    return f"memory://{uuid.uuid4().hex}/store"


# --- in and out ---


def test_what_goes_in_comes_out(place):
    model, tokenizer = model_and_tokenizer()
    store = open_store(place, adapter=adapter())
    assert len(store) == 0 and list(store) == []
    texts = [*some_texts(5), "é漢 🥊 w120", "w130"]
    ids = store.add(texts)
    assert len(set(ids)) == len(texts) == len(store) and sorted(ids) == list(store)
    order = random.sample(range(len(texts)), len(texts))
    again = open_store(place, adapter=adapter())  # another process, as it were
    for index in order:
        assert ids[index] in again
        assert_same_packet(again[ids[index]], build_packet(model, tokenizer, texts[index], adapter()))
    for packet, text in zip(again.load(ids), texts, strict=True):
        assert packet.text == text
    assert again.counters.built == 0 and again.counters.loaded == len(texts) and again.counters.hits == len(texts)


def test_a_text_is_computed_once(place):
    store = open_store(place)
    one, two, three = some_texts(3)
    ids = store.add([one, two, one, one])
    assert ids[0] == ids[2] == ids[3] != ids[1] and store.counters.built == 2
    assert store.add([three, two]) == [store.id_of(three), ids[1]] and store.counters.built == 3
    assert open_store(place).add([one, two, three]) == [ids[0], ids[1], store.id_of(three)]
    assert store.add([]) == [] and len(store) == 3
    assert store.add(text for text in (one, three)) == [ids[0], store.id_of(three)]


def test_removing(place):
    store = open_store(place)
    texts = some_texts(3)
    ids = store.add(texts)
    kept = store[ids[0]]
    bits = kept.keys.clone()
    del store[ids[0]]
    assert ids[0] not in store and len(store) == 2 and ids[0] not in list(store)
    for use in (lambda: store[ids[0]], lambda: store.load(ids), lambda: store.__delitem__(ids[0])):
        with pytest.raises(KeyError) as caught:
            use()
        assert str(caught.value).startswith(f"there is no packet {ids[0]} in ")
    assert torch.equal(kept.keys, bits), "who has a packet keeps it"
    assert store.add(texts) == ids and store.counters.built == 4


def test_removed_by_another(place):
    mine, other = open_store(place), open_store(place)
    ids = mine.add(some_texts(2))
    for id in ids:
        assert mine[id] is mine[id]
    del other[ids[0]]
    assert ids[0] not in mine and len(mine) == 1
    if not str(place).startswith("memory"):
        with pytest.raises(KeyError):
            mine[ids[0]]
    assert mine.stats().packets == 1


def test_assemble(place):
    model, tokenizer = model_and_tokenizer()
    store = open_store(place, adapter=adapter())
    texts = some_texts(3)
    ids = store.add(texts)
    preamble = build_preamble(model, tokenizer, [1, 5, 6])
    order = [ids[2], ids[0], ids[2], ids[1]]
    built = {id: build_packet(model, tokenizer, text, adapter()) for id, text in zip(ids, texts, strict=True)}
    direct = kvspeed.assemble([built[id] for id in order], model=model, preamble=preamble, mode="copy", capacity=500)
    cache = store.assemble(order, preamble=preamble, mode="copy", capacity=500)
    assert torch.equal(cached_logits(model, cache, [7, 8], [9]), cached_logits(model, direct, [7, 8], [9]))
    assert store.assemble([]).get_seq_length() == 0


# --- ids ---


def test_everything_that_makes_a_packet_is_in_its_id(tmp_path):
    model = model_and_tokenizer()[0]
    other_model, deep = tiny_model("llama", layers=3, seed=1), tiny_model("llama", layers=3)
    kvspeed.patch_model(deep, 2, anchor_tokens=3)
    half = tiny_model("llama", layers=3, dtype=torch.bfloat16)
    text = "w110 w111 w112 w113"
    variants = {
        "plain": {},
        "adapter": {"adapter": adapter(0)},
        "other adapter": {"adapter": adapter(1)},
        "header": {"adapter": PacketAdapter.for_model(model, header=3, trailer=0)},
        "weights": {"model": other_model},
        "k": {"k": 2},
        "other k": {"k": 1},
        "anchors": {"model": deep},
        "press": {"press": press_from_name("tova-30")},
        "ratio": {"press": press_from_name("tova-50")},
        "other press": {"press": press_from_name("random-50")},
        "dtype": {"model": half},
        "bf16": {"dtype": "bf16"},
        "f16": {"dtype": torch.float16},
        "int8": {"dtype": "int8"},
        "fp8": {"dtype": "fp8"},
        "tokenizer": {"tokenizer": tiny_tokenizer(vocab=400)},
    }
    found = {}
    for name, options in variants.items():
        store = open_store(tmp_path, **options)
        short = text.replace("w113", "w450") if name == "tokenizer" else text
        found[name] = store.add([short])[0]
        assert len(store) == (2 if name == "tokenizer" else 1), name
        assert store[found[name]].text == short
    assert len(set(found.values())) == len(found), found
    # other words, and other ids of the same words
    store = open_store(tmp_path)
    assert store.id_of(text) != store.id_of(text + " ") and store.id_of("w450") != found["tokenizer"]
    # the same content: the same id, whatever is called otherwise
    assert open_store(tmp_path, k=3).id_of(text) == found["plain"]
    assert open_store(tmp_path, dtype="f32").id_of(text) == found["plain"]
    assert open_store(tmp_path, adapter=PacketAdapter(64, 0, 0)).id_of(text) == found["plain"]
    patched = tiny_model("llama", layers=3)
    kvspeed.patch_model(patched)
    patched.config._name_or_path = "elsewhere/another-name"
    assert open_store(tmp_path, model=patched).add([text]) == [found["plain"]]


def test_others_are_neither_used_nor_touched(tmp_path):
    one, two = open_store(tmp_path, adapter=adapter(0)), open_store(tmp_path, adapter=adapter(1))
    text = some_texts(1)[0]
    (first,) = one.add([text])
    assert len(two) == 0 and first not in two and list(two) == []
    for use in (lambda: two[first], lambda: two.assemble([first]), lambda: two.__delitem__(first)):
        with pytest.raises(KeyError, match=r"was made otherwise .*adapter .* than this store makes them .*adapter"):
            use()
    (second,) = two.add([text])
    assert first != second and one[first].adapter_fingerprint != two[second].adapter_fingerprint
    assert len(one) == len(two) == 1 and len(PacketStore(tmp_path)) == 2
    assert one.stats().all_packets == 2 and one.stats().recipes == 2


def test_a_changed_model_is_noticed(tmp_path):
    model = tiny_model("llama", layers=3)
    changing = PacketAdapter.for_model(model, 2, 2)
    store = open_store(tmp_path, model=model, adapter=changing)
    texts = some_texts(2)
    store.add(texts[:1])
    with torch.no_grad():
        changing.header.mul_(1.5)
    with pytest.raises(ValueError, match="changed since this store was opened"):
        store.add(texts)
    assert len(store) == 1
    store = open_store(tmp_path, model=model, adapter=changing)
    assert len(store) == 0
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="changed since this store was opened"):
        store.add(texts)
    assert open_store(tmp_path, model=model, adapter=changing).add(texts)
    kvspeed.patch_model(model, 2)
    assert len(open_store(tmp_path, model=model, adapter=changing)) == 0


def test_ids_are_the_same_on_every_machine(tmp_path):
    """What is stored now must be found by later versions: change this only with the version of the recipe."""
    from kvspeed.packet.store import Recipe

    recipe = Recipe("ab" * 32, "any", 4, "float32", "int8", "cd" * 32, 8, 7, 3, 1, {"name": "tova", "ratio": 0.3})
    assert recipe.name == "962b49a0844f195d"
    assert recipe.id_of("Zwölf Boxkämpfer 🥊", (5, 6, 7)) == "3ba9315c1fae206a5573077136c4defa"
    assert Recipe.from_json(recipe.to_json()) == recipe


# --- storage in fewer bits ---


@pytest.mark.parametrize("dtype", ["bf16", "f16", "int8", "fp8"])
def test_fewer_bits(tmp_path, dtype):
    model, tokenizer = model_and_tokenizer()
    store = open_store(tmp_path, dtype=dtype)
    text = some_texts(1, words=60)[0]
    (id,) = store.add([text])
    stored = {"bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[dtype]
    exact = build_packet(model, tokenizer, text)
    assert_same_packet(store[id], quantise(exact, stored))
    assert store[id].dtype == torch.float32
    logits = [cached_logits(model, store.assemble([id, id], mode="copy"), [5, 6], [7])]
    logits.append(cached_logits(model, kvspeed.assemble([exact, exact], model=model, mode="copy"), [5, 6], [7]))
    assert 0 < (logits[0] - logits[1]).abs().max() < 2
    # made full for reading in place: once, and kept at hand
    kvspeed.patch_model(model)
    try:
        view = [store.assemble([id], mode="view") for _ in range(2)]
        assert len({cache.layer(0).segments[0].key.data_ptr() for cache in view}) == 1
        assert torch.allclose(
            cached_logits(model, view[0], [5], []),
            cached_logits(model, store.assemble([id], mode="copy"), [5], []),
            atol=1e-4,
        )
    finally:
        kvspeed.unpatch_model(model)
    size = files(tmp_path)[0].stat().st_size
    assert size < exact.kv_bytes * (0.3 if stored.itemsize == 1 else 0.55) + 6000


def test_a_press(tmp_path):
    press = press_from_name("random-50")
    store = open_store(tmp_path, press=press, dtype="int8", k=2)
    (id,) = store.add([random_text(20, 3)])
    packet = store[id]
    assert packet.length == 20 and packet.keys.shape == (2, 2, 10, 16) and packet.positions is not None
    assert packet.press == press.describe() == store.recipe.press


# --- without a model ---


def test_looking_at_a_store(tmp_path):
    text = some_texts(1)[0]
    (first,) = open_store(tmp_path).add([text])
    (second,) = open_store(tmp_path, adapter=adapter(), dtype="int8").add([text])
    store = PacketStore(tmp_path)
    assert sorted([first, second]) == list(store) and first in store
    assert store[first].text == store[second].text == text and store[second].header == 2
    assert [str(recipe) for recipe in store.recipes().values()] and len(store.recipes()) == 2
    assert store.verify().ok and store.verify().packets == 2
    for use in (lambda: store.add([text]), lambda: store.assemble([first]), lambda: store.id_of(text)):
        with pytest.raises(TypeError, match="opened without a model"):
            use()
    with pytest.raises(TypeError, match="without a model"):
        store.verify(rebuild=True)
    del store[second]
    assert list(store) == [first]
    assert len(PacketStore(tmp_path / "nowhere")) == 0 and not (tmp_path / "nowhere").exists()


# --- wrong use ---


def test_texts_are_checked_before_anything_is_done(tmp_path):
    store = open_store(tmp_path / "s")
    good = some_texts(1)[0]
    for wrong, error, message in (
        ("w100 w101", TypeError, r"texts: expected several texts, got one: write \[text\]"),
        (b"w100", TypeError, "texts: expected several"),
        (None, TypeError, "texts: expected a sequence of strings, got NoneType"),
        ([good, 3], TypeError, r"texts\[1\]: expected a string, got int"),
        ([good, ""], ValueError, r"texts\[1\]: is empty"),
        ([good, good, " \n "], ValueError, r"texts\[2\]: is empty"),
        ([good, "a\ud800"], ValueError, r"texts\[1\]: holds half of a surrogate pair"),
        ([good, random_text(4097, 1)], ValueError, r"texts\[1\]: is 4097 tokens long .* the model has 4096 positions"),
    ):
        with pytest.raises(error, match=message):
            store.add(wrong)
    assert not (tmp_path / "s").exists() and store.counters.built == 0


@pytest.mark.parametrize(
    "id", ["", "x", "A" * 32, "0" * 31, "0" * 33, "../" + "0" * 29, "0" * 16 + "/" + "0" * 15, 7, None, b"0" * 32]
)
def test_ids_that_are_none(tmp_path, id):
    store = open_store(tmp_path)
    store.add(some_texts(1))
    assert id not in store
    for use in (lambda: store[id], lambda: store.load([id]), lambda: store.__delitem__(id)):
        with pytest.raises(KeyError, match="is no packet's id"):
            use()
    with pytest.raises(TypeError, match=r"write \[id\]"):
        store.load("0" * 32)
    with pytest.raises(TypeError, match=r"ids: expected several ids, as store.add returns them, got NoneType"):
        store.load(None)


def test_arguments_are_checked(tmp_path):
    for options, error, message in (
        ({"tokenizer": None}, TypeError, "give both"),
        ({"model": "llama"}, TypeError, "model: expected"),
        ({"adapter": "x"}, TypeError, "adapter: expected"),
        ({"adapter": PacketAdapter(32)}, ValueError, "hidden size 32"),
        ({"k": 4}, ValueError, "k: is 4 and the model has 3"),
        ({"press": 0.3}, TypeError, "press: expected"),
        ({"dtype": "int4"}, ValueError, "dtype: got 'int4'"),
        ({"memory_limit": -1}, ValueError, "memory_limit: expected at least 0"),
        ({"disk_limit": "two"}, ValueError, "disk_limit: got 'two'"),
        ({"disk_limit": 1.5}, TypeError, "disk_limit: expected"),
        ({"cache": tmp_path}, ValueError, "cache: is for URLs"),
        ({"checksums": "sometimes"}, ValueError, "checksums: expected"),
    ):
        with pytest.raises(error, match=message):
            open_store(tmp_path, **options)
    with pytest.raises(TypeError, match="say how packets are made"):
        PacketStore(tmp_path, k=2)
    for wrong in (3, None):
        with pytest.raises(TypeError, match="path_or_url: expected a path or a URL"):
            open_store(wrong)
    for wrong in ("", "  ", "a\0b"):
        with pytest.raises(ValueError, match="path_or_url: got"):
            open_store(wrong)
    with pytest.raises(ValueError, match="path_or_url: nosuch://x cannot be opened"):
        open_store("nosuch://x")
    with pytest.raises(ValueError, match="disk_limit: limits a folder, or the cache of a URL"):
        open_store("memory://x", disk_limit=5)
    assert os.listdir(tmp_path) == []


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds other things and is no packet store"):
        open_store(tmp_path)
    with pytest.raises(ValueError, match="Could not determine home directory"):
        open_store("~nobody-of-this-name/store")
    with pytest.raises(ValueError, match="device: got 'nonsense'"):
        open_store(tmp_path / "new", device="nonsense")
    with pytest.raises(OSError, match="a file is in the way"):
        open_store(tmp_path / "letter.txt")
    for content, message in ((b"{}", "no mark"), (b"\xff", "no mark"), (b"[" * 10**5, "no mark")):
        (tmp_path / "kvspeed-store.json").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_store(tmp_path)
    (tmp_path / "kvspeed-store.json").write_text('{"format": "kvspeed.store", "version": 2}')
    with pytest.raises(ValueError, match="version 2, and this kvspeed knows version 1"):
        open_store(tmp_path)


def test_a_file_in_the_way_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"cannot (read|write to) .*a file is in the way"):
        store = open_store(tmp_path / "file" / "store")
        store.add(some_texts(1))


def test_strange_things_in_the_folder_are_left_alone(tmp_path):
    store = open_store(tmp_path)
    (id,) = store.add(some_texts(1))
    folder = tmp_path / store.recipe.name
    (folder / "notes.txt").write_text("mine")
    (folder / "zz.packet.safetensors").write_text("mine")
    (tmp_path / "0123").mkdir()
    (tmp_path / "0123" / ("0" * 32 + ".packet.safetensors")).write_text("mine")
    store = PacketStore(tmp_path)
    assert list(store) == [id] and store.stats().all_packets == 1 and store.verify().ok
    store.gc(limit=0, grace_s=0)
    assert (folder / "notes.txt").exists() and (folder / "zz.packet.safetensors").exists() and len(store) == 0


def test_a_damaged_recipe_hides_nothing(tmp_path):
    store = open_store(tmp_path)
    texts = some_texts(2)
    ids = store.add(texts)
    recipe = tmp_path / store.recipe.name / "recipe.json"
    whole = recipe.read_bytes()
    strange = [whole.replace(b'"layers": 3', b'"layers": "3"'), whole.replace(b'"layers": 3', b'"layers": 5')]
    for content in (b"", b"{", b"[]", *strange, whole[:-9], b"[" * 10**5):
        recipe.write_bytes(content)
        again = open_store(tmp_path)
        assert again[ids[0]].text == texts[0] and len(again) == 2
        assert PacketStore(tmp_path)[ids[1]].text == texts[1]
        assert PacketStore(tmp_path).recipes() == {store.recipe.name: None}
        assert PacketStore(tmp_path).verify(remove=True).ok and len(again) == 2, "whole packets stay"
        del again[ids[0]]
        again.add(texts)
        assert recipe.read_bytes() == whole


def test_a_store_that_is_removed_while_it_is_open(tmp_path):
    store = open_store(tmp_path / "store")
    texts = some_texts(2)
    store.add(texts)
    shutil.rmtree(tmp_path / "store")
    ids = store.add(texts)
    assert [packet.text for packet in open_store(tmp_path / "store").load(ids)] == texts


def test_one_file_is_removed_and_not_another_of_its_name(tmp_path):
    plain, wrapped = open_store(tmp_path), open_store(tmp_path, adapter=adapter())
    texts = some_texts(1)
    (id,) = plain.add(texts)
    wrapped.add(texts)
    copy = file_of(wrapped, id)
    copy.write_bytes(file_of(plain, id).read_bytes())
    looked = PacketStore(tmp_path)
    entry = next(entry for entry in looked.entries() if entry.id == id and entry.folder == wrapped.recipe.name)
    assert looked.remove(entry) and not looked.remove(entry)
    assert not copy.exists() and plain[id].text == texts[0]


def test_a_packet_under_another_name_is_not_used(tmp_path):
    """Copied by hand, or on purpose: the content decides."""
    plain, wrapped = open_store(tmp_path), open_store(tmp_path, adapter=adapter())
    texts = some_texts(2)
    ids = plain.add(texts)
    (other,) = wrapped.add(texts[:1])
    folder, from_ = tmp_path / plain.recipe.name, tmp_path / wrapped.recipe.name
    target = folder / f"{ids[1]}.packet.safetensors"
    for source in (folder / f"{ids[0]}.packet.safetensors", from_ / f"{other}.packet.safetensors"):
        target.write_bytes(source.read_bytes())
        with pytest.raises(TensorFileError, match="is another packet than its name says"):
            open_store(tmp_path)[ids[1]]
        check = PacketStore(tmp_path).verify()
        assert [problem.id for problem in check.problems] == [ids[1]] and not check.ok
    with pytest.warns(RuntimeWarning, match="another packet"):
        assert plain.add(texts) == ids
    assert open_store(tmp_path)[ids[1]].text == texts[1]


def test_sizes():
    for text, size in (("0", 0), ("12", 12), ("1.5 kB", 1500), ("2GiB", 2**31), ("7 mb", 7 * 10**6), ("1Ti", 2**40)):
        assert parse_size("x", text) == size
    assert parse_size("x", None) is None and parse_size("x", 5) == 5
    for wrong in ("", "-1", "1 PB", "GiB", "1e9", "1.2.3 MB"):
        with pytest.raises(ValueError, match="x: got"):
            parse_size("x", wrong)
    assert parse_size("x", "7TiB") == 7 * 2**40 and parse_size("x", 2**63 - 1) == 2**63 - 1
    for wrong in ("9" * 400, "9" * 9000 + "GiB", "9.9" * 2000, 2**63, 10**5000, -(10**5000), "8388608 TiB"):
        with pytest.raises(ValueError, match=r"x: (got|expected)") as caught:
            parse_size("x", wrong)
        assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)
    assert [show_size(n) for n in (0, 1023, 1536, 150 * 2**20, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "150 MiB",
        "3 GiB",
    ]
