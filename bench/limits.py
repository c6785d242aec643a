# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the machine itself allows: copying and reading memory, with the threads that torch uses.

`memcpy` is libc's, one share a thread (above some MiB it writes around the caches, as it should); reading is a sum over
int64, the fastest plain read that torch and numpy offer. Both work on the very tensors that the benchmark uses, so they
meet the same pages.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _shares(nbytes: int, threads: int) -> list[tuple[int, int]]:
    step = -(-nbytes // threads) + 4095 & ~4095
    return [(begin, min(step, nbytes - begin)) for begin in range(0, nbytes, step)]


def memcpy(target: Tensor, source: Tensor) -> None:
    """Copies a contiguous tensor with libc's memcpy, in torch.get_num_threads() threads."""
    threads = torch.get_num_threads()
    shares = _shares(source.numel() * source.element_size(), threads)
    to, from_ = target.data_ptr(), source.data_ptr()
    jobs = [_pool(threads).submit(ctypes.memmove, to + at, from_ + at, n) for at, n in shares[1:]]
    ctypes.memmove(to, from_, shares[0][1])  # ctypes lets go of the GIL
    for job in jobs:
        job.result()


def _read(flat: np.ndarray) -> int:
    return int(np.bitwise_or.reduce(flat))


def read(*tensors: Tensor) -> None:
    """Reads contiguous tensors once, in torch.get_num_threads() threads."""
    threads = torch.get_num_threads()
    jobs = []
    for tensor in tensors:
        flat = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).reshape(-1).numpy()
        flat = flat.view(np.int64) if flat.nbytes % 8 == 0 else flat
        for at, n in _shares(flat.nbytes, threads):
            jobs.append(_pool(threads).submit(_read, flat[at // flat.itemsize : (at + n) // flat.itemsize]))
    for job in jobs:
        job.result()
