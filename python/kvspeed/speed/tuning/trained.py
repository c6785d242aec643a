# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What is trained of a model: a LoRA that peft puts into it, or all of its weights. And how it is saved and loaded."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import base_model, causal_lm
from kvspeed.rule import SpeedSpec
from kvspeed.speed.choice import take_choice
from kvspeed.tuned import read_object, read_spec, remember_spec, remembered_spec, spec_fields, write_spec

__all__ = ["Trained", "load_tuned"]

_LORA_CONFIG, _LORA_NOTES = "adapter_config.json", "kvspeed-lora.json"


class Trained:
    """A model with what is trained of it.

    Args:
        model: a causal LM; one that is wrapped by PEFT already is trained as it is wrapped.
        method: "lora" or "full".
        rank: of the LoRA.
        alpha: the LoRA's scale is alpha / rank.
        seed: of the LoRA's A; its B begins at zero.

    Attributes:
        model: bare, or wrapped by PEFT.
        method: "lora" or "full".
        weights: the trained parameters, by name; float32.

    Raises:
        ImportError: peft is missing.
        ValueError: nothing can be trained in float32.
    """

    def __init__(self, model: nn.Module, method: str, *, rank: int = 16, alpha: float | None = None, seed: int = 0):
        self.method, self._given = method, model
        self._flags = [(weight, weight.requires_grad) for weight in model.parameters()]
        self._wrapped_before = hasattr(model, "get_base_model")
        self.base, self.base_dtype = model_fingerprint(model), str(next(model.parameters()).dtype)
        self.model = model
        if method == "lora" and not self._wrapped_before:
            self.model = _with_lora(model, rank, alpha if alpha is not None else 2 * rank, seed)
        elif method == "full":
            model.requires_grad_(True)
        self.weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        problem = None
        if not self.weights:
            problem = "the PEFT wrapper has no weights that want a gradient: load it with is_trainable=True"
        low = next((name for name, weight in self.weights.items() if weight.dtype != torch.float32), None)
        if low is not None:
            problem = (
                f"{low} is {self.weights[low].dtype}, in which small steps are lost: load the model in float32 (and "
                'give dtype="bf16" for products in bfloat16), or train a LoRA'
            )
        if problem is not None:
            self.close(merge=False)
            raise ValueError(f"model: {problem}")

    @property
    def start(self) -> str | None:
        """The fingerprint of the weights that a LoRA of ours is put on; None where weights of the model itself learn,
        which a checkpoint replaces."""
        return self.base if self.method == "lora" and not self._wrapped_before else None

    @contextmanager
    def original(self) -> Iterator[nn.Module]:
        """The model as it was given, for distillation on the way; call `keep_original` before training."""
        if self.method == "full":
            yield self._original
        elif self._wrapped_before:
            now = {name: weight.data for name, weight in self.weights.items()}
            try:
                for name, weight in self.weights.items():
                    weight.data = self._first[name]
                yield self.model
            finally:
                for name, weight in self.weights.items():
                    weight.data = now[name]
        else:
            inner: Any = self.model
            with inner.disable_adapter():
                yield self.model

    def keep_original(self) -> None:
        """Make a copy for `original` of what is trained, except of a LoRA of ours, which begins as nothing."""
        if self.method == "full":
            self._original = copy.deepcopy(self.model).requires_grad_(False)
        elif self._wrapped_before:
            self._first = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def save(self, folder: Path, tokenizer: Any, spec: SpeedSpec, notes: dict[str, Any]) -> None:
        """Write what `load_tuned` reads: the adapter, or the whole model, with what it was tuned for.

        A LoRA's folder holds, beside peft's files, the model's configuration: what it is of, its depth, and what
        `kvspeed choose-depth --save` finds. Each file takes the place of an older one at once.
        """
        before = _entry(self.model)
        remember_spec(self.model, spec)
        part = folder / ".saving"
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while it saved
            part.mkdir(parents=True)
            inner: Any = self.model
            ours = self.method == "lora" and not self._wrapped_before
            inner.save_pretrained(str(part), **({"save_embedding_layers": False} if ours else {}))
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(str(part))
            if self.method == "lora":
                causal_lm(self.model).config.save_pretrained(str(part))  # type: ignore[union-attr, operator]
                write_spec(part, spec)
                facts = {"base_fingerprint": self.base, "base_dtype": self.base_dtype, **notes}
                (part / _LORA_NOTES).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            (part / "README.md").unlink(missing_ok=True)  # a model card with nothing in it
            for file in sorted(part.rglob("*")):  # tokenizers with several templates keep them in a folder
                place = folder / file.relative_to(part)
                if file.is_dir():
                    place.mkdir(exist_ok=True)
                else:
                    os.replace(file, place)
        finally:
            _put_entry(self.model, before)
            shutil.rmtree(part, ignore_errors=True)

    def close(self, *, merge: bool) -> nn.Module:
        """Leave the model as the caller knows it; returns it. A LoRA of ours is merged into its weights, or taken off.

        One that the caller brought stays on.
        """
        if self.method == "lora" and not self._wrapped_before and self.model is not self._given:
            inner: Any = self.model
            inner.merge_and_unload() if merge else inner.unload()
            self._given.__dict__.pop("peft_config", None)
            self._given.__dict__.pop("_hf_peft_config_loaded", None)
        for weight, flag in self._flags:
            weight.requires_grad_(flag)
            weight.grad = None
        self.model = self._given
        return self._given


def load_tuned(
    folder: str | Path, base_model: nn.Module | str | Path | None = None, *, dtype: torch.dtype | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """(model, settings) of a folder that `tune` wrote: a whole model, or a LoRA merged into the model it was made for.

    `patch_model(model)` then patches it for the depth that it was tuned for.

    Args:
        folder: with a model of transformers, or an adapter of peft.
        base_model: of a LoRA: the model, its folder or name; None: the one that it names itself.
        dtype: of the weights; None: as saved (float32 for the models that kvspeed ships).

    Returns:
        The model, in eval mode on the CPU, and `config.kvspeed` ({} where it was tuned for no depth).

    Raises:
        FileNotFoundError: the folder holds neither.
        ImportError: peft is missing.
        ValueError: the LoRA was made for other weights, or its files are damaged; `base_model` is as before then.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    model: Any
    if not (folder / _LORA_CONFIG).is_file():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds neither a model (config.json) nor a LoRA ({_LORA_CONFIG})")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype if dtype is not None else "auto")
        model.config._name_or_path = str(folder)
    else:
        peft = _peft()
        model = base_model if isinstance(base_model, nn.Module) else _base(folder, base_model, dtype)
        _check_base(folder, model)
        with _unharmed(model, folder):
            model = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        model.config._name_or_path = str(folder)
        remember_spec(model, read_spec(folder))
        take_choice(model, folder)
    spec = remembered_spec(model)
    return model.eval(), spec_fields(spec) if spec is not None else {}


def _with_lora(model: nn.Module, rank: int, alpha: float, seed: int) -> nn.Module:
    peft = _peft()
    layers: Any = base_model(model).layers
    names = {name.rpartition(".")[2] for name, part in layers.named_modules() if isinstance(part, nn.Linear)}
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=sorted(names), task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config)
    inner: Any = causal_lm(model)
    wrapped.peft_config["default"].base_model_name_or_path = inner.config._name_or_path or None
    return wrapped


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError(
            "LoRA is done with peft, which is missing; pip install 'kvspeed[train]' (or peft), or train all weights"
        ) from None
    return peft


def _base(folder: Path, name: nn.Module | str | Path | None, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM

    from kvspeed import smollm2, testbed

    if name is None:
        name = read_object(folder / _LORA_CONFIG).get("base_model_name_or_path")
    if not name or not isinstance(name, (str, Path)):
        raise ValueError(f"{folder} does not say which model its LoRA is for; give base_model")
    if str(name) in (testbed.MODEL_NAME, "testbed"):
        return testbed.load_tuned(dtype=dtype)[0]
    if str(name) in (smollm2.MODEL_NAME, "smollm2"):
        return smollm2.load_smollm2(dtype=dtype or torch.float32)[0]
    if (Path(name) / _LORA_CONFIG).is_file():  # tuned further from a LoRA
        _refuse_circle(folder, Path(name))
        return load_tuned(name, dtype=dtype)[0]
    return AutoModelForCausalLM.from_pretrained(str(name), dtype=dtype if dtype is not None else "auto")


def _refuse_circle(folder: Path, at: Path) -> None:
    """Refuse LoRAs that are, by way of others, on themselves."""
    seen = [folder.resolve()]
    while (at / _LORA_CONFIG).is_file():
        if at.resolve() in seen:
            by = "itself" if len(seen) == 1 else f"itself, by way of {seen[-1]},"
            raise ValueError(f"{folder} names {by} as the model that its LoRA is for; give base_model")
        seen.append(at.resolve())
        at = Path(str(read_object(at / _LORA_CONFIG).get("base_model_name_or_path")))


def _check_base(folder: Path, model: nn.Module) -> None:
    """Refuse a LoRA on other weights than it was made for, where it says so and the dtype lets it be seen."""
    path = folder / _LORA_NOTES
    if not path.is_file():
        return
    notes = read_object(path)
    wanted, dtype = notes.get("base_fingerprint"), notes.get("base_dtype")
    if dtype == str(next(model.parameters()).dtype) and wanted != model_fingerprint(model):
        raise ValueError(
            f"the LoRA in {folder} was made for other weights than base_model has; give the model it was tuned from"
        )


@contextmanager
def _unharmed(model: nn.Module, folder: Path) -> Iterator[None]:
    """A LoRA whose files are damaged leaves `model` as it was: peft puts its layers in before it reads them."""
    modules = [(module, dict(module._modules)) for module in model.modules()]
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    except BaseException as error:
        for module, parts in modules:
            module._modules.clear()
            module._modules.update(parts)
        for weight, flag in flags:
            weight.requires_grad_(flag)
        for name in ("peft_config", "_hf_peft_config_loaded"):
            model.__dict__.pop(name, None)
        if not isinstance(error, Exception):
            raise
        text = " ".join(str(error).split())
        raise ValueError(f"the LoRA in {folder} cannot be put on the model ({text:.200}); tune again") from error


def _entry(model: nn.Module) -> Any:
    return getattr(causal_lm(model).config, "kvspeed", None)


def _put_entry(model: nn.Module, entry: Any) -> None:
    config: Any = causal_lm(model).config
    if entry is not None:
        config.kvspeed = entry
    elif hasattr(config, "kvspeed"):
        del config.kvspeed
