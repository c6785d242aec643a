# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Suffix loops: an answer that ends by saying the same thing over and over.

The rule is the one of SPEED's authors (arXiv:2605.06105): of the last 256 generated tokens, a contiguous unit of at
least 12 tokens stands at least 3 times, back to back, at the very end. They leave open what the 12 tokens count, so
there are two readings, and `loop_rates` gives both:

- "unit": the repeated unit has at least 12 tokens. A shorter one counts as often as it takes to fill 12 tokens (one
  token 36 times over is a unit of 12 equal tokens, three times).
- "span": all repeats together have at least 12 tokens, whatever the unit's length. What the first reading flags, this
  one flags too.

An answer whose last `s` tokens have period `p` ends with s // p copies of a unit of p tokens (where in the unit it
stops does not matter: a rotated unit is a unit). So one number a period decides, the length of the run of tokens that
equal the one p before; it is found in linear time for a finished answer (`find_loop`), and by one vector operation a
token for one that grows (`LoopDetector`) or for the rows of a batch (`LoopStopping`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import StoppingCriteria

__all__ = ["Loop", "LoopDetector", "LoopRates", "LoopRule", "LoopStopping", "find_loop", "loop_rates"]

READINGS = ("unit", "span")


@dataclass(frozen=True)
class LoopRule:
    """What counts as a loop.

    Attributes:
        window: how many of the last generated tokens are looked at.
        minimum: tokens of the unit, or of all its repeats, at least; see `reading`.
        repeats: how often the unit stands there at least.
        reading: "unit" or "span"; see the module's docstring.

    Raises:
        TypeError, ValueError: a number below 1 (2 for `repeats`), another reading, or a window too short for any loop.
    """

    window: int = 256
    minimum: int = 12
    repeats: int = 3
    reading: str = "unit"

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("minimum", 1), ("repeats", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be an int")
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.reading not in READINGS:
            raise ValueError(f"reading is {self.reading!r}; it must be one of {', '.join(map(repr, READINGS))}")
        shortest = self.reach(self.first_unit)
        if self.window < shortest:
            raise ValueError(
                f"window is {self.window}, in which no loop fits: minimum = {self.minimum} and repeats = "
                f"{self.repeats} need {shortest} tokens (reading = {self.reading!r}); give a longer window"
            )

    @property
    def first_unit(self) -> int:
        """The shortest unit."""
        return self.minimum if self.reading == "unit" else 1

    @property
    def last_unit(self) -> int:
        """The longest unit that fits the window often enough."""
        return self.window // self.repeats

    def reach(self, unit: int) -> int:
        """How many tokens at the end of an answer must have period `unit`."""
        least = self.repeats * unit
        return least if self.reading == "unit" else max(least, self.minimum)


@dataclass(frozen=True)
class Loop:
    """A loop at the end of an answer.

    Attributes:
        unit: tokens of the repeated unit, the shortest that the rule allows.
        repeats: how often it stands there in full, within the window.
        span: tokens of the periodic run, within the window.
    """

    unit: int
    repeats: int
    span: int


def find_loop(tokens: Sequence[int] | torch.Tensor, rule: LoopRule | None = None) -> Loop | None:
    """The loop at the end of an answer, or None. Linear in the window.

    Args:
        tokens: ids of the generated tokens (a sequence, or an integer tensor `[n]`), without prompt; what fills up a
            row after its end (padding) must be gone, since it would be a loop itself.
        rule: what counts; the paper's rule, by the length of the unit, for None.

    Raises:
        TypeError: `tokens` is not one row of integers.
    """
    rule = rule or LoopRule()
    tail = _ids(tokens)[-rule.window :][::-1]
    runs = _matches(tail)
    for unit in range(rule.first_unit, min(rule.last_unit, len(tail) - 1) + 1):
        span = runs[unit] + unit
        if span >= rule.reach(unit):
            return Loop(unit, span // unit, span)
    return None


class LoopDetector:
    """Watches one answer as it grows: push token by token, at a fixed small cost each.

    After any number of pushes `push` has said what `find_loop` says of all tokens so far.
    """

    def __init__(self, rule: LoopRule | None = None) -> None:
        self.rule = rule or LoopRule()
        self._units = np.arange(1, self.rule.last_unit + 1)
        self._reach = np.array([self.rule.reach(unit) for unit in self._units.tolist()])
        self._reach[: self.rule.first_unit - 1] = np.iinfo(np.int64).max  # too short to be a unit
        self.reset()

    def reset(self) -> None:
        """Forget all tokens: another answer begins."""
        self._recent = np.full(len(self._units), -1, dtype=np.int64)  # newest first; -1 is no token
        self._runs = np.zeros(len(self._units), dtype=np.int64)

    def push(self, token: int) -> Loop | None:
        """Take the next token; the loop that the answer ends with now, or None.

        Raises:
            ValueError: a negative id.
        """
        token = int(token)
        if token < 0:
            raise ValueError(f"token is {token}; ids are 0 or more")
        self._runs = np.where(self._recent == token, self._runs + 1, 0)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        span = self._runs + self._units
        found = span >= self._reach
        first = int(found.argmax())
        if not found[first]:
            return None
        unit, length = first + 1, min(int(span[first]), self.rule.window)
        return Loop(unit, length // unit, length)


class LoopStopping(StoppingCriteria):
    """Ends those rows of a `generate` call that have run into a loop; other rows go on.

        model.generate(**inputs, stopping_criteria=[LoopStopping(inputs["input_ids"].shape[1])])

    It keeps nothing from step to step, so that beams may change places, and asks the device for nothing. A beam that
    loops is ended as if it had said EoS. As with every criterion, `generate` fills ended rows of a batch up with
    padding where it has an `eos_token_id`; without one it lets them go on until the last row ends.

    Args:
        prompt_length: how many columns of the tokens that `generate` returns are prompt, left padding included; they
            never count. 0 where only `inputs_embeds` were given. None: all but the newest token of the first step,
            which is right for one call of `generate`: make another object for the next.
        rule: what counts; None: the paper's rule by the length of the unit.

    Raises:
        TypeError, ValueError: `prompt_length` is no int from 0.
    """

    def __init__(self, prompt_length: int | None = None, rule: LoopRule | None = None) -> None:
        if prompt_length is not None and (isinstance(prompt_length, bool) or not isinstance(prompt_length, int)):
            raise TypeError(f"prompt_length is {prompt_length!r} ({type(prompt_length).__name__}); it must be an int")
        if prompt_length is not None and prompt_length < 0:
            raise ValueError(f"prompt_length is {prompt_length}; it must be at least 0")
        self.prompt_length = prompt_length
        self.rule = rule or LoopRule()
        units = range(self.rule.first_unit, self.rule.last_unit + 1)
        self._reach = [self.rule.reach(unit) for unit in units]
        self._needed = torch.tensor([reach - unit for reach, unit in zip(self._reach, units, strict=True)])

    def __call__(self, input_ids: torch.Tensor, scores: Any = None, **kwargs: Any) -> torch.Tensor:
        """bool `[B]`, True for rows of `input_ids` `[B, T]` that end in a loop."""
        if self.prompt_length is None:
            self.prompt_length = max(input_ids.shape[1] - 1, 0)
        new = input_ids.shape[1] - self.prompt_length
        units = sum(reach <= new for reach in self._reach)  # growing, so these are the first
        if units == 0 or not input_ids.shape[0]:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        if self._needed.device != input_ids.device:
            self._needed = self._needed.to(input_ids.device)
        first, window = self.rule.first_unit, self.rule.window
        newest = input_ids[:, max(input_ids.shape[1] - window, self.prompt_length) :].flip(1)
        needed = self._needed[:units]
        width = max(reach - unit for unit, reach in enumerate(self._reach[:units], first))
        # Row u of `shifted` is the answer, newest token first, without its newest `first + u` tokens. What is filled up
        # is never looked at: no unit needs more than `new` tokens.
        filled = functional.pad(newest, (0, max(0, first + units - 1 + width - newest.shape[1])))
        shifted = filled.unfold(1, width, 1)[:, first : first + units]
        same = shifted == filled[:, None, :width]
        beyond = torch.arange(width, device=input_ids.device) >= needed[:, None]
        return (same | beyond).all(-1).any(-1)


@dataclass(frozen=True)
class LoopRates:
    """How many answers end in a loop.

    Attributes:
        answers: how many there were.
        unit: how many of them loop by the length of the unit.
        span: and how many by the length of all repeats together.
        units: of those that loop by the unit, its length in each.
    """

    answers: int
    unit: int
    span: int
    units: tuple[int, ...] = field(default=())

    @property
    def unit_rate(self) -> float:
        """Share in 0 .. 1, by the length of the unit; 0 where there are no answers."""
        return self.unit / self.answers if self.answers else 0.0

    @property
    def span_rate(self) -> float:
        """Share in 0 .. 1, by the length of all repeats together; 0 where there are no answers."""
        return self.span / self.answers if self.answers else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts and both rates."""
        return {**asdict(self), "units": list(self.units), "unit_rate": self.unit_rate, "span_rate": self.span_rate}


def loop_rates(
    answers: Iterable[Sequence[int] | torch.Tensor], rule: LoopRule | None = None, *, ignore: Iterable[int] = ()
) -> LoopRates:
    """How many of `answers` end in a loop, by both readings.

    Args:
        answers: ids of the generated tokens, one sequence or tensor `[n]` an answer, without prompts.
        rule: window, minimum and repeats; its reading does not matter here.
        ignore: ids that are taken off the end of each answer before it is looked at: the padding of a batch, and EoS,
            so that an answer that stops in time after its third repeat counts like one that ran on.

    Raises:
        TypeError: an answer is not one row of integers.
    """
    rule, ignored = rule or LoopRule(), set(ignore)
    by_unit, by_span = replace(rule, reading="unit"), replace(rule, reading="span")
    count, span, units = 0, 0, []
    for answer in answers:
        tokens = _ids(answer)
        while tokens and tokens[-1] in ignored:
            tokens.pop()
        count += 1
        span += find_loop(tokens, by_span) is not None
        found = find_loop(tokens, by_unit)
        if found is not None:
            units.append(found.unit)
    return LoopRates(count, len(units), span, tuple(units))


def _matches(tokens: list[int]) -> list[int]:
    """`z[p]`: how many tokens from the front equal those `p` further on (the Z function; z[0] is the length)."""
    n = len(tokens)
    z = [n] * min(n, 1) + [0] * (n - 1)
    left = right = 0
    for i in range(1, n):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < n and tokens[length] == tokens[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z


def _ids(tokens: Any) -> list[int]:
    if isinstance(tokens, (torch.Tensor, np.ndarray)):
        if tokens.ndim != 1:
            raise TypeError(f"tokens have {tokens.ndim} dimensions; give one row of ids")
        if isinstance(tokens, torch.Tensor) and (tokens.is_floating_point() or tokens.is_complex()):
            raise TypeError(f"tokens are {tokens.dtype}; give integer ids")
        tokens = tokens.tolist()
    elif isinstance(tokens, (str, bytes)):
        raise TypeError("tokens are text; give the ids of an answer")
    found = list(tokens)
    for token in found:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise TypeError(f"tokens hold {token!r} ({type(token).__name__}); give integer ids")
    return found
