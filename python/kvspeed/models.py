# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which transformers models kvspeed knows, and how to find their parts.

A model is patched only when its architecture is listed here: an unknown one could rotate, mask or cache in a way that
looks right and is not, so it is refused by name (a renamed class once made a patch elsewhere a silent no-op).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "architecture",
    "base_model",
    "cache_argument",
    "causal_lm",
    "check_own_kv",
    "max_positions",
]


@dataclass(frozen=True)
class Architecture:
    """What kvspeed must know of a model family beyond what its modules say themselves."""

    name: str
    rope_pairing: str = "half"  # "half": pairs (i, i + R/2); "interleaved": pairs (2i, 2i + 1)


# Keyed by `config.model_type`.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama"),
    "mistral": Architecture("Mistral"),
    "qwen2": Architecture("Qwen2"),
    "qwen3": Architecture("Qwen3"),
    "smollm3": Architecture("SmolLM3"),
    "phi3": Architecture("Phi-3"),
    "olmo2": Architecture("OLMo2"),
    "granite": Architecture("Granite"),
    "gemma2": Architecture("Gemma 2"),
    "gemma3_text": Architecture("Gemma 3 (text)"),
}


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers model inside `model`: itself, or what a PEFT wrapper holds.

    Raises:
        ValueError: the wrapper prepends virtual tokens (prompt or prefix tuning), whose positions kvspeed cannot place.
    """
    if hasattr(model, "get_base_model"):  # peft.PeftModel
        config = getattr(model, "active_peft_config", None)
        if config is not None and getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"model is wrapped by PEFT with {config.peft_type}, which prepends virtual tokens; kvspeed supports "
                "adapters that leave the tokens alone (LoRA and its kin): merge or remove this one first"
            )
        return model.get_base_model()  # type: ignore[operator]
    return model


def base_model(model: nn.Module) -> nn.Module:
    """The decoder stack (the module that owns `layers` and `rotary_emb`) of a causal LM, bare or wrapped by PEFT."""
    inner = causal_lm(model)
    names = (
        getattr(inner, "base_model_prefix", ""),
        "model",
    )  # Gemma 3 before transformers 5 names a prefix it has not
    candidates = [inner, *(getattr(inner, name, None) for name in names if name)]
    stack = next((module for module in candidates if hasattr(module, "layers")), None)
    if stack is None:
        raise ValueError(
            f"model is {type(model).__name__}, in which no decoder layers were found; kvspeed supports "
            f"{_known()}: pass such a model, as AutoModelForCausalLM loads it"
        )
    return stack


def max_positions(model: nn.Module) -> int | None:
    """The positions that the model was made for, None where its configuration does not say."""
    config: Any = base_model(model).config
    value = getattr(config, "max_position_embeddings", None)
    return int(value) if value else None


def architecture(model: nn.Module) -> Architecture:
    """The entry of `ARCHITECTURES` for `model`.

    Raises:
        ValueError: the architecture is not known; the message names it and those that are.
    """
    config = getattr(causal_lm(model), "config", None)
    model_type = getattr(config, "model_type", None)
    found = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise ValueError(
            f"architecture {model_type!r} ({type(causal_lm(model)).__name__}) is not known to kvspeed; known are "
            f"{_known()}: use one of these, or open a request for it"
        )
    return found


def cache_argument(module: nn.Module) -> str:
    """The name under which this transformers version passes the KV cache (`past_key_values`, or `cache` from 5.23)."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def attention_modules(model: nn.Module) -> list[Any]:
    """The attention module of every decoder layer, in order."""
    stack: Any = base_model(model)
    return [layer.self_attn for layer in stack.layers]


def check_own_kv(config: Any) -> None:
    """Refuse, for SPEED, a model whose upper layers use the keys and values of lower ones.

    Raises:
        ValueError: it is one.
    """
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if shared:
        raise ValueError(
            f"the model's last {shared} layers share the KV of lower ones, so that there is nothing to leave out above "
            "k; use it with k = all layers, or a model whose layers have KV of their own"
        )


def _known() -> str:
    return ", ".join(sorted(f"{entry.name} ({key})" for key, entry in ARCHITECTURES.items()))
