# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""generate: its prompts, its logits against plain generation and singles, batches, beams, and refusals."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from kvspeed import generate, generation, patch_model, speed_mask, unpatch_model
from kvspeed.packet import PacketAdapter, build_packet, build_preamble, prompt_ids
from kvspeed.packet import generate as package_generate
from kvspeed.state import state_of
from packet_tools import CHAT_TEMPLATE, block_mask, embed, masked_logits, packet_embeds, random_text, tiny_tokenizer
from tiny_models import tiny_model
from transformers import LogitsProcessor

QUESTIONS = ["w150 w160", "w170", "w180 w190 w200 w210 w220 w230 w240"]


class Record(LogitsProcessor):
    """Keeps the ids and the logits of each step."""

    def __init__(self):
        self.ids, self.logits = [], []

    def __call__(self, input_ids, scores):
        self.ids.append(input_ids.clone())
        self.logits.append(scores.clone())
        return scores


def ask(model, tokenizer, question, packets, **options):
    """(answer, logits [rows, steps, vocab], record)"""
    record = Record()
    options = {"max_new_tokens": 5, "eos_token_id": -1, **options}
    answer = generate(model, tokenizer, question, packets, logits_processor=[record], **options)
    return answer, torch.stack(record.logits, 1), record


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(template=CHAT_TEMPLATE)


@pytest.fixture(params=[None, 3], ids=["all layers", "k=3"])
def model(request):
    model = tiny_model("llama", layers=5)
    return patch_model(model, k=request.param) if request.param else model


def documents(model, tokenizer, adapter=None, sizes=(6, 1, 14)):
    return [build_packet(model, tokenizer, random_text(n, n), adapter) for n in sizes]


def oracle(model, tokenizer, question, packets, adapter=None, *, answer, preamble=None, k=None):
    """Logits [steps, vocab] of one masked forward over everything, the answer's ids given.

    `k` is the depth where `model` is not patched any more.
    """
    state, bare = state_of(model), model
    if state is not None:
        k = state.spec.k if state.spec is not None else None
        bare = type(model)(model.config).eval()
        bare.load_state_dict(model.state_dict())
    prompt = prompt_ids(tokenizer, question, preamble=preamble)
    parts = [embed(bare, prompt.preamble)] if prompt.preamble else []
    parts += [packet_embeds(bare, packet, adapter) for packet in packets]
    last = embed(bare, [*prompt.question, *answer[:-1]])
    lengths = [len(part) for part in parts] + [len(last)]
    total = sum(lengths)
    start = total - len(answer) + 1
    upper = (k, speed_mask(start, total)) if k is not None else None
    return masked_logits(bare, torch.cat([*parts, last]), block_mask(lengths), upper=upper)[start - 1 :]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("soft", [None, (2, 3)])
@pytest.mark.parametrize("preamble", [None, " w300 w301", False])
def test_logits_are_those_of_one_masked_forward(model, tokenizer, mode, soft, preamble):
    adapter = PacketAdapter.for_model(model, *soft) if soft else None
    packets = documents(model, tokenizer, adapter)
    answer, logits, record = ask(model, tokenizer, QUESTIONS[0], packets, mode=mode, preamble=preamble)
    new = torch.cat((record.ids[-1][0], logits[0, -1].argmax()[None]))[record.ids[0].shape[1] :].tolist()
    want = oracle(model, tokenizer, QUESTIONS[0], packets, adapter, answer=new, preamble=preamble)
    close(logits[0], want)
    assert answer == tokenizer.decode(new)


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_a_batch_of_ragged_questions_equals_singles(model, tokenizer, mode):
    packets = documents(model, tokenizer)
    answers, logits, _ = ask(model, tokenizer, QUESTIONS, packets, mode=mode)
    assert isinstance(answers, list) and len(answers) == 3
    for row, question in enumerate(QUESTIONS):
        answer, alone, _ = ask(model, tokenizer, question, packets, mode=mode)
        assert answers[row] == answer
        close(logits[row], alone[0])


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_batches_on_every_architecture(architecture, tokenizer, mode):
    model = tiny_model(architecture, layers=4)
    packets = documents(model, tokenizer, sizes=(30, 12))  # longer than Gemma's windows
    _, logits, _ = ask(model, tokenizer, QUESTIONS, packets, mode=mode)
    for row, question in enumerate(QUESTIONS):
        _, alone, record = ask(model, tokenizer, question, packets, mode=mode)
        close(logits[row], alone[0])
        new = torch.cat((record.ids[-1][0], alone[0, -1].argmax()[None]))[record.ids[0].shape[1] :].tolist()
        close(alone[0], oracle(model, tokenizer, question, packets, answer=new))


def test_view_and_copy_agree(model, tokenizer):
    packets = documents(model, tokenizer, PacketAdapter.for_model(model))
    _, view, _ = ask(model, tokenizer, QUESTIONS, packets, mode="view")
    _, copy, _ = ask(model, tokenizer, QUESTIONS, packets, mode="copy")
    close(view, copy)


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_a_question_of_one_token(model, tokenizer, mode):
    packets = documents(model, tokenizer)
    options = dict(mode=mode, preamble=False, separator="")
    _, logits, record = ask(model, tokenizer, "w150", packets, **options)
    assert record.ids[0].shape[1] == sum(p.length for p in packets) + 1
    new = torch.cat((record.ids[-1][0], logits[0, -1].argmax()[None]))[record.ids[0].shape[1] :].tolist()
    close(logits[0], oracle(model, tokenizer, "w150", packets, answer=new, preamble=False))
    _, batch, _ = ask(model, tokenizer, ["w150", "w151 w152"], packets, **options)
    close(batch[0], logits[0])


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("options", [dict(), dict(num_beams=3), dict(num_beams=4, num_return_sequences=2)])
def test_one_packet_equals_plain_generate(tokenizer, mode, options):
    """A single packet at position 0 is an ordinary prompt: beams and all."""
    model = tiny_model("llama", layers=3)
    packet = build_packet(model, tokenizer, random_text(20, 1))
    ids = torch.tensor([[*packet.token_ids, *prompt_ids(tokenizer, QUESTIONS[2], preamble=False).question]])
    common = dict(max_new_tokens=6, eos_token_id=-1, **options)
    plain = model.generate(ids, do_sample=False, **common)[:, ids.shape[1] :]
    answer = generate(model, tokenizer, QUESTIONS[2], [packet], preamble=False, mode=mode, **common)
    expected = tokenizer.batch_decode(plain, skip_special_tokens=True)
    assert answer == (expected if len(expected) > 1 else expected[0])


def test_beams_in_a_batch(model, tokenizer):
    packets = documents(model, tokenizer)
    options = dict(max_new_tokens=4, eos_token_id=-1, num_beams=3)
    answers = generate(model, tokenizer, QUESTIONS, packets, **options)
    assert answers == [generate(model, tokenizer, question, packets, **options) for question in QUESTIONS]


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_prompt_lookup_changes_no_answer(model, tokenizer, mode):
    """Candidates come from the packets' own ids; verifying several at once, and dropping some, is greedy decoding."""
    packets = documents(model, tokenizer, sizes=(12, 20)) * 2
    options = dict(mode=mode, max_new_tokens=12, eos_token_id=-1)
    plain = generate(model, tokenizer, QUESTIONS[0], packets, **options)
    assert generate(model, tokenizer, QUESTIONS[0], packets, prompt_lookup_num_tokens=3, **options) == plain


def test_sampling_is_passed_on(model, tokenizer):
    packets = documents(model, tokenizer)
    options = dict(do_sample=True, temperature=1.5, top_k=0, num_return_sequences=4, max_new_tokens=8)
    torch.manual_seed(5)
    first = generate(model, tokenizer, QUESTIONS[0], packets, **options)
    torch.manual_seed(5)
    assert first == generate(model, tokenizer, QUESTIONS[0], packets, **options)
    assert len(first) == 4 and len(set(first)) > 1


def test_a_generation_config_decides(tokenizer):
    model = tiny_model("llama", layers=2)
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.temperature, config.num_return_sequences = True, 2.0, 8
    torch.manual_seed(0)
    answers = generate(model, tokenizer, QUESTIONS[0], documents(model, tokenizer), generation_config=config)
    assert len(answers) == 8 and len(set(answers)) > 1


def test_greedy_without_warnings_even_where_the_model_would_sample(tokenizer):
    model = tiny_model("llama", layers=2)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.6
    model.generation_config.top_p = 0.9
    packets = documents(model, tokenizer)
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = generate(model, tokenizer, QUESTIONS[0], packets, max_new_tokens=6)
        assert one == generate(model, tokenizer, QUESTIONS[0], packets, max_new_tokens=6)
    logger.removeHandler(handler)
    logger.setLevel(level)
    assert not heard, [record.getMessage() for record in heard]
    assert model.generation_config.do_sample is True and model.generation_config.temperature == 0.6


def test_processors_see_the_ids_of_the_packets(tokenizer):
    model = tiny_model("llama", layers=2)
    adapter = PacketAdapter.for_model(model, 1, 2)
    packets = documents(model, tokenizer, adapter, sizes=(3, 4))
    _, _, record = ask(model, tokenizer, QUESTIONS[:2], packets)
    prompt = prompt_ids(tokenizer, QUESTIONS[1])
    want = [*prompt.preamble]
    for packet in packets:
        want += [0, *packet.token_ids, 0, 0]
    want += [0, *prompt.question]  # one pad: the other question is a token longer
    assert record.ids[0][1].tolist() == want
    assert record.ids[2].shape[1] == len(want) + 2


def test_the_model_is_left_as_it_was(tokenizer):
    model = tiny_model("llama", layers=3).train()
    packets = documents(model, tokenizer)
    generate(model, tokenizer, QUESTIONS[0], packets, max_new_tokens=2)
    assert state_of(model) is None and model.training
    with pytest.raises(ZeroDivisionError):
        generate(model, tokenizer, QUESTIONS[0], packets, logits_processor=[lambda *_: 1 / 0])
    assert state_of(model) is None and model.training
    patch_model(model, k=2)
    packets = documents(model, tokenizer)
    generate(model, tokenizer, QUESTIONS[0], packets, max_new_tokens=2)
    assert state_of(model).spec.k == 2
    unpatch_model(model)


@pytest.mark.parametrize("k", [None, 2])
def test_dropout_is_off(tokenizer, k):
    model = patch_model(tiny_model("llama", layers=3, attention_dropout=0.9), k=k)
    for packets in (documents(model, tokenizer), []):  # the latter goes through the model's own attention
        _, quiet, _ = ask(model.eval(), tokenizer, QUESTIONS, packets, preamble=False)
        _, logits, _ = ask(model.train(), tokenizer, QUESTIONS, packets, preamble=False)
        close(logits, quiet)


def test_packets_are_not_written_to(model, tokenizer):
    packets = documents(model, tokenizer)
    before = [{name: tensor.clone() for name, tensor in packet.tensors().items()} for packet in packets]
    for mode in ("view", "copy"):
        generate(model, tokenizer, QUESTIONS, packets, mode=mode, max_new_tokens=4, num_beams=2)
    for packet, old in zip(packets, before, strict=True):
        for name, tensor in packet.tensors().items():
            assert torch.equal(tensor, old[name]), name


def test_packets_from_files(model, tokenizer, tmp_path):
    packets = documents(model, tokenizer)
    loaded = []
    for index, packet in enumerate(packets):
        packet.save(tmp_path / str(index))
        loaded.append(type(packet).load(tmp_path / str(index)))
    _, one, _ = ask(model, tokenizer, QUESTIONS, packets)
    _, two, _ = ask(model, tokenizer, QUESTIONS, loaded)
    assert torch.equal(one, two)


@pytest.mark.parametrize("preamble", [None, False])
def test_without_packets(model, tokenizer, preamble):
    _, logits, record = ask(model, tokenizer, QUESTIONS[0], [], preamble=preamble)
    new = torch.cat((record.ids[-1][0], logits[0, -1].argmax()[None]))[record.ids[0].shape[1] :].tolist()
    close(logits[0], oracle(model, tokenizer, QUESTIONS[0], [], answer=new, preamble=preamble))


def test_a_preamble_of_ones_own(model, tokenizer):
    packets = documents(model, tokenizer)
    preamble = build_preamble(model, tokenizer, " w300 w301")
    _, own, _ = ask(model, tokenizer, QUESTIONS[0], packets, preamble=preamble)
    _, text, _ = ask(model, tokenizer, QUESTIONS[0], packets, preamble=" w300 w301")
    assert torch.equal(own, text)


def test_the_kept_preamble_follows_the_weights(tokenizer):
    model = tiny_model("llama", layers=3)
    ask(model, tokenizer, QUESTIONS[0], documents(model, tokenizer))
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2.0)
    packets = documents(model, tokenizer)
    _, logits, record = ask(model, tokenizer, QUESTIONS[0], packets)
    new = torch.cat((record.ids[-1][0], logits[0, -1].argmax()[None]))[record.ids[0].shape[1] :].tolist()
    close(logits[0], oracle(model, tokenizer, QUESTIONS[0], packets, answer=new))


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_stats(model, tokenizer, mode):
    packets = documents(model, tokenizer)
    answer, stats = generate(
        model, tokenizer, QUESTIONS, packets, mode=mode, max_new_tokens=4, return_stats=True, eos_token_id=-1
    )
    assert len(answer) == 3 and stats.new_tokens == [4, 4, 4]
    assert stats.prefix_tokens == 2 + 6 + 1 + 14
    assert stats.question_tokens == [4, 3, 9]
    assert 0 < stats.assemble_s < stats.ttft_s < stats.total_s
    assert 0 < stats.time_per_token_s < stats.total_s
    assert stats.kv_bytes > sum(packet.kv_bytes for packet in packets)
    assert stats.allocated_bytes > 0


def test_strings_that_end_an_answer_come_with_the_tokenizer(tokenizer, monkeypatch):
    """transformers looks for them with the tokenizer, which `generate` has; the tiny one is too small for that."""
    seen = []
    monkeypatch.setattr(generation, "generate", lambda self, **given: seen.append(given) or given["input_ids"])
    model = tiny_model("llama")
    packets = [build_packet(model, tokenizer, random_text(20, 1))]
    for given in ({"stop_strings": ["."]}, {}):
        generate(model, tokenizer, "w300", packets, max_new_tokens=6, **given)
    assert seen[0]["tokenizer"] is tokenizer and "tokenizer" not in seen[1]


def test_answers_end_at_eos(model, tokenizer):
    packets = documents(model, tokenizer)
    _, logits, _ = ask(model, tokenizer, QUESTIONS[0], packets)
    second = int(logits[0, 1].argmax())
    answer, stats = generate(
        model, tokenizer, QUESTIONS[0], packets, max_new_tokens=9, eos_token_id=second, return_stats=True
    )
    assert stats.new_tokens[0] <= 2 and len(answer.split()) == stats.new_tokens[0]


def test_peft_wrapped_models(tokenizer):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    for k in (None, 2):
        wrapped = peft.get_peft_model(tiny_model("llama", layers=4), config).eval()
        if k is not None:
            patch_model(wrapped, k=k)
        packets = documents(wrapped, tokenizer)
        _, logits, _ = ask(wrapped, tokenizer, QUESTIONS, packets)
        merged = wrapped.merge_and_unload()
        merged.generation_config.pad_token_id = 0
        _, again, _ = ask(merged, tokenizer, QUESTIONS, documents(merged, tokenizer))
        torch.testing.assert_close(logits, again, atol=1e-3, rtol=1e-3)


# --- prompts ---


def test_prompt_ids(tokenizer):
    user, assistant = (tokenizer.convert_tokens_to_ids(f"[{name}]") for name in ("user", "assistant"))
    tail = (2, assistant)
    assert prompt_ids(tokenizer, "w150 w160") == type(prompt_ids(tokenizer, "w1"))((1, user), (150, 160, *tail))
    assert prompt_ids(tokenizer, "w150", preamble=" w199").preamble == (1, user, 199)
    raw = prompt_ids(tokenizer, "w150", preamble=False)
    assert (raw.preamble, raw.question) == ((), (150,))
    plain = prompt_ids(tiny_tokenizer(bos=True), "w150")
    assert (plain.preamble, plain.question) == ((1,), (150,))
    none = prompt_ids(tiny_tokenizer(), "w150")
    assert (none.preamble, none.question) == ((), (150,))


def test_template_arguments_and_templates_without_a_place():
    template = "{{ '[system]' if thinking else '' }}" + CHAT_TEMPLATE
    tokenizer = tiny_tokenizer(template=template)
    system = tokenizer.convert_tokens_to_ids("[system]")
    assert prompt_ids(tokenizer, "w150").preamble[0] == 1
    assert prompt_ids(tokenizer, "w150", chat_template_kwargs={"thinking": True}).preamble[0] == system
    for template in ("{{ messages[0]['content'] }}" * 2, "hello"):
        with pytest.raises(ValueError, match="preamble=False"):
            prompt_ids(tiny_tokenizer(template=template), "w150")
        assert prompt_ids(tiny_tokenizer(template=template), "w150", preamble=False).question == (150,)


# --- refusals ---


@pytest.mark.parametrize("question", ["", "  ", ["w150", ""], [" "]])
def test_empty_questions(model, tokenizer, question):
    with pytest.raises(ValueError, match="question"):
        generate(model, tokenizer, question, documents(model, tokenizer))


@pytest.mark.parametrize("question", [None, 3, b"x", [], [3], [None], {}])
def test_questions_of_another_type(model, tokenizer, question):
    with pytest.raises(TypeError, match="question"):
        generate(model, tokenizer, question, documents(model, tokenizer))


@pytest.mark.parametrize("value", [0, -3, 1.5, "4", None, True])
def test_refused_max_new_tokens(model, tokenizer, value):
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, tokenizer, "w150", documents(model, tokenizer), max_new_tokens=value)


def test_refused_arguments(model, tokenizer):
    packets = documents(model, tokenizer)
    for name in ("input_ids", "attention_mask", "cache", "past_key_values", "inputs_embeds", "cache_implementation"):
        with pytest.raises(TypeError, match=name):
            generate(model, tokenizer, "w150", packets, **{name: 1})
    with pytest.raises(TypeError, match="preamble"):
        generate(model, tokenizer, "w150", packets, preamble=3)
    with pytest.raises(ValueError, match="mode"):
        generate(model, tokenizer, "w150", packets, mode="paged")
    with pytest.raises(TypeError, match=r"\[packet\]"):
        generate(model, tokenizer, "w150", packets[0])
    with pytest.raises(TypeError, match="tokenizer"):
        generate(model, None, "w150", packets)


def test_a_prompt_beyond_the_models_positions(tokenizer):
    model = tiny_model("llama", layers=2, max_position_embeddings=30)
    packets = documents(model, tokenizer, sizes=(20,))
    generate(model, tokenizer, "w150", packets, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"max_new_tokens \(6\) need 31 positions, and the model has 30"):
        generate(model, tokenizer, "w150", packets, max_new_tokens=6)
    assert state_of(model) is None


def test_it_is_one_function():
    assert generate is package_generate


# --- the real model ---


@pytest.mark.parametrize(("k", "mode", "steps"), [(None, "view", 4), (24, "copy", 2)])
def test_smollm2(smollm2, k, mode, steps):
    model, tokenizer = smollm2
    texts = (
        "Marta Holm was born in Bergen and works as a glass blower.",
        "Pavel Duda was born in Brno and works as a pilot.",
    )
    question = "Where was Marta Holm born? Answer with the name of the city."
    if k is not None:
        patch_model(model, k=k)
    packets = [build_packet(model, tokenizer, text) for text in texts]
    _, logits, record = ask(model, tokenizer, question, packets, mode=mode, max_new_tokens=steps)
    new = torch.cat((record.ids[-1][0], logits[0, -1].argmax()[None]))[record.ids[0].shape[1] :].tolist()
    want = oracle(unpatch_model(model), tokenizer, question, packets, answer=new, k=k)
    torch.testing.assert_close(logits[0], want, atol=2e-3, rtol=1e-3)
