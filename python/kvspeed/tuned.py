# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The depth and rule that a model was tuned for, kept where the model is.

A tuned model says so in its config, `config.kvspeed`, a dictionary of `SpeedSpec`'s fields: transformers saves and
loads it with the weights, and `patch_model(model)` reads it. A PEFT adapter is saved without the model's config: it
gets a file beside its own, `kvspeed.json`, of the same fields.

    remember_spec(model, SpeedSpec(k=22)); model.save_pretrained(folder)     # a whole model
    remember_spec(model, SpeedSpec(k=22)); peft_model.save_pretrained(folder); write_spec(folder, SpeedSpec(k=22))
    remember_spec(peft_model, read_spec(folder))                             # after loading an adapter
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from kvspeed.atomic import replacing
from kvspeed.models import base_model, causal_lm
from kvspeed.rule import SpeedSpec

__all__ = [
    "SPEC_FILE",
    "read_object",
    "read_spec",
    "remember_spec",
    "remembered_spec",
    "spec_fields",
    "spec_of_fields",
    "write_spec",
]

SPEC_FILE = "kvspeed.json"
_FIELD = "kvspeed"


def remember_spec(model: nn.Module, spec: SpeedSpec | None) -> None:
    """Write into `model`'s config that it was tuned for `spec`; None takes it out again.

    Args:
        model: a causal LM that kvspeed knows, bare or wrapped by PEFT, patched or not.
        spec: depth and rule.

    Raises:
        ValueError: the model has fewer layers than `spec.k`.
    """
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    if spec is not None and spec.k > layers:
        raise ValueError(f"k is {spec.k} and the model has {layers} layers; give 1 to {layers}")
    config: Any = causal_lm(model).config
    if spec is not None:
        setattr(config, _FIELD, spec_fields(spec))
    elif hasattr(config, _FIELD):
        delattr(config, _FIELD)


def remembered_spec(model: nn.Module) -> SpeedSpec | None:
    """What `model` was tuned for, by its config; None where that says nothing.

    Raises:
        ValueError: the config's entry is damaged, or does not fit the model.
    """
    fields = getattr(causal_lm(model).config, _FIELD, None)
    if fields is None:
        return None
    spec = spec_of_fields(fields, f"config.{_FIELD}")
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    if spec.k > layers:
        raise ValueError(
            f"config.{_FIELD} says k = {spec.k} and the model has {layers} layers; it was written for another model: "
            f"give k to patch_model, or take the entry out with kvspeed.tuned.remember_spec(model, None)"
        )
    return spec


def write_spec(folder: str | os.PathLike[str], spec: SpeedSpec) -> None:
    """Write `kvspeed.json` into the folder of a PEFT adapter, atomically.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    with replacing(Path(folder) / SPEC_FILE) as part:
        part.write_text(json.dumps(spec_fields(spec), indent=1) + "\n", encoding="utf-8")


def read_spec(folder: str | os.PathLike[str]) -> SpeedSpec | None:
    """What `write_spec` wrote into `folder`; None where there is no such file.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / SPEC_FILE
    try:
        fields = read_object(path)
    except FileNotFoundError:
        return None
    return spec_of_fields(fields, str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file of a tuned model's folder holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, no UTF-8
        raise ValueError(f"{path} is damaged ({error}); tune again, or fetch the folder again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no object); tune again, or fetch the folder again")
    return found


def spec_fields(spec: SpeedSpec) -> dict[str, Any]:
    """`spec` as JSON can hold it."""
    return asdict(spec)


def spec_of_fields(fields: Any, where: str) -> SpeedSpec:
    """The spec in a dictionary made by `spec_fields`, read from `where`.

    Raises:
        ValueError: it is none.
    """
    hint = "give k to patch_model instead, or mend the entry"
    if not isinstance(fields, dict):
        raise ValueError(
            f"{where} is {fields!r:.80}, and not a dictionary with k, anchor_tokens, boundary, ...: {hint}"
        )
    try:
        gaps = fields.get("gaps", ())  # a list in JSON
        return SpeedSpec(**{**fields, "gaps": tuple(gaps) if isinstance(gaps, list) else gaps})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is no depth and rule of SPEED ({error}); {hint}") from None
