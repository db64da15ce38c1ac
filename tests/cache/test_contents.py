"""A complete cache says which samples it holds, wherever it is opened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdpipes.cache.contents import read_contents, write_contents
from kdpipes.cache.file_store import FileStore
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.storage.codec import DamagedError, encode


@pytest.mark.parametrize("kind", [FileStore, LmdbStore])
def test_a_cache_is_complete_when_it_was_said_to_be(tmp_path: Path, kind: Any) -> None:
    store = kind(tmp_path / "cache")
    store.put(b"a", [b"heron"])
    assert read_contents(store) is None
    assert write_contents(store, ["birds/2.jpg", "birds/1.jpg", ""], {"fields": ["x"], "y": np.arange(3)})
    store.close()
    found = read_contents(kind(tmp_path / "cache"))
    assert found is not None
    assert list(found.keys) == ["birds/2.jpg", "birds/1.jpg", ""]
    assert (found.notes["fields"], found.notes["y"].tolist()) == (["x"], [0, 1, 2])
    assert write_contents(store, [], {})
    assert [len(part) for part in read_contents(store) or ()] == [0, 0]


def test_a_packed_cache_says_what_it_holds(tmp_path: Path) -> None:
    write_contents(FileStore(tmp_path / "cache"), ["heron", "gull"], {})
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "cache")
    found = read_contents(FileStore(f"zip://::{tmp_path}/packed.zip"))
    assert found is not None
    assert list(found.keys) == ["heron", "gull"]


def test_damaged_contents_are_an_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "cache", num_entries=1)
    write_contents(store, ["heron"], {})
    path = next(path for path in (tmp_path / "cache").iterdir() if path.name not in ("METADATA", ".partial"))
    path.write_bytes(b"".join(encode(1))[:-1])
    with pytest.raises(DamagedError):
        read_contents(store)
