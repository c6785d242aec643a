# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A depth k to try first, from a model's diagnostics.

It is a rule of thumb and no more: SPEED's authors (arXiv:2605.06105) found that k must pass the layer at which the
trajectory of hidden states turns most, with slack; for their 32 layers with peaks at 17 to 19 they took k = 24, and k =
16 cost quality. What a depth costs is known only from scores of a model that was tuned for it.

How it is read here, since the paper gives no procedure: the curve is smoothed over three layers; the last tenth of the
layers is left out, which turn to the vocabulary; a peak may be flat, so that its end counts, the deepest layer within
2 % of the maximum; the slack is 15 % of the layers, rounded up (5 of 32); k is at least half of the layers; and of
several kinds of task the one that needs the deepest k decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CategoryDepth", "Recommendation", "recommend_depth"]

Curve = Sequence[float | None]


@dataclass(frozen=True)
class CategoryDepth:
    """What one kind of task says. Layers are counted from 0.

    Attributes:
        k: the depth this kind alone would get.
        curvature_peak: the layer where the (perhaps flat) peak of the curvature ends; None: there is no curvature.
        entropy_minimum: the layer that picks among the prompt's content most sharply; None: there is no content.
        mass_peak: the layer that looks at the prompt's content most.
        content_below: mean attention weight on the content in the layers below k.
        content_above: in the layers from k on: what SPEED takes away; 0 where k is all layers.
    """

    k: int
    curvature_peak: int | None
    entropy_minimum: int | None
    mass_peak: int
    content_below: float
    content_above: float


@dataclass(frozen=True)
class Recommendation:
    """A depth to try first.

    Attributes:
        k: that depth, 1 .. L; L: do not cut.
        layers: L.
        reason: why, in words, with what speaks against it.
        by_category: each kind of task by itself.
    """

    k: int
    layers: int
    reason: str
    by_category: dict[str, CategoryDepth]


def recommend_depth(
    curves: Mapping[str, Mapping[str, Curve]],
    layers: int,
    *,
    slack: float = 0.15,
    flat: float = 0.02,
    least: float = 0.5,
) -> Recommendation:
    """The depth that the rule of thumb gives; see the module's docstring.

    Args:
        curves: for each kind of task its `curvature`, `content_mass` and `content_entropy`, one number a layer.
        layers: L.
        slack: how far beyond the peak, as a share of the layers, 0 .. 1.
        flat: how far below its maximum the curve still counts as peak, as a share of it, 0 .. 1.
        least: the smallest k, as a share of the layers, 0 .. 1.

    Raises:
        ValueError: no curves, curves that are not `layers` long, or a share out of range.
    """
    for name, value in (("slack", slack), ("flat", flat), ("least", least)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be between 0 and 1")
    if not curves:
        raise ValueError("curves: got none; measure at least one prompt")
    for category, given in curves.items():
        for name in ("curvature", "content_mass", "content_entropy"):
            if len(given[name]) != layers:
                raise ValueError(f"{name} of {category!r} has {len(given[name])} numbers for {layers} layers")
    extra, floor = math.ceil(slack * layers - 1e-9), max(1, math.ceil(least * layers - 1e-9))
    found = {name: _category(given, layers, extra, floor, flat) for name, given in curves.items()}
    k = max(one.k for one in found.values())
    return Recommendation(k, layers, _reason(found, curves, k, layers, extra), found)


def _category(curves: Mapping[str, Curve], layers: int, extra: int, floor: int, flat: float) -> CategoryDepth:
    peak = _peak_end(curves["curvature"], flat)
    k = layers if peak is None else min(layers, max(floor, peak + 1 + extra))
    content = [value or 0.0 for value in curves["content_mass"]]
    entropy = {layer: value for layer, value in enumerate(curves["content_entropy"]) if value is not None}
    return CategoryDepth(
        k=k,
        curvature_peak=peak,
        entropy_minimum=min(entropy, key=lambda layer: entropy[layer]) if entropy else None,
        mass_peak=max(range(layers), key=lambda layer: content[layer]),
        content_below=_mean(content[:k]),
        content_above=_mean(content[k:]),
    )


def _peak_end(curvature: Curve, flat: float) -> int | None:
    """The deepest layer whose smoothed curvature is within `flat` of the maximum, the last layers aside."""
    last = len(curvature) - max(1, round(0.1 * len(curvature)))
    smooth = {}
    for layer in range(1, last):
        near = [value for value in curvature[max(1, layer - 1) : min(layer + 2, last)] if value is not None]
        if near:
            smooth[layer] = _mean(near)
    if not smooth:
        return None
    return max(layer for layer, value in smooth.items() if value >= (1 - flat) * max(smooth.values()))


def _reason(
    found: dict[str, CategoryDepth], curves: Mapping[str, Mapping[str, Curve]], k: int, layers: int, extra: int
) -> str:
    deepest = [name for name, one in found.items() if one.k == k]
    one = found[deepest[0]]
    if one.curvature_peak is None:
        return f"{layers} layers are too few to see where the hidden states turn, so that nothing speaks for a cut"
    peaks = ", ".join(f"{name} {entry.curvature_peak}" for name, entry in found.items())
    parts = [
        f"a rule of thumb, not a promise: the hidden states' way turns most up to layer {one.curvature_peak} of "
        f"{layers}, counted from 0 ({peaks}), and k should pass that by {extra} layers"
    ]
    if k == layers:
        parts.append("that leaves no layer to cut")
        return "; ".join(parts)
    if k > one.curvature_peak + 1 + extra:
        parts.append(f"k = {k} is the least that is recommended")
    content = [[value or 0.0 for value in given["content_mass"]] for given in curves.values()]
    below, above = _mean([_mean(curve[:k]) for curve in content]), _mean([_mean(curve[k:]) for curve in content])
    parts.append(
        f"from layer {k} on the prompt's content, which the cut takes away, gets {above:.0%} of the attention on "
        f"average, against {below:.0%} below"
    )
    sharp = [name for name, entry in found.items() if entry.entropy_minimum is not None and entry.entropy_minimum >= k]
    if sharp:
        parts.append(f"against it: layers above pick their tokens most sharply in {', '.join(sharp)}")
    late = [name for name, entry in found.items() if entry.mass_peak >= k]
    if late:
        parts.append(f"against it: layers above look at the content most in {', '.join(late)}")
    parts.append("a model must be tuned for its k, and scores on held-out tasks decide")
    return "; ".join(parts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
