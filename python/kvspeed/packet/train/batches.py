# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which samples are trained on, which are held out, and in which order they come."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

from kvspeed.packet.train.contexts import Context
from kvspeed.samples import Sample, check_samples

__all__ = ["batches", "digest", "split"]


def batches(contexts: list[Context], batch_size: int, epochs: int, steps: int | None, seed: int) -> Iterator[list[int]]:
    """Indices of each step's contexts: every epoch in another order, at least `batch_size` samples a step."""
    made, epoch = 0, 0
    while epoch < epochs if steps is None else made < steps:
        order = list(range(len(contexts)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        batch: list[int] = []
        samples = 0
        for place, index in enumerate(order):
            batch.append(index)
            samples += len(contexts[index].queries)
            if samples >= batch_size or place == len(order) - 1:
                yield batch
                made, batch, samples = made + 1, [], 0
                if made == steps:
                    return
        epoch += 1


def split(samples: list[Sample], dev: Any, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(to train on, held out); samples about the same documents stay on one side."""
    if dev is None:
        return samples, []
    if not isinstance(dev, (int, float)):
        held = check_samples(dev)
        check_samples([*samples, *held])
        return samples, held
    if isinstance(dev, bool) or not 0 <= dev < 1:
        raise ValueError(f"dev: got {dev!r}; give samples, or a share of at least 0 and below 1")
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.documents, []).append(sample)
    keys = list(groups)
    random.Random(f"dev/{seed}").shuffle(keys)
    count = round(dev * len(keys)) if dev else 0
    if dev and (count == 0 or count == len(keys)):
        raise ValueError(
            f"dev: a share of {dev} of {len(keys)} contexts leaves one side empty; give more samples, another share, "
            "or 0 to hold none out"
        )
    chosen = set(keys[:count])
    held = [sample for sample in samples if sample.documents in chosen]
    return [sample for sample in samples if sample.documents not in chosen], held


def digest(train: list[Sample], held: list[Sample]) -> str:
    text = json.dumps([[[s.id, s.documents, s.question, s.target] for s in part] for part in (train, held)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
