# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Devices, instruction sets, the extension, and the helpers of the ops."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from kvspeed import ops
from kvspeed.ops import checks, device, native, overlap
from kvspeed.segment import Segment


class Elsewhere(torch.Tensor):
    """Says that it lies on a GPU."""

    @property
    def device(self):
        return torch.device("cuda:1")


class Build:
    """What an extension with, or without, CUDA kernels answers."""

    def __init__(self, archs=(), devices=(), message=""):
        self.archs, self.devices, self.message = list(archs), list(devices), message

    def build_info(self):
        return {"isas": ["baseline", "avx2"], "cuda": bool(self.archs), "cuda_archs": self.archs}

    def cuda_device_count(self):
        return len(self.devices), self.message

    def cuda_device_supported(self, index):
        return f"{self.devices[index]}" in self.archs, self.devices[index]


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (
            Build(message="this build has no CUDA kernels: no nvcc was found"),
            ["this build has no CUDA kernels: no nvcc was found", "baseline, avx2", "move the tensors to the CPU"],
        ),
        (
            Build(["90"], [], "the NVIDIA driver is too old: kernels built with CUDA 13 need driver 580 or newer"),
            ["cannot use it", "need driver 580 or newer", "move the tensors to the CPU"],
        ),
        (Build(["90"], [90]), ["cannot use it", "sees 1 device", "move the tensors to the CPU"]),
        (Build(["90", "100"], [90, 86]), ["8.6", "kernels for 90, 100 only", "KVSPEED_CUDA_ARCHS=86"]),
    ],
    ids=["not built", "no driver", "not visible", "another architecture"],
)
def test_a_gpu_that_cannot_be_used_is_a_sentence(monkeypatch, build, parts):
    monkeypatch.setattr(device, "_C", build)
    monkeypatch.setattr(device, "build_info", build.build_info)
    monkeypatch.setattr(device, "_gpus", {})
    with pytest.raises(RuntimeError) as caught:
        checks.tensor("query", torch.zeros(2).as_subclass(Elsewhere))
    message = str(caught.value)
    assert message.startswith("query is on cuda:1: ") and "\n" not in message
    assert all(part in message for part in parts), message
    assert device.cuda_refusal(1) in message


def test_a_gpu_that_can_be_used_is_not_refused(monkeypatch):
    build = Build(["90"], [90])
    monkeypatch.setattr(device, "_C", build)
    monkeypatch.setattr(device, "build_info", build.build_info)
    monkeypatch.setattr(device, "_gpus", {})
    assert device.cuda_refusal(0) is None


def test_this_build_says_what_it_has():
    count, message = native._C.cuda_device_count()
    info = ops.build_info()
    if not info["cuda"]:
        assert count == 0 and message.startswith("this build has no CUDA kernels: ") and len(message) > 40
        assert native._C.cuda_device_supported(0) == (False, 0)
    elif count == 0:
        assert "driver" in message
        assert native._C.cuda_device_supported(0) == (False, 0)
    else:
        supported, capability = native._C.cuda_device_supported(0)
        assert message == "" and capability >= 50 and isinstance(supported, bool)
    assert native._C.cuda_device_supported(10**6) == (False, 0)


def test_instruction_sets():
    before = ops.current_isa()
    assert before in ops.cpu_isas() and "baseline" in ops.cpu_isas()
    with ops.cpu_isa("baseline"):
        assert ops.current_isa() == "baseline"
        with ops.cpu_isa("auto"):
            assert ops.current_isa() == before
        with pytest.raises(ZeroDivisionError), ops.cpu_isa(before):
            raise ZeroDivisionError
        assert ops.current_isa() == "baseline"
    assert ops.current_isa() == before
    with pytest.raises(ValueError, match=r"sse9.*baseline"), ops.cpu_isa("sse9"):
        pass
    with pytest.raises(TypeError, match="string"), ops.cpu_isa(2):
        pass
    missing = [name for name in native.ISA_CODES if name != "auto" and name not in ops.cpu_isas()]
    for name in missing:
        with pytest.raises(RuntimeError, match=f"{name}.*available"), ops.cpu_isa(name):
            pass


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_the_environment_chooses_the_instruction_set():
    code = "from kvspeed import ops; print(ops.current_isa())"
    done = python(code, KVSPEED_CPU_ISA="baseline")
    assert done.stdout.split() == ["baseline"], done.stderr
    done = python(code, KVSPEED_CPU_ISA="sse9")
    assert done.returncode and "KVSPEED_CPU_ISA is 'sse9'" in done.stderr and "avx2" in done.stderr


def test_a_missing_extension_is_one_sentence():
    done = python("import sys; sys.modules['kvspeed._C'] = None\nimport kvspeed.ops")
    assert done.returncode
    assert "ImportError: kvspeed's compiled kernels (kvspeed._C) cannot be loaded" in done.stderr
    assert "pip install ." in done.stderr.strip().splitlines()[-1]


def test_importing_the_ops_imports_nothing_large_and_no_device():
    code = (
        "import sys, kvspeed.ops, torch\n"
        "print([name for name in ('transformers', 'peft', 'torch._dynamo', 'rich') if name in sys.modules])\n"
        "print(torch.cuda.is_initialized())"
    )
    done = python(code)
    before = python("import sys, torch\nprint([n for n in ('torch._dynamo',) if n in sys.modules])").stdout.split()[0]
    assert done.stdout.splitlines() == [before, "False"], done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is a call of Unix")
def test_the_ops_work_after_a_fork():
    code = (
        "import os, torch\nfrom kvspeed import ops\n"
        "x = torch.randn(4, 8, 64, 64)\n"
        "def use():\n"
        "    return ops.segment_attention(x[:, :, :1], [], x, x, inv_freq=None)\n"
        "expected = use()\n"
        "child = os.fork()\n"
        "torch.set_num_threads(1)\n"  # OpenMP's threads do not survive a fork, torch's rule too
        "same = torch.allclose(use(), expected)\n"
        "if child == 0:\n"
        "    os._exit(0 if same else 1)\n"
        "print(same, os.waitpid(child, 0)[1])"
    )
    done = python(code)
    assert done.stdout.split() == ["True", "0"], done.stdout + done.stderr


def test_empty_huge():
    for shape in ((3, 5), [0], (1024, 1024, 3), torch.Size([2])):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            tensor = ops.empty_huge(shape, dtype, "cpu")
            assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.is_contiguous()
            tensor.fill_(3)
            assert (tensor == 3).all()
    assert ops.empty_huge((2, 2), device="meta").device.type == "meta"


def test_segments_are_light_and_readable():
    key = torch.randn(2, 5, 16)
    segment = Segment(key, key, 3, start=-3)
    assert segment.tokens == 5 and segment.first is None and not hasattr(segment, "__dict__")
    assert repr(segment) == "Segment(key=[2, 5, 16] torch.float32, offset=3, start=-3)"
    assert "first" in repr(Segment(key, key, first=torch.zeros(1, dtype=torch.int32)))
    assert "NoneType" in repr(Segment(None, None))


def test_overlaps_against_numpy():
    """The exact answers of numpy's solver, on random strided views."""
    base = torch.zeros(4000, dtype=torch.int16)
    generator = np.random.default_rng()

    def view():
        rank = generator.integers(1, 5)
        shape = generator.integers(1, 6, rank).tolist()
        stride = (generator.integers(0, 13, rank) * generator.choice([1, 1, 3, 10], rank)).tolist()
        return base.as_strided(shape, stride, int(generator.integers(0, 400)))

    found = set()
    for _ in range(1000):
        a, b = view(), view()
        shared = bool(np.shares_memory(a.numpy(), b.numpy()))
        assert overlap.share_memory(a, b) == shared, (a.shape, a.stride(), b.shape, b.stride())
        index = torch.arange(4000).as_strided(a.shape, a.stride()).flatten()
        itself = len(index.unique()) != len(index)
        assert overlap.overlaps_itself(a) == itself, (a.shape, a.stride())
        found |= {("pair", shared), ("self", itself)}
    assert len(found) == 4
    assert not overlap.share_memory(base[:10], base[10:]) and not overlap.share_memory(base[:0], base)
    odd = torch.zeros(9, dtype=torch.int8)[1:].view(torch.int8)
    assert overlap.share_memory(odd, odd[3:4])
