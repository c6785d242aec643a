# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed doctor`: what is installed, what the machine offers, and whether the kernels compute the right thing."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Any

import typer

from kvspeed.cli.common import Debug, counted, guarded, progress, stdout

_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "numpy", "typer", "rich")
_OPTIONAL = ("peft", "accelerate", "matplotlib", "fsspec", "s3fs", "datasets")


@guarded
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Debug = False,
) -> None:
    """Show versions, backend and devices, and check every kernel against a float64 oracle. Exit code 1 on a failure."""
    report = _report()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _report() -> dict[str, Any]:
    import torch

    from kvspeed import __version__

    report: dict[str, Any] = {
        "versions": {"kvspeed": __version__, "python": platform.python_version(), **_versions(_PACKAGES)},
        "optional": _versions(_OPTIONAL),
        "platform": platform.platform(),
        "cpu": {
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "openmp": torch.backends.openmp.is_available(),
            "openmp_runtimes": [],
        },
        "devices": _devices(),
        "build": None,
        "checks": [],
        "ok": False,
    }
    try:
        from kvspeed import ops
        from kvspeed.eval.selfcheck import count_checks, run_checks
        from kvspeed.ops.device import cuda_refusal
        from kvspeed.ops.native import _C
    except ImportError as error:
        report["fault"] = str(error)
        return report
    build = ops.build_info()
    report["build"] = {
        "backend": "cuda and cpu" if build.get("cuda") else "cpu",
        "compiler": build.get("compiler"),
        "instruction_sets_built": list(build.get("isas", [])),
        "instruction_sets_available": ops.cpu_isas(),
        "instruction_set_in_use": ops.current_isa(),
        "cuda_architectures": [str(arch) for arch in build.get("cuda_archs", [])],
        "cuda_note": _C.cuda_device_count()[1] or _without_cuda(),
    }
    for index, device in enumerate(report["devices"]):
        device["refused"] = cuda_refusal(index)
    with progress("checking kernels", count_checks()) as advance:
        for check in run_checks():
            report["checks"].append({**asdict(check), "ok": check.ok})
            advance(check.kernel)
    report["cpu"]["openmp_runtimes"] = _openmp_runtimes()
    report["ok"] = bool(report["checks"]) and all(check["ok"] for check in report["checks"])
    return report


def _versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _openmp_runtimes() -> list[str]:
    """Paths of the OpenMP libraries in this process (Linux); two of them are two thread pools in each other's way."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = {line.split(maxsplit=5)[-1].strip() for line in lines if "/lib" in line}
    except OSError:
        return []
    return sorted(path for path in paths if re.match(r"lib(gomp|omp|iomp)", os.path.basename(path)))


def _without_cuda() -> str:
    """Why torch gives no CUDA tensors although the driver shows a GPU to kvspeed; nothing where it does."""
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA, so no tensor is on a GPU: install one with CUDA"
    return f"torch {torch.__version__} cannot use CUDA {torch.version.cuda} on this machine, so no tensor is on a GPU"


def _devices() -> list[dict[str, Any]]:
    """CUDA devices as torch sees them; none, without a word, on a machine or torch without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        found.append({"name": properties.name, "architecture": architecture, "memory_bytes": properties.total_memory})
    return found


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = stdout()
    facts = Table.grid(padding=(0, 1))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for title, value in _lines(report):
        facts.add_row(title, escape(value))
    console.print(facts)
    if report.get("fault"):
        console.print(f"[red]FAILED[/red] the kernels cannot be loaded: {escape(report['fault'])}")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("kernel", "runs on", "dtype"):
        table.add_column(title)
    for title in ("error", "allowed"):
        table.add_column(title, justify="right")
    table.add_column("")
    for check in report["checks"]:
        mark = "[green]ok[/green]" if check["ok"] else f"[red]FAILED[/red] {escape(check['fault'])}"
        numbers = (f"{check['error']:.1e}", f"{check['tolerance']:.1e}")
        table.add_row(check["kernel"], check["isa"], check["dtype"], *numbers, mark)
    console.print(table)
    failed = sum(not check["ok"] for check in report["checks"])
    console.print(
        f"[red]{failed} of {len(report['checks'])} checks FAILED[/red]"
        if failed
        else f"[green]all {len(report['checks'])} checks passed[/green] (error: largest difference from float64, "
        "relative to the largest value; values and unmoved keys bit for bit)"
    )


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, build = report["cpu"], report["build"]
    versions, optional = (
        ", ".join(f"{name} {version or 'missing'}" for name, version in report[kind].items())
        for kind in ("versions", "optional")
    )
    lines = [("versions", versions), ("optional", optional), ("platform", report["platform"])]
    openmp = "OpenMP" if cpu["openmp"] else "no OpenMP"
    threads = f"{counted(cpu['threads'], 'thread')} ({openmp}, OMP_NUM_THREADS {cpu['omp_num_threads'] or 'not set'})"
    lines.append(("processor", f"{cpu['name']}, {counted(cpu['cores'], 'core')}, {threads}"))
    if build:
        lines += [
            ("backend", f"{build['backend']}, compiler {build['compiler']}"),
            ("instruction set", f"{build['instruction_set_in_use']} in use; {_sets(build)}"),
            ("CUDA architectures", ", ".join(build["cuda_architectures"]) or "none built"),
        ]
        if build["cuda_note"]:
            lines.append(("CUDA kernels", build["cuda_note"]))
    devices = [f"{one['name']} ({one['architecture']})" for one in report["devices"]]
    lines += [
        ("warning", f"cuda:{index} is not used: {one['refused']}")
        for index, one in enumerate(report["devices"])
        if one.get("refused")
    ]
    runtimes = cpu["openmp_runtimes"]
    if len(runtimes) > 1:
        lines.append(
            ("warning", f"{len(runtimes)} OpenMP runtimes are loaded, which slows both: {', '.join(runtimes)}")
        )
    lines.append(("CUDA devices", ", ".join(devices) or "none"))
    return lines


def _sets(build: dict[str, Any]) -> str:
    return (
        f"available here: {', '.join(build['instruction_sets_available'])}; "
        f"built: {', '.join(build['instruction_sets_built'])}"
    )
