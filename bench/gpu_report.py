# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The lines that bench/gpu.py prints at its end, from the JSON that it wrote.

python bench/gpu_report.py bench/results/gpu-nvidia-h200.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines(document: dict[str, Any]) -> Iterator[str]:
    """A short report; whatever is missing is left out."""
    yield document["meaning"]
    for name, stage in document["stages"].items():
        yield f"{name}: {stage['status']}, {stage.get('seconds', 0)} s"
        found = stage.get("found", {})
        for case, result in found.items():
            if not isinstance(result, dict):
                continue
            if "error" in result:
                yield f"    {case}: FAILED, {result['error'].splitlines()[0][:160]}"
            if "left_out" in result:
                yield f"    {case}: left out, {result['left_out']}"
            if "times" in result:
                yield f"    {case}: {_kernel(result)}"
            for how in ("eager", "cuda graph"):
                if how in result:
                    yield f"    {case}, {how}: {_model(result, result[how])}"


def _kernel(result: dict[str, Any]) -> str:
    parts = [f"{1e6 * result['times']['kvspeed']['seconds']:.1f} us", f"{result['bytes_a_second'] / 1e12:.2f} TB/s"]
    if "operations_a_second" in result:
        parts.append(f"{result['operations_a_second'] / 1e12:.0f} TFLOP/s")
    if "of_copy" in result:
        parts.append(f"{result['of_copy']:.2f} of a device copy")
    parts += [f"{ratio:.2f}x {name}" for name, ratio in result["faster_than"].items()]
    return ", ".join(parts)


def _model(result: dict[str, Any], one: dict[str, Any]) -> str:
    parts = [f"TTFT {1e3 * one['ttft_seconds']:.1f} ms"] if "ttft_seconds" in one else []
    if "ttft_faster_than_unpatched" in one:
        parts.append(f"{one['ttft_faster_than_unpatched']:.2f}x unpatched")
    parts.append(f"{1e3 * one['token_seconds']:.2f} ms a token")
    if "kv_bytes" in result:
        parts.append(f"KV {result['kv_bytes'] / 1e9:.3f} GB")
    return ", ".join(parts)


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
