# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Suffix loops: planted ones, near-misses and noise, against a search that tries everything; and inside `generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import kvspeed
import numpy as np
import pytest
import torch
from cli_tools import save_tokenizer
from kvspeed.packet import build_packet
from kvspeed.speed.loops import Loop, LoopDetector, LoopRates, LoopRule, LoopStopping, find_loop, loop_rates
from speed_tools import fresh, ids_of, left_padded, speedy
from transformers import AutoTokenizer

RULES = {
    "paper": LoopRule(),
    "span": LoopRule(reading="span"),
    "short": LoopRule(window=20, minimum=3, repeats=2),
    "short-span": LoopRule(window=17, minimum=7, repeats=3, reading="span"),
    "tight": LoopRule(window=9, minimum=3, repeats=3),
    "one": LoopRule(window=12, minimum=1, repeats=4),
}


def by_trying(tokens: list[int], rule: LoopRule) -> Loop | None:
    """Every unit, its copies laid out and compared one by one."""
    tail = tokens[-rule.window :]
    for unit in range(1, len(tail) + 1):
        if rule.reading == "unit" and unit < rule.minimum:
            continue
        copies = 1
        block = tail[len(tail) - unit :]
        while len(tail) >= (copies + 1) * unit and tail[-(copies + 1) * unit :][:unit] == block:
            copies += 1
        span = copies * unit
        while span < len(tail) and tail[-span - 1] == tail[-span - 1 + unit]:
            span += 1
        if copies >= rule.repeats and (rule.reading == "unit" or span >= rule.minimum):
            return Loop(unit, copies, span)
    return None


def stopped(rows: list[list[int]], prompt: int, rule: LoopRule) -> list[bool]:
    return LoopStopping(prompt, rule)(torch.tensor(rows), None).tolist()


def noise(length: int, vocab: int = 50_000) -> list[int]:
    return [random.randrange(vocab) for _ in range(length)]


def distinct(length: int) -> list[int]:
    """Ids that occur once each, so that the unit has no period of its own."""
    return random.sample(range(50_000), length)


@pytest.mark.parametrize("name", RULES)
def test_all_three_agree_with_trying_everything(name: str) -> None:
    """Few different ids give loops of all kinds; the stream is checked after every token, the batch at the end."""
    rule, found = RULES[name], 0
    for round in range(12):
        vocab, length = random.choice([1, 2, 2, 3, 50]), random.randrange(0, 2 * rule.window + 5)
        tokens = noise(length, vocab)
        if round == 0:
            tokens += noise(rule.first_unit, 5) * (rule.repeats + 1)
        elif round % 2:  # a loop, perhaps, with a blemish here and there
            unit = noise(random.randrange(1, rule.last_unit + 2), 5)
            tokens += unit * random.randrange(1, rule.repeats + 3) + unit[: random.randrange(len(unit))]
            for _ in range(random.randrange(2)):
                tokens[random.randrange(len(tokens))] += 1
        detector = LoopDetector(rule)
        for end, token in enumerate(tokens, 1):
            said = detector.push(token)
            if end % 7 == 0 or end > len(tokens) - 20:
                wanted = by_trying(tokens[:end], rule)
                assert said == wanted and find_loop(tokens[:end], rule) == wanted, (tokens[:end], rule)
                assert stopped([tokens[:end]], 0, rule) == [wanted is not None], (tokens[:end], rule)
                found += wanted is not None
    assert found > 0, "no case had a loop"


@pytest.mark.parametrize("unit", [12, 13, 40, 84, 85])
@pytest.mark.parametrize("before", [0, 1, 300])
def test_a_planted_loop_is_found_at_its_last_token_and_not_before(unit: int, before: int) -> None:
    ids = distinct(before + unit)
    tokens = ids[:before] + 3 * ids[before:]
    detector = LoopDetector()
    said = [detector.push(token) for token in tokens]
    assert said[:-1] == [None] * (len(tokens) - 1) and said[-1] == Loop(unit, 3, 3 * unit)
    assert find_loop(tokens) == said[-1] and find_loop(tokens[:-1]) is None
    assert find_loop(torch.tensor(tokens)) == find_loop(np.array(tokens)) == find_loop(tuple(tokens)) == said[-1]
    assert find_loop([*tokens[: -unit // 2], tokens[-unit // 2] + 1, *tokens[-unit // 2 + 1 :]]) is None  # one off
    assert find_loop([*tokens, tokens[-1] + 1]) is None  # it went on to something else
    assert find_loop([*tokens, tokens[-unit]]) == Loop(unit, 3, 3 * unit + 1)  # and here it goes on looping


def test_units_at_the_edges_of_the_rule() -> None:
    ids = distinct(90)
    assert find_loop(3 * ids[:11]) is None  # unit 11 is too short by this reading ...
    assert find_loop(3 * ids[:11], LoopRule(reading="span")) == Loop(11, 3, 33)  # ... and long enough by the other
    assert find_loop(6 * ids[:11]) == Loop(22, 3, 66)  # two of them are a unit of 22
    assert find_loop(3 * ids[:86]) is None and len(3 * ids[:86]) == 258  # no room in a window of 256
    assert find_loop(3 * ids[:86], LoopRule(window=258)) == Loop(86, 3, 258)
    assert find_loop(35 * [7]) is None and find_loop(36 * [7]) == Loop(12, 3, 36)
    span = LoopRule(reading="span")
    assert find_loop(11 * [7], span) is None and find_loop(12 * [7], span) == Loop(1, 12, 12)
    assert find_loop(3 * ids[:3], span) is None and find_loop(4 * ids[:3], span) == Loop(3, 4, 12)
    assert find_loop(3 * ids[:4], span) == Loop(4, 3, 12)
    assert find_loop(1000 * [7]) == Loop(12, 21, 256)  # repeats and span are those of the window
    assert find_loop([]) is None and find_loop([5]) is None and find_loop(torch.tensor([], dtype=torch.long)) is None


def test_random_ids_do_not_loop() -> None:
    for _ in range(30):
        assert find_loop(noise(400), LoopRule(reading="span")) is None
    assert find_loop(list(range(400)), LoopRule(reading="span")) is None


def test_a_loop_by_the_unit_is_a_loop_by_the_span() -> None:
    for _ in range(200):
        tokens = noise(random.randrange(120), 2) + noise(random.randrange(1, 20), 2) * random.randrange(1, 9)
        if find_loop(tokens, LoopRule(window=64, minimum=5)) is not None:
            assert find_loop(tokens, LoopRule(window=64, minimum=5, reading="span")) is not None


def test_the_detector_forgets() -> None:
    detector = LoopDetector()
    for token in 35 * [7]:
        assert detector.push(token) is None
    detector.reset()
    assert [detector.push(7) for _ in range(36)] == [None] * 35 + [Loop(12, 3, 36)]
    assert detector.push(torch.tensor(8)) is None  # type: ignore[arg-type]


def test_rows_of_a_batch_are_independent_and_prompts_do_not_count() -> None:
    loop = distinct(20)
    rows = [noise(60), noise(30) + loop[:10] * 3, 60 * [7], (3 * loop)[-60:], [*noise(59), 7]]
    prompt = 3 * loop  # looks like a loop itself, and would go on in the fourth row
    for width in (0, 60):
        rows = [prompt[:width] + row for row in rows]
        assert stopped(rows, width, LoopRule()) == [False, False, True, True, False]
    # Two repeats in the prompt and one in the answer are none in the answer.
    assert stopped([prompt], 40, LoopRule()) == [False] and stopped([prompt], 0, LoopRule()) == [True]
    assert stopped([prompt], 60, LoopRule()) == [False] and stopped([prompt], 1000, LoopRule()) == [False]
    assert LoopStopping(0)(torch.zeros(0, 40, dtype=torch.long), None).shape == (0,)
    assert LoopStopping(0)(torch.zeros(3, 0, dtype=torch.long), None).tolist() == [False] * 3


def test_rates() -> None:
    loop, eos, pad = distinct(20), 60_001, 60_000
    answers = [3 * loop, noise(100), 20 * [7], 3 * loop + [eos, pad, pad], [eos] * 50, []]
    kept = [list(answer) for answer in answers]
    rates = loop_rates(iter(answers), ignore=(eos, pad))
    assert rates == LoopRates(6, 2, 3, (20, 20)) and rates.unit_rate == 2 / 6 and rates.span_rate == 0.5
    assert answers == kept, "the answers were changed"
    assert loop_rates([torch.tensor(a, dtype=torch.long) for a in answers], ignore=(eos, pad)) == rates
    plain = loop_rates(answers)  # EoS and padding as they are: one loop ended by EoS, one made of it
    assert (plain.unit, plain.span) == (2, 3) and plain.units == (20, 12)
    assert loop_rates([]).as_dict() == {
        **{"answers": 0, "unit": 0, "span": 0, "units": []},
        **{"unit_rate": 0.0, "span_rate": 0.0},
    }
    assert loop_rates(answers, LoopRule(minimum=21, window=300), ignore=(eos, pad)).unit == 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"window": 35}, ValueError, "window is 35.* need 36 tokens"),
        ({"window": 11, "reading": "span"}, ValueError, "window is 11"),
        ({"repeats": 1}, ValueError, "repeats is 1; it must be at least 2"),
        ({"minimum": 0}, ValueError, "minimum is 0"),
        ({"window": 2.5}, TypeError, "window is 2.5"),
        ({"repeats": True}, TypeError, "repeats is True"),
        ({"reading": "total"}, ValueError, "reading is 'total'; it must be one of 'unit', 'span'"),
    ],
)
def test_bad_rules(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LoopRule(**options)


@pytest.mark.parametrize(
    "tokens", ["text", b"bytes", [1.5], [True, False], ["a"], torch.zeros(3), torch.zeros(2, 3, dtype=torch.long)]
)
def test_bad_tokens(tokens: Any) -> None:
    with pytest.raises(TypeError, match="token"):
        find_loop(tokens)
    with pytest.raises(TypeError, match="token"):
        loop_rates([tokens])


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="token is -1"):
        LoopDetector().push(-1)
    with pytest.raises(ValueError, match="prompt_length is -1"):
        LoopStopping(-1)
    for wrong in (1.0, True, "3"):
        with pytest.raises(TypeError, match="prompt_length"):
            LoopStopping(wrong)  # type: ignore[arg-type]


# ---- inside generate -----------------------------------------------------------------------------------------------

SHORT = LoopRule(window=32, minimum=3, repeats=3)  # tiny models loop soon


class Script:
    """A logits processor that makes each row say given tokens, one after the other, whatever the model thinks."""

    def __init__(self, lines: list[list[int]], prompt: int) -> None:
        self.lines, self.prompt = lines, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = input_ids.shape[1] - self.prompt
        wanted = torch.tensor([line[at] for line in self.lines])
        return scores.fill_(-1e4).scatter_(1, wanted[:, None], 0.0)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_rows_end_when_they_loop(patched: bool, known: bool) -> None:
    """Left-padded prompts full of loops; each row goes its own way, and is filled up with padding once it looped."""
    ids, mask = left_padded([torch.tensor(4 * [5, 6, 7]), torch.tensor(2 * [5, 6, 7])], pad=7)
    lines = [[8] + 5 * [5, 6, 7] + [9] * 9, [5, 6, 7] + [11, 12, 13, 14] * 6]
    model = (speedy if patched else fresh)("llama")
    stop = LoopStopping(ids.shape[1] if known else None, SHORT)
    found = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=500,
        pad_token_id=501,
        logits_processor=[Script(lines, ids.shape[1])],
        stopping_criteria=[stop],
    )
    assert stop.prompt_length == 12
    assert found[:, 12:].tolist() == [lines[0][:10] + 5 * [501], lines[1][:15]]


class Few:
    """A logits processor that leaves a model three words, so that it soon repeats itself."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = scores[:, 100:103].clone()
        scores = scores.fill_(-1e4)
        scores[:, 100:103] = kept
        return scores


@pytest.mark.parametrize("batch", [1, 3])
def test_a_models_own_loops_end(batch: int) -> None:
    """Where a greedy answer is cut is where a search of the uncut one finds its first loop."""
    model, ended = speedy("llama"), 0
    options: dict[str, Any] = dict(max_new_tokens=60, do_sample=False, eos_token_id=500, pad_token_id=501)
    for _ in range(4):
        prompt = ids_of(9, batch=batch) % 500
        free = model.generate(prompt, logits_processor=[Few()], **options)[:, 9:].tolist()
        found = model.generate(prompt, logits_processor=[Few()], stopping_criteria=[LoopStopping(9, SHORT)], **options)
        for long, short in zip(free, found[:, 9:].tolist(), strict=True):
            ends = [end for end in range(1, 61) if by_trying(long[:end], SHORT)]
            assert [token for token in short if token != 501] == long[: ends[0] if ends else 60]
            ended += bool(ends)
    assert ended > 0, "no answer looped"


def test_beams() -> None:
    """A beam that loops is a finished answer, as if it had ended; whatever comes back loops at its end or nowhere."""
    model, looped = fresh("llama"), 0
    for _ in range(3):
        found = model.generate(
            ids_of(7, batch=2) % 500,
            max_new_tokens=40,
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            eos_token_id=500,
            pad_token_id=501,
            logits_processor=[Few()],
            stopping_criteria=[LoopStopping(7, SHORT)],
        )
        for row in found[:, 7:].tolist():
            row = [token for token in row if token != 501]
            ends = [end for end in range(1, len(row) + 1) if by_trying(row[:end], SHORT)]
            assert not ends or ends == [len(row)], (row, ends)
            looped += bool(ends)
    assert looped > 0, "no beam looped"


def test_with_packets(tmp_path: Path) -> None:
    """kvspeed.generate knows how long its prompt is, the caller does not."""
    model = fresh("llama", vocab=300)
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    packet = build_packet(model, tokenizer, "ab" * 40)
    free = kvspeed.generate(model, tokenizer, "ababab", [packet], max_new_tokens=60, return_stats=True)[1]
    _, stats = kvspeed.generate(
        model,
        tokenizer,
        "ababab",
        [packet],
        max_new_tokens=60,
        return_stats=True,
        stopping_criteria=[LoopStopping(rule=LoopRule(window=60, minimum=1, repeats=2))],
    )
    assert 2 <= stats.new_tokens[0] <= free.new_tokens[0] == 60
