# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Training under SPEED: loss and gradients against the masked full-depth forward, and the work that is saved."""

from __future__ import annotations

import copy
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.labelled import labelled_rows
from speed_tools import (
    CACHE,
    LAYERS,
    K,
    Token,
    answer,
    close,
    fresh,
    ids_of,
    masked,
    poison,  # noqa: F401
    rows_above,
    rule,
    speedy,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"boundary": "keep"},
    "no-anchor": {"anchor_tokens": 0},
    "three-anchors": {"anchor_tokens": 3},
    "self": {"upper_attention": "self"},
    "reset": {"turns": "reset"},
    "reset-keep-two": {"turns": "reset", "boundary": "keep", "anchor_tokens": 2},
}
options = pytest.mark.parametrize("option", OPTIONS)

# Rows, one character a token: p prompt, a answer, . padding.
BATCHES: dict[str, list[str]] = {
    "one-row": ["pppppaaaa"],
    "two-spans": ["ppppaapppaaa"],
    "many-spans": ["ppaapaapppap"],
    "answer-at-the-start": ["aaappaa"],
    "only-answer": ["aaaaa"],
    "last-token-only": ["pppppppa"],
    "left-padding": ["pppppppaaaa", "....ppaaapa", ".........pa"],
    "right-padding": ["pppppppaaaa", "ppaaapa....", "pa........."],
    "starts-with-answer-padded": ["ppppaa", "..aapa", "aapa..", ".....a"],
    "a-row-without-answer": ["pppaa", "ppppp", "..ppp"],
    "window-crossed": ["p" * 30 + "a" * 6 + "p" * 4 + "a" * 30, "." * 20 + "p" * 2 + "a" * 48],
}


def read(text: str) -> tuple[list[Token], int, int]:
    """A row's tokens without padding, and how much padding stands left and right."""
    left, right = len(text) - len(text.lstrip(".")), len(text) - len(text.rstrip("."))
    body = text.strip(".")
    tokens, span = [], 0
    for i, kind in enumerate(body):
        boundary = kind == "p" and body[i + 1 : i + 2] == "a"
        span += boundary  # a span is its last prompt token and its answer
        tokens.append(Token(kind == "a", boundary, span))
    return tokens, left, right


def batch_of(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, labels, attention mask, each `[B, T]`."""
    ids = ids_of(len(texts[0]), batch=len(texts))
    labels = torch.where(torch.tensor([[c == "a" for c in text] for text in texts]), ids, -100)
    mask = torch.tensor([[int(c != ".") for c in text] for text in texts])
    return ids, labels, mask


def mask_of(texts: list[str], **opts: Any) -> torch.Tensor:
    """The oracle's mask of a padded batch, bool `[B, T, T]`."""
    total = len(texts[0])
    seen = torch.eye(total, dtype=torch.bool).repeat(len(texts), 1, 1)
    for row, text in zip(seen, texts, strict=True):
        tokens, left, right = read(text)
        row[left : total - right, left : total - right] = rule(tokens, **opts)
    return seen


def oracle_loss(
    model: Any, texts: list[str], ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, **opts: Any
) -> Any:
    """Loss of an unpatched model. A row's first token has nothing before it that could predict it: no label there."""
    labels = labels.clone()
    for row, text in zip(labels, texts, strict=True):
        row[: read(text)[1] + 1] = -100
    with masked(model, mask_of(texts, **opts)):
        return model(ids, attention_mask=mask, labels=labels, use_cache=False).loss


def alike(one: Any, two: Any, tolerance: float = 1e-4) -> None:
    """The same gradients in both models."""
    pairs = list(zip(one.named_parameters(), two.named_parameters(), strict=True))
    scale = max(weight.grad.abs().max().item() for _, (_, weight) in pairs if weight.grad is not None)
    assert scale > 1e-3
    for (name, found), (_, wanted) in pairs:
        assert (found.grad is None) == (wanted.grad is None), name
        if found.grad is not None:
            error = (found.grad - wanted.grad).abs().max().item()
            assert error <= tolerance * scale, f"{name}: gradients differ by {error:.3g} (largest {scale:.3g})"


def check(architecture: str, texts: list[str], opts: dict[str, Any], *, backward: bool = True, **kwargs: Any) -> Any:
    ids, labels, mask = batch_of(texts)
    model, reference = speedy(architecture, **opts), fresh(architecture)
    padded = any("." in text for text in texts)
    loss = model(ids, labels=labels, **({"attention_mask": mask} if padded else {}), **kwargs).loss
    wanted = oracle_loss(reference, texts, ids, labels, mask, **opts)
    assert abs(loss.item() - wanted.item()) < 1e-4, f"loss {loss.item():.6f} is not {wanted.item():.6f}"
    if backward:
        loss.backward()
        wanted.backward()
        alike(model, reference)
    return model


@pytest.mark.parametrize("batch", ["two-spans", "left-padding"])
def test_every_architecture(architecture: str, batch: str) -> None:
    check(architecture, BATCHES[batch], {})


@options
@pytest.mark.parametrize("batch", BATCHES)
def test_every_batch_and_option(batch: str, option: str) -> None:
    check("gemma3_text" if batch == "window-crossed" else "llama", BATCHES[batch], OPTIONS[option])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_eager_and_sdpa(implementation: str) -> None:
    chosen = {"attn_implementation": implementation}
    ids, labels, mask = batch_of(BATCHES["left-padding"])
    model, reference = speedy("qwen3", model=chosen), fresh("qwen3", **chosen)
    loss = model(ids, attention_mask=mask, labels=labels).loss
    wanted = oracle_loss(reference, BATCHES["left-padding"], ids, labels, mask)
    assert abs(loss.item() - wanted.item()) < 1e-4
    loss.backward(), wanted.backward()
    alike(model, reference)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_gradient_checkpointing(architecture: str, reentrant: bool) -> None:
    texts = BATCHES["left-padding"]
    ids, labels, mask = batch_of(texts)
    model, reference = speedy(architecture, boundary="keep").train(), fresh(architecture)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss = model(ids, attention_mask=mask, labels=labels).loss
    with rows_above(model) as counts:
        loss.backward()
    assert {n for _, n in counts} == {3 * 7}, "the recomputation ran other rows"
    oracle_loss(reference, texts, ids, labels, mask, boundary="keep").backward()
    alike(model, reference)


def test_the_rows_that_run_above_k() -> None:
    """An anchor, the answers, and the tokens that predict one; nothing else, in every layer >= k."""
    for text, deep in (("ppppppppaaa", 5), ("p" * 60 + "a", 3), ("ppppaapppaaa", 8), ("aaap", 4)):
        ids, labels, _ = batch_of([text])
        model = speedy("llama")
        with rows_above(model) as counts:
            out = model(ids, labels=labels)
        expected = deep - (1 if text == "aaap" else 0)  # there the anchor is an answer itself
        assert counts == [(layer, expected) for layer in range(K, LAYERS)]
        assert out.logits.shape == (1, expected, 512)
    texts = BATCHES["left-padding"]
    ids, labels, mask = batch_of(texts)
    model = speedy("llama")
    with rows_above(model) as counts:
        model(ids, attention_mask=mask, labels=labels)
    assert counts == [(layer, 3 * 7) for layer in range(K, LAYERS)]  # seven in the longest row


def test_rows_do_not_disturb_each_other() -> None:
    """A row's answer tokens get the same logits alone, left-padded and right-padded."""
    model = speedy("llama", anchor_tokens=2, boundary="keep")
    ids, labels, _ = batch_of(["pppaaapaa"])
    alone = model(ids, labels=labels).logits[0]
    for left in (0, 3):
        texts = ["." * left + "pppaaapaa" + "." * (3 - left), "ppaaaaaaaaaa"]
        more, other, mask = batch_of(texts)
        more[0, left : left + 9] = ids[0]
        found = model(more, attention_mask=mask, labels=torch.where(other != -100, more, -100)).logits[0]
        close(found[: alone.shape[0]], alone)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_lora(architecture: str, when: str) -> None:
    """PEFT wraps the model before or after the patch; generate and training work in both."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = fresh(architecture)
    if when == "before":
        kvspeed.patch_model(model, K)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    reference = copy.deepcopy(model)
    kvspeed.unpatch_model(reference)
    if when == "after":
        kvspeed.patch_model(model, K)
    texts = BATCHES["left-padding"]
    ids, labels, mask = batch_of(texts)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    wanted = oracle_loss(reference, texts, ids, labels, mask)
    assert abs(loss.item() - wanted.item()) < 1e-4
    loss.backward(), wanted.backward()
    alike(model, reference)
    found = answer(model, input_ids=ids_of(12), n=4)
    tokens = [Token(False)] * 12 + [Token(True)] * 4
    with torch.no_grad(), masked(reference, rule(tokens)):
        close(found.logits[0], reference(input_ids=found.sequences, use_cache=False).logits[0, 11:-1])


def test_num_items_in_batch_and_evaluation() -> None:
    """What a Trainer passes; and a loss without gradients."""
    texts = BATCHES["two-spans"]
    ids, labels, _ = batch_of(texts)
    model = speedy("llama")
    mean = model(ids, labels=labels).loss
    total = model(ids, labels=labels, num_items_in_batch=torch.tensor(2)).loss
    assert abs(total.item() - mean.item() * 5 / 2) < 1e-4
    with torch.no_grad():
        out = model(ids, labels=labels, use_cache=True)
    assert abs(out.loss.item() - mean.item()) < 5e-5 and getattr(out, CACHE, None) is None


def test_embeddings_and_positional_arguments() -> None:
    ids, labels, mask = batch_of(BATCHES["left-padding"])
    model = speedy("llama")
    wanted = model(ids, attention_mask=mask, labels=labels).loss
    embeddings = model.get_input_embeddings()(ids)
    assert abs(model(inputs_embeds=embeddings, attention_mask=mask, labels=labels).loss - wanted) < 5e-5
    assert abs(model(ids, mask, labels=labels).loss - wanted) < 5e-5
    assert abs(model(ids, attention_mask=mask.bool(), labels=labels).loss - wanted) < 5e-5


def test_at_full_depth_training_is_the_unpatched_models() -> None:
    ids, labels, mask = batch_of(BATCHES["right-padding"])
    model, reference = speedy("llama", None), fresh("llama")
    loss, wanted = (m(ids, attention_mask=mask, labels=labels).loss for m in (model, reference))
    assert abs(loss.item() - wanted.item()) < 5e-5
    loss.backward(), wanted.backward()
    alike(model, reference)


def test_a_few_steps_lower_the_loss() -> None:
    """Gradients point the right way, through the gather into the layers < k too."""
    ids, labels, _ = batch_of(["p" * 20 + "a" * 8])
    model = speedy("llama").train()
    optimiser = torch.optim.SGD(model.model.layers[:K].parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=labels).loss
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0], losses


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_labels_without_an_answer() -> None:
    ids, labels, mask = batch_of(["ppppp", "..ppp"])
    with pytest.raises(ValueError, match="labels hold no answer"):
        speedy("llama")(ids, attention_mask=mask, labels=labels)
    labels[1, :2] = ids[1, :2]  # labels on padding are none
    with pytest.raises(ValueError, match="labels hold no answer"):
        speedy("llama")(ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("deep", [{"k": K}, {"deep_layers": [2, 3]}])
@pytest.mark.parametrize("text", ["..ppaa", "ppaa..", "..aapa"])
def test_labels_on_padding_do_not_count(text: str, deep: dict[str, Any]) -> None:
    """A short row beside a longer one, its padding labelled by a careless collator; padding predicts nothing either."""
    ids, labels, mask = batch_of([text, "ppaaaa"])
    model = kvspeed.patch_model(fresh("llama"), **deep)
    alone = []
    for row, real in enumerate(mask.bool()):
        said = labels[row : row + 1, real]
        loss = model(ids[row : row + 1, real], labels=said).loss
        alone.append((loss, int((said[:, 1:] != -100).sum())))
    mean = sum(loss * count for loss, count in alone) / sum(count for _, count in alone)
    assert abs(model(ids, attention_mask=mask, labels=labels).loss.item() - mean.item()) < 2e-5
    wanted = model(ids, attention_mask=mask, labels=labels).loss
    careless = torch.where(mask == 0, ids, labels)
    assert abs(model(ids, attention_mask=mask, labels=careless).loss.item() - wanted.item()) < 2e-5


@pytest.mark.parametrize("with_mask", [False, True])
def test_packed_sequences(with_mask: bool) -> None:
    ids, labels, mask = batch_of(["pppaappaaa"])
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    given = {"attention_mask": mask} if with_mask else {}
    with pytest.raises(ValueError, match=r"position_ids restart.*packed"):
        speedy("llama")(ids, labels=labels, position_ids=packed, **given)


def test_position_ids_of_padded_rows_are_no_packing() -> None:
    """transformers gives padding position 0 or 1, which then seems to restart."""
    texts = BATCHES["left-padding"]
    ids, labels, mask = batch_of(texts)
    model = speedy("llama")
    wanted = model(ids, attention_mask=mask, labels=labels).loss
    for filler in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        found = model(ids, attention_mask=mask, labels=labels, position_ids=positions).loss
        assert abs(found.item() - wanted.item()) < 1e-4


def test_shapes_masks_and_caches_that_do_not_fit() -> None:
    model = speedy("llama")
    ids, labels, mask = batch_of(["pppaa", "pppaa"])
    with pytest.raises(ValueError, match="labels"):
        model(ids, labels=labels[:, :4])
    with pytest.raises(ValueError, match="labels"):
        model(ids, labels=labels[:1])
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, labels=labels, attention_mask=mask[:, :4])
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        model(ids, labels=labels, attention_mask=torch.ones(2, 1, 5, 5, dtype=torch.bool))
    cache = answer(model, ids_of(5), n=2).cache
    with pytest.raises(ValueError, match="labels were given together with a filled cache"):
        model(ids, labels=labels, **{CACHE: cache})


def test_a_hole_in_the_mask_predicts_nothing() -> None:
    """The label after it has no token before it, and none of the other columns learns it instead."""
    ids, _, mask = batch_of(["pppppppaaaaa"])
    mask[0, 6] = 0
    labels = ids.clone()
    labels[:, :7] = -100
    _, learned = labelled_rows(kvspeed.SpeedSpec(K), labels, mask)
    assert learned[learned != -100].tolist() == ids[0, 8:].tolist()
    alone = torch.full_like(labels, -100)
    alone[:, 7] = ids[:, 7]
    with pytest.raises(ValueError, match="labels hold no answer"):
        speedy("llama")(ids, attention_mask=mask, labels=alone)
