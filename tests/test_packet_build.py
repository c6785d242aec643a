# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""build_packet and build_preamble: what they compute, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from kvspeed import patch_model, unpatch_model
from kvspeed.fingerprint import model_fingerprint
from kvspeed.packet import PacketAdapter, build_packet, build_preamble
from kvspeed.state import state_of
from packet_tools import CHAT_TEMPLATE, assert_same_packet, random_text, tiny_tokenizer
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(bos=True)


@pytest.fixture
def model():
    return tiny_model("llama", layers=3)


def plain_kv(model, **inputs):
    """Keys and values [L, H, T, D] of transformers' own forward."""
    from kvspeed.models import cache_argument
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(use_cache=True, **{cache_argument(model.model): cache}, **inputs)
    return tuple(torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values"))


def test_kv_is_that_of_the_text_alone(tokenizer):
    for name in ("llama", "qwen3", "smollm3", "phi3", "olmo2", "granite"):
        model = tiny_model(name, layers=3)
        packet = build_packet(model, tokenizer, random_text(11, 1))
        keys, values = plain_kv(model, input_ids=torch.tensor([packet.token_ids]))
        torch.testing.assert_close(packet.keys, keys, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(packet.values, values, atol=5e-5, rtol=1e-5)


def test_soft_tokens_are_around_the_text(model, tokenizer):
    adapter = PacketAdapter.for_model(model, 3, 2)
    packet = build_packet(model, tokenizer, random_text(4, 1), adapter)
    embeds = model.get_input_embeddings()(torch.tensor([packet.token_ids]))
    wrapped = torch.cat((adapter.header[None], embeds, adapter.trailer[None]), 1)
    keys, values = plain_kv(model, inputs_embeds=wrapped)
    torch.testing.assert_close(packet.keys, keys, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(packet.values, values, atol=5e-5, rtol=1e-5)
    assert (packet.header, packet.trailer, packet.length) == (3, 2, 9)
    assert packet.adapter_fingerprint == adapter.fingerprint()


def test_what_a_packet_remembers(model, tokenizer):
    text = random_text(6, 2)
    packet = build_packet(model, tokenizer, text)
    assert packet.text == text and packet.length == 6 and len(packet.token_ids) == 6
    assert packet.model_fingerprint == model_fingerprint(model)
    assert packet.adapter_fingerprint is None and packet.press is None and packet.positions is None
    assert not packet.keys.requires_grad and packet.keys.dtype == torch.float32


def test_no_special_tokens_inside(model, tokenizer):
    assert tokenizer("w200")["input_ids"][0] == 1
    assert 1 not in build_packet(model, tokenizer, random_text(6, 2)).token_ids


def test_adapter_without_tokens_is_no_adapter(model, tokenizer):
    text = random_text(5, 1)
    empty = PacketAdapter.for_model(model, 0, 0)
    assert_same_packet(build_packet(model, tokenizer, text, empty), build_packet(model, tokenizer, text))


def test_training_mode_and_gradients_do_not_matter(tokenizer):
    model = tiny_model("llama", layers=3, attention_dropout=0.5)
    text = random_text(12, 1)
    quiet = build_packet(model, tokenizer, text)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    with torch.enable_grad():
        packet = build_packet(model, tokenizer, text, k=None)
    assert torch.equal(packet.keys, quiet.keys) and not packet.keys.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(weight.grad is None for weight in model.parameters())


def test_the_patch_is_left_as_it_was(model, tokenizer):
    build_packet(model, tokenizer, random_text(5, 1), k=2)
    assert state_of(model) is None
    patch_model(model, k=1)
    build_packet(model, tokenizer, random_text(5, 1), k=2)
    assert state_of(model).spec.k == 1
    unpatch_model(model)


def test_built_twice_is_the_same_to_the_bit(model, tokenizer):
    text = random_text(33, 3)
    assert_same_packet(build_packet(model, tokenizer, text, k=2), build_packet(model, tokenizer, text, k=2))


def test_peft_wrapped_models(tokenizer):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_model("llama", layers=3), config).eval()
    text = random_text(7, 1)
    packet = build_packet(wrapped, tokenizer, text)
    keys, _ = plain_kv(wrapped.get_base_model(), input_ids=torch.tensor([packet.token_ids]))
    torch.testing.assert_close(packet.keys, keys, atol=5e-5, rtol=1e-5)
    with wrapped.disable_adapter():
        bare = build_packet(wrapped, tokenizer, text)
    assert bare.model_fingerprint == model_fingerprint(tiny_model("llama", layers=3)) != packet.model_fingerprint


# --- preamble ---


def test_preamble_without_template(model, tokenizer):
    assert build_preamble(model, tokenizer).token_ids == (1,)
    assert build_preamble(model, tokenizer, "w200 w201").token_ids == (1, 200, 201)
    assert build_preamble(model, tokenizer, "<s> w200").token_ids == (1, 200)
    assert build_preamble(model, tokenizer, [5, 6, 7]).token_ids == (5, 6, 7)
    assert build_preamble(model, tokenizer, torch.tensor([5, 6, 7])).token_ids == (5, 6, 7)
    plain = tiny_tokenizer()
    assert build_preamble(model, plain, "w200").token_ids == (200,)
    with pytest.raises(ValueError, match="no default preamble"):
        build_preamble(model, plain)


def test_preamble_with_template(model):
    tokenizer = tiny_tokenizer(template=CHAT_TEMPLATE)
    user = tokenizer.convert_tokens_to_ids("[user]")
    assert build_preamble(model, tokenizer).token_ids == (1, user)
    assert build_preamble(model, tokenizer, " w200").token_ids == (1, user, 200)
    packet = build_preamble(model, tokenizer)
    assert packet.header == packet.trailer == 0 and packet.text == "<s>[user]"


def test_preamble_to_a_depth(model, tokenizer):
    assert build_preamble(model, tokenizer, k=2).k == 2
    assert build_preamble(patch_model(model, k=1), tokenizer).k == 1


# --- refusals ---


@pytest.mark.parametrize(
    ("text", "error"),
    [("", ValueError), ("  \n", ValueError), (None, TypeError), (b"x", TypeError), (["x"], TypeError)],
)
def test_refused_texts(model, tokenizer, text, error):
    with pytest.raises(error, match="text"):
        build_packet(model, tokenizer, text)


def test_text_longer_than_the_model(tokenizer):
    model = tiny_model("llama", layers=2, max_position_embeddings=20)
    assert build_packet(model, tokenizer, random_text(20, 1)).length == 20
    with pytest.raises(ValueError, match="21 tokens long and the model has 20 positions"):
        build_packet(model, tokenizer, random_text(21, 1))
    with pytest.raises(ValueError, match="22 tokens long and the model has 20 positions"):
        build_packet(model, tokenizer, random_text(20, 1), PacketAdapter.for_model(model, 1, 1))
    with pytest.raises(ValueError, match="positions"):
        build_preamble(model, tokenizer, list(range(21)))


@pytest.mark.parametrize(
    ("k", "error"),
    [(0, ValueError), (-1, ValueError), (4, ValueError), (1.0, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_refused_depths(model, tokenizer, k, error):
    with pytest.raises(error, match="k"):
        build_packet(model, tokenizer, "w200", k=k)
    with pytest.raises(error, match="k"):
        build_preamble(model, tokenizer, k=k)


def test_refused_press_and_adapters(model, tokenizer):
    for press in ("tova", "cur-30", 0.5, object(), PacketAdapter):
        with pytest.raises(TypeError, match=r"press: expected a press of kvspeed\.packet\.press"):
            build_packet(model, tokenizer, "w200", press=press)
    with pytest.raises(TypeError, match="adapter"):
        build_packet(model, tokenizer, "w200", torch.zeros(8, 64))
    with pytest.raises(ValueError, match=r"hidden size 96.*hidden size 64"):
        build_packet(model, tokenizer, "w200", PacketAdapter(96))
    adapter = PacketAdapter.for_model(model, 2, 2)
    adapter.trailer.data[0, 3] = float("nan")
    with pytest.raises(ValueError, match="its soft tokens hold a number that is not finite"):
        build_packet(model, tokenizer, "w200", adapter)


class NoIds:
    """A tokenizer that gives something, and no ids."""

    def __init__(self, given):
        self.given = given

    def __call__(self, *args, **kwargs):
        return self.given


@pytest.mark.parametrize("given", [{}, {"input_ids": None}, {"input_ids": ["a"]}, {"input_ids": [[1]]}, "text", None])
def test_refused_tokenizers(model, given):
    with pytest.raises(ValueError, match="gave no list of input_ids"):
        build_packet(model, NoIds(given), "w200")


def test_refused_ids(model, tokenizer):
    with pytest.raises(TypeError, match="tokenizer"):
        build_packet(model, None, "w200")
    with pytest.raises(ValueError, match="no tokens"):
        build_packet(model, NoIds({"input_ids": []}), "w200")
    with pytest.raises(ValueError, match="id 512 and the model has 512 embeddings"):
        build_packet(model, NoIds({"input_ids": [512]}), "w200")
    for ids in ([], [-1], torch.tensor([[1]]), [1.5], [True], 7):
        with pytest.raises((TypeError, ValueError), match="text_or_ids"):
            build_preamble(model, tokenizer, ids)


def test_refused_models(tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=600))
    with pytest.raises(ValueError, match=r"gpt2.*not known"):
        build_packet(other, tokenizer, "w200")
    dynamic = tiny_model("llama", layers=1, rope={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="dynamic"):
        build_packet(dynamic, tokenizer, "w200")
