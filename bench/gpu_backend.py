# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which kernels bench/gpu.py's stages call: the GPU's, the emulator's (--dry-run), or the CPU's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gpu_clock import Run


@contextmanager
def active(run: Run) -> Iterator[None]:
    """Ops called within run on `run.backend`.

    Raises:
        RuntimeError: it is "cuda", and kvspeed or torch cannot use the GPU; the text says why.
    """
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    if run.backend == "simt":
        from backends import emulator, running  # of tests/

        torch.set_num_threads(1)
        with running("simt"):
            before = emulator().module.simt_launches()
            yield
            run.note("emulated_launches", emulator().module.simt_launches() - before)
        return
    if run.backend == "cuda":
        from kvspeed.ops.device import cuda_refusal

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        if (refusal := cuda_refusal(torch.cuda.current_device())) is not None:
            raise RuntimeError(refusal)
    yield
