# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvspeed.atomic import replacing


def test_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("one", "two"):
        with replacing(path) as part:
            part.write_text(text)
            assert part.parent == tmp_path and (not path.exists() or path.read_text() == "one")
        assert path.read_text() == text and os.listdir(tmp_path) == ["file"]
    old = os.umask(0o027)
    try:
        with replacing(path) as part:
            part.write_text("three")
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for written in (True, False):
        with pytest.raises(error), replacing(path) as part:
            if written:
                part.write_text("half")
            raise error
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_no_place_for_it(tmp_path: Path) -> None:
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "missing" / "file", FileNotFoundError)):
        with pytest.raises(error, match="cannot write"), replacing(path):
            raise AssertionError("it began")
    assert os.listdir(tmp_path) == []
