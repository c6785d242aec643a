# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Block-Attention (arXiv:2409.15355) with the user's weights: each block sees itself, the last one sees everything.

At inference that is plain concatenation: blocks are computed alone, re-rotated to their positions, and the question
attends to all. What makes it work is the model, fine-tuned for these masks: load such a checkpoint (a standard
architecture, e.g. Tulu 3's) and run this method on it; `full` on the same model is its full-attention mode. On a model
that was not trained so it equals `none`.
"""

from __future__ import annotations

from kvspeed.eval.methods.none import NoRecompute

__all__ = ["BlockAttention"]


class BlockAttention(NoRecompute):
    """The same masks as `none`, named for a model that was trained with them."""

    name = "block-attention"
