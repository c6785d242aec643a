# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One set of op tests, several kinds of kernels.

A test that uses the fixture `backend` (see conftest.py) and takes `ops` from here runs once for each of

* the CPU's instruction sets, or the best of them where the test does not carry the marker `every_isa`;
* "simt": the CUDA kernels, run by the emulator in tests/simt, which checks every access and every wait. Tensors are the
  CPU's; the op takes them for tensors of a GPU.
* "cuda": the same kernels on a GPU, where there is one. Tests make their tensors on the CPU; `ops` copies whole
  storages to the GPU and back, so strides, alignment and what lies around a tensor are kept.

What a GPU's kernels do not take (float32 attention, some head dimensions) is left out of the tests that are collected;
test_ops_devices.py asserts that all of it is refused.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import kvspeed.ops
import torch
from kvspeed.ops import attention, device
from kvspeed.ops.attention_checks import GPU_DTYPES, GPU_HEAD_DIMS
from kvspeed.segment import Segment, SegmentList
from torch import Tensor

GPUS = ("simt", "cuda")
CUDA = "cuda"  # torch's name of the device of the backend "cuda"
_T = TypeVar("_T")


def cuda_usable() -> bool:
    """Whether there is a GPU that this build has kernels for."""
    return torch.cuda.is_available() and device.cuda_refusal(0) is None


def names(*, every_isa: bool, without: Sequence[str] = ()) -> list[str]:
    """The backends of a test."""
    found = [*(kvspeed.ops.cpu_isas() if every_isa else ["cpu"]), "simt", *(["cuda"] if cuda_usable() else [])]
    return [name for name in found if name not in without]


def leaves_out(name: str, parameters: dict[str, Any]) -> bool:
    """Whether attention on that backend refuses a test's dtype or head dimension."""
    dtype, head_dim = parameters.get("dtype", GPU_DTYPES[0]), parameters.get("head_dim", GPU_HEAD_DIMS[0])
    return name in GPUS and (dtype not in GPU_DTYPES or head_dim not in GPU_HEAD_DIMS)


# ----------------------------------------------------------------------------------------------------------------------
# The backend of the running test
# ----------------------------------------------------------------------------------------------------------------------

_current = "cpu"


def is_gpu() -> bool:
    return _current in GPUS


def on_cuda() -> bool:
    return _current == "cuda"


def small(size: _T, emulated: _T) -> _T:
    """A size of a test, and the one that the emulator can afford."""
    return emulated if _current == "simt" else size


def attention_dtypes() -> list[torch.dtype]:
    return list(GPU_DTYPES) if is_gpu() else [torch.float32, torch.bfloat16, torch.float16]


def attention_dtype() -> torch.dtype:
    """What a test that does not care computes in."""
    return random.choice(GPU_DTYPES) if is_gpu() else torch.float32


def attention_head_dims() -> list[int]:
    return list(GPU_HEAD_DIMS) if is_gpu() else list(range(8, 257, 8))


class EmulatedGpu(device.Gpu):
    """A GPU whose memory is the host's; workspaces are exact in size and full of NaN."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, 0, torch.device("cpu"))
        attention.introduce(module)

    def stream(self) -> int:
        return 0

    def keeps_workspace(self) -> bool:
        return False

    def capturing(self) -> bool:
        return False

    def synchronise(self) -> None:
        pass

    def _workspace(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)


_emulator: EmulatedGpu | Exception | None = None


def emulator() -> EmulatedGpu:
    """The emulated GPU; built when first asked for, and a failure to build it fails the test."""
    global _emulator
    if _emulator is None:
        path = Path(__file__).with_name("simt") / "build.py"
        spec = importlib.util.spec_from_file_location("simt_build", path)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            _emulator = EmulatedGpu(build.load())
        except Exception as error:  # once is enough
            _emulator = error
    if isinstance(_emulator, Exception):
        raise RuntimeError("the emulator could not be built") from _emulator
    return _emulator


def reschedule(seed: int | None = None) -> None:
    """Another order of blocks, warps and lanes for the kernels that the emulator runs from now on."""
    seed = random.randrange(2**31) if seed is None else seed
    emulator().module.simt_schedule(seed % 3, seed)


@contextmanager
def running(name: str) -> Iterator[None]:
    """Runs the ops of this module on a backend: an instruction set of the CPU, "cpu" for the best, "simt" or "cuda"."""
    global _current
    before, _current = _current, name if name in GPUS else "cpu"
    token = None
    try:
        if name == "simt":
            gpu = emulator()
            reschedule()
            token = device.emulated.set(gpu)
            yield
        else:
            with kvspeed.ops.cpu_isa("auto" if name in ("cpu", "cuda") else name):
                yield
    finally:
        _current = before
        if token is not None:
            device.emulated.reset(token)


# ----------------------------------------------------------------------------------------------------------------------
# The ops
# ----------------------------------------------------------------------------------------------------------------------


class _Mover:
    """Copies tensors to the GPU within their whole storages, so that views of one storage stay so."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Segment):
            moved = {name: self(getattr(value, name)) for name in ("key", "value", "first", "page_table")}
            tokens = value._length
            return Segment(
                moved["key"],
                moved["value"],
                value.offset,
                start=value.start,
                first=moved["first"],
                page_table=moved["page_table"],
                tokens=tokens,
            )
        if isinstance(value, (list, tuple, SegmentList)):
            moved = [self(one) for one in value]
            return SegmentList(moved) if isinstance(value, SegmentList) else moved
        if not isinstance(value, Tensor) or not value.is_cpu or value.layout != torch.strided:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = (whole, whole.to(CUDA, copy=True))
        whole = self._storages[storage.data_ptr()][1].view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    def back(self) -> None:
        """Brings every storage back, with what was written to it and beside it."""
        for host, there in self._storages.values():
            host.copy_(there)


def _home(result: Any) -> Any:
    """Results on the CPU, with the strides that they had."""
    if isinstance(result, tuple):
        return tuple(_home(one) for one in result)
    if isinstance(result, Tensor) and result.is_cuda:
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).copy_(result)
    return result


class _Ops:
    """`kvspeed.ops` on the backend of the running test."""

    def __getattr__(self, name: str) -> Any:
        return getattr(kvspeed.ops, name)

    def rope_concat(self, *arguments: Any, **options: Any) -> None:
        self._call(kvspeed.ops.rope_concat, arguments, options, writes=True)

    def segment_attention(self, *arguments: Any, **options: Any) -> Any:
        return self._call(kvspeed.ops.segment_attention, arguments, options)

    def merge_states(self, *arguments: Any) -> Any:
        return self._call(kvspeed.ops.merge_states, arguments, {})

    def _call(self, op: Callable[..., Any], arguments: Any, options: dict[str, Any], writes: bool = False) -> Any:
        if _current != "cuda":
            return op(*arguments, **options)
        move = _Mover()
        if "inv_freq" in options:  # on the GPU, or on the CPU, where it is best
            options = {**options, "inv_freq": random.choice((move, lambda x: x))(options["inv_freq"])}
        kept = options.pop("inv_freq", None)
        result = op(*move(arguments), **{name: move(value) for name, value in options.items()}, **_given(kept, op))
        if writes:
            move.back()
        return _home(result)


def _given(inv_freq: Any, op: Any) -> dict[str, Any]:
    return {"inv_freq": inv_freq} if op is kvspeed.ops.segment_attention else {}


ops = _Ops()
