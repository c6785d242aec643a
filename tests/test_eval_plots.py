# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Plots are drawn from what a report holds and from nothing else; where the question looks is a distribution."""

from __future__ import annotations

import sys

import pytest
import torch
from kvspeed import PacketAdapter, Sample, patch_model
from kvspeed.eval import drawing, plots
from kvspeed.eval.sinks import attention_profile
from tiny_models import tiny_model

pytest.importorskip("matplotlib")


def row(task: str, method: str, f1: float, **more) -> dict:
    interval = (max(f1 - 0.1, 0.0), min(f1 + 0.05, 1.0))
    return {"task": task, "method": method, "f1": f1, "f1_interval": interval, "flops": 1e9, "ttft_s": 0.1, **more}


ROWS = [
    row("niah", "full", 1.0, flops=4e9, ttft_s=0.5),
    row("niah", "packet", 0.9),
    row("bio", "full", 0.9, flops=3e9),
    row("bio", "packet", 0.8, ttft_s=None),
    row("bio", "packet@bio", 0.85),
    row("niah", "packet@niah", 0.95),
    row("niah", "packet+cur-30", 0.7),
    row("niah", "packet+cur-10", 0.8),
    row("niah", "packet+tova-30-whole", 0.5),
    row("niah", "single+cur-30", 0.6),
]


def is_png(path) -> bool:
    data = path.read_bytes()
    return data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 2000


def test_a_report_gets_the_plots_that_it_has_rows_for(tmp_path):
    written = plots.plot_report({"rows": ROWS}, tmp_path / "all")
    assert [path.name for path in written] == ["f1-flops.png", "f1-ttft.png", "f1-compression.png", "adapters.png"]
    assert all(is_png(path) for path in written) and len(list((tmp_path / "all").iterdir())) == 4
    few = plots.plot_report({"rows": [{**one, "ttft_s": None} for one in ROWS[:2]]}, tmp_path / "few")
    assert [path.name for path in few] == ["f1-flops.png"]


def drawn(monkeypatch) -> list:
    """The figures, kept open."""
    figures = []
    for module in (plots, drawing):
        monkeypatch.setattr(module, "saved", lambda plt, figure, path: figures.append(figure))
    return figures


def test_points_stand_where_the_rows_say(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    plots.plot_against(ROWS, "flops", tmp_path / "x.png")
    niah, bio = figures[0].axes
    assert (niah.get_title(), bio.get_title()) == ("niah", "bio")
    points = {box.get_label(): box.lines[0].get_xydata()[0].tolist() for box in niah.containers}
    assert points == {"full": [4e9, 1.0], "packet": [1e9, 0.9], "packet@niah": [1e9, 0.95]}  # compressed ones aside
    plots.plot_against(ROWS, "ttft_s", tmp_path / "x.png")
    assert [box.get_label() for box in figures[1].axes[1].containers] == ["full", "packet@bio"]


def test_compression_lines_begin_at_nothing_removed(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    plots.plot_compression(ROWS, tmp_path / "x.png")
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].lines}
    assert lines == {
        "packet, cur": [[0, 0.9], [10, 0.8], [30, 0.7]],
        "packet-whole, tova": [[0, 0.9], [30, 0.5]],
        "single, cur": [[0, 1.0], [30, 0.6]],
    }


def test_the_matrix_leaves_out_what_was_not_asked(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    plots.plot_matrix(ROWS, tmp_path / "x.png")
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["0.90", "0.80", "", "0.85", "0.95", ""]


def test_loss(tmp_path, monkeypatch):
    file = tmp_path / "curve.csv"
    file.write_text("step,loss,dev_loss\n1,2.5,\n2,1.5,1.75\n")
    assert is_png(plots.plot_loss({"bio": file}, tmp_path / "loss.png"))
    figures = drawn(monkeypatch)
    plots.plot_loss({"bio": file}, tmp_path / "loss.png")
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].lines}
    assert lines == {"bio": [[1, 2.5], [2, 1.5]], "bio, dev": [[2, 1.75]]}
    file.write_text("time,value\n1,2\n")
    with pytest.raises(ValueError, match="no columns step and loss"):
        plots.plot_loss({"bio": file}, tmp_path / "loss.png")


def test_without_matplotlib_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plots need matplotlib.*kvspeed\[plots\]"):
        plots.plot_report({"rows": ROWS}, tmp_path / "p")
    assert not (tmp_path / "p").exists()


# ---- where the question looks --------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    from cli_tools import save_tokenizer
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


SAMPLE = Sample("a", ("the ash is red", "fox", "the sea is ink"), "which?", ("ash",))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2"])
def test_shares_are_those_of_the_definition(tokenizer, architecture):
    model = tiny_model(architecture, vocab=300, layers=3)
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    before = model.config._attn_implementation
    for options, soft in (({"alone": False}, 0), ({}, 0), ({"adapter": adapter}, 5)):
        profile = attention_profile(model, tokenizer, SAMPLE, **options)
        assert sum(profile.shares) == pytest.approx(1.0, abs=1e-5)
        lengths = [end - begin for begin, end in profile.blocks]
        assert lengths[1:] == [len(text) + 2 + soft for text in SAMPLE.documents]
        assert (profile.on_soft_tokens() > 0) == bool(soft) and profile.on_first_tokens() > 0
    assert model.config._attn_implementation == before


def test_documents_alone_are_the_logits_of_packets(tokenizer):
    """The mask and the positions are those of packets: the same last hidden state, up to rounding."""
    from kvspeed.eval.methods import Context, get_method

    model = tiny_model("llama", vocab=300, layers=3)
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    seen = []
    handle = model.model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    attention_profile(model, tokenizer, SAMPLE, adapter=adapter)
    handle.remove()
    context = Context(model, tokenizer, adapter=adapter)
    method = get_method("packet")
    logits, _ = method.first_token(method.prepare(context, SAMPLE.documents), context.question_ids(SAMPLE.question))
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(seen[0][0, -1]), logits, atol=3e-4, rtol=1e-4)


def test_a_patched_model_is_refused(tokenizer):
    model = patch_model(tiny_model("llama", vocab=300, layers=2))
    with pytest.raises(ValueError, match="call unpatch_model"):
        attention_profile(model, tokenizer, SAMPLE)


def test_a_prompt_longer_than_the_model_is_refused(tokenizer):
    length = len(attention_profile(tiny_model("llama", vocab=300, layers=2), tokenizer, SAMPLE).shares)
    model = tiny_model("llama", vocab=300, layers=2, max_position_embeddings=length + 5)
    attention_profile(model, tokenizer, SAMPLE)
    with pytest.raises(ValueError, match=f"{length + 6} tokens, and the model has {length + 5} positions"):
        attention_profile(model, tokenizer, SAMPLE, adapter=PacketAdapter.for_model(model, header=1, trailer=1))
