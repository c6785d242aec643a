# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which weights made these keys and values: a fingerprint of a model as it computes now.

`model_fingerprint` covers every parameter, every persistent buffer, the configuration fields that enter the computation
and the PEFT adapters that are in effect. Two models with one fingerprint compute the same function.

PEFT, what counts as the same model:

- wrapper prefixes (`base_model.model.`, `.base_layer`, `.original_module`) do not count;
- an adapter counts where it has an effect: active, enabled, not merged, and not a LoRA whose B is all zero. A wrapper
  whose adapters are all without effect has the fingerprint of the bare model, and so does a model after
  `merge_and_unload` compared with the merged wrapper;
- adapter names do not count, their scaling does.

The full digest reads all weights once per call site and is then kept; a kept one is used only after a cheap probe
(identity, address, version counter and a few elements of every matrix) found nothing changed. Merging an adapter edits
`.data` and bumps no version counter: the sampled elements are there for that. What the probe cannot see is an edit
through `.data` of a few elements that are not sampled; `refresh=True` reads everything again.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvspeed.digest import tensor_digest
from kvspeed.models import causal_lm

__all__ = ["model_fingerprint"]

# Configuration fields that change what a decoder computes; absent and None are the same.
_CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "no_rope_layers",
)
# RoPE settings that change the angles. transformers 4 keeps them in `rope_theta` and `rope_scaling`, 5 in
# `rope_parameters`, one set a layer type where types differ: one spelling here, so that versions agree.
_ROPE_FIELDS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "partial_rotary_factor",
    "truncate",
    "long_factor",
    "short_factor",
)
_SAMPLES = 16  # elements of each weight that the probe looks at

_Entries = list[tuple[str, torch.Tensor]]
_known: weakref.WeakKeyDictionary[nn.Module, tuple[bytes, str]] = weakref.WeakKeyDictionary()


def model_fingerprint(model: nn.Module, *, refresh: bool = False) -> str:
    """The fingerprint (64 hex digits) of `model` as it computes now; see the module's docstring for what counts.

    It does not depend on the device, the process, the attention implementation, or on `patch_model`.

    Args:
        model: a transformers model, bare or wrapped by PEFT or `torch.compile`.
        refresh: read every weight again even where the probe finds nothing changed.

    Raises:
        TypeError: `model` is not a module.
        ValueError: its weights are not loaded or cannot be read, a merged adapter is disabled (PEFT would unmerge it
            in the next forward), or the wrapper prepends virtual tokens.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    model = causal_lm(getattr(model, "_orig_mod", model))
    entries: _Entries = []
    settings: list[str] = [_config_key(getattr(model, "config", None))]
    _collect(model, "", entries, settings, set())
    for name, tensor in entries:
        if tensor.is_meta:
            raise ValueError(f"weight {name} is on the meta device: load the model's weights before using packets")
    probe = _probe(entries, settings)
    kept = _known.get(model)
    if kept is not None and kept[0] == probe and not refresh:
        return kept[1]
    digest = hashlib.sha256("\n".join(settings).encode())
    for name, tensor in entries:
        digest.update(name.encode() + b"\0")
        try:
            digest.update(tensor_digest(tensor))
        except ValueError as error:
            raise ValueError(f"weight {name}: {error}") from error
    fingerprint = digest.hexdigest()
    _known[model] = (probe, fingerprint)
    return fingerprint


def _collect(module: nn.Module, prefix: str, entries: _Entries, settings: list[str], seen: set[int]) -> None:
    """Append the tensors below `module` that take part in the computation, under names without PEFT's prefixes."""
    if "base_layer" in module._modules:
        _collect_tuner_layer(module, prefix, entries, settings, seen)
        return
    if "original_module" in module._modules and "modules_to_save" in module._modules:
        _collect(_module_in_use(module), prefix, entries, settings, seen)
        return
    for name, parameter in module._parameters.items():
        _append(prefix + name, parameter, entries, seen)
    for name, buffer in module._buffers.items():
        # other buffers (inv_freq) follow from the configuration, and may differ by a rounding between devices
        if name not in module._non_persistent_buffers_set:
            _append(prefix + name, buffer, entries, seen)
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", entries, settings, seen)


def _append(name: str, tensor: torch.Tensor | None, entries: _Entries, seen: set[int]) -> None:
    if tensor is not None and id(tensor) not in seen:  # tied weights count once, under their first name
        seen.add(id(tensor))
        entries.append((name, tensor))


def _collect_tuner_layer(layer: Any, prefix: str, entries: _Entries, settings: list[str], seen: set[int]) -> None:
    """A PEFT layer: its base layer, then each adapter that changes the result."""
    merged = tuple(getattr(layer, "merged_adapters", ()))
    disabled = bool(getattr(layer, "disable_adapters", False))
    if disabled and merged:
        raise ValueError(
            f"{prefix[:-1]}: adapter {merged[0]!r} is merged and at the same time disabled, so that PEFT unmerges it "
            "in the next forward: call unmerge_adapter(), or enable it"
        )
    _collect(layer.base_layer, prefix, entries, settings, seen)
    if disabled:
        return
    for index, adapter in enumerate(getattr(layer, "active_adapters", ())):
        own = list(_adapter_tensors(layer, adapter))
        if adapter in merged or not own or _without_effect(own):
            continue
        for path, tensor in own:
            _append(f"{prefix}{path}.adapter{index}", tensor, entries, seen)
        for name in ("scaling", "use_dora"):
            value = getattr(layer, name, None)
            if isinstance(value, dict) and adapter in value:
                settings.append(f"{prefix}{name}.adapter{index}={value[adapter]!r}")


def _adapter_tensors(layer: nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """`(path without the adapter's name, tensor)` of one adapter's tensors in a PEFT layer."""
    for child_name, child in layer._modules.items():
        if child_name == "base_layer" or child is None:
            continue
        named = list(child.named_parameters(remove_duplicate=False)) + list(child.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            parts = name.split(".")
            if parts[0] == adapter:
                yield ".".join([child_name, *parts[1:]]), tensor


def _without_effect(tensors: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether these are plain LoRA matrices with B = 0, as LoRA starts."""
    if any(not name.startswith(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")) for name, _ in tensors):
        return False
    return not any(bool(tensor.any()) for name, tensor in tensors if "_B" in name)


def _module_in_use(wrapper: Any) -> nn.Module:
    """Of PEFT's ModulesToSaveWrapper, the module that runs."""
    if not getattr(wrapper, "disable_adapters", False):
        for adapter in getattr(wrapper, "active_adapters", ()):
            if adapter in wrapper.modules_to_save:
                return wrapper.modules_to_save[adapter]
    return wrapper.original_module


def _config_key(config: Any) -> str:
    """The fields of a model's configuration that enter the computation, as one line of JSON."""
    fields = {name: getattr(config, name, None) for name in _CONFIG_FIELDS}
    layer_types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        fields["layer_types"] = list(layer_types)
    fields["rope"] = _rope_fields(config)
    return json.dumps({name: value for name, value in fields.items() if value is not None}, sort_keys=True, default=str)


def _rope_fields(config: Any) -> dict[str, Any]:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kinds = {name: dict(value) for name, value in parameters.items() if isinstance(value, dict)}
    if kinds:  # one set a layer type
        return {name: _rope_set(config, values) for name, values in kinds.items()}
    one = _rope_set(config, parameters or dict(getattr(config, "rope_scaling", None) or {}))
    local = getattr(config, "rope_local_base_freq", None)  # Gemma 3 before transformers 5
    if local is None:
        return one
    return {"full_attention": one, "sliding_attention": {"rope_type": "default", "rope_theta": float(local)}}


def _rope_set(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    values = {"rope_theta": getattr(config, "rope_theta", None), **values}
    values.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    kind = values.get("rope_type") or values.get("type") or "default"
    wanted = ("rope_theta", "partial_rotary_factor") if kind == "default" else _ROPE_FIELDS
    result: dict[str, Any] = {"rope_type": kind}
    for name in wanted:
        value = values.get(name)
        if value is not None and (name, value) != ("partial_rotary_factor", 1.0):
            result[name] = float(value) if isinstance(value, int | float) else value
    return result


def _probe(entries: _Entries, settings: list[str]) -> bytes:
    """What must be unchanged for a kept fingerprint to hold; takes a few milliseconds at most."""
    digest = hashlib.sha256("\n".join(settings).encode())
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for name, tensor in entries:
        digest.update(f"{name} {id(tensor)} {tensor.data_ptr()} {_version(tensor)} {tuple(tensor.shape)}".encode())
        samples.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor.detach()))
    for group in samples.values():
        # the copies to the host are one a dtype and device, not one a weight
        digest.update(torch.cat(group).cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to `_SAMPLES` elements spread over `tensor`, as a view where it is contiguous."""
    step = max(tensor.numel() // _SAMPLES, 1)
    if tensor.is_contiguous():
        return tensor.view(-1)[step // 2 :: step]
    # rows are enough of a spread, and take no copy of the whole matrix
    row = tensor[:: max(tensor.shape[0] // _SAMPLES, 1)]
    while row.ndim > 1:
        row = row.select(-1, 0)
    return row.reshape(-1)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
