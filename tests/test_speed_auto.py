# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""k="auto": the least depth at which the score is kept, found on a calibration set and kept with the model."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
import transformers
from kvspeed import Sample, SpeedSpec
from kvspeed.speed import auto, trial
from kvspeed.speed.auto import choose_depth, sample_ids, word_f1
from kvspeed.speed.choice import (
    DepthChoice,
    TaskDepth,
    least_samples,
    loss_bound,
    remember_choice,
    remembered_choice,
)
from kvspeed.speed.trial import answers_at
from kvspeed.state import at_depth, state_of
from kvspeed.tuned import remember_spec
from packet_tools import CHAT_TEMPLATE, random_text, tiny_tokenizer
from speed_tools import LAYERS, K, answer, fresh, ids_of, plain, poison  # noqa: F401

TOKENIZER = tiny_tokenizer(template=CHAT_TEMPLATE)


def samples(task: str = "qa", count: int = 4) -> list[Sample]:
    made = []
    for number in range(count):
        texts = (random_text(random.randint(1, 6), random.randrange(10**6)), "w5 w6")
        made.append(Sample(f"{task}-{number}", texts, "w9", ("w7",), task=task))
    return made


class Scorer:
    """Scores by depth as a test wants them, whatever the model says; it counts what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keeps: dict[str, set[int]], lost: float = 1.0) -> None:
        self.keeps, self.lost, self.asked = keeps, lost, dict[str, set[int]]()
        monkeypatch.setattr(trial, "answers_at", self.answers)

    def answers(self, model: Any, ids: Any, depths: Any, **options: Any) -> dict[int, list[int]]:
        return {k: [100 + k] for k in depths}

    def __call__(self, sample: Sample, text: str) -> float:
        k = int(text.strip().removeprefix("w")) - 100
        self.asked.setdefault(sample.task, set()).add(k)
        return 1.0 if k == LAYERS or k in self.keeps[sample.task] else 1.0 - self.lost


def choose(model: Any, data: list[Sample], **options: Any) -> DepthChoice:
    return choose_depth(model, TOKENIZER, data, **{"confidence": None, "max_new_tokens": 3, **options})


# ---- answers at several depths with one prefill --------------------------------------------------------------------


@pytest.mark.parametrize("anchors", [0, 1, 3])
def test_answers_are_those_of_generate(architecture: str, anchors: int) -> None:
    rule = SpeedSpec(K, anchors, random.choice(["transient", "keep"]), random.choice(["causal", "self"]))
    model, other = kvspeed.patch_model(fresh(architecture), 5), fresh(architecture)
    depths = [LAYERS, 5, 3, 1]
    for length in (1, anchors + 1, 23):
        ids = ids_of(length)
        found = answers_at(model, ids[0].tolist(), depths, rule=rule, max_new_tokens=4)
        for k in depths:
            kvspeed.patch_model(
                other,
                k,
                anchor_tokens=anchors,
                boundary=rule.boundary,
                upper_attention=rule.upper_attention,
            )
            wanted = answer(other, ids, n=4).sequences[0, length:].tolist()
            assert found[k] == wanted[: len(found[k])] and (len(found[k]) == 4 or wanted[len(found[k])] == 2)
    assert state_of(model).spec == SpeedSpec(5)  # type: ignore[union-attr]


def test_one_prefill_serves_all_depths() -> None:
    model, rows = kvspeed.patch_model(fresh("llama"), 5), []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    answers_at(model, ids_of(40)[0].tolist(), [LAYERS, 5, 4, 3], rule=SpeedSpec(5), max_new_tokens=1)
    assert rows == [39, 1, 1, 1, 1]


def test_the_prompt_is_that_of_an_evaluation() -> None:
    from kvspeed.eval.methods.context import Context

    sample = samples(count=1)[0]
    context = Context(plain("llama"), TOKENIZER)
    wanted = [*context.preamble_ids]
    for text in sample.documents:
        wanted += context.document_ids(text)
    assert list(sample_ids(TOKENIZER, sample)) == [*wanted, *context.question_ids(sample.question)]


# ---- the search ----------------------------------------------------------------------------------------------------

SEARCHES: list[tuple[set[int], int, int, set[int]]] = [
    # depths that keep the score, where to begin, what is found, what is tried at least
    ({3, 4, 5}, 4, 3, {4, 3}),
    ({3, 4, 5}, 3, 3, {3}),
    ({4, 5}, 3, 4, {3, 4}),
    ({5}, 3, 5, {3, 4, 5}),
    (set(), 3, LAYERS, {3, 4, 5}),
    (set(), LAYERS, LAYERS, {5}),
    ({3, 4, 5}, LAYERS, 3, {5, 4, 3}),
    ({3, 5}, 5, 5, {5, 4}),  # what lies below a depth that fails is not asked for
]


@pytest.mark.parametrize(("keeps", "start", "wanted", "tried"), SEARCHES)
def test_search(monkeypatch: pytest.MonkeyPatch, keeps: set[int], start: int, wanted: int, tried: set[int]) -> None:
    score = Scorer(monkeypatch, {"qa": keeps})
    choice = choose(fresh("llama"), samples(), score=score, start=start)
    assert (choice.k, choice.by_task) == (wanted, {"qa": wanted})
    assert score.asked["qa"] >= tried | {LAYERS}
    for one in choice.measured:
        assert one.kept == (one.k in keeps) and one.full == 1.0 and one.samples == 4
        assert one.score == (1.0 if one.kept else 0.0)


def test_every_task_keeps_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = {"code": {3, 4, 5}, "copying": set[int](), "qa": {4, 5}}
    score = Scorer(monkeypatch, keeps)
    data = [one for task in keeps for one in samples(task)]
    random.shuffle(data)
    choice = choose(fresh("llama"), data, score=score)
    assert choice.by_task == {"code": 3, "copying": LAYERS, "qa": 4} and choice.k == LAYERS
    assert "copying" in choice.reason and "no depth below 6" in choice.reason
    model = kvspeed.patch_model(fresh("llama"), choice.k, k_by_task=choice.k_by_task())
    for task, k in (("code", 3), ("qa", 4), ("copying", None), ("poetry", None)):
        with at_depth(model, task=task):
            assert state_of(model).spec == (None if k is None else SpeedSpec(k))  # type: ignore[union-attr]


def test_depths_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Scorer(monkeypatch, {"qa": {1, 2, 3, 4, 5}})
    assert choose(fresh("llama"), samples(), score=score).k == 3  # half of the layers
    assert choose(fresh("llama"), samples(), score=score, depths=[5, 2]).k == 2
    assert choose(fresh("llama"), samples(), score=score, depths=[]).k == LAYERS
    assert choose(fresh("llama"), samples(), score=score, depths=[4, LAYERS], start=1).k == 4


def test_it_begins_where_the_model_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Scorer(monkeypatch, {"qa": {5}})
    monkeypatch.setattr(auto, "diagnose", lambda *args, **kwargs: pytest.fail("nothing to diagnose"))
    model = fresh("llama")
    remember_spec(model, SpeedSpec(5, 2, "keep"))
    choice = choose(model, samples(), score=score)
    assert choice.k == 5 and choice.rule["anchor_tokens"] == 2 and choice.rule["boundary"] == "keep"
    assert score.asked["qa"] == {LAYERS, 5, 4, 3}  # three depths with one prefill


def test_budget_and_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of 0.03 in every sample is within 0.05 on average, and not within 0.02."""
    score = Scorer(monkeypatch, {"qa": set()}, lost=0.03)
    for budget, confidence, count, k in ((0.05, None, 2, 3), (0.02, None, 2, LAYERS), (0.05, 0.8, 80, 3)):
        options: dict[str, Any] = {"budget": budget, "confidence": confidence}
        assert choose(fresh("llama"), samples(count=count), score=score, **options).k == k
    with pytest.raises(ValueError, match=r"has 4 samples of task 'qa', too few.*give 23 or more"):
        choose(fresh("llama"), samples(), score=score, budget=0.05, confidence=0.8)


def test_the_bound_holds_on_other_samples() -> None:
    """Of depths that lose more than the budget, those found to keep it are no more than the confidence allows."""
    rng = random.Random(5)
    for confidence in (0.8, 0.95):
        for true, count in ((0.1, 60), (0.05, 120)):
            wrong = 0
            for _ in range(1000):
                lost = [float(rng.random() < true) for _ in range(count)]
                wrong += loss_bound(lost, confidence) < true
            assert wrong / 1000 < 1 - confidence + 0.1  # losses of 0 or 1 make it coarse
    assert loss_bound([0.25, 0.75], None) == 0.5
    assert loss_bound([0.0] * 10, 0.8) > 0.05  # ten that lose nothing prove little


@pytest.mark.parametrize("budget", [0.01, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("confidence", [0.4, 0.5, 0.8, 0.95, None])
def test_least_samples(budget: float, confidence: float | None) -> None:
    least = least_samples(budget, confidence)
    assert loss_bound([0.0] * least, confidence) <= budget + 1e-9
    assert least == 1 or loss_bound([0.0] * (least - 1), confidence) > budget


# ---- with a model that answers -------------------------------------------------------------------------------------


def test_a_model_that_needs_its_layers(architecture: str) -> None:
    """Scored by agreement with its own full-depth answer, a random model keeps what the depth keeps."""
    model = fresh(architecture)
    data = samples(count=3)
    full = {}
    kvspeed.patch_model(model, LAYERS)
    for one in data:
        ids = torch.tensor([sample_ids(TOKENIZER, one)])
        full[one.id] = answer(model, ids, n=3).sequences[0, ids.shape[1] :].tolist()
    kvspeed.unpatch_model(model)

    def agrees(sample: Sample, text: str) -> float:
        wanted = full[sample.id]
        wanted = wanted[: wanted.index(2)] if 2 in wanted else wanted
        return float(text == TOKENIZER.decode(wanted, skip_special_tokens=True))

    choice = choose(model, data, score=agrees)
    assert state_of(model) is None  # the model is left as it was
    assert all(one.full == 1.0 for one in choice.measured)
    for one in choice.measured:  # what was measured is what `generate` does at that depth
        kvspeed.patch_model(model, one.k)
        got = []
        for sample in data:
            ids = torch.tensor([sample_ids(TOKENIZER, sample)])
            new = answer(model, ids, n=3).sequences[0, ids.shape[1] :].tolist()
            new = new[: new.index(2)] if 2 in new else new
            got.append(agrees(sample, TOKENIZER.decode(new, skip_special_tokens=True)))
        assert one.score == pytest.approx(statistics.mean(got))


def test_patched_models_stay_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kvspeed.patch_model(fresh("llama"), 4, k_by_task={"code": 2})
    before = state_of(model)
    choose(model, samples(count=1), depths=[4])
    assert state_of(model) is before
    with at_depth(model, task="code"):
        assert state_of(model).spec == SpeedSpec(2)  # type: ignore[union-attr]


def test_progress_is_told() -> None:
    told: list[str] = []
    choose(fresh("llama"), samples(count=2), depths=[4], start=4, each=told.append)
    assert told == ["qa 1 of 2, k = 6, 4", "qa 2 of 2, k = 6, 4"]


# ---- patch_model(model, "auto") ------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a depth was chosen anew; with few samples, which the real confidence would refuse."""
    calls = []
    real = auto.choose_depth

    def chosen(*args: Any, **options: Any) -> DepthChoice:
        calls.append(1)
        return real(*args, **{**options, "confidence": None})

    monkeypatch.setattr(auto, "choose_depth", chosen)
    return lambda: len(calls)


def test_chosen_once_and_kept_with_the_model(
    counted: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(auto, "word_f1", Scorer(monkeypatch, {"code": {3, 4, 5}, "qa": {4, 5}}))
    model, data = fresh("llama"), [*samples("code"), *samples("qa")]
    kvspeed.patch_model(model, "auto", tokenizer=TOKENIZER, calibration=data, anchor_tokens=2)
    assert counted() == 1 and state_of(model).spec == SpeedSpec(4, 2)  # type: ignore[union-attr]
    with at_depth(model, task="code"):
        assert state_of(model).spec == SpeedSpec(3, 2)  # type: ignore[union-attr]
    kvspeed.patch_model(model, "auto", tokenizer=TOKENIZER, calibration=iter(data), anchor_tokens=2)
    kvspeed.patch_model(model, "auto", anchor_tokens=2, budget=0.02)
    assert counted() == 1
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert remembered_choice(loaded) == remembered_choice(model)
    kvspeed.patch_model(loaded, "auto", anchor_tokens=2, k_by_task={"code": 5})
    assert counted() == 1 and state_of(loaded).spec == SpeedSpec(4, 2)  # type: ignore[union-attr]
    with at_depth(loaded, task="code"):  # depths that are given go before those that were found
        assert state_of(loaded).spec == SpeedSpec(5, 2)  # type: ignore[union-attr]


def test_not_for_other_weights_rules_budgets_or_samples(
    counted: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "word_f1", Scorer(monkeypatch, {"qa": {4, 5}}))
    model, data = fresh("llama"), samples()
    kvspeed.patch_model(model, "auto", tokenizer=TOKENIZER, calibration=data)
    with pytest.raises(ValueError, match="was made for another rule: give tokenizer and calibration"):
        kvspeed.patch_model(model, "auto", anchor_tokens=2)
    with pytest.raises(ValueError, match="was made for another budget"):
        kvspeed.patch_model(model, "auto", budget=0.1)
    choice = remembered_choice(model)
    remember_choice(model, replace(choice, k=9, layers=9))
    with pytest.raises(ValueError, match="was made for another number of layers"):
        kvspeed.patch_model(model, "auto")
    remember_choice(model, choice)
    assert state_of(model).spec == SpeedSpec(4)  # type: ignore[union-attr]
    kvspeed.patch_model(model, "auto", tokenizer=TOKENIZER, calibration=data, budget=0.1)
    kvspeed.patch_model(model, "auto", tokenizer=TOKENIZER, calibration=samples(count=3), budget=0.1)
    assert counted() == 3
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match="was made for another fingerprint"):
        kvspeed.patch_model(model, "auto", budget=0.1)
    kvspeed.patch_model(model, "auto", tokenizer=TOKENIZER, calibration=samples(count=3), budget=0.1)
    assert counted() == 4


def test_another_choice_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """choose_depth with options of one's own, remembered: patch_model takes it."""
    model = fresh("llama")
    choice = choose(model, samples(), score=Scorer(monkeypatch, {"qa": {5}}), depths=[5])
    remember_choice(model, choice)
    assert state_of(kvspeed.patch_model(model, "auto")).spec == SpeedSpec(5)  # type: ignore[union-attr]
    remember_choice(model, None)
    remember_choice(model, None)
    with pytest.raises(ValueError, match="a choice in the model's config is not there"):
        kvspeed.patch_model(model, "auto")


def test_a_choice_survives_its_file() -> None:
    one = TaskDepth("qa", 4, 9, 0.5, 0.25, 0.3, False)
    choice = DepthChoice(5, {"qa": 5}, 6, 0.02, 0.8, {"anchor_tokens": 1}, "ab" * 32, "cd", (one,), "so")
    assert DepthChoice.from_dict(choice.as_dict()) == choice
    good = choice.as_dict()
    for name, value in (
        ("k", 0),
        ("k", "5"),
        ("k", 7),
        ("by_task", {"qa": 9}),
        ("measured", 3),
        ("measured", [{}]),
        ("rule", {"boundary": "none"}),
        ("fingerprint", 3),
        ("more", 1),
    ):
        model = fresh("llama")
        model.config.kvspeed_auto = {**good, name: value}
        with pytest.raises(ValueError, match=r"config\.kvspeed_auto holds no chosen depth"):
            kvspeed.patch_model(model, "auto")
    for wrong in ([], 5, {}):
        with pytest.raises(ValueError, match="no chosen depth"):
            DepthChoice.from_dict(wrong)


# ---- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "text", "score"),
    [
        (("Paris",), "paris.", 1.0),
        (("New York", "NYC"), "It is NYC", 0.5),
        (("New York",), "york new", 1.0),
        (("82",), "1823", 0.0),
        (("82",), "", 0.0),
        (("...",), "...", 1.0),
        (("...",), "", 0.0),
        (("Été",), "ÉTÉ!", 1.0),
    ],
)
def test_word_f1(answers: tuple[str, ...], text: str, score: float) -> None:
    assert word_f1(Sample("a", ("d",), "q", answers), text) == pytest.approx(score)


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"calibration": []}, ValueError, "got no samples"),
        ({"calibration": ["a"]}, TypeError, r"calibration\[0\]: expected a kvspeed.Sample, got str"),
        ({"budget": -0.1}, ValueError, "budget: is -0.1"),
        ({"budget": 1.0}, ValueError, "budget: is 1.0"),
        ({"budget": float("nan")}, ValueError, "budget: is nan"),
        ({"budget": 0.0, "confidence": 0.8}, ValueError, "budget of 0 cannot be shown"),
        ({"confidence": 1.0}, ValueError, "confidence: is 1.0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": 4090}, ValueError, "sample 'qa-0' has .* up to 4090, and the model has 4096 positions"),
        ({"depths": [0]}, ValueError, "depths: hold 0"),
        ({"depths": [LAYERS + 1]}, ValueError, "depths: hold 7"),
        ({"depths": [2.0]}, TypeError, "depths: hold 2.0"),
        ({"score": lambda sample, text: 2.0}, ValueError, "score: gave 2.0 for sample 'qa-0'"),
        ({"score": lambda sample, text: float("nan")}, ValueError, "score: gave nan"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], says: str) -> None:
    data = options.pop("calibration", None)
    with pytest.raises(error, match=says):
        choose(fresh("llama"), samples() if data is None else data, **options)


def test_bad_calls_of_patch_model() -> None:
    model = kvspeed.patch_model(fresh("llama"), K)
    before = state_of(model)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"k": "auto", "calibration": [], "tokenizer": TOKENIZER}, "got no samples"),
        ({"k": "auto", "calibration": samples()}, "give tokenizer and calibration"),
        ({"k": "auto"}, "give tokenizer and calibration"),
        ({"k": "auto", "deep_layers": [2]}, "only a depth can be chosen"),
        ({"k": 3, "budget": 0.1}, "budget was given and k is 3"),
        ({"calibration": samples()}, "calibration was given and k is None"),
        ({"k": "auto", "calibration": samples(), "tokenizer": TOKENIZER}, "too few to show.*give 59 or more"),
    ]
    for arguments, says in bad:
        with pytest.raises(ValueError, match=says):
            kvspeed.patch_model(model, **arguments)
    with pytest.raises(TypeError, match="k is 'automatic'"):
        kvspeed.patch_model(model, "automatic")
    assert state_of(model) is before


def test_a_model_in_training_mode() -> None:
    with pytest.raises(ValueError, match="training mode"):
        choose(fresh("llama").train(), samples())


# ---- held out ------------------------------------------------------------------------------------------------------


def test_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the depth for all and at the task's own; there the budget is what is lost on average."""
    score = Scorer(monkeypatch, {"code": {3, 4, 5}, "qa": {4, 5}, "new": set()}, lost=0.1)
    model = fresh("llama")
    calibration = [*samples("code"), *samples("qa")]
    choice = choose(model, calibration, score=score, rule=SpeedSpec(LAYERS, 2))
    assert choice.rule["anchor_tokens"] == 2
    data = [*samples("code", 3), *samples("qa", 2), *samples("new", 2)]
    found = auto.held_out(model, TOKENIZER, data, choice, score=score)
    assert [(one.task, one.k, one.samples, one.kept) for one in found] == [
        ("code", 4, 3, True),
        ("code", 3, 3, True),
        ("qa", 4, 2, True),
        ("new", 4, 2, False),
    ]
    assert found[-1].full - found[-1].score == pytest.approx(0.1)
    assert state_of(model) is None
    with pytest.raises(ValueError, match="got no samples"):
        auto.held_out(model, TOKENIZER, [], choice)
    with pytest.raises(ValueError, match=r"'new-0' has .* up to 4090, and the model has 4096 positions"):
        auto.held_out(model, TOKENIZER, data[-2:], choice, max_new_tokens=4090)
