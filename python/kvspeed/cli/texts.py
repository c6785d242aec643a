# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Text files on their way in, and the packet files that stand for them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from kvspeed.cli.common import Fault

__all__ = ["ENDING", "TextFile", "packet_files", "read_texts"]

ENDING = ".packet.safetensors"


@dataclass(frozen=True)
class TextFile:
    """One input: where it came from, and its text without byte order mark and outer white space."""

    path: Path
    text: str

    @property
    def packet_name(self) -> str:
        """File name of its packet: the input's name for people, a hash of the text so that equal names do not collide.

        The same text under the same name has the same packet, which is what lets a second run skip it.
        """
        readable = re.sub(r"[^\w.-]+", "-", self.path.stem).strip("-.")[:48] or "text"
        return f"{readable}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}{ENDING}"


def read_texts(paths: list[Path]) -> list[TextFile]:
    """The texts of all `paths`, in order, a file given twice only once.

    Raises:
        Fault: some cannot be taken; the message has a sentence for each of these, and nothing was done yet.
    """
    found: dict[tuple[str, str], TextFile] = {}
    faults = []
    for path in paths:
        try:
            file = _read(path)
            found.setdefault((file.packet_name, file.text), file)
        except Fault as fault:
            faults.append(str(fault))
    if faults:
        raise Fault(*faults)
    return list(found.values())


def _read(path: Path) -> TextFile:
    if path.is_dir():
        raise Fault(f"{path} is a folder; give the text files in it, such as {path / '*.txt'}")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Fault(f"{path}: there is no such file") from None
    except OSError as error:
        raise Fault(f"{path} cannot be read ({error.strerror or error})") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Fault(f"{path} is UTF-16 text; convert it to UTF-8, e.g. with iconv -f utf-16 -t utf-8")
    if b"\0" in data:
        raise Fault(f"{path} is a binary file (it holds zero bytes); give plain text in UTF-8")
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise Fault(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}); convert it, e.g. with "
            "iconv -f latin1 -t utf-8"
        ) from None
    if not text:
        raise Fault(f"{path} is empty; a packet needs some text")
    return TextFile(path, text)


def packet_files(folder: Path) -> list[Path]:
    """The packet files in `folder`, sorted by name.

    Raises:
        Fault: there is no such folder, or no packet in it.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise Fault(f"--packets: {folder} {what}; give the folder that kvspeed pack wrote to")
    files = sorted(path for path in folder.iterdir() if path.name.endswith(ENDING) and path.is_file())
    if not files:
        raise Fault(
            f"--packets: {folder} holds no packets (*{ENDING}); make some with kvspeed pack FILES --out {folder}"
        )
    return files
