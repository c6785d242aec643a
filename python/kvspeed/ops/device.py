# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Where a call runs: on the CPU, or on the GPU that holds its tensors, in torch's current stream of that GPU.

The compiled code allocates nothing, so what it needs on a GPU comes from torch's caching allocator:

Workspace. Kept for each thread, GPU and stream, and grown as needed. Work of one stream runs in order, so one call has
finished with it before the next begins; two streams have two. It is kept for each thread too, because two threads may
enqueue in one stream between the launches of one call. A block that is outgrown goes back to the allocator, which
gives it out again in the order of the stream that it was allocated for: the one that uses it. While a CUDA graph is
captured nothing kept is used: the graph owns the memory that it was captured with (torch allocates it from the graph's
pool), since it may be replayed at any time and in any stream.

Rotation rows. cos and sin of an offset, kept for each GPU, frequencies and offset; all layers of a model share them.
New ones are copied before the call goes on, so that every stream may read them. They are only freed all at once, a
generation later and after a synchronisation, and those that a captured graph may read are never freed. A capture that
meets an offset for the first time leaves the row to the compiled code, which brings it over by value.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kvspeed.ops.native import _C, build_info

__all__ = ["Frequencies", "Gpu", "cuda_refusal", "emulated", "gpu_at", "gpu_of", "host_frequencies"]

_KIND = 1  # KVSPEED_CUDA
_MAX_ROWS = 1 << 14  # rotation rows kept on one GPU: 8 MB at R = 128
_MAX_FREQUENCIES = 256  # tensors of frequencies whose host copies are kept
_MAX_STREAMS = 32  # workspaces that a thread keeps on one GPU
_NO_WORKSPACE = (0, 0, None)


class Frequencies:
    """The host's copy of one layer's frequencies, and their rotation rows on one GPU."""

    __slots__ = ("host", "pointer", "rows", "slabs")

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.pointer = host.data_ptr()
        self.rows: dict[int, int] = {}  # offset: address of cos[R/2], sin[R/2] on the GPU
        self.slabs: list[Tensor] = []


class Gpu:
    """One GPU that this build has kernels for.

    Attributes:
        module: the compiled extension.
        index: the GPU's number.
        where: the index that its tensors report; -1 for an emulated GPU, whose memory is the host's.
        device: torch's device of its tensors.
    """

    def __init__(self, module: Any, index: int, device: torch.device) -> None:
        self.module = module
        self.index = index
        self.device = device
        self.where = -1 if device.index is None else device.index
        self._local = threading.local()
        self._frequencies: dict[bytes, Frequencies] = {}
        self._previous: list[Tensor] = []  # slabs that were forgotten last; a call may still be using one
        self._captured: dict[int, Tensor] = {}  # slabs that a captured graph may read, by address
        self._lock = threading.Lock()

    # What a real GPU answers; the emulated one has its own.

    def stream(self) -> int:
        """The handle of torch's current stream on this GPU."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def keeps_workspace(self) -> bool:
        """Whether a kept workspace may be used: not in a capture, nor where that cannot be asked cheaply."""
        return self.index == torch._C._cuda_getDevice() and not torch._C._cuda_isCurrentStreamCapturing()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured in the current stream of this GPU."""
        if self.index == torch._C._cuda_getDevice():
            return torch._C._cuda_isCurrentStreamCapturing()
        with torch.cuda.device(self.index):
            return torch._C._cuda_isCurrentStreamCapturing()

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.index)

    # The calls.

    def launch(self, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        """Enqueues an op of `module` with its arguments up to the number of threads, over a workspace as it needs."""
        kept, stream = self.keeps_workspace(), self.stream()
        pointer, size, _ = self._held().get(stream, _NO_WORKSPACE) if kept else _NO_WORKSPACE
        needed = function(*arguments, 1, 0, (_KIND, self.index, stream, pointer, size))
        if needed:
            pointer, size, memory = self._grown(needed, stream if kept else None)
            if function(*arguments, 1, 0, (_KIND, self.index, stream, pointer, size)):
                raise RuntimeError("kvspeed asked for a larger workspace twice; this is a fault of the library")
            del memory  # not before the work is enqueued

    def try_attend(self, arguments: tuple[Any, ...]) -> Any:
        """segment_attention's result from its plain arguments, or None, as `module.attend`; None too in a capture."""
        attend = self.module.attend
        kept = self.keeps_workspace()
        if not kept and self.where >= 0:
            return None
        grad, stream, known = torch.is_grad_enabled(), self.stream(), self._frequencies
        pointer, size, _ = self._held().get(stream, _NO_WORKSPACE) if kept else _NO_WORKSPACE
        result = attend(*arguments, grad, 1, 0, (_KIND, self.index, stream, pointer, size), known)
        if type(result) is int:
            pointer, size, _ = workspace = self._grown(result, stream if kept else None)
            result = attend(*arguments, grad, 1, 0, (_KIND, self.index, stream, pointer, size), known)
            del workspace
        return result

    def _grown(self, needed: int, stream: int | None) -> tuple[int, int, Tensor]:
        """A workspace of at least `needed` bytes: address, size, and what must live until the work is enqueued.

        It is kept for `stream`, unless that is None.
        """
        if stream is not None:
            needed = 1 << (needed - 1).bit_length()  # growing tails do not grow it every time
        memory = self._workspace(needed)
        workspace = (memory.data_ptr(), needed, memory)
        if stream is not None:
            held = self._held()
            if len(held) >= _MAX_STREAMS:
                held.clear()
            held[stream] = workspace
        return workspace

    def _held(self) -> dict[int, tuple[int, int, Tensor]]:
        try:
            return self._local.workspaces
        except AttributeError:
            self._local.workspaces = {}
            return self._local.workspaces

    def _workspace(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    # Frequencies and rotation rows.

    def frequencies(self, inv_freq: Tensor) -> Frequencies:
        """What is known of a contiguous float32 `[R/2]`, on the CPU or on this GPU, by its content.

        Raises:
            RuntimeError: it is on the GPU and must be read, while a CUDA graph is captured.
        """
        host = inv_freq if inv_freq.is_cpu else host_frequencies(inv_freq)
        content = ctypes.string_at(host.data_ptr(), 4 * host.shape[0])
        found = self._frequencies.get(content)
        if found is None:
            with self._lock:
                if len(self._frequencies) >= _MAX_FREQUENCIES:
                    self._forget_rows()
                    self._frequencies = {}
                found = self._frequencies.setdefault(content, Frequencies(host.clone()))
        return found

    def rows(self, known: Frequencies, offsets: list[int]) -> dict[int, int]:
        """The addresses of rotation rows by offset, new ones brought over in one copy.

        In a capture nothing is brought over, and the rows that are known are kept for as long as the process lives.
        """
        rows = known.rows
        missing = [offset for offset in offsets if offset and offset not in rows]
        capturing = self.capturing()
        if capturing:
            for slab in known.slabs:
                self._captured[slab.data_ptr()] = slab
        if missing and not capturing and known.host.numel():
            with self._lock:
                rows = self._add_rows(known, sorted(set(missing)))
        return rows

    def _add_rows(self, known: Frequencies, offsets: list[int]) -> dict[int, int]:
        row = 2 * known.host.shape[0]
        if sum(len(one.rows) for one in self._frequencies.values()) + len(offsets) > _MAX_ROWS:
            self._forget_rows()
        slab = torch.empty(len(offsets), row)
        for i, offset in enumerate(offsets):
            self.module.rope_row(offset, known.pointer, row // 2, slab.data_ptr() + 4 * row * i)
        if self.where >= 0:
            slab = slab.to(self.device)  # from pageable memory: waits until it is there
        known.slabs.append(slab)
        known.rows.update({offset: slab.data_ptr() + 4 * row * i for i, offset in enumerate(offsets)})
        return known.rows

    def _forget_rows(self) -> None:
        self.synchronise()
        self._previous = [slab for one in self._frequencies.values() for slab in one.slabs]
        for one in self._frequencies.values():
            one.rows, one.slabs = {}, []


# The GPUs asked for so far, or why one cannot be used.
_gpus: dict[int, Gpu | str] = {}

# Tests set this to an emulated GPU: calls on CPU tensors then go to its kernels, as if their memory were its own.
emulated: ContextVar[Gpu | None] = ContextVar("kvspeed_emulated_gpu", default=None)


def gpu_of(tensor: Tensor) -> Gpu | None:
    """The GPU that a call on such tensors runs on; None for the CPU.

    Raises:
        RuntimeError: the tensor is elsewhere, or on a GPU that this build cannot use.
    """
    if tensor.is_cpu:
        return emulated.get()
    found = _gpu(tensor.get_device()) if tensor.is_cuda else f"there are no kernels for {tensor.device.type}"
    if isinstance(found, str):
        raise RuntimeError(f"a tensor is on {tensor.device}: {found}")
    return found


def gpu_at(index: int) -> Gpu | None:
    """The GPU of that index; None where this build cannot use it."""
    found = _gpu(index)
    return None if isinstance(found, str) else found


def cuda_refusal(index: int) -> str | None:
    """Why this build cannot use a GPU, and what to do about it; None where it can."""
    found = _gpu(index)
    return found if isinstance(found, str) else None


def _gpu(index: int) -> Gpu | str:
    found = _gpus.get(index)
    if found is None:
        found = _look(index)
        _gpus[index] = found
    return found


def _look(index: int) -> Gpu | str:
    info = build_info()
    if not info["cuda"]:
        built = ", ".join(info["isas"]) or "baseline"
        return (
            f"{_C.cuda_device_count()[1]}. It has those for CPUs ({built}): move the tensors to the CPU, or install "
            "kvspeed again where nvcc can be found"
        )
    count, message = _C.cuda_device_count()
    if index >= count:
        reason = message or f"the CUDA runtime of this build sees {count} devices"
        return f"kvspeed's CUDA kernels cannot use it ({reason}): move the tensors to the CPU"
    supported, capability = _C.cuda_device_supported(index)
    if not supported:
        return (
            f"its compute capability is {capability // 10}.{capability % 10}, and this build has kernels for "
            f"{', '.join(info['cuda_archs'])} only: install kvspeed again with KVSPEED_CUDA_ARCHS={capability}, or "
            "move the tensors to the CPU"
        )
    return Gpu(_C, index, torch.device("cuda", index))


# Host copies of frequencies that lie on a GPU: the tensor (kept, so that its memory is not given to another), the
# version of its content, and the copy.
_host_copies: dict[tuple[Any, ...], tuple[Tensor, int, Tensor]] = {}


def host_frequencies(inv_freq: Tensor) -> Tensor:
    """`inv_freq` on the CPU. One on a GPU is read once, and again when it has changed.

    Raises:
        RuntimeError: it must be read while a CUDA graph is captured, when nothing can be.
    """
    if inv_freq.is_cpu:
        return inv_freq
    if inv_freq.is_inference():  # such a tensor does not count its changes
        return _read(inv_freq)
    key = (inv_freq.device, inv_freq.data_ptr(), inv_freq.shape, inv_freq.stride())
    held = _host_copies.get(key)
    if held is not None and held[0]._version == held[1] == inv_freq._version:
        return held[2]
    copy = _read(inv_freq)
    if len(_host_copies) >= _MAX_FREQUENCIES:
        _host_copies.clear()
    _host_copies[key] = (inv_freq.detach(), inv_freq._version, copy)
    return copy


def _read(inv_freq: Tensor) -> Tensor:
    gpu = gpu_of(inv_freq)
    if gpu is not None and gpu.capturing():
        raise RuntimeError(
            f"inv_freq is on {inv_freq.device} and was not read before: the host cannot read it while a CUDA graph is "
            "captured; give it on the CPU, or call the op once before the capture"
        )
    return inv_freq.detach().cpu().contiguous()
