# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What compiled CUDA code must look like, judged without a GPU from ptxas's figures and the machine code (SASS).

    python tests/cuda_gates.py                    builds csrc/cuda for every architecture, prints a table, judges it
    python tests/cuda_gates.py --archs 80         the same for one
    python tests/cuda_gates.py a.o _C.so          judges these files
    python tests/cuda_gates.py --write            records the registers in csrc/cuda/registers.json as the new ceilings

The tools come with CUDA, or with pip: nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "csrc" / "cuda" / "registers.json"
ARCHS = (80, 86, 89, 90, 100, 120)
GRANULE = 8  # registers are given out in steps of 8 a thread, so up to the next multiple nothing changes

# What each kind of kernel must contain, by its name: tensor cores, copies in the background, whole 16-byte accesses.
WIDE_LOAD, WIDE_STORE = r"LDG\.E(\.\w+)*\.128(\.\w+)*", r"STG\.E(\.\w+)*\.128(\.\w+)*"
MUST_HAVE: dict[str, Sequence[str]] = {
    r"segment_(prefill|decode)\w*<": (r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", r"LDGSTS\.E\.BYPASS(\.\w+)*\.128"),
    r"segment_(prefill|decode)\w*<bf16": (r"HMMA\.16816\.F32\.BF16",),
    r"segment_(prefill|decode)\w*<f16": (r"HMMA\.16816\.F32",),
    r"rope_concat\w*": (WIDE_STORE,),
    r"rope_concat\w*<\w+, true": (WIDE_LOAD,),  # packets of 8-bit numbers are read 8 or 4 bytes at a time
    r"upload\w*": (WIDE_STORE,),
}
# And none of them: accesses that do not know their state space, and memory that stands in for registers.
MUST_NOT_HAVE = {r"(LD|ST|ATOM)(\.\w+)*": "generic access", r"(LDL|STL)(\.\w+)*": "local memory (spill or array)"}


@dataclass
class Kernel:
    """One kernel for one architecture."""

    name: str
    arch: int
    registers: int = 0
    stack: int = 0
    local: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)

    def count(self, pattern: str) -> int:
        return sum(n for opcode, n in self.opcodes.items() if re.fullmatch(pattern, opcode))


# ---------------------------------------------------------------------------------------------------------- tools ----


def tool(name: str) -> str | None:
    """The path of a CUDA tool: from CUDA_HOME, pip's packages beside this interpreter, PATH, or /usr/local/cuda."""
    site = Path(sysconfig.get_paths()["purelib"])
    folders = [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    folders += [site / "nvidia" / "cu13" / "bin", *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    for folder in [*folders, Path("/usr/local/cuda/bin")]:
        if shutil.which(name, path=str(folder)):
            return str(folder / name)
    return None


def nvcc_release() -> str | None:
    """E.g. "13.0"; None without nvcc."""
    nvcc = os.environ.get("CUDACXX") or tool("nvcc")
    if nvcc is None:
        return None
    found = re.search(r"release (\d+\.\d+)", _run([nvcc, "--version"]))
    return found.group(1) if found else None


def _run(command: Sequence[str | Path], timeout: float = 1800) -> str:
    folders = {
        str(Path(path).parent) for path in (tool("cuobjdump"), tool("nvdisasm")) if path
    }  # the one calls the other
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")])}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-5000:]}{done.stderr[-5000:]}")
    return done.stdout


def build(folder: Path, archs: Iterable[int] = ARCHS) -> list[Path]:
    """Builds the CUDA kernels alone, in a folder that can be used again, and returns the objects."""
    command = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DKVSPEED_PYTHON=OFF", "-DKVSPEED_CUDA=ON"]
    _run([*command, f"-DKVSPEED_CUDA_ARCHS={';'.join(map(str, archs))}"])
    _run(["cmake", "--build", folder, "--target", "kvspeed_cuda"])
    return sorted(folder.glob("**/kvspeed_cuda.dir/**/*.o"))


# -------------------------------------------------------------------------------------------------------- reading ----


def read(files: Iterable[Path]) -> list[Kernel]:
    """Every kernel in objects or shared libraries, for each architecture, by name and architecture."""
    kernels: dict[tuple[str, int], Kernel] = {}
    for file in files:
        cuobjdump = tool("cuobjdump")
        if cuobjdump is None:
            raise FileNotFoundError("cuobjdump is needed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        _read_resources(_run([cuobjdump, "-res-usage", file]), kernels)
        _read_sass(_run([cuobjdump, "-sass", file]), kernels)
    names = _demangle([name for name, _ in kernels])
    for (mangled, _), kernel in kernels.items():
        kernel.name = names[mangled]
    return sorted(kernels.values(), key=lambda kernel: (kernel.name, kernel.arch))


def _read_resources(text: str, kernels: dict[tuple[str, int], Kernel]) -> None:
    arch, name = 0, ""
    for line in text.splitlines():
        if found := re.match(r"\s*arch = sm_(\d+)", line):
            arch = int(found.group(1))
        elif found := re.match(r"\s*Function (\S+):$", line):
            name = found.group(1)
        elif found := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            registers, stack, local = map(int, found.groups())
            kernels[name, arch] = Kernel(name, arch, registers, stack, local)


def _read_sass(text: str, kernels: dict[tuple[str, int], Kernel]) -> None:
    arch, name = 0, ""
    for line in text.splitlines():
        if found := re.match(r"\s*code for sm_(\d+)", line):
            arch = int(found.group(1))
        elif found := re.match(r"\s*Function : (\S+)", line):
            name = found.group(1)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            kernels[name, arch].opcodes[found.group(1)] += 1


def _demangle(mangled: Sequence[str]) -> dict[str, str]:
    """Short readable names: segment_decode<bf16, 128>."""
    filter_ = shutil.which("c++filt") or tool("cu++filt")
    if filter_ is None:
        raise FileNotFoundError("c++filt is needed: it comes with binutils")
    unique = sorted(set(mangled))
    plain = _run([filter_, *unique]).splitlines() if unique else []
    return {name: shorten(text) for name, text in zip(unique, plain, strict=True)}


def shorten(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|kvspeed::(cuda|gpu)::|\b_GLOBAL__N_\w*::", "", name)
    name = name.replace("__nv_bfloat16", "bf16").replace("__half", "f16").removeprefix("void ")
    name = re.sub(r"\((?:int|bool|unsigned int)\)(\d+)", r"\1", name)
    depth = 0
    for at, letter in enumerate(name):  # cut the parameters: the first parenthesis outside angle brackets
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:at]
    return name


# -------------------------------------------------------------------------------------------------------- judging ----


def faults(kernel: Kernel) -> list[str]:
    """What is wrong with one kernel, registers aside."""
    found = []
    if kernel.stack or kernel.local:
        found.append(f"uses {kernel.stack + kernel.local} bytes of stack or local memory")
    for pattern, what in MUST_NOT_HAVE.items():
        if n := kernel.count(pattern):
            found.append(f"has {n} of {what}")
    for name, patterns in MUST_HAVE.items():
        if re.match(name, kernel.name):
            found += [f"has no {pattern}" for pattern in patterns if not kernel.count(pattern + r"(\.\w+)*")]
    return [f"{kernel.name} for sm_{kernel.arch} {fault}" for fault in found]


def over_the_ceiling(kernels: Iterable[Kernel], table: dict) -> list[str]:
    """Kernels with more registers than the table allows, those it lacks, and rows of the table without a kernel."""
    found, seen = [], set()
    for kernel in kernels:
        seen.add(kernel.name)
        row = table["registers"].get(kernel.name)
        if row is None or kernel.arch not in table["archs"]:
            found.append(f"{kernel.name} for sm_{kernel.arch} has no ceiling in {TABLE.name}; record it with --write")
        elif kernel.registers > (ceiling := row[table["archs"].index(kernel.arch)]):
            found.append(f"{kernel.name} for sm_{kernel.arch} uses {kernel.registers} registers, more than {ceiling}")
    found += [f"{TABLE.name} has a row for {name}, which is not built" for name in table["registers"].keys() - seen]
    return sorted(found)


def write_table(kernels: Iterable[Kernel]) -> None:
    rows: dict[str, dict[int, int]] = {}
    for kernel in kernels:
        rows.setdefault(kernel.name, {})[kernel.arch] = -(-kernel.registers // GRANULE) * GRANULE
    archs = sorted({arch for row in rows.values() for arch in row})
    lines = [
        f"    {json.dumps(name)}: {json.dumps([row.get(arch, 0) for arch in archs])}" for name, row in rows.items()
    ]
    head = f'{{\n  "nvcc": {json.dumps(nvcc_release())},\n  "archs": {json.dumps(archs)},\n  "registers": {{\n'
    TABLE.write_text(head + ",\n".join(lines) + "\n  }\n}\n")


def table_of(kernels: Iterable[Kernel]) -> str:
    """For people: registers and the numbers of instructions that matter."""
    columns = {"HMMA": r"HMMA.*", "LDSM": r"LDSM.*", "LDGSTS": r"LDGSTS.*", "LDG.128": WIDE_LOAD, "STG.128": WIDE_STORE}
    columns |= {"CALL": r"CALL.*", "BAR": r"BAR.*", "all": r".*"}
    lines = [f"{'kernel':60} {'sm':>4} {'regs':>5} {'stack':>6} " + " ".join(f"{name:>7}" for name in columns)]
    for one in kernels:
        counts = " ".join(f"{one.count(pattern):7}" for pattern in columns.values())
        lines.append(f"{one.name:60} {one.arch:4} {one.registers:5} {one.stack:6} {counts}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Judges compiled CUDA code without a GPU.")
    parser.add_argument("files", nargs="*", type=Path, help="objects or libraries; none: build csrc/cuda")
    parser.add_argument("--archs", default=",".join(map(str, ARCHS)), help="architectures to build, with commas")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "cuda-gates", help="where to build")
    parser.add_argument("--write", action="store_true", help="record the registers as the new ceilings")
    options = parser.parse_args()
    files = options.files or build(options.folder, [int(arch) for arch in options.archs.split(",")])
    kernels = read(files)
    print(table_of(kernels))
    if options.write:
        write_table(kernels)
    problems = [fault for kernel in kernels for fault in faults(kernel)]
    if TABLE.is_file():
        problems += [one for one in over_the_ceiling(kernels, json.loads(TABLE.read_text())) if "not built" not in one]
    print("\n".join(problems) or "nothing to object to")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
