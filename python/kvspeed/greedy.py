# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Whether the arguments and configuration of a `generate` call leave it greedy and nothing more."""

from __future__ import annotations

from typing import Any

__all__ = ["check_greedy", "greedy_arguments", "token_ids"]

# What each setting must be for the next token to be the most likely one. None is always fine.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "diversity_penalty": 0.0,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "use_cache": True,
    **dict.fromkeys(
        (
            "bad_words_ids",
            "force_words_ids",
            "constraints",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "suppress_tokens",
            "begin_suppress_tokens",
            "sequence_bias",
            "exponential_decay_length_penalty",
            "watermarking_config",
            "dola_layers",
            "prompt_lookup_num_tokens",
            "assistant_early_exit",
            "prefill_chunk_size",
            "max_time",
            "stop_strings",
        )
    ),
}
_FREE = ("do_sample", "eos_token_id", "pad_token_id", "bos_token_id", "generation_config")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)  # greedy ignores them


def check_greedy(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what would make transformers' `generate` do more than take the likeliest token at each step.

    Raises:
        ValueError: naming the setting, and where it comes from.
    """
    given = kwargs.get("generation_config")
    if kwargs.get("do_sample") or ("do_sample" not in kwargs and getattr(given, "do_sample", False)):
        raise ValueError("do_sample is True, and decoding by a CUDA graph is greedy: give do_sample=False, or no graph")
    for name, value in kwargs.items():
        if name not in _NEUTRAL and name not in _FREE and name not in _SAMPLING and value is not None:
            raise ValueError(
                f"{name} was given, and decoding by a CUDA graph is plain greedy search, which knows eos_token_id and "
                "pad_token_id: leave it out, or generate without the graph"
            )
    for name, neutral in _NEUTRAL.items():
        where = "the argument" if name in kwargs else "the generation_config given"
        value = kwargs.get(name, getattr(given, name, None))
        if value is None and name not in kwargs:
            where, value = "the model's generation_config", getattr(model.generation_config, name, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"{name} is {value!r} ({where}), and decoding by a CUDA graph is plain greedy search: give "
                f"{name}={neutral!r}, or generate without the graph"
            )


def greedy_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs`, and what silences a model's own sampling settings where no configuration of the caller's is in them."""
    given = dict(kwargs)
    if "generation_config" not in given:
        given["do_sample"] = False
        for name in ("temperature", "top_p", "top_k"):
            given.setdefault(name, None)
    return given


def token_ids(model: Any, kwargs: dict[str, Any]) -> tuple[list[int], int]:
    """The ids that end a row (may be none), and the one that fills it up after that."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    eos, pad = (_setting(name, kwargs, configs) for name in ("eos_token_id", "pad_token_id"))
    ends = [] if eos is None else [int(token) for token in (eos if hasattr(eos, "__iter__") else [eos])]
    return ends, int(pad) if pad is not None else (ends[0] if ends else 0)


def _setting(name: str, kwargs: dict[str, Any], configs: tuple[Any, ...]) -> Any:
    value = kwargs.get(name)
    for config in configs:
        value = getattr(config, name, None) if value is None else value
    return value
