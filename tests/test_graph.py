# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Decoding by one step of fixed shape gives the tokens and leaves the cache of transformers' greedy generate.

Each test runs the step twice: one by one, and recorded once and replayed as a CUDA graph would (see tape.py).
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed import graph
from kvspeed.packet import PacketAdapter, build_packet
from packet_tools import CHAT_TEMPLATE, random_text, tiny_tokenizer
from speed_tools import CACHE, LAYERS, answer, fresh, ids_of, left_padded, poison, speedy  # noqa: F401
from tape import Tape
from tiny_models import tiny_model


@pytest.fixture(params=["one by one", "replayed"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """`graph.generate`, its steps run one by one or recorded and replayed."""
    if request.param == "one by one":
        return graph.generate
    fake_cuda(monkeypatch)
    begin = graph.DecodeStep.__init__

    def begin_and_capture(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        assert self.capture(must=True)

    monkeypatch.setattr(graph.DecodeStep, "__init__", begin_and_capture)
    return graph.generate


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch.cuda what a capture calls; the graph is a tape."""

    class Graph:
        def __init__(self) -> None:
            self.tape, self.steps = Tape(), 0

        def replay(self) -> None:
            if self.steps:  # recording has run the first step already
                self.tape.replay()
            self.steps += 1

    @contextlib.contextmanager
    def recording(captured: Graph, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        with captured.tape:
            yield
        assert captured.tape.calls

    def here(_: Any) -> Any:
        return contextlib.nullcontext()

    stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    fakes = {"CUDAGraph": Graph, "graph": recording, "Stream": lambda device: stream, "stream": here, "device": here}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def prompts(rows: int = 3, ragged: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(3, 14, (rows,)).tolist() if ragged else [9] * rows
    return left_padded([ids_of(length)[0] for length in lengths])


def same_cache(found: Any, wanted: Any) -> None:
    """The same tokens in every layer, told by the next turn's logits' inputs: lengths, slots, and what is stored."""
    assert found.get_seq_length() == wanted.get_seq_length()
    assert found.deep_slots == wanted.deep_slots
    for a, b in zip(found.layers, wanted.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        if a.start == b.start:
            torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(a.values, b.values, atol=1e-4, rtol=1e-4)


def same_generation(
    run: Any, model: Any, ids: torch.Tensor, mask: Any = None, *, new: int = 12, **options: Any
) -> None:
    """Tokens, cache and the next turn are those of `model.generate`."""
    mask = torch.ones_like(ids) if mask is None else mask
    caches = [kvspeed.KVCache(model.config, spec=model.__dict__["_kvspeed"].spec) for _ in range(2)]
    options = {"pad_token_id": 7, **options}
    plain = {"do_sample": False, "attention_mask": mask, CACHE: caches[0], **options}
    wanted = model.generate(ids, max_new_tokens=new, **plain)
    found = run(model, ids, mask, max_new_tokens=new, cache=caches[1], **options)
    assert found.tolist() == wanted.tolist()
    same_cache(caches[1], caches[0])
    more = torch.cat([wanted, ids_of(4, batch=len(ids))], 1)
    mask = torch.cat([mask, mask.new_ones(len(ids), more.shape[1] - mask.shape[1])], 1)
    again = [answer(model, more, attention_mask=mask, n=4, **{CACHE: cache, **options}).sequences for cache in caches]
    assert torch.equal(*again)


@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("ragged", [False, True])
def test_every_architecture(run, architecture, k, ragged):
    same_generation(run, speedy(architecture, k), *prompts(ragged=ragged), new=40)  # past the sliding windows


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"anchor_tokens": 0},
        {"anchor_tokens": 5},
        {"boundary": "keep"},
        {"upper_attention": "self"},
        {"anchor_tokens": 3, "upper_attention": "self", "boundary": "keep"},
        {"turns": "reset"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_choice_of_speed(run, name, options, ragged):
    same_generation(run, speedy(name, 3, **options), *prompts(ragged=ragged))


def test_a_window_that_has_forgotten_tokens(run):
    model = kvspeed.patch_model(tiny_model("mistral", sliding_window=6))
    same_generation(run, model, ids_of(250, batch=2), new=200)


def test_rows_end_on_their_own(run):
    model = speedy("llama", 4)
    ids, mask = prompts()
    free = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[:, ids.shape[1] :]
    for ends in ([int(free[0, 3])], free[:, 5].tolist(), [int(free[0, 0])], free[:, 0].tolist(), free[:, 19].tolist()):
        same_generation(run, model, ids, mask, new=20, eos_token_id=ends)


@pytest.mark.parametrize("new", [1, 2, 9])
def test_few_tokens(run, new):
    same_generation(run, speedy("llama", 4), *prompts(), new=new)
    same_generation(run, speedy("qwen3", None), ids_of(1, batch=2), new=new)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(template=CHAT_TEMPLATE)


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("k", [None, 3])
def test_packets(run, architecture, tokenizer, mode, k):
    question: Any = "w150 w160" if architecture == "llama" else ["w150 w160", "w170", "w180 w190 w200 w210"]
    model = kvspeed.patch_model(tiny_model(architecture, layers=5), k)
    adapter = PacketAdapter.for_model(model, 2, 1)
    packets = [build_packet(model, tokenizer, random_text(n, n), adapter) for n in (30, 5, 5)]
    packets.append(packets[0])
    options = {"mode": mode, "max_new_tokens": 12, "eos_token_id": -1}
    wanted = kvspeed.generate(model, tokenizer, question, packets, **options)
    found, stats = kvspeed.generate(model, tokenizer, question, packets, cuda_graph=True, return_stats=True, **options)
    assert found == wanted
    assert stats.new_tokens == [12] * (1 if isinstance(question, str) else 3)
    assert 0 < stats.assemble_s < stats.ttft_s < stats.total_s
    assert stats.kv_bytes > 0 and stats.allocated_bytes > 0


def test_unpatched_models_are_patched_for_the_call(tokenizer):
    model = tiny_model("llama", layers=3)
    packets = [build_packet(model, tokenizer, random_text(6, 1))]
    wanted = kvspeed.generate(model, tokenizer, "w150", packets, max_new_tokens=5)
    assert kvspeed.generate(model, tokenizer, "w150", packets, max_new_tokens=5, cuda_graph=True) == wanted
    assert "_kvspeed" not in model.__dict__


def test_inference_mode_and_what_was_made_in_it(run):
    model, ids = speedy("llama", 4), ids_of(7)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=600)
    cache = kvspeed.KVCache(model.config, spec=model.__dict__["_kvspeed"].spec)
    with torch.inference_mode():
        assert torch.equal(run(model, ids, max_new_tokens=4, cache=cache, pad_token_id=600), wanted[:, :11])
    cache = kvspeed.KVCache(model.config, spec=model.__dict__["_kvspeed"].spec)
    with torch.inference_mode():
        model.generate(ids[:, :3], max_new_tokens=1, do_sample=False, **{CACHE: cache})
    run(model, torch.cat([ids[:, :3], ids], 1), max_new_tokens=4, cache=cache)


def test_each_token_is_told_when_it_is_queued(run):
    told = []
    run(speedy("llama", 4), ids_of(5), max_new_tokens=6, on_token=told.append)
    assert told == [0, 1, 2, 3, 4, 5]


def test_a_failure_leaves_the_cache_as_it_was(run):
    model, ids = speedy("llama", 4), ids_of(5)
    cache = kvspeed.KVCache(model.config, spec=model.__dict__["_kvspeed"].spec)
    first = model.generate(ids, max_new_tokens=3, do_sample=False, **{CACHE: cache})
    before = copy.deepcopy(cache)
    longer = torch.cat([first, ids_of(3)], 1)

    def fail(token: int) -> None:
        if token == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, longer, max_new_tokens=6, cache=cache, on_token=fail)
    same_cache(cache, before)
    assert torch.equal(
        run(model, longer, max_new_tokens=6, cache=cache),
        model.generate(longer, max_new_tokens=6, do_sample=False, **{CACHE: before}),
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"do_sample": True}, "do_sample=False"),
        ({"num_beams": 3}, "num_beams is 3 .*num_beams=1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"streamer": object()}, "streamer was given"),
        ({"logits_processor": [None]}, "logits_processor"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"output_attentions": True}, "output_attentions"),
    ],
    ids=str,
)
def test_more_than_greedy_search_is_refused(tokenizer, options, words):
    model = speedy("llama", 4)
    with pytest.raises(ValueError, match=words):
        graph.generate(model, ids_of(4), max_new_tokens=3, **options)
    with pytest.raises(ValueError, match=words):
        kvspeed.generate(model, tokenizer, "w150", [], cuda_graph=True, **options)


def test_a_models_own_settings_are_looked_at(tokenizer):
    model = speedy("llama", 4)
    model.generation_config.repetition_penalty = 1.1
    with pytest.raises(ValueError, match="the model's generation_config"):
        graph.generate(model, ids_of(4), max_new_tokens=3)
    graph.generate(model, ids_of(4), max_new_tokens=3, repetition_penalty=1.0)
    model.generation_config.repetition_penalty = None
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.6
    same_generation(graph.generate, model, ids_of(4), new=3)  # as kvspeed.generate: greedy unless asked


def test_models_that_a_fixed_step_cannot_serve_are_refused():
    ids = ids_of(4)
    with pytest.raises(ValueError, match="is not patched"):
        graph.generate(tiny_model("llama"), ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="training mode"):
        graph.generate(speedy("llama", 4).train(), ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="head dimension 12"):
        graph.generate(kvspeed.patch_model(tiny_model("qwen3", head_dim=12)), ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="dynamic"):
        model = tiny_model("llama", rope={"rope_type": "dynamic", "factor": 2.0})
        graph.generate(kvspeed.patch_model(model), ids, max_new_tokens=3)
    holes = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(ValueError, match="padding_side"):
        graph.generate(speedy("llama", None), ids, holes, max_new_tokens=3)
    for wrong in (0, True, 2.0, None):
        with pytest.raises(ValueError, match="max_new_tokens"):
            graph.generate(speedy("llama", None), ids, max_new_tokens=wrong)
    with pytest.raises(RuntimeError, match="input_ids are on cpu"):
        graph.generate(speedy("llama", None), ids, max_new_tokens=3, capture=True)
    with pytest.raises(TypeError, match="cuda_graph"):
        kvspeed.generate(speedy("llama", None), None, "w150", [], cuda_graph=1)


@pytest.mark.parametrize("must", [False, True])
def test_a_capture_that_fails_warns_once_or_raises(monkeypatch, must):
    model, ids = speedy("llama", 4), ids_of(5)
    wanted = graph.generate(model, ids, max_new_tokens=9)
    fake_cuda(monkeypatch)

    @contextlib.contextmanager
    def broken(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    # What fails in a capture has not run; here it has, so that only a step that changes nothing is left.
    monkeypatch.setattr(graph.DecodeStep, "_run", lambda self: None)
    begin = graph.DecodeStep.__init__

    def begin_and_capture(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        assert not self.capture(must=must)
        monkeypatch.undo()

    monkeypatch.setattr(graph.DecodeStep, "__init__", begin_and_capture)
    if must:
        with pytest.raises(RuntimeError, match="could not be captured as a CUDA graph: operation not permitted"):
            graph.generate(model, ids, max_new_tokens=9)
        return
    with pytest.warns(RuntimeWarning, match="not permitted") as told:
        assert torch.equal(graph.generate(model, ids, max_new_tokens=9), wanted)
    assert len(told) == 1
