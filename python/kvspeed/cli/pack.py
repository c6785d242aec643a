# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed pack`: text files in, packets out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvspeed.cli.common import (
    Adapter,
    Debug,
    DType,
    Fault,
    ModelName,
    check_adapter_file,
    check_depth,
    check_folder,
    guarded,
    load_model,
    progress,
    soft_tokens,
    stdout,
    warn_untuned,
)
from kvspeed.cli.texts import TextFile, read_texts

if TYPE_CHECKING:
    from kvspeed.packet import Packet, PacketAdapter
    from kvspeed.packet.press import Press


@guarded
def pack(
    files: Annotated[list[Path], typer.Argument(help="Text files in UTF-8, one packet each.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Folder for the packets; made where it is missing.")],
    model: ModelName = None,
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            help="Layers to compute and store (SPEED); the model is then asked at the same k. Default: the depth that "
            "the model was tuned for, else all.",
            show_default=False,
        ),
    ] = None,
    adapter: Adapter = None,
    press: Annotated[
        str | None,
        typer.Option(
            "--press", help="Remove tokens: random-30, tova-30, cur-30, leverage-30 (per cent); -whole: soft ones too."
        ),
    ] = None,
    dtype: DType = None,
    debug: Debug = False,
) -> None:
    """Compute the keys and values of text files once and store them as packets, for `kvspeed ask`.

    Packets that are there already and made in this very way are kept, so an interrupted run can be repeated; others of
    the same name are replaced. All inputs are checked before the first packet is written, and each packet appears under
    its name only when it is complete.
    """
    chosen = _press(press)
    texts = read_texts(files)
    check_folder("--out", out)
    check_adapter_file(adapter)
    network, tokenizer, name = load_model(model, dtype)
    check_depth(k, network)
    job = _Job(network, tokenizer, k, soft_tokens(adapter, model, network), chosen)
    for text in texts:
        job.check(text)
    warn_untuned(network, k, name)
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    with progress(f"packing with {name}", len(texts)) as advance:
        for text in texts:
            target = out / text.packet_name
            state = "replaced" if target.exists() else "written"
            packet, kept = job.run(text, target)
            state = "kept" if kept else state
            lines.append(f"{state}  {target}  {packet.length} tokens, {packet.kv_bytes / 2**20:.1f} MiB")
            advance(text.path.name)
    for line in lines:
        stdout().print(line, soft_wrap=True, markup=False)


def _press(name: str | None) -> Press | None:
    if name is None:
        return None
    from kvspeed.packet.press import press_from_name

    try:
        return press_from_name(name)
    except ValueError as error:
        raise Fault(f"--{error}") from None


class _Job:
    """A model, the depth, the adapter and the press that all packets of a run share.

    Raises:
        Fault, ValueError, TypeError: k or the adapter does not fit the model, or the model is not supported.
    """

    def __init__(
        self, model: Any, tokenizer: Any, k: int | None, adapter: PacketAdapter | None, press: Press | None = None
    ) -> None:
        from kvspeed import patch_model

        patch_model(model, k)
        self.model, self.tokenizer, self.press, self.adapter = model, tokenizer, press, adapter

    def check(self, text: TextFile) -> None:
        """Refuses a text that is longer than the model."""
        from kvspeed.eval.compare import document_text
        from kvspeed.packet.build import max_positions
        from kvspeed.prompt import encode

        length = len(encode(self.tokenizer, document_text(text.text), "text"))
        length += self.adapter.tokens if self.adapter is not None else 0
        limit = max_positions(self.model)
        if limit is not None and length > limit:
            raise Fault(
                f"{text.path} is {length} tokens long and the model has {limit} positions: split it into several files"
            )

    def run(self, text: TextFile, target: Path) -> tuple[Packet, bool]:
        """(packet, True where `target` held it already)."""
        from kvspeed.eval.compare import document_text
        from kvspeed.packet import build_packet

        document = document_text(text.text)
        kept = self._existing(target, document)
        if kept is not None:
            return kept, True
        packet = build_packet(self.model, self.tokenizer, document, self.adapter, press=self.press)
        packet.save(target)
        return packet, False

    def _existing(self, target: Path, document: str) -> Packet | None:
        """The packet at `target` if it is whole, of this very text, and belongs to model, depth, adapter and press."""
        from kvspeed.packet import Packet, TensorFileError
        from kvspeed.packet.belongs import check_blocks

        try:
            packet = Packet.load(target)
            fitting = check_blocks([packet], None, self.model)
        except (FileNotFoundError, TensorFileError, ValueError):
            return None
        adapter = self.adapter.fingerprint() if self.adapter is not None and self.adapter.tokens else None
        press = self.press.describe() if self.press is not None else None
        same = packet.text == document and packet.adapter_fingerprint == adapter and packet.press == press
        return packet if same and fitting[0] is packet else None  # one that is deeper would do, and take more room
