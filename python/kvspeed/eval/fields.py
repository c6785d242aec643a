# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a record and a report must hold for what is made of them, so that a damaged file is refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ANSWER", "AVERAGE", "ROW", "SPEED_ROW", "Fields", "wrong_field"]

Fields = Mapping[str, Callable[[Any], bool]]  # name -> whether a value can be one


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _pair(value: Any) -> bool:
    return _numbers(value) and len(value) == 2


ANSWER: Fields = {  # a record of `kvspeed.eval.runner`
    **dict.fromkeys(("group", "text", "prediction"), _text),
    **dict.fromkeys(("f1", "em", "contains", "string_match"), _share),
    "token_ids": _numbers,
    **dict.fromkeys(("prompt_tokens", "flops", "kv_bytes", "stored_bytes", "seconds"), _number),
    **dict.fromkeys(("ttft_s", "end_to_end_s"), _number_or_none),
}
ROW: Fields = {  # of a report, for its plots
    **dict.fromkeys(("task", "method"), _text),
    **dict.fromkeys(("f1", "flops"), _number),
    "f1_interval": _pair,
    "ttft_s": _number_or_none,
}
SPEED_ROW: Fields = {
    **dict.fromkeys(("task", "method"), _text),
    **dict.fromkeys(("prompt_tokens", "kv_bytes"), _number),
    **dict.fromkeys(("ttft_s", "step_s"), _number_or_none),
}
AVERAGE: Fields = {
    **dict.fromkeys(("method", "category"), _text),
    **dict.fromkeys(("score", "loop_rate", "loop_span_rate"), _number),
    "score_interval": _pair,
}


def wrong_field(entry: Mapping[str, Any], fields: Fields) -> str | None:
    """The first field that is not there or cannot be what it is called; None where all are well."""
    return next((name for name, fits in fields.items() if name not in entry or not fits(entry[name])), None)
