# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A small model that has something to lose: SmolLM2-135M-Instruct tuned to short questions about documents, and packet
adapters trained for it. Both ship with kvspeed (`data/testbed`); `bench/make_testbed.py` made them.

    model, tokenizer, adapter = load_testbed()

Untuned, a model this small answers in sentences and is often wrong, so that nothing can be seen of what packets cost or
keep. The tuning saw full attention only, no packets.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvspeed.packet import PacketAdapter

__all__ = ["MODEL_NAME", "adapter_file", "load_testbed", "load_tuned", "specialists", "testbed_folder"]

MODEL_NAME = "kvspeed-testbed"

_SPECIALIST = "adapter-"


def testbed_folder() -> Path:
    """Where the testbed's files are.

    Raises:
        FileNotFoundError: they are not part of this installation.
    """
    folder = Path(str(resources.files("kvspeed.data"))) / "testbed"
    if not (folder / "lora.safetensors").is_file():
        raise FileNotFoundError(
            f"the testbed's files are not in {folder}: install kvspeed with its data, or make them with "
            "bench/make_testbed.py"
        )
    return folder


def load_tuned(*, dtype: torch.dtype | None = None, progress: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer): the tuned SmolLM2, LoRA merged, frozen, in eval mode on the CPU, float32 unless asked.

    Raises:
        FileNotFoundError: see `testbed_folder`.
        SmolLM2Unavailable: the base model cannot be had.
    """
    from kvspeed.smollm2 import load_smollm2
    from kvspeed.testbed.lora import merge_lora, read_lora

    tensors, _ = read_lora(testbed_folder() / "lora.safetensors")
    model, tokenizer = load_smollm2(progress=progress)
    merge_lora(model, tensors)
    model.config._name_or_path = MODEL_NAME
    model.requires_grad_(False)
    return (model if dtype is None else model.to(dtype)), tokenizer


def load_testbed(*, dtype: torch.dtype | None = None, progress: bool = True) -> tuple[Any, Any, PacketAdapter]:
    """(model, tokenizer, adapter): `load_tuned` and the universal adapter, trained on a mixture of all tasks.

    Raises:
        FileNotFoundError, SmolLM2Unavailable: see `load_tuned`.
    """
    from kvspeed.packet import PacketAdapter

    model, tokenizer = load_tuned(dtype=dtype, progress=progress)
    return model, tokenizer, PacketAdapter.load(adapter_file(), model)


def adapter_file() -> Path:
    """Where the universal adapter is.

    Raises:
        FileNotFoundError: see `testbed_folder`.
    """
    return testbed_folder() / "adapter.safetensors"


def specialists() -> dict[str, Path]:
    """Adapters trained on one task alone, by task; `PacketAdapter.load` reads them."""
    files = sorted(testbed_folder().glob(f"{_SPECIALIST}*.safetensors"))
    return {file.stem.removeprefix(_SPECIALIST): file for file in files}
