# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A small model that has something to lose: SmolLM2-135M-Instruct tuned to short questions about documents, and packet
adapters trained for it. Both ship with kvspeed (`data/testbed`); `bench/make_testbed.py` made them.

    model, tokenizer, adapter = load_testbed()
    model, tokenizer, adapter = load_testbed(speed=True)    # tuned further, to prompts of 22 of 30 layers
    kvspeed.patch_model(model)                              # knows its depth

Untuned, a model this small answers in sentences and is often wrong, so that nothing can be seen of what packets cost or
keep. The first tuning saw full attention only, no packets; the second, for SPEED, both.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvspeed.packet import PacketAdapter

__all__ = [
    "MODEL_NAME",
    "adapter_file",
    "load_testbed",
    "load_tuned",
    "specialists",
    "testbed_folder",
]

MODEL_NAME = "kvspeed-testbed"

_LORA, _SPEED_LORA = "lora.safetensors", "speed.safetensors"
_SPECIALIST = "adapter-"


def testbed_folder() -> Path:
    """Where the testbed's files are.

    Raises:
        FileNotFoundError: they are not part of this installation.
    """
    folder = Path(str(resources.files("kvspeed.data"))) / "testbed"
    if not (folder / _LORA).is_file():
        raise FileNotFoundError(
            f"the testbed's files are not in {folder}: install kvspeed with its data, or make them with "
            "bench/make_testbed.py"
        )
    return folder


def load_tuned(*, speed: bool = False, dtype: torch.dtype | None = None, progress: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer): the tuned SmolLM2, LoRA merged, frozen, in eval mode on the CPU, float32 unless asked.

    Args:
        speed: the one that was tuned for SPEED as well; its config says for which depth.
        dtype: of the weights.
        progress: show the download of the base model.

    Raises:
        FileNotFoundError: see `testbed_folder`.
        SmolLM2Unavailable: the base model cannot be had.
    """
    from kvspeed.smollm2 import load_smollm2
    from kvspeed.testbed.lora import merge_lora, read_lora

    updates = [read_lora(testbed_folder() / name) for name in (_LORA, *((_SPEED_LORA,) if speed else ()))]
    model, tokenizer = load_smollm2(progress=progress)
    for tensors, _ in updates:
        merge_lora(model, tensors)
    model.config._name_or_path = MODEL_NAME + ("-speed" if speed else "")
    if speed:
        from kvspeed.tuned import remember_spec, spec_of_fields

        remember_spec(model, spec_of_fields(updates[-1][1]["speed"], _SPEED_LORA))
    model.requires_grad_(False)
    return (model if dtype is None else model.to(dtype)), tokenizer


def load_testbed(
    *, speed: bool = False, dtype: torch.dtype | None = None, progress: bool = True
) -> tuple[Any, Any, PacketAdapter]:
    """(model, tokenizer, adapter): `load_tuned` and its universal adapter, trained on a mixture of all tasks.

    Raises:
        FileNotFoundError, SmolLM2Unavailable: see `load_tuned`.
    """
    from kvspeed.packet import PacketAdapter

    model, tokenizer = load_tuned(speed=speed, dtype=dtype, progress=progress)
    return model, tokenizer, PacketAdapter.load(adapter_file(speed=speed), model)


def adapter_file(*, speed: bool = False) -> Path:
    """Where the universal adapter is; with `speed` that of the model tuned for SPEED, for packets of its depth.

    Raises:
        FileNotFoundError: see `testbed_folder`.
    """
    return testbed_folder() / ("speed-adapter.safetensors" if speed else "adapter.safetensors")


def specialists() -> dict[str, Path]:
    """Adapters trained on one task alone, by task; `PacketAdapter.load` reads them."""
    files = sorted(testbed_folder().glob(f"{_SPECIALIST}*.safetensors"))
    return {file.stem.removeprefix(_SPECIALIST): file for file in files}
