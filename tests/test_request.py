# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Requests of different depths to one patched model."""

from __future__ import annotations

import copy
import gc
import random
import threading
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.install import patched
from kvspeed.rule import SpeedSpec
from kvspeed.state import at_depth, state_of
from speed_tools import (
    CACHE,
    LAYERS,
    K,
    answer,
    close,
    conversation,
    fresh,
    ids_of,
    left_padded,
    oracle,
    plain,
    poison,  # noqa: F401
    rows_above,
    speedy,
)

BY_TASK = {"code": 2, "copying": LAYERS, "*": 5}


def spec_of(model: Any) -> SpeedSpec | None:
    state = state_of(model)
    assert state is not None
    return state.spec


@pytest.mark.parametrize("patched_to", [None, K])
def test_any_depth_on_every_architecture(architecture: str, patched_to: int | None) -> None:
    model, ids = speedy(architecture, patched_to), ids_of(15)
    depths = [*range(1, LAYERS + 1), None]
    random.shuffle(depths)
    for k in depths:
        found = answer(model, ids, n=3, **({} if k is None else {"k": k}))
        depth = (patched_to or LAYERS) if k is None else k
        wanted = oracle(plain(architecture), found.sequences[0], conversation((15, 3)), depth)
        close(found.logits[0], wanted[14:-1])
        assert [found.cache.layer(layer).length for layer in range(LAYERS)] == [
            17 if layer < depth else 3 for layer in range(LAYERS)
        ]
    assert spec_of(model) == (None if patched_to is None else SpeedSpec(patched_to))


def test_the_rest_of_the_rule_stays() -> None:
    options: dict[str, Any] = {"anchor_tokens": 2, "boundary": "keep", "upper_attention": "self"}
    for patched_to in (LAYERS, K):
        model, ids = speedy("llama", patched_to, **options), ids_of(15)
        found = answer(model, ids, k=2)
        close(found.logits[0], oracle(plain("llama"), found.sequences[0], conversation((15, 5)), 2, **options)[14:-1])


def test_no_work_above() -> None:
    """No shallow token runs above the request's own depth, nor is a deep one left out below it."""
    model = speedy("llama", 5)
    for k in (2, 4, 5):
        with rows_above(model, 0) as ran:
            answer(model, ids_of(20), n=3, k=k)
        for layer in range(LAYERS):
            assert sum(rows for index, rows in ran if index == layer) == (20 + 2 if layer < k else 2 + 2)


@pytest.mark.parametrize("kind", ["mapping", "function"])
def test_by_task(kind: str) -> None:
    by_task = BY_TASK if kind == "mapping" else lambda task: BY_TASK.get(task, BY_TASK["*"])
    model, ids = speedy("llama", K, k_by_task=by_task), ids_of(15)
    for task, k in (("code", 2), ("copying", LAYERS), ("poetry", 5), (None, K)):
        found = answer(model, ids, n=3, **({} if task is None else {"task": task}))
        close(found.logits[0], oracle(plain("llama"), found.sequences[0], conversation((15, 3)), k)[14:-1])


def test_a_mapping_is_copied_and_replaced_by_another_patch() -> None:
    by_task = dict(BY_TASK)
    model = speedy("llama", K, k_by_task=by_task)
    by_task.clear()
    with at_depth(model, task="code"):
        assert spec_of(model) == SpeedSpec(2)
    kvspeed.verify(model)
    with at_depth(model, task="code"):  # the gate leaves the patch as it was
        assert spec_of(model) == SpeedSpec(2)
    kvspeed.patch_model(model, K)
    with pytest.raises(ValueError, match="patched without depths by task"):
        model.generate(ids_of(3), task="code")


def test_padded_rows_and_beams() -> None:
    model = speedy("qwen3", K, anchor_tokens=2)
    rows = [ids_of(length)[0] for length in (17, 9, 1)]
    ids, mask = left_padded(rows)
    found = answer(model, ids, attention_mask=mask, k=2)
    for i, row in enumerate(rows):
        sequence = torch.cat([row, found.sequences[i, 17:]])
        wanted = oracle(plain("qwen3"), sequence, conversation((row.shape[0], 5)), 2, anchor_tokens=2)
        close(found.logits[i], wanted[row.shape[0] - 1 : -1])
    alike = answer(speedy("qwen3", 2), ids, attention_mask=mask, num_beams=2, n=3)
    beams = answer(speedy("qwen3", K), ids, attention_mask=mask, num_beams=2, n=3, k=2)
    assert torch.equal(beams.sequences, alike.sequences)


def test_a_conversation_keeps_its_depth() -> None:
    model = speedy("llama", K)
    first = answer(model, ids_of(15), k=2)
    ids = torch.cat([first.sequences, ids_of(6)], 1)
    with pytest.raises(ValueError, match=r"made with k=2.*patched with k=4.*ask"):
        answer(model, ids, **{CACHE: first.cache})
    second = answer(model, ids, k=2, **{CACHE: first.cache})
    wanted = oracle(plain("llama"), second.sequences[0], conversation((15, 4), (7, 5)), 2)
    close(second.logits[0], wanted[25:-1])


def test_threads_ask_for_different_depths() -> None:
    model = speedy("llama", K)
    ids = ids_of(30)
    wanted = {k: answer(speedy("llama", k), ids, n=12) for k in range(1, LAYERS + 1)}
    wrong: list[str] = []

    def ask(k: int) -> None:
        for _ in range(4):
            try:
                found = answer(model, ids, n=12, **({} if k == K else {"k": k}))
                close(found.logits, wanted[k].logits)
            except Exception as error:
                wrong.append(f"k={k}: {error}")

    threads = [threading.Thread(target=ask, args=(k,)) for k in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert spec_of(model) == SpeedSpec(K)


def test_training_at_another_depth() -> None:
    model, other = speedy("llama", None), speedy("llama", 2)
    ids = ids_of(12, batch=2)
    labels = ids.clone()
    labels[:, :8] = -100
    with at_depth(model, 2):
        loss = model(ids, labels=labels).loss
    loss.backward()  # after the block: what runs again then follows the plan
    wanted = other(ids, labels=labels).loss
    wanted.backward()
    close(loss.detach()[None], wanted.detach()[None], 1e-6)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, another.grad, 1e-5)  # type: ignore[arg-type]
    full = model(ids, labels=labels).loss  # and the model is at full depth again
    close(full.detach()[None], plain("llama")(ids, labels=labels).loss.detach()[None], 1e-6)


def test_another_model_inside_a_request() -> None:
    """An assistant is patched in its own way, and the request is none of its business."""
    model, assistant, ids = speedy("llama", K), speedy("llama", 5), ids_of(20)
    with at_depth(model, 2):
        assert (spec_of(model), spec_of(assistant)) == (SpeedSpec(2), SpeedSpec(5))
        with at_depth(assistant, 3), at_depth(model, 1):
            assert spec_of(model) == SpeedSpec(1)
        assert spec_of(model) == SpeedSpec(2)
    helped = answer(model, ids, n=8, k=2, assistant_model=assistant)
    assert torch.equal(helped.sequences, answer(speedy("llama", 2), ids, n=8).sequences)


def test_a_copy_has_requests_of_its_own() -> None:
    model = speedy("llama", K)
    answer(model, ids_of(5), k=2)
    other = copy.deepcopy(model)
    with at_depth(model, 1):
        assert spec_of(other) == SpeedSpec(K)
    close(answer(other, ids := ids_of(9), k=1).logits, answer(speedy("llama", 1), ids).logits)


def test_a_patch_within_a_request_and_back() -> None:
    model = speedy("llama", K)
    with at_depth(model, 2):
        with patched(model, SpeedSpec(3), force=True):
            assert spec_of(model) == SpeedSpec(3)
        assert spec_of(model) == SpeedSpec(2)
        found = answer(model, ids_of(12), n=3)
    close(found.logits[0], oracle(plain("llama"), found.sequences[0], conversation((12, 3)), 2)[11:-1])


def test_an_error_inside_ends_the_request() -> None:
    model = speedy("llama", K)
    with pytest.raises(ValueError):
        model.generate(ids_of(3), k=2, max_new_tokens=0)
    assert spec_of(model) == SpeedSpec(K)


def test_unpatching_after_requests_leaves_nothing() -> None:
    model = speedy("llama", None)
    answer(model, ids_of(5), k=1)
    kvspeed.unpatch_model(model)
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    assert not any(hooks) and type(model.model.layers) is torch.nn.ModuleList
    gc.collect()
    close(answer(model, ids := ids_of(7)).logits, answer(plain("llama"), ids).logits)


def test_gaps_are_left_out() -> None:
    model, ids = kvspeed.patch_model(fresh("llama"), deep_layers=[1, 4]), ids_of(12)
    close(answer(model, ids, k=3).logits, answer(speedy("llama", 3), ids).logits)
    close(answer(model, ids, k=LAYERS).logits, answer(plain("llama"), ids).logits)
    alike = kvspeed.patch_model(fresh("llama"), deep_layers=[1, 4])
    close(answer(model, ids).logits, answer(alike, ids).logits)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"k": 0}, ValueError, "k is 0"),
        ({"k": LAYERS + 1}, ValueError, f"k is {LAYERS + 1} and the model has {LAYERS} layers"),
        ({"k": True}, TypeError, "k is True"),
        ({"k": "3"}, TypeError, "k is '3'"),
        ({"k": 2.0}, TypeError, "k is 2.0"),
        ({"k": 2, "task": "code"}, ValueError, "both"),
        ({"task": 3}, TypeError, "task is 3"),
        ({"task": "poetry"}, ValueError, r"task is 'poetry'.*'code', 'copying'.*'\*'"),
    ],
)
def test_bad_requests(given: dict[str, Any], error: type[Exception], says: str) -> None:
    model = speedy("llama", K, k_by_task={"code": 2, "copying": 5})
    with pytest.raises(error, match=says):
        model.generate(ids_of(4), **given)
    with pytest.raises(error, match=says), at_depth(model, **given):
        pass
    assert spec_of(model) == SpeedSpec(K)


def test_a_model_without_patch() -> None:
    with pytest.raises(ValueError, match="not patched"), at_depth(fresh("llama"), 3):
        pass
    with at_depth(fresh("llama")):
        pass  # nothing was asked for


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, ValueError, "names no task"),
        ({"code": 0}, ValueError, r"k_by_task\['code'\] is 0"),
        ({"code": LAYERS + 1}, ValueError, "k_by_task.* is 7 and the model has 6 layers"),
        ({"code": "2"}, TypeError, "k_by_task.* is '2'"),
        ({"code": True}, TypeError, "k_by_task.* is True"),
        ({3: 2}, TypeError, "has the key 3"),
        ([2], TypeError, "must be a mapping"),
        ("code", TypeError, "must be a mapping"),
    ],
)
def test_bad_mappings(given: Any, error: type[Exception], says: str) -> None:
    model = speedy("llama", K)
    with pytest.raises(error, match=says):
        kvspeed.patch_model(model, 2, k_by_task=given)
    assert spec_of(model) == SpeedSpec(K)


@pytest.mark.parametrize(
    ("gives", "error"), [(0, ValueError), (LAYERS + 1, ValueError), (2.0, TypeError), (None, TypeError)]
)
def test_a_function_that_gives_no_depth(gives: Any, error: type[Exception]) -> None:
    model = speedy("llama", K, k_by_task=lambda task: gives)
    with pytest.raises(error, match=r"k_by_task\('code'\) is"):
        model.generate(ids_of(4), task="code")
