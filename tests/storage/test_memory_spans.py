"""Files that stay open: a bounded number, never the wrong one, and no signal from one that shrinks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kdpipes.storage.files import pread
from kdpipes.storage.readers import read_span


def _num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_spans_are_read_and_end_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"heron")
    assert [read_span(str(path), 1, size) for size in (0, 3, 9)] == [b"", b"ero", b"eron"]
    path.write_bytes(b"he")
    assert (read_span(str(path), 1, 3), read_span(str(path), 4, 1)) == (b"e", b"")


def test_a_replaced_file_is_opened_anew_a_missing_one_fails(tmp_path: Path) -> None:
    path, new = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"heron")
    assert read_span(str(path), 0, 5) == b"heron"
    new.write_bytes(b"stork")
    new.replace(path)
    assert read_span(str(path), 0, 5) == b"stork"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_span(str(path), 0, 5)


def test_only_so_many_files_stay_open_under_threads(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(200)]
    for path in paths:
        path.write_bytes(path.name.encode())
    before = _num_open()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: read_span(str(path), 0, 9), paths * 10))
    assert found == [path.name.encode() for path in paths] * 10
    assert _num_open() <= before + 64


def test_a_forked_process_reads_on(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"heron")
    assert read_span(str(path), 0, 1) == b"h"
    child = os.fork()
    if not child:
        os._exit(0 if read_span(str(path), 1, 4) == b"eron" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read_span(str(path), 1, 4) == b"eron"


def test_what_comes_in_parts_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(100))
    monkeypatch.setattr(os, "pread", lambda _, size, offset: content[offset : offset + min(size, 7)])
    assert pread(0, 50, 3) == content[3:53]
    assert pread(0, 200, 90) == content[90:]
