# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The presses against kvpress, in an environment that has it.

kvpress 0.5.5 needs a transformers below 5.3 and patches attention functions when it is imported, so it gets an
environment and a process of its own:

    python -m venv kvpress-env
    kvpress-env/bin/pip install kvpress==0.5.5
    PYTHONPATH=python kvpress-env/bin/python tests/kvpress_check.py

(where kvspeed is not installed in that environment, its compiled extension must be built for the same Python). The
script prints one line a comparison and ends with 0 where all agree. test_press_kvpress.py runs it. Two arguments are
understood: a seed, and the folder of a model to compare on instead of the tiny ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parent))

import kvpress
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from kvpress.presses.leverage_press import LeverageScorePress
from kvspeed import assemble, patch_model, unpatch_model
from kvspeed.packet import PacketAdapter, build_packet
from kvspeed.packet.press import CURPress, LayerKV, Press, TOVAPress, as_press, kvzap_press
from kvspeed.packet.press.leverage import leverage
from packet_tools import cached_logits, tiny_tokenizer
from tiny_models import tiny_model
from transformers import DynamicCache

MODELS = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # those that both know
TOKENS = 45
RATIOS = (0.1, 0.3, 0.5)


@dataclass(frozen=True)
class Beside(Press):
    """Scores of another press, which are kept."""

    name: ClassVar[str] = "beside"
    needs_hidden: ClassVar[bool] = True
    inner: Any = None
    kept: ClassVar[list[tuple[LayerKV, torch.Tensor]]] = []

    def begin(self, model: Any) -> None:
        self.inner.begin(model)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        scores = self.inner.scores(layer)
        self.kept.append((layer, scores.clone()))
        return scores


def scores_of(press: Press, model: Any, tokenizer: Any, text: str) -> list[tuple[LayerKV, torch.Tensor]]:
    """What `press` gives each layer of a packet."""
    Beside.kept.clear()
    build_packet(model, tokenizer, text, press=Beside(press.ratio, inner=press))
    return list(Beside.kept)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """Empty, or by how much they differ relative to the largest."""
    error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))
    return "" if error <= tolerance else f"relative error {error:.1e}"


@torch.no_grad()
def kvpress_cache(press: Any, model: Any, tokenizer: Any, text: str) -> Any:
    """What kvpress itself leaves of the text's KV."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache)
    for layer in model.model.layers:
        layer.self_attn._modules.pop("rotary_emb", None)  # kvpress leaves it there, as a part of the weights
    return cache


def same_tokens(packet: Any, cache: Any) -> str:
    """Whether a packet holds the very keys and values of kvpress' cache, in whatever order."""
    for index, layer in enumerate(cache.layers):
        if layer.keys.shape[2] != packet.keys.shape[2]:
            return f"layer {index}: {layer.keys.shape[2]} tokens in kvpress, {packet.keys.shape[2]} here"
        for head in range(layer.keys.shape[1]):
            ours = torch.cat([packet.keys[index, head], packet.values[index, head]], -1)
            theirs = torch.cat([layer.keys[0, head], layer.values[0, head]], -1)
            nearest, place = (ours[:, None] - theirs[None]).abs().amax(-1).min(1)
            if float(nearest.max()) > 1e-4 or len(set(place.tolist())) < len(place):
                return f"layer {index}, head {head}: other tokens"
    return ""


def own_presses(model: Any, tokenizer: Any, text: str) -> Iterator[tuple[str, str]]:
    """TOVA, CUR and leverage as they are here, and in kvpress."""
    pairs = [(TOVAPress(0.3), kvpress.TOVAPress(0.3)), (CURPress(0.3), kvpress.CURPress(compression_ratio=0.3))]
    pairs += [(CURPress(0.3, sinks=2, window=7), kvpress.CURPress(0.3, num_sinks=2, local_window_size=7))]
    for ours, theirs in pairs:
        name = type(ours).__name__
        found = scores_of(ours, model, tokenizer, text)
        wanted = scores_of(as_press(theirs), model, tokenizer, text)
        for (layer, got), (_, want) in zip(found, wanted, strict=True):
            if name == "TOVAPress":  # only that the last token is above all others counts
                got, want = got[:, :-1], want[:, :-1]
            yield f"{name} scores, layer {layer.index}", close(got, want, 1e-4)
        for ratio in RATIOS:
            theirs.compression_ratio = ratio
            packet = build_packet(model, tokenizer, text, press=type(ours)(**{**vars(ours), "ratio": ratio}))
            yield f"{name} tokens at {ratio}", same_tokens(packet, kvpress_cache(theirs, model, tokenizer, text))
    for layer, want in scores_of(as_press(LeverageScorePress(0.3)), model, tokenizer, text):
        torch.manual_seed(layer.index)
        want = LeverageScorePress(0.3).score(
            layer.module, layer.hidden, layer.keys[None], layer.values[None], None, layer.arguments
        )[0]
        torch.manual_seed(layer.index)
        size = layer.keys.shape[2]
        got = leverage(layer.unrotated_keys(), torch.randn(1, layer.keys.shape[0], size, 48)[0])
        got = (got - got.mean()) / got.std().clamp_min(1e-6)
        yield f"LeveragePress scores, layer {layer.index}", close(got, want, 5e-3)


def bridged(model: Any, tokenizer: Any, text: str) -> Iterator[tuple[str, str]]:
    """Presses of kvpress through the bridge, and on their own."""
    presses = [
        kvpress.RandomPress(0.4, seed=3),
        kvpress.KnormPress(0.4),
        kvpress.SnapKVPress(0.4, window_size=8),
        kvpress.ExpectedAttentionPress(0.4),
        kvpress.StreamingLLMPress(0.4),
        kvpress.KeyDiffPress(0.4),
        kvpress.TOVAPress(0.4),
        kvpress.NonCausalAttnPress(0.4),
    ]
    for press in presses:
        name = type(press).__name__
        try:
            cache = kvpress_cache(press, model, tokenizer, text)
        except Exception as error:
            yield f"{name}: kvpress itself fails ({type(error).__name__}), not compared", ""
            continue
        packet = build_packet(model, tokenizer, text, press=press)
        assert packet.press is not None and packet.press["name"] == f"kvpress.{name}"
        yield f"{name} through the bridge", same_tokens(packet, cache)


def kvzap(model: Any, tokenizer: Any, text: str, folder: Path) -> Iterator[tuple[str, str]]:
    """KVzap with weights of one's own, by kvpress and without it."""
    for hidden in (None, 24):
        config = KVzapConfig(input_dim=64, output_dim=2, n_modules=len(model.model.layers), hidden_dim=hidden)
        weights = KVzapModel(config)
        weights.save_pretrained(folder / str(hidden))
        theirs = kvpress.KVzapPress(0.4)
        model.config._name_or_path = "tiny"
        theirs.kvzap_model_name, theirs.kvzap_model = "nvidia/KVzap-mlp-tiny", weights
        cache = kvpress_cache(theirs, model, tokenizer, text)
        yield (
            f"KVzap (hidden {hidden}) through the bridge",
            same_tokens(build_packet(model, tokenizer, text, press=theirs), cache),
        )
        ours = kvzap_press(folder / str(hidden), 0.4)
        yield f"KVzap (hidden {hidden}) here", same_tokens(build_packet(model, tokenizer, text, press=ours), cache)


def refused(model: Any, tokenizer: Any, text: str) -> Iterator[tuple[str, str]]:
    """Presses that a packet cannot hold."""
    inner = kvpress.KnormPress(0.3)
    makes: list[Callable[[], Any]] = [
        lambda: kvpress.AdaKVPress(inner),
        lambda: kvpress.KeyRerotationPress(inner),
        lambda: kvpress.PyramidKVPress(0.3),
        lambda: kvpress.ThinKPress(),
        lambda: kvpress.ChunkPress(inner),
    ]
    for make in makes:
        press = make()
        try:
            build_packet(model, tokenizer, text, press=press)
        except ValueError as error:
            yield f"{type(press).__name__} is refused", "" if "does more than give scores" in str(error) else str(error)
        else:
            yield f"{type(press).__name__} is refused", "it was taken"


def protected(model: Any, tokenizer: Any, text: str) -> Iterator[tuple[str, str]]:
    """Soft tokens stay, whatever the scores of kvpress say; the packet works in both modes."""
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    press = as_press(kvpress.KnormPress(0.5))
    packet = build_packet(model, tokenizer, text, adapter, press=press)
    soft = {0, 1, 2, TOKENS + 3, TOKENS + 4}
    assert packet.positions is not None
    kept = all(soft <= set(head) for head in packet.positions.flatten(0, 1).tolist())
    yield "soft tokens are protected", "" if kept else "some are gone"
    patch_model(model)
    logits = [
        cached_logits(model, assemble([packet, packet], model=model, mode=mode), range(5, 11), [7, 8])
        for mode in ("view", "copy")
    ]
    unpatch_model(model)
    yield "view = copy", close(logits[0], logits[1], 1e-4)


def report(model: str, checks: list[Iterator[tuple[str, str]]]) -> int:
    """Print what the comparisons found; returns how many failed."""
    failures = 0
    for check in checks:
        for name, fault in check:
            failures += bool(fault)
            print(f"{'FAILED' if fault else 'ok    '} {model}: {name}{': ' + fault if fault else ''}", flush=True)
    return failures


@torch.no_grad()
def main_on(folder: Path) -> int:
    """The comparisons on a model from a folder, on a text without equal tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, seen = "", set()
    words = Path(__file__).read_text().split()
    for word in (words[place] for place in torch.randperm(len(words)).tolist()):
        ids = tokenizer(text + " " + word, add_special_tokens=False)["input_ids"]
        if word.isalpha() and len(set(ids)) == len(ids) and word not in seen and len(ids) <= 120:
            text, seen = text + " " + word, seen | {word}
    return report(folder.name, [check(model, tokenizer, text) for check in (own_presses, bridged)])


@torch.no_grad()
def main(folder: Path) -> int:
    """Run all comparisons; returns how many failed."""
    failures = 0
    tokenizer = tiny_tokenizer()
    for architecture in MODELS:
        whole = {"partial_rotary_factor": 1.0} if architecture == "phi3" else {}  # kvpress cannot turn half a head
        model = tiny_model(architecture, layers=3, **whole)
        # every token once: equal tokens have equal norms, and of equal scores anyone may take either
        text = " ".join(f"w{index}" for index in (100 + torch.randperm(400)[:TOKENS]).tolist())
        checks = [
            own_presses(model, tokenizer, text),
            bridged(model, tokenizer, text),
            protected(model, tokenizer, text),
        ]
        if architecture == "llama":
            checks += [kvzap(model, tokenizer, text, folder), refused(model, tokenizer, text)]
        failures += report(architecture, checks)
    return failures


if __name__ == "__main__":
    import tempfile

    torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else torch.seed() % 2**31)
    if len(sys.argv) > 2:
        sys.exit(1 if main_on(Path(sys.argv[2])) else 0)
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(1 if main(Path(scratch)) else 0)
