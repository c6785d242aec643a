# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tiny random models, one a supported architecture, for tests (no download, milliseconds to build).

    from tiny_models import ARCHITECTURES, tiny_model
    model = tiny_model("gemma2", layers=6, seed=3)

Hidden size 64, 4 query heads, 2 KV heads, head_dim 16. The weights are drawn with a standard deviation of about
1/sqrt(fan in), not with the 0.02 of `initializer_range`: logits have a standard deviation near 1 to 4, attention is
neither uniform nor one-hot, and a fault in any layer shows in the logits.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import transformers

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "olmo2",
    "granite",
    "gemma2",
    "gemma3_text",
)

#: The names transformers gives these architectures: configuration class, model class.
_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}

BOS, EOS, PAD = 1, 2, 0


def tiny_config(architecture: str, *, layers: int = 6, vocab: int = 512, theta: float = 10000.0, **overrides: Any):
    """The configuration of a tiny model; `overrides` replace or add fields.

    `theta` is the RoPE base (the global one in Gemma 3, whose sliding layers keep 10000). RoPE scaling is asked for
    with `rope={"rope_type": "llama3", ...}`, which works under both spellings of transformers.
    """
    if architecture not in _CLASSES:
        raise ValueError(f"architecture: got {architecture!r}, known are {', '.join(ARCHITECTURES)}")
    config_class = getattr(transformers, _CLASSES[architecture][0])
    rope = {"rope_type": "default", **overrides.pop("rope", {})}
    values: dict[str, Any] = dict(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    partial = None
    if architecture in ("qwen3", "gemma2", "gemma3_text", "mistral"):
        values["head_dim"] = 16
    if architecture == "mistral":
        values["sliding_window"] = None
    elif architecture == "smollm3":
        values["no_rope_layers"] = [0 if (i + 1) % 3 == 0 else 1 for i in range(layers)]
    elif architecture == "phi3":
        partial = 0.5
        values["original_max_position_embeddings"] = 4096
    elif architecture == "granite":
        values |= dict(embedding_multiplier=2.0, logits_scaling=1.5, attention_multiplier=0.3, residual_multiplier=0.8)
    elif architecture == "gemma2":
        values |= dict(
            sliding_window=24, query_pre_attn_scalar=16, attn_logit_softcapping=8.0, final_logit_softcapping=15.0
        )
        values["layer_types"] = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    elif architecture == "gemma3_text":
        values |= dict(sliding_window=24, query_pre_attn_scalar=16)
        values["layer_types"] = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(layers)]
    partial = overrides.pop("partial_rotary_factor", partial)
    values |= _rope_fields(config_class, architecture, theta, rope, partial)
    values |= overrides
    return config_class(**values)


def _rope_fields(
    config_class: type, architecture: str, theta: float, rope: dict[str, Any], partial: float | None
) -> dict[str, Any]:
    """RoPE settings as this version of transformers spells them (5.x: rope_parameters, before: rope_theta, ...)."""
    new = "rope_parameters" in inspect.signature(config_class.__init__).parameters
    if new:
        settings = {"rope_theta": theta, **rope}
        if partial is not None:
            settings["partial_rotary_factor"] = partial
        if architecture == "gemma3_text":
            local = {"rope_type": "default", "rope_theta": 10000.0}
            return {"rope_parameters": {"full_attention": settings, "sliding_attention": local}}
        return {"rope_parameters": settings}
    fields: dict[str, Any] = {"rope_theta": theta}
    if architecture == "gemma3_text":
        fields |= {"rope_local_base_freq": 10000.0}
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = rope
    if partial is not None:
        fields["partial_rotary_factor"] = partial
    return fields


def tiny_model(
    architecture: str,
    *,
    layers: int = 6,
    vocab: int = 512,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **overrides: Any,
):
    """A random causal language model in eval mode, the same for the same arguments.

    Attention is sdpa unless named, and eager in Gemma 2 (transformers has no softcap in sdpa and would drop it).
    """
    overrides = dict(overrides)
    if architecture == "gemma3_text":
        overrides.setdefault("theta", 100000.0)
    config = tiny_config(architecture, layers=layers, vocab=vocab, **overrides)
    config._attn_implementation = attn_implementation or ("eager" if architecture == "gemma2" else "sdpa")
    model = getattr(transformers, _CLASSES[architecture][1])(config)
    randomise(model, seed)
    # generate() must be greedy and silent unless a test asks otherwise
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws all weights anew from `seed` (see the module's docstring)."""
    rng = torch.Generator().manual_seed(seed)
    gemma = type(model).__name__.startswith("Gemma")
    embedding_scale = getattr(model.config, "hidden_size", 64) ** -0.5 if gemma else 1.0  # Gemma multiplies it back
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=rng)
        if "norm" in name:
            # q_norm and k_norm set the sharpness of attention; Gemma's norms multiply by 1 + weight
            middle = 1.6 if "q_norm" in name or "k_norm" in name else 1.0
            weight.copy_(middle + 0.2 * noise - (1.0 if gemma else 0.0))
        elif weight.dim() == 1:
            weight.copy_(0.3 * noise)
        elif "embed_tokens" in name:
            weight.copy_(embedding_scale * noise)
        else:
            gain = 1.5 if ("q_proj" in name or "k_proj" in name or "qkv_proj" in name) else 1.0
            weight.copy_(gain / math.sqrt(weight.shape[1]) * noise)


def random_ids(length: int, *, vocab: int = 512, batch: int = 1, seed: int = 0, bos: bool = True) -> torch.Tensor:
    """int64 [batch, length] of ordinary tokens (ids 3 and up), each row beginning with BOS when `bos`."""
    rng = torch.Generator().manual_seed(1000003 * seed + length)
    ids = torch.randint(3, vocab, (batch, length), generator=rng)
    if bos and length:
        ids[:, 0] = BOS
    return ids
