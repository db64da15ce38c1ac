"""Mapped files: the same bytes as the file's, and those kept that were used last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdpipes.core.errors import DataError
from kdpipes.storage import readers
from kdpipes.storage.readers import MappedFiles


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Three files of five bytes."""
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 5)
    return [str(tmp_path / name) for name in "abc"]


def test_what_was_used_last_stays_mapped(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(readers._Map):
        def __init__(self, path: str) -> None:
            made.append(path)
            super().__init__(path)

    monkeypatch.setattr(readers, "_KEPT", 2)
    monkeypatch.setattr(readers, "_Map", Counted)
    files, (a, b, c) = MappedFiles(), paths
    for path in (a, b, a, c, a, b):
        assert bytes(files.view(path, 1, 2, 5)) == Path(path).read_bytes()[1:3]
    assert made == [a, b, c, b], "a is used every second time"


def test_views_outlive_the_maps_that_are_kept(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_KEPT", 1)
    files = MappedFiles()
    views: list[Any] = [files.view(path, 0, 5, 5) for path in paths]
    del files
    assert [bytes(view) for view in views] == [b"aaaaa", b"bbbbb", b"ccccc"]


def test_files_that_have_been_cut_or_removed_are_told(paths: list[str]) -> None:
    files = MappedFiles()
    assert bytes(files.view(paths[0], 0, 1, 5)) == b"a"
    Path(paths[0]).write_bytes(b"aa")
    with pytest.raises(DataError, match="should have 5 bytes, but has 2"):
        files.view(paths[0], 0, 1, 5)
    Path(paths[0]).unlink()
    with pytest.raises(DataError, match="cannot be read"):
        files.view(paths[0], 0, 1, 5)
