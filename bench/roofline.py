# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the hardware allows, by arithmetic alone: the tables of docs/kernels.md.

    python bench/roofline.py            # prints the tables
    python bench/roofline.py --write    # puts them into docs/kernels.md, between the marks that name them

Nothing here is measured. Every time is a *floor*: bytes over bandwidth, or operations over rate, at the vendor's
nominal figures, unless the table says which published rate it uses instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvspeed.eval.flops import ModelShape, decode_flops, prefill_flops

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: decimal units, dense rates without sparsity, SXM boards."""

    name: str
    sms: int
    bandwidth: float  # bytes a second
    tensor: float  # bf16 operations a second
    vector: float  # float32 operations a second
    clock: float  # Hz at which those rates are quoted
    l2: int  # MB
    flash2: float  # what FlashAttention-2 is published to reach, operations a second

    @property
    def ridge(self) -> float:
        """Operations a byte from which on the tensor cores are the limit."""
        return self.tensor / self.bandwidth

    @property
    def exponentials(self) -> float:
        """ex2 a second: 16 a clock and SM."""
        return 16 * self.sms * self.clock


# FlashAttention-2: 72 % of the A100 in its authors' report, and 35 % of the H100 in that of FlashAttention-3.
A100 = Card("A100", 108, 2.039e12, 312e12, 19.5e12, 1.41e9, 40, 225e12)
H100 = Card("H100", 132, 3.35e12, 989e12, 67e12, 1.83e9, 50, 350e12)
H200 = Card("H200", 132, 4.8e12, 989e12, 67e12, 1.83e9, 50, 350e12)
CARDS = (A100, H100, H200)
FLASH3 = 740e12  # FlashAttention-3 on the H100, as its authors report: what a wgmma path could reach
GOAL = 0.87  # share of the nominal bandwidth that a copy reaches in practice, and rope_concat aims at
DECODE_GOAL = 0.85
LATENCY = 700e-9  # seconds from a load's issue to its data, memory busy
EAGER_FORWARD = 30e-3  # seconds of host time of one eager forward of an 8B model in transformers, as published


@dataclass(frozen=True)
class Model:
    name: str
    shape: ModelShape

    @property
    def kv_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer, 16-bit."""
        return 2 * 2 * self.shape.kv_heads * self.shape.head_dim

    @property
    def kv_token(self) -> int:
        return self.kv_token_layer * self.shape.layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one forward reads: all layers and the head, 16-bit, not the embedding table."""
        return self.shape.token_layer * self.shape.layers + self.shape.logits


def model(name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, vocab: int) -> Model:
    return Model(name, ModelShape(hidden, inner, heads, kv_heads, dim, vocab, (None,) * layers))


SMOL = model("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152)
LLAMA8 = model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN8 = model("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936)
LLAMA70 = model("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, 128256)
MODELS = (SMOL, LLAMA8, QWEN8, LLAMA70)
CONTEXTS = (4096, 32768, 131072)

Table = tuple[Sequence[str], list[Sequence[str]]]


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def time(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def cards() -> Table:
    """The cards."""
    rows = [
        (
            card.name,
            str(card.sms),
            f"{card.bandwidth / 1e12:.2f} TB/s",
            f"{card.tensor / 1e12:.0f} TFLOP/s",
            f"{card.ridge:.0f}",
            f"{card.l2} MB",
            f"{card.bandwidth * LATENCY / card.sms / 1024:.1f} KiB",
        )
        for card in CARDS
    ]
    head = ("card", "SMs", "memory", "bf16 tensor", "ridge, FLOP a byte", "L2", "in flight a SM to hide 700 ns")
    return head, rows


def rope_concat() -> Table:
    """One launch for all layers: each byte read once and written once."""
    rows = []
    for m in MODELS:
        for tokens in (1024, 4096, 32768):
            moved = 2 * m.kv_token * tokens
            flops = 6 * (m.kv_token // 4) * tokens // 2  # a pair of K: 4 products, 2 sums
            rows.append(
                (
                    m.name,
                    short(tokens),
                    f"{moved / 1e6:.0f} MB",
                    *(time(moved / card.bandwidth) for card in CARDS),
                    time(moved / (GOAL * H200.bandwidth)),
                    time(flops / H200.vector),
                )
            )
    head = (
        "model",
        "tokens",
        "moved",
        *(f"{c.name}, bytes" for c in CARDS),
        "H200 at 87 %",
        "H200, float32 operations",
    )
    return head, rows


def decode() -> Table:
    """One query token, one layer of Llama-3.1-8B: bytes against tensor-core time, with rows padded to 16."""
    rows = []
    m = LLAMA8
    for batch, tokens in ((1, 4096), (1, 16384), (1, 32768), (1, 131072), (8, 16384), (32, 16384)):
        read = batch * tokens * m.kv_token_layer
        padded = batch * 4 * 16 * m.shape.kv_heads * m.shape.head_dim * tokens
        rows.append(
            (
                f"{batch} x {short(tokens)}",
                f"{read / 1e6:.1f} MB",
                *(f"{time(read / card.bandwidth)} / {time(padded / card.tensor)}" for card in CARDS),
                time(read / (DECODE_GOAL * H200.bandwidth)),
            )
        )
    return ("batch x tokens", "K and V", *(f"{c.name}, bytes / MMA" for c in CARDS), "H200 at 85 %"), rows


def prefill() -> Table:
    """A question over packets, one layer of Llama-3.1-8B."""
    rows = []
    shape = LLAMA8.shape
    for question, context in ((16, 32768), (64, 4096), (64, 32768), (64, 131072), (256, 32768), (1024, 32768)):
        pairs = question * context + question * (question + 1) // 2
        read = (context + question) * LLAMA8.kv_token_layer
        row = [f"{question} over {short(context)}", f"{shape.pair * pairs / 1e9:.1f} GFLOP", f"{read / 1e6:.0f} MB"]
        for card in CARDS:
            floors = (shape.pair * pairs / card.tensor, read / card.bandwidth, shape.heads * pairs / card.exponentials)
            row.append(" / ".join(time(floor) for floor in floors))
        row.append(time(shape.pair * pairs / H200.flash2))
        rows.append(tuple(row))
    head = ("question", "operations", "K and V", *(f"{c.name}: MMA / bytes / exp" for c in CARDS), "H200 at FA2's rate")
    return head, rows


def forward_seconds(
    m: Model, card: Card, tokens: int, past: int, k: int | None, attention: float
) -> tuple[float, float]:
    """(matrix products, attention) of a prefill in seconds: products at the nominal rate or bound by the weights."""
    shape, depth = m.shape, m.shape.layers if k is None else k
    pairs = tokens * past + tokens * (tokens + 1) // 2
    products = 0.0
    for layer in range(shape.layers):
        rows = tokens if layer < depth else 1
        products += max(rows * shape.token_layer / card.tensor, shape.token_layer / card.bandwidth)
    products += max(shape.logits / card.tensor, shape.logits / card.bandwidth)
    flops = depth * shape.pair * pairs
    floor = depth * (past + tokens) * m.kv_token_layer / card.bandwidth
    return products, max(flops / attention, floor)


def wgmma() -> Table:
    """What FlashAttention-3's rate would save over FlashAttention-2's: H200, 8B model, a question over packets."""
    rows = []
    for question in (16, 64, 256, 1024):
        for context in CONTEXTS:
            products, now = forward_seconds(LLAMA8, H200, question, context, None, H200.flash2)
            _, then = forward_seconds(LLAMA8, H200, question, context, None, FLASH3)
            device, better = products + now, products + then
            waits, waits_better = max(device, EAGER_FORWARD), max(better, EAGER_FORWARD)
            rows.append(
                (
                    f"{question} over {short(context)}",
                    time(products),
                    f"{time(now)} -> {time(then)}",
                    f"{1 - better / device:.0%}",
                    f"{1 - waits_better / waits:.0%}",
                )
            )
    head = ("question", "products", "attention, FA2 -> FA3 rate", "of device time saved", "of an eager TTFT saved")
    return head, rows


def speed() -> Table:
    """SPEED on an H200, Llama-3.1-8B: a whole prompt, then decoding at batch 1."""
    rows = []
    m = LLAMA8
    for tokens in CONTEXTS:
        full = sum(forward_seconds(m, H200, tokens, 0, None, H200.flash2))
        step = (m.weight_bytes + m.kv_token * tokens) / H200.bandwidth
        rows.append(
            (short(tokens), "unpatched", time(full), "1", f"{m.kv_token * tokens / 1e9:.2f} GB", time(step), "1")
        )
        for k in (16, 20, 24, 28):
            part = sum(forward_seconds(m, H200, tokens, 0, k, H200.flash2))
            kv = k * m.kv_token_layer * tokens
            deep = (m.weight_bytes + kv) / H200.bandwidth
            rows.append(
                (
                    "",
                    f"k = {k}",
                    time(part),
                    f"{full / part:.2f}",
                    f"{kv / 1e9:.2f} GB",
                    time(deep),
                    f"{step / deep:.2f}",
                )
            )
    return ("prompt", "method", "TTFT, computed", "faster", "KV", "a token, computed", "faster"), rows


def packets() -> Table:
    """A question of 64 tokens over packets on an H200, Llama-3.1-8B, device time alone."""
    rows = []
    m = LLAMA8
    for context in CONTEXTS:
        full = sum(forward_seconds(m, H200, context + 64, 0, None, H200.flash2))
        view = sum(forward_seconds(m, H200, 64, context, None, H200.flash2))
        copied = 2 * m.kv_token * context / (GOAL * H200.bandwidth)
        rows.append(
            (
                short(context),
                time(full),
                time(view),
                f"{time(view + copied)} ({time(copied)} of it the copy)",
                f"{full / view:.0f} / {full / (view + copied):.0f}",
            )
        )
    return ("packets", "full recompute", "view", "copy", "faster, view / copy, computed"), rows


def flops() -> Table:
    """Operations of a prompt and of 128 answer tokens, Llama-3.1-8B (kvspeed.eval.flops)."""
    rows = []
    shape = LLAMA8.shape
    for tokens in CONTEXTS:
        row = [short(tokens)]
        for k in (None, 24, 16):
            row.append(
                f"{prefill_flops(shape, tokens, k=k) / 1e12:.0f} + {decode_flops(shape, tokens, 128, k=k) / 1e12:.1f}"
            )
        rows.append(tuple(row))
    return ("prompt", "unpatched", "k = 24", "k = 16"), rows


# ---- what fits on a multiprocessor ---------------------------------------------------------------------------------

# Threads and KiB of shared memory of one SM, by architecture; each block takes 1 KiB more than it asks for. Registers
# are 65536 everywhere, given out to warps in steps of 256.
SM_LIMITS = {80: (2048, 164), 86: (1536, 100), 89: (1536, 100), 90: (2048, 228), 100: (2048, 228), 120: (1536, 100)}
REGISTERS = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "registers.json"


@dataclass(frozen=True)
class Block:
    """A block of one kernel: threads, shared bytes, and bytes of keys and values on their way while it computes."""

    threads: int
    shared: int
    in_flight: int


def decode_block(head_dim: int) -> Block:
    """As csrc/cuda/segment_decode.cuh has it; tests/test_bench_roofline.py compares."""
    pitch, warps, runs = head_dim + 8, 4 if head_dim <= 128 else 2, 3 if head_dim <= 80 else 2
    ring = warps * runs * 2 * 16 * pitch * 2
    return Block(32 * warps, 128 + 16 * pitch * 2 + ring, warps * (2 * runs - 1) * 16 * head_dim * 2)


def prefill_block(head_dim: int, row_tiles: int) -> Block:
    """As csrc/cuda/segment_prefill.cuh has it."""
    pitch, rows, keys = head_dim + 8, 64 * row_tiles, 32 if head_dim > 128 else 64
    query = 0 if row_tiles * head_dim <= 128 else rows * pitch
    own = (128 + 16 + 9 * 4 + 4 * rows + 15) // 16 * 16
    return Block(128, (query + 2 * keys * pitch) * 2 + own, keys * head_dim * 2)


BLOCKS = {
    **{f"decode, D = {d}": (f"segment_decode_kernel<bf16, {d}>", decode_block(d)) for d in (64, 80, 96, 128, 256)},
    **{f"prefill 64, D = {d}": (f"segment_prefill_kernel<bf16, {d}, 1>", prefill_block(d, 1)) for d in (64, 128, 256)},
    **{f"prefill 128, D = {d}": (f"segment_prefill_kernel<bf16, {d}, 2>", prefill_block(d, 2)) for d in (64, 128)},
}


def registers() -> dict[str, dict[int, int]]:
    """{kernel: {architecture: registers}} as the build's gate has recorded them; {} before there is such a table."""
    if not REGISTERS.is_file():
        return {}
    table = json.loads(REGISTERS.read_text(encoding="utf-8"))
    return {name: dict(zip(table["archs"], row, strict=True)) for name, row in table["registers"].items()}


def resident(block: Block, arch: int, count: int | None) -> int:
    """Blocks that one SM holds, by shared memory, threads and registers (where their count is known)."""
    threads, kibibytes = SM_LIMITS[arch]
    fits = min(threads // block.threads, kibibytes * 1024 // (block.shared + 1024))
    if count:
        warp = -(-count * 32 // 256) * 256
        fits = min(fits, 65536 // warp // (block.threads // 32))
    return fits


def occupancy() -> Table:
    """Blocks of an SM, from the compiler's registers and the shared memory that a block asks for."""
    known, rows = registers(), []
    for label, (name, block) in BLOCKS.items():
        row = [label, str(block.threads), f"{block.shared / 1024:.1f} KiB"]
        for arch in (80, 86, 90, 100):
            count = known.get(name, {}).get(arch)
            blocks = resident(block, arch, count)
            row.append(f"{count or '?'} / {blocks} / {blocks * block.in_flight / 1024:.0f} KiB")
        rows.append(tuple(row))
    head = (
        "kernel (bf16)",
        "threads",
        "shared",
        *(f"sm_{a}: registers / blocks / in flight" for a in (80, 86, 90, 100)),
    )
    return head, rows


TABLES: dict[str, Callable[[], Table]] = {
    function.__name__: function
    for function in (cards, rope_concat, decode, prefill, wgmma, speed, packets, flops, occupancy)
}


def markdown(table: Table) -> str:
    head, rows = table
    lines: Iterable[Sequence[str]] = (head, ["---"] * len(head), *rows)
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in lines)
        .replace("| --- ", "|---")
        .replace("---|---", "---|---")
    )


def filled(text: str) -> str:
    """`text` with every marked table made anew.

    Raises:
        ValueError: a mark names no table, or has no end.
    """

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise ValueError(f"a mark names the table {name!r}; there are {', '.join(TABLES)}")
        return f"<!-- roofline: {name} -->\n{markdown(TABLES[name]())}\n<!-- end -->"

    result = re.sub(r"<!-- roofline: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)
    if len(re.findall("<!-- roofline: ", text)) != len(re.findall("<!-- end -->", text)):
        raise ValueError("every '<!-- roofline: NAME -->' needs an '<!-- end -->'")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/kernels.md")
    options = parser.parse_args(arguments)
    if options.write:
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    for name, function in TABLES.items():
        print(f"\n{name}: {function.__doc__}\n{markdown(function())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
