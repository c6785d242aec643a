# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Diagnoses of tiny models against transformers' own weights and hidden states; files, resuming, refusals."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.speed import diagnose as module
from kvspeed.speed.diagnose import METRICS, Diagnosis, Measured, TokenPrompt, diagnose
from kvspeed.state import state_of
from speed_tools import LAYERS, answer, close, fresh, ids_of, speedy
from test_speed_probe import by_outputs, eager


def prompt(length: int = 30, answered: int | None = None, *, id: str = "one", category: str = "qa") -> TokenPrompt:
    given = tuple(ids_of(answered)[0].tolist()) if answered else None
    return TokenPrompt(id, category, tuple(ids_of(length)[0].tolist()), given)


def wanted(
    architecture: str, one: Measured, ids: tuple[int, ...], anchors: int = 1, **options: Any
) -> dict[str, list[float]]:
    """The curves of a measured prompt from what transformers gives out."""
    tokens = torch.tensor([[*ids, *one.answer[:-1]]])
    found = by_outputs(eager(architecture, **options), tokens, len(ids), anchors)
    found["entropy_normalised"] = found["entropy"] / (math.log(len(ids)) or 1.0)
    found["content_entropy_normalised"] = found["content_entropy"] / math.log(max(2, len(ids) - anchors))
    return {name: found[name].nanmean(1).tolist() for name in METRICS}


def check(architecture: str, found: Measured, ids: tuple[int, ...], anchors: int = 1, **options: Any) -> None:
    for name, curve in wanted(architecture, found, ids, anchors, **options).items():
        have = [math.nan if value is None else value for value in found.curves[name]]
        assert have == pytest.approx(curve, abs=2e-4, nan_ok=True), name


@pytest.mark.parametrize(("answered", "small"), [(None, True), (7, False), (7, True)])
def test_against_weights_and_hidden_states(
    architecture: str, answered: int | None, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths, in one forward or many, with an answer or the model's own."""
    if small:
        monkeypatch.setattr(module, "_PREFILL_ROWS", 16)
        monkeypatch.setattr(module, "_chunk", lambda config, total: random.randrange(1, 9))
    prompts = [prompt(length, answered, id=str(length)) for length in (39, 2, 1)]
    found = diagnose(fresh(architecture), prompts, max_new_tokens=7, name="tiny")
    assert found.complete and (found.layers, found.model) == (LAYERS, "tiny")
    for one, given in zip(found.measured, prompts, strict=True):
        assert (one.id, one.prompt_tokens) == (given.id, len(given.ids))
        assert len(one.answer) == (answered or 7) or answered is None
        check(architecture, one, given.ids)
        assert one.curves["curvature"][0] is None and None not in one.curves["mass"]
        alone = len(given.ids) == 1 and len(one.answer) == 1
        assert (one.curves["entropy"] == [None] * LAYERS) == alone


def test_the_answer_is_the_models_own() -> None:
    """Greedy, the same as generate's, whatever patch the model has; and the patch is still there afterwards."""
    given = prompt(20)
    for model in (fresh("llama"), speedy("llama", None), speedy("llama", 3, boundary="keep")):
        state = state_of(model)
        found = diagnose(model, [given], max_new_tokens=6).measured[0]
        assert state_of(model) is state
        full = answer(kvspeed.unpatch_model(model), torch.tensor([given.ids]), n=6)
        assert found.answer == full.sequences[0, 20:].tolist()


def test_an_answer_ends_at_eos_and_in_a_loop() -> None:
    given, model = prompt(20), fresh("llama")
    free = diagnose(model, [given], max_new_tokens=8).measured[0].answer
    assert len(free) == 8
    first = free.index(free[4])
    ended = diagnose(model, [given], max_new_tokens=8, eos_token_ids=[free[4]]).measured[0]
    assert ended.answer == free[: first + 1]
    model.generation_config.eos_token_id = [free[4], 3]
    assert diagnose(model, [given], max_new_tokens=8).measured[0] == ended
    check("llama", ended, given.ids)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # it says token 0 for ever
    assert diagnose(model, [given], max_new_tokens=200, eos_token_ids=[]).measured[0].answer == [0] * 36


def test_a_given_answer_is_cut() -> None:
    given = prompt(9, 30)
    assert given.answer is not None
    found = diagnose(fresh("llama"), [given], max_new_tokens=5).measured[0]
    assert tuple(found.answer) == given.answer[:5]
    check("llama", found, given.ids)


@pytest.mark.parametrize("anchors", [0, 4, 100])
def test_anchors(anchors: int) -> None:
    given = prompt(30, 4)
    found = diagnose(fresh("qwen3"), [given], anchor_tokens=anchors).measured[0]
    check("qwen3", found, given.ids, anchors)
    if anchors == 100:
        assert found.curves["content_entropy"] == [None] * LAYERS and found.curves["content_mass"] == [0.0] * LAYERS


def test_curves_by_category_are_means_over_prompts() -> None:
    """Each prompt counts alike, however long its answer."""
    prompts = [prompt(20 + n, 2 + n, id=str(n), category="ab"[n % 2]) for n in range(5)]
    found = diagnose(fresh("llama"), prompts)
    assert found.categories == ["a", "b"]
    for name in METRICS:
        for category, members in (("a", (0, 2, 4)), ("b", (1, 3)), (None, range(5))):
            rows = [found.measured[n].curves[name] for n in members]
            for layer, (value, error) in enumerate(
                zip(found.curve(name, category), found.error(name, category), strict=True)
            ):
                column = torch.tensor(
                    [math.nan if row[layer] is None else row[layer] for row in rows], dtype=torch.float64
                )
                if column.isnan().all():
                    assert value is None and error is None
                else:
                    assert value == pytest.approx(float(column.mean()))
                    assert error == pytest.approx(float(column.std()) / math.sqrt(len(rows)))
    assert found.recommendation().layers == LAYERS
    assert set(found.recommendation().by_category) == {"a", "b"}
    with pytest.raises(ValueError, match="metric is 'masses'"):
        found.curve("masses")
    with pytest.raises(ValueError, match="category is 'c'"):
        found.curve("mass", "c")


def test_a_window_that_leaves_the_prompt_behind() -> None:
    """The last tokens see nothing of the prompt in sliding layers: no mass, and no part in the mean entropy."""
    given = prompt(12, 20)
    found = diagnose(fresh("gemma2", sliding_window=4), [given]).measured[0]
    check("gemma2", found, given.ids, sliding_window=4)
    assert max(found.curves["mass"][::2]) < 3 / 20 and None not in found.curves["entropy"]  # type: ignore[type-var]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.json"
    found = diagnose(
        fresh("gemma2"),
        [prompt(20, 3, id="x"), prompt(1, 1, id="y", category="other")],
        each=lambda so_far, one: so_far.save(path),
    )
    assert Diagnosis.load(path) == found and os.listdir(tmp_path) == ["diagnosis.json"]
    data = json.loads(path.read_text())
    assert data["complete"] is True and data["recommendation"]["k"] == found.recommendation().k
    assert data["categories"]["qa"]["curves"]["mass"] == found.curve("mass", "qa")
    assert data["categories"]["qa"]["errors"]["mass"] == [None] * LAYERS
    with pytest.raises(OSError):
        found.save(tmp_path / "missing" / "file.json")
    with pytest.raises(OSError):
        Diagnosis.load(tmp_path / "missing.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "diagnosis.json"
    found = diagnose(fresh("llama"), [prompt(5, 2)])
    found.save(path)
    before = path.read_bytes()
    found.model = "other"
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        found.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["diagnosis.json"]


def _broken(change: Any) -> Any:
    def apply(data: dict[str, Any]) -> str:
        change(data)
        return json.dumps(data)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "",
        lambda data: "[]",
        lambda data: json.dumps(data)[:-9],
        _broken(lambda data: data.update(format="kvspeed-diagnosis-0")),
        _broken(lambda data: data.pop("layers")),
        _broken(lambda data: data.update(layers="six")),
        _broken(lambda data: data.update(layers=7)),
        _broken(lambda data: data["measured"][0].pop("digest")),
        _broken(lambda data: data["measured"][0].update(more=1)),
        _broken(lambda data: data["measured"][0]["curves"].pop("mass")),
        _broken(lambda data: data["measured"][0]["curves"].update(mass=["a"] * LAYERS)),
        _broken(lambda data: data.update(measured=[3])),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "diagnosis.json"
    diagnose(fresh("llama"), [prompt(5, 2)]).save(path)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"diagnosis\.json is no diagnosis"):
        Diagnosis.load(path)


class Interrupted(Exception):
    pass


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "diagnosis.json", fresh("llama")
    prompts = [prompt(9, 2, id=str(n)) for n in range(4)]

    def interrupt(so_far: Diagnosis, one: Measured) -> None:
        so_far.save(path)
        if one.id == "1":
            raise Interrupted

    with pytest.raises(Interrupted):
        diagnose(model, prompts, each=interrupt)
    assert state_of(model) is None
    known = Diagnosis.load(path)
    assert [one.id for one in known.measured] == ["0", "1"] and not known.complete
    measured = []
    original = module._measure
    monkeypatch.setattr(module, "_measure", lambda *args: measured.append(args[2].id) or original(*args))
    found = diagnose(model, prompts, known=known)
    assert measured == ["2", "3"] and found.complete
    assert found == diagnose(model, prompts) and len(measured) == 6
    # A prompt that changed, other settings or other weights are measured anew; a new name or place is not.
    measured.clear()
    moved = [TokenPrompt("new", "qa", prompts[1].ids, prompts[1].answer), prompts[0]]
    assert [one.id for one in diagnose(model, moved, known=known).measured] == ["new", "0"] and measured == []
    diagnose(model, [TokenPrompt("0", "qa", prompts[0].ids[:-1], prompts[0].answer)], known=known)
    diagnose(model, prompts[:1], known=known, max_new_tokens=31)
    diagnose(model, prompts[:1], known=known, anchor_tokens=2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    diagnose(model, prompts[:1], known=known)
    assert measured == ["0"] * 4


def test_bad_calls() -> None:
    model, given = fresh("llama"), prompt(5)
    for prompts, options, error, says in (
        ([], {}, ValueError, "prompts: got none"),
        ([given, given], {}, ValueError, "two are called 'one'"),
        ([given], {"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ([given], {"anchor_tokens": -1}, ValueError, "anchor_tokens is -1"),
        ([given], {"max_new_tokens": 1.5}, TypeError, "max_new_tokens is 1.5"),
        ([given], {"anchor_tokens": True}, TypeError, "anchor_tokens is True"),
        ([prompt(4090)], {}, ValueError, "4090 tokens and its answer up to 32, and the model has 4096"),
        ([TokenPrompt("a", "qa", (3, 512))], {}, ValueError, "holds token 512"),
        ([TokenPrompt("a", "qa", (3, -1))], {}, ValueError, "holds token -1"),
        ([TokenPrompt("a", "qa", (3,), (700,))], {}, ValueError, "holds token 700"),
    ):
        with pytest.raises(error, match=says):
            diagnose(model, prompts, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="training mode"):
        diagnose(model.train(), [given])
    with pytest.raises(ValueError, match=r"gpt2|GPT2"):
        diagnose(_unknown(), [given])
    for ids, answered in (((), None), ((3,), ())):
        with pytest.raises(ValueError, match="no tokens"):
            TokenPrompt("a", "qa", ids, answered)


def _unknown() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)).eval()


def test_bfloat16_and_float16() -> None:
    """Close to float32's curves, within the rounding of the model itself."""
    given = prompt(40, 6)
    exact = diagnose(fresh("llama"), [given]).measured[0].curves
    for dtype in (torch.bfloat16, torch.float16):
        found = diagnose(fresh("llama", dtype=dtype), [given]).measured[0].curves
        for name in METRICS:
            a, b = (torch.tensor(curve[1:], dtype=torch.float64) for curve in (found[name], exact[name]))
            close(a, b, 0.05)
