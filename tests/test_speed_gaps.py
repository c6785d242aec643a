# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Deep layers anywhere in a model: prompts pass them by, and the layers above take all tokens again.

The oracle is the unpatched model in which the deep layers have the mask of SPEED, and give back unchanged what is no
column there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
import transformers
from kvspeed import graph
from kvspeed.rule import SpeedSpec
from kvspeed.state import state_of
from kvspeed.tuned import remember_spec
from speed_tools import (
    CACHE,
    LAYERS,
    NEW,
    Answer,
    Token,
    answer,
    close,
    conversation,
    fresh,
    ids_of,
    left_padded,
    masked,
    plain,
    poison,  # noqa: F401
    rows_above,
    rule,
)
from test_speed_training import alike, batch_of, mask_of, read

SETS = {"one": [2], "two": [1, 3], "gap-and-top": [2, 4, 5], "all-but-two": [1, 2, 3, 4], "next-to-last": [4]}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"boundary": "keep"},
    "no-anchor": {"anchor_tokens": 0},
    "three-anchors": {"anchor_tokens": 3},
    "self": {"upper_attention": "self"},
}
TINY = ("llama", "gemma2")


def columns_of(tokens: list[Token], anchor_tokens: int = 1, **_: Any) -> torch.Tensor:
    """bool `[T]`: who runs in the deep layers."""
    return torch.tensor([token.answer or token.boundary or i < anchor_tokens for i, token in enumerate(tokens)])


@torch.no_grad()
def oracle(model: Any, ids: torch.Tensor, tokens: list[Token], deep: list[int], **options: Any) -> torch.Tensor:
    with masked(model, rule(tokens, **options), deep=deep, columns=columns_of(tokens, **options)):
        return model(ids[None], use_cache=False).logits[0].float()


def gapped(architecture: str, deep: list[int], **options: Any) -> Any:
    return kvspeed.patch_model(fresh(architecture), deep_layers=deep, **options)


def check(architecture: str, found: Answer, prompt: int, deep: list[int], **options: Any) -> None:
    for row, logits in zip(found.sequences, found.logits, strict=True):
        tokens = conversation((prompt, row.shape[0] - prompt))
        wanted = oracle(plain(architecture), row, tokens, deep, **options)
        close(logits, wanted[prompt - 1 : prompt - 1 + logits.shape[0]])


@pytest.mark.parametrize("name", SETS)
def test_one_turn_on_every_architecture(architecture: str, name: str) -> None:
    found = answer(gapped(architecture, SETS[name]), ids_of(37))
    check(architecture, found, 37, SETS[name])
    for layer in range(LAYERS):  # anchor and answers, or everything; the last token is not cached yet
        if layer in SETS[name]:
            assert found.cache.layer(layer).length == 1 + 4
        else:
            assert found.cache.layer(layer).get_seq_length() == 37 + 4


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("architecture", TINY)
def test_every_option(architecture: str, option: str) -> None:
    for name in ("two", "gap-and-top"):
        for prompt in (30, 3, 1):
            found = answer(gapped(architecture, SETS[name], **OPTIONS[option]), ids_of(prompt))
            check(architecture, found, prompt, SETS[name], **OPTIONS[option])


def test_a_gap_is_not_a_lower_k() -> None:
    """The oracle can tell: skipping layer 2 is neither the full model nor k = 2, and passing by is not masking."""
    ids, tokens = ids_of(30)[0], conversation((25, 5))
    model, found = plain("llama"), []
    for deep in ([], [2], [2, 3, 4, 5]):
        found.append(oracle(model, ids, tokens, deep))
    with torch.no_grad(), masked(model, rule(tokens), deep=[2]):
        found.append(model(ids[None], use_cache=False).logits[0])
    for i, one in enumerate(found):
        for other in found[:i]:
            assert float((one - other)[24:].abs().max()) > 0.05


def test_the_last_layers_are_a_k() -> None:
    for deep, k in (([4, 5], 4), ([5], 5), ([1, 2, 3, 4, 5], 1), ((5, 3, 4), 3)):
        model = kvspeed.patch_model(fresh("llama"), deep_layers=iter(deep), anchor_tokens=2)
        assert state_of(model).spec == SpeedSpec(k, 2)  # type: ignore[union-attr]
    assert state_of(kvspeed.patch_model(fresh("llama"), deep_layers=[])).spec is None  # type: ignore[union-attr]
    spec = SpeedSpec(5, gaps=(1, 3))
    assert spec.deep_layers(7) == [1, 3, 5, 6] and [spec.is_deep(i) for i in range(7)] == [
        i in (1, 3, 5, 6) for i in range(7)
    ]


@pytest.mark.parametrize("name", ["two", "gap-and-top"])
@pytest.mark.parametrize("option", ["default", "keep", "three-anchors", "no-anchor"])
@pytest.mark.parametrize("architecture", TINY)
def test_rows_of_a_padded_batch_are_as_alone(architecture: str, option: str, name: str) -> None:
    """Rows shorter than the anchor, and rows whose anchors are another row's prompt."""
    model, options = gapped(architecture, SETS[name], **OPTIONS[option]), OPTIONS[option]
    rows = [ids_of(length)[0] for length in (31, 30, 2, 1)]
    ids, mask = left_padded(rows)
    found = answer(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        sequence = torch.cat([row, found.sequences[i, ids.shape[1] :]])
        tokens = conversation((row.shape[0], 5))
        wanted = oracle(plain(architecture), sequence, tokens, SETS[name], **options)
        close(found.logits[i], wanted[row.shape[0] - 1 : -1])


@pytest.mark.skipif(not NEW, reason="transformers 4.57 gives chunks other arguments")
@pytest.mark.parametrize("chunk", [1, 6])
def test_chunked_prefill(architecture: str, chunk: int) -> None:
    """Chunks without a column: no token of theirs runs in a deep layer, and the layers keep their kinds of mask."""
    for name in ("two", "gap-and-top"):
        model = gapped(architecture, SETS[name])
        with rows_above(model, 0) as ran:
            found = answer(model, ids_of(31), prefill_chunk_size=chunk)
        check(architecture, found, 31, SETS[name])
        for layer in range(LAYERS):
            rows = sum(count for index, count in ran if index == layer)
            assert rows == (31 + 4 if layer not in SETS[name] else 1 + 1 + 4), layer


def test_padded_chunks() -> None:
    if not NEW:
        pytest.skip("transformers 4.57 gives chunks of padded rows wrong positions")
    rows = [ids_of(length)[0] for length in (23, 4)]
    ids, mask = left_padded(rows)
    found = answer(gapped("qwen3", [1, 3], anchor_tokens=2), ids, attention_mask=mask, prefill_chunk_size=5)
    for i, row in enumerate(rows):
        sequence = torch.cat([row, found.sequences[i, 23:]])
        wanted = oracle(plain("qwen3"), sequence, conversation((row.shape[0], 5)), [1, 3], anchor_tokens=2)
        close(found.logits[i], wanted[row.shape[0] - 1 : -1])


@pytest.mark.parametrize("option", ["default", "keep", "three-anchors"])
@pytest.mark.parametrize("architecture", TINY)
def test_turns(architecture: str, option: str) -> None:
    """Earlier answers stay deep; the layers above the gap keep what they were in it."""
    model, deep, options = gapped(architecture, [1, 3], **OPTIONS[option]), [1, 3], OPTIONS[option]
    first = answer(model, ids_of(20))
    ids = torch.cat([first.sequences, ids_of(7)], 1)
    second = answer(model, ids, **{CACHE: first.cache})
    tokens = conversation((20, 4), (1 + 7, 5))
    wanted = oracle(plain(architecture), second.sequences[0], tokens, deep, **options)
    close(second.logits[0], wanted[31:-1])


def test_anchors_that_come_late_in_one_row() -> None:
    """A token that is an anchor in a short row and plain prompt in a long one passes the gap by in that one."""
    model, options = gapped("llama", [1, 3], anchor_tokens=4), {"anchor_tokens": 4}
    rows = [ids_of(10)[0], ids_of(1)[0]]
    ids, mask = left_padded(rows)
    first = answer(model, ids, attention_mask=mask, n=2)
    ids = torch.cat([first.sequences, ids_of(4, batch=2)], 1)
    mask = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
    second = answer(model, ids, attention_mask=mask, **{CACHE: first.cache})
    for i, row in enumerate(rows):
        tokens = conversation((row.shape[0], 1), (1 + 4, 5))
        wanted = oracle(plain("llama"), second.sequences[i, 10 - row.shape[0] :], tokens, [1, 3], **options)
        close(second.logits[i], wanted[-6:-1])


def test_crop_and_going_on() -> None:
    model = gapped("llama", [1, 3])
    first = answer(model, ids_of(20), n=6)
    first.cache.crop(23)
    assert [first.cache.layer(layer).length for layer in range(LAYERS)] == [23, 1 + 3, 23, 1 + 3, 23, 23]
    again = answer(model, first.sequences[:, :24], **{CACHE: first.cache}, n=2)
    wanted = oracle(plain("llama"), again.sequences[0], conversation((20, 3), (1, 2)), [1, 3])
    close(again.logits[0], wanted[23:-1])


def test_beams_and_prompt_lookup() -> None:
    model = gapped("llama", [2, 4, 5])
    ids = ids_of(12).repeat(1, 2)
    lookup = answer(model, ids, n=8, prompt_lookup_num_tokens=3)
    greedy = answer(model, ids, n=8)
    assert torch.equal(lookup.sequences, greedy.sequences)
    check("llama", greedy, 24, [2, 4, 5])
    found = answer(model, ids, n=5, num_beams=3, num_return_sequences=3, output_scores=True)
    for row, score in zip(found.sequences, found.output.sequences_scores, strict=True):
        logits = oracle(plain("llama"), row, conversation((24, 5)), [2, 4, 5])[23:-1]
        wanted = torch.log_softmax(logits, -1).gather(1, row[24:, None]).mean()
        close(score[None].float(), wanted[None])


def test_without_a_cache_and_as_a_graph() -> None:
    model, ids = gapped("qwen3", [1, 3]), ids_of(20)
    wanted = answer(model, ids)
    close(answer(model, ids, use_cache=False).logits, wanted.logits)
    found = graph.generate(model, ids, torch.ones_like(ids), max_new_tokens=5, pad_token_id=600, eos_token_id=None)
    assert torch.equal(found, wanted.sequences)


# ---- training ------------------------------------------------------------------------------------------------------

BATCHES = {
    "one-row": ["pppppaaaa"],
    "spans": ["ppppaapppaaa", "ppaapaapppap"],
    "left": ["pppppppaaaa", "....ppaaapa", ".........pa"],
    "right": ["pppppppaaaa", "ppaaapa....", "pa........."],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["two", "gap-and-top"])
@pytest.mark.parametrize("option", ["default", "keep", "three-anchors"])
def test_loss_and_gradients(batch: str, name: str, option: str) -> None:
    compare("llama", BATCHES[batch], SETS[name], OPTIONS[option])


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_gradients_on_every_architecture(architecture: str, checkpointing: bool | None) -> None:
    """Also with gradient checkpointing of either kind, which runs single layers a second time."""
    compare(architecture, BATCHES["left"], [1, 3, 5], {}, checkpointing)


def compare(
    architecture: str, texts: list[str], deep: list[int], options: dict[str, Any], checkpointing: bool | None = None
) -> None:
    ids, labels, mask = batch_of(texts)
    model, reference = gapped(architecture, deep, **options), fresh(architecture)
    if checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    out = model(ids, attention_mask=mask, labels=labels)
    columns = torch.zeros_like(mask, dtype=torch.bool)
    first = labels.clone()
    for row, (text, keep) in enumerate(zip(texts, first, strict=True)):
        tokens, left, _ = read(text)
        columns[row, left : left + len(tokens)] = columns_of(tokens, **options)
        keep[: left + 1] = -100
    with masked(reference, mask_of(texts, **options), deep=deep, columns=columns):
        wanted = reference(ids, attention_mask=mask, labels=first, use_cache=False)
    close(out.loss.detach()[None], wanted.loss.detach()[None], 1e-5)
    out.loss.backward()
    wanted.loss.backward()
    alike(model, reference)


# ---- what does not go together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"k": 3, "deep_layers": [4]}, ValueError, "k is 3 and deep_layers were given too"),
        ({"deep_layers": [0, 3]}, ValueError, "deep_layers hold 0; give layers from 1 to 5"),
        ({"deep_layers": [6]}, ValueError, "deep_layers hold 6"),
        ({"deep_layers": [-1]}, ValueError, "deep_layers hold -1"),
        ({"deep_layers": [2, 2]}, ValueError, "deep_layers hold 2; .* each once"),
        ({"deep_layers": [2.0]}, TypeError, "deep_layers hold 2.0"),
        ({"deep_layers": [True]}, TypeError, "deep_layers hold True"),
        ({"deep_layers": [2], "turns": "reset"}, ValueError, 'turns is "reset"'),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    model = kvspeed.patch_model(fresh("llama"), 5)
    with pytest.raises(error, match=says):
        kvspeed.patch_model(model, **arguments)
    assert state_of(model).spec == SpeedSpec(5)  # type: ignore[union-attr]


@pytest.mark.parametrize("gaps", [(3, 2), (2, 2), (0,), (4,), (5,)])
def test_bad_specs(gaps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="gaps are"):
        SpeedSpec(5, gaps=gaps)


@pytest.mark.parametrize("gaps", [[1], 1, (1.0,), (True,), ("1",), None])
def test_specs_of_other_types(gaps: Any) -> None:
    with pytest.raises(TypeError, match=r"gaps are .* tuple of ints"):
        SpeedSpec(5, gaps=gaps)


def test_tuned_for_a_gap(tmp_path: Path) -> None:
    """The config keeps the layers; a k that is given goes before them."""
    model = fresh("llama")
    remember_spec(model, SpeedSpec(5, 2, gaps=(1, 3)))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    given: list[tuple[dict[str, Any], SpeedSpec | None]] = [
        ({}, SpeedSpec(5, 2, gaps=(1, 3))),
        ({"k": 4}, SpeedSpec(4, 2)),
        ({"k": LAYERS}, None),
        ({"deep_layers": [2]}, SpeedSpec(LAYERS, 2, gaps=(2,))),
        ({"anchor_tokens": 1}, SpeedSpec(5, gaps=(1, 3))),
    ]
    for arguments, wanted in given:
        assert state_of(kvspeed.patch_model(loaded, **arguments)).spec == wanted  # type: ignore[union-attr]
    loaded.config.kvspeed = {"k": 5, "gaps": 1}
    with pytest.raises(ValueError, match=r"config\.kvspeed is no depth and rule"):
        kvspeed.patch_model(loaded)


def test_another_patch_refuses_its_cache() -> None:
    found = answer(gapped("llama", [1, 3]), ids_of(9))
    for other in (gapped("llama", [1, 2]), kvspeed.patch_model(fresh("llama"), 5), kvspeed.patch_model(fresh("llama"))):
        with pytest.raises(ValueError, match=r"gaps at layers \[1, 3\]"):
            answer(other, torch.cat([found.sequences, ids_of(3)], 1), **{CACHE: found.cache})


def test_packets_are_refused() -> None:
    model = gapped("llama", [1, 3])
    for name, given in (("set_segments", ([[]] * 4, 3)), ("set_storage", (torch.zeros(4, 2, 3, 16),) * 2 + (0,))):
        cache = kvspeed.KVCache(model.config, spec=state_of(model).spec)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"leaves out the layers \[1, 3\]"):
            getattr(cache, name)(*given)


def test_the_gate(architecture: str) -> None:
    model = gapped(architecture, [1, 3, 5], anchor_tokens=2)
    before = state_of(model).spec  # type: ignore[union-attr]
    report = kvspeed.verify(model)
    assert report.ok, report
    assert state_of(model).spec == before  # type: ignore[union-attr]
