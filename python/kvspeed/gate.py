# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The gate: does kvspeed compute the same as this very model, in this process, with these weights?

Four checks on the loaded model, on logits and KV rather than on generated text: a shift of a packet, the patch without
SPEED, the two ways to use packets, and SPEED against a forward with its written-out mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from kvspeed import ops
from kvspeed.install import install, patched, unpatch_model
from kvspeed.models import architecture, base_model, causal_lm
from kvspeed.packet import assemble, build_preamble
from kvspeed.rule import SpeedSpec, speed_mask
from kvspeed.speed.prefill import prompt_kv
from kvspeed.state import state_of

__all__ = ["Check", "VerifyReport", "verify"]

_TOKENS = 48  # of the test prompt
_SHIFT = 3000  # positions; far enough that a wrong frequency, scaling or pairing cannot hide
_STEPS = 6


@dataclass(frozen=True)
class Check:
    """One check: the largest difference found, relative to the largest value compared, and what was allowed."""

    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # a NaN is not


@dataclass
class VerifyReport:
    """What `verify` found. `ok` when every check passed; `str()` is a table; `checks` holds the errors."""

    model: str
    dtype: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "ok": self.ok,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }

    def __str__(self) -> str:
        rows = [f"kvspeed.verify: {self.model} ({self.dtype}): {'ok' if self.ok else 'FAILED'}"]
        for check in self.checks:
            mark = "ok    " if check.ok else "FAILED"
            rows.append(
                f"  {mark} {check.name}: error {check.error:.1e}, allowed {check.tolerance:.1e} {check.note}".rstrip()
            )
        return "\n".join(rows)


@torch.no_grad()
def verify(model: nn.Module, tokenizer: Any = None) -> VerifyReport:
    """Check kvspeed against `model` as it is loaded; a few short forwards. The model is left as it was found.

    Four checks: (a) a packet built at position 0 and shifted equals the same tokens computed there; (b) the patch with
    k = L equals the unpatched model; (c) packets in view mode equal packets in copy mode; (d) `generate` under SPEED
    equals a full-depth forward with `speed_mask` in the layers >= k (the model's k when it is patched, else 3/4 of L).

    Args:
        model: a causal LM that kvspeed knows.
        tokenizer: unused where None; otherwise its BoS token starts the test prompt.

    Returns:
        A report; `report.ok` says whether all checks passed.

    Raises:
        ValueError: the architecture is not known.
    """
    architecture(model)
    inner, before = causal_lm(model), state_of(model)
    spec = before.spec if before is not None else None
    training = inner.training
    dtype = next(inner.parameters()).dtype
    report = VerifyReport(type(inner).__name__, str(dtype).removeprefix("torch."))
    tolerance = 1e-3 if dtype == torch.float32 else 0.15
    ids = _prompt(model, tokenizer)
    checks: list[tuple[str, Callable[[], float]]] = [
        ("(a) shifted packet = computed there", lambda: _shift(model, ids)),
        ("(b) k = L = unpatched", lambda: _full_depth(model, ids)),
        ("(c) view = copy", lambda: _view_copy(model, ids)),
        ("(d) generate under SPEED = masked forward", lambda: _speed(model, ids, spec)),
    ]
    inner.eval()
    try:
        unpatch_model(model)
        for name, run in checks:
            try:
                report.checks.append(Check(name, run(), tolerance))
            except ValueError as error:  # e.g. a RoPE whose keys cannot be shifted
                report.checks.append(Check(name, float("nan"), tolerance, f"({error})"))
    finally:
        inner.train(training)
        if before is not None:
            install(model, before)
    return report


def _shift(model: nn.Module, ids: torch.Tensor) -> float:
    base = base_model(model)
    shift = min(_SHIFT, max(1, int(getattr(base.config, "max_position_embeddings", 2048)) - ids.shape[1] - 1))
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with patched(model) as state:
        rope = state.rope
        here = prompt_kv(model, ids)
        moved = prompt_kv(model, ids, positions=positions + shift)
    out_keys, out_values = torch.empty_like(here.keys), torch.empty_like(here.values)
    ops.rope_concat(
        [here.keys], [here.values], [shift], rope.inv_freq, out_keys, out_values, interleaved=rope.interleaved
    )
    return max(_error(out_keys, moved.keys), _error(out_values, moved.values))


def _full_depth(model: nn.Module, ids: torch.Tensor) -> float:
    expected = _generate(model, ids)
    with patched(model):
        found = _generate(model, ids)
    # A tie may be broken either way, and after it the texts differ: compare up to the first step that does.
    same = int((expected.sequences == found.sequences).all(0).to(torch.long).cumprod(0).sum())
    steps = same - ids.shape[1] + 1
    return _error(torch.stack(found.logits[:steps], 1), torch.stack(expected.logits[:steps], 1))


def _view_copy(model: nn.Module, ids: torch.Tensor) -> float:
    half = ids.shape[1] // 2
    with patched(model) as state:
        packets = [build_preamble(model, None, part) for part in (ids[0, :half].tolist(), ids[0, half:].tolist())]
        logits = []
        for mode in ("view", "copy"):
            cache = assemble(packets, model=model, mode=mode)
            out = causal_lm(model)(input_ids=ids[:, :9], use_cache=True, **{state.cache_name: cache})
            logits.append(out.logits)
    return _error(*logits)


def _speed(model: nn.Module, ids: torch.Tensor, spec: SpeedSpec | None) -> float:
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    if layers < 2:
        return 0.0
    spec = spec or SpeedSpec(max(1, 3 * layers // 4))
    with patched(model, spec):
        result = _generate(model, ids)
    mask = speed_mask(
        ids.shape[1],
        result.sequences.shape[1],
        anchor_tokens=spec.anchor_tokens,
        boundary=spec.boundary,
        upper_attention=spec.upper_attention,
    )
    columns = torch.ones(mask.shape[0], dtype=torch.bool)
    columns[spec.anchor_tokens : ids.shape[1] - 1] = False
    with _masked(model, spec.deep_layers(layers), mask, columns):
        expected = causal_lm(model)(input_ids=result.sequences, use_cache=False).logits
    return _error(torch.stack(result.logits, 1), expected[:, ids.shape[1] - 1 : -1])


@contextmanager
def _masked(model: nn.Module, deep: list[int], mask: torch.Tensor, columns: torch.Tensor) -> Iterator[None]:
    """The unpatched model with `mask` (bool [T, T]) in `deep` layers, sliding windows kept; tokens that are not among
    `columns` (bool [T]) pass those layers by."""
    base: Any = base_model(model)
    eager = base.config._attn_implementation == "eager"
    distance = torch.arange(mask.shape[0])[:, None] - torch.arange(mask.shape[0])[None]

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        window = getattr(module.self_attn, "sliding_window", None)
        seen = mask if window is None else mask & (distance < window)
        weight = next(module.parameters())
        if eager:
            seen = torch.zeros(seen.shape, dtype=weight.dtype).masked_fill(~seen, torch.finfo(weight.dtype).min)
        return args, {**kwargs, "attention_mask": seen[None, None].to(weight.device)}

    def put(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = torch.where(columns.to(hidden.device)[:, None], hidden, before)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = []
    for layer in [base.layers[index] for index in deep]:
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(layer.register_forward_hook(put, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generate(model: nn.Module, ids: torch.Tensor) -> Any:
    return causal_lm(model).generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_STEPS,
        min_new_tokens=_STEPS,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )


def _prompt(model: nn.Module, tokenizer: Any) -> torch.Tensor:
    config: Any = base_model(model).config
    generator = torch.Generator().manual_seed(0)
    tokens = min(_TOKENS, int(getattr(config, "max_position_embeddings", 2048)) // 4)
    ids = torch.randint(min(10, config.vocab_size - 1), config.vocab_size, (1, tokens), generator=generator)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        bos = getattr(config, "bos_token_id", None)
    if isinstance(bos, int):
        ids[0, 0] = bos
    return ids.to(next(model.parameters()).device)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
