# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The compiled extension, and the choice of instruction set.

torch is imported before the extension on purpose: both use OpenMP, and the first library loaded decides which copy
of the runtime the process gets. Loaded this way round there is one thread pool, torch's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

try:
    from kvspeed import _C
except ImportError as error:
    raise ImportError(
        f"kvspeed's compiled kernels (kvspeed._C) cannot be loaded ({error}); build and install the package with "
        "`pip install .` in its checkout, for the Python that you are running"
    ) from error

__all__ = [
    "DTYPE_CODES",
    "ISA_CODES",
    "build_info",
    "cpu_isa",
    "cpu_isas",
    "current_isa",
    "isa_variable",
]

# The numbers of kvspeed_dtype in kvspeed.h.
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The numbers of kvspeed_isa in kvspeed.h.
ISA_CODES: dict[str, int] = {"auto": 0, "baseline": 1, "avx2": 2, "avx512": 3, "neon": 4}
_ISA_ENVIRONMENT = "KVSPEED_CPU_ISA"


def build_info() -> dict[str, Any]:
    """What the extension was built with: version, compiler, instruction sets, CUDA and its architectures."""
    return dict(_C.build_info())


def cpu_isas() -> list[str]:
    """The instruction sets that are built and that this processor runs, from the plainest to the best."""
    return [name for name, code in ISA_CODES.items() if code and _C.isa_available(code)]


def _isa_code(name: str, where: str) -> int:
    if not isinstance(name, str):
        raise TypeError(f"{where} must be a string, got {type(name).__name__}; choose from {', '.join(ISA_CODES)}")
    code = ISA_CODES.get(name)
    if code is None:
        raise ValueError(f"{where} is {name!r}, which is not an instruction set; choose from {', '.join(ISA_CODES)}")
    if code and not _C.isa_available(code):
        raise RuntimeError(
            f"{where} is {name!r}, which is not built or not supported by this processor; "
            f"available: {', '.join(['auto', *cpu_isas()])}"
        )
    return code


def _isa_from_environment() -> int:
    name = os.environ.get(_ISA_ENVIRONMENT, "").strip().lower()
    return _isa_code(name, f"the environment variable {_ISA_ENVIRONMENT}") if name else 0


_default_isa = _isa_from_environment()
isa_variable: ContextVar[int] = ContextVar("kvspeed_cpu_isa", default=_default_isa)


def current_isa() -> str:
    """The name of the instruction set that CPU calls use now; "auto" is resolved."""
    return _C.isa_name(isa_variable.get() or _C.isa_best())


@contextmanager
def cpu_isa(name: str) -> Iterator[None]:
    """Runs the CPU kernels of one instruction set inside a `with` block, in this thread.

    The environment variable `KVSPEED_CPU_ISA`, read once at import, sets the same for a whole process.

    Args:
        name: "auto", "baseline", "avx2", "avx512" or "neon".

    Raises:
        ValueError: the name is unknown.
        RuntimeError: it is not built, or the processor does not support it.
    """
    token = isa_variable.set(_isa_code(name, "cpu_isa's name"))
    try:
        yield
    finally:
        isa_variable.reset(token)
