"""Shards elsewhere, and where whole ones are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdpipes.storage import remote, shard_cache
from tests.faulty_storage import FaultyFileSystem, faulty_storage
from tests.storage.kept_shards import CONTENTS, RANGE


@pytest.fixture
def forgets_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """No knowledge of tags from other tests."""
    monkeypatch.setattr(shard_cache, "_without_md5", set())


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads by requests of 1,000 bytes, four at a time."""
    monkeypatch.setattr(remote, "_FIRST_CHUNK", RANGE)
    monkeypatch.setattr(remote, "_LARGEST_CHUNK", RANGE)
    monkeypatch.setattr(remote, "_NUM_WHOLE", 4)


@pytest.fixture
def one_range(small_ranges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads by requests of 1,000 bytes, one at a time."""
    monkeypatch.setattr(remote, "_NUM_WHOLE", 1)


@pytest.fixture
def origin(tmp_path: Path) -> str:
    """A folder with shards 0.tar, 1.tar, ..."""
    folder = tmp_path / "origin"
    folder.mkdir()
    for number, content in enumerate(CONTENTS):
        (folder / f"{number}.tar").write_bytes(content)
    return str(folder)


@pytest.fixture
def storage(origin: str) -> Iterator[FaultyFileSystem]:
    """The shards as `faulty://0.tar`, ..., without faults."""
    with faulty_storage(origin) as files:
        yield files


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where whole shards are kept."""
    return tmp_path / "kept"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache of its own."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
