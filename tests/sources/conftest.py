"""Shards of three kinds of storage, and a cache for each test."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

from tests.faulty_storage import faulty_storage
from tests.sources.shards_elsewhere import TARS, write


@pytest.fixture
def cache(no_waits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache of its own, and retries without waits."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(name="write")
def write_shard(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a shard of rows."""

    def write(rows: list[dict[str, Any]], name: str = "a.tar") -> Path:
        with TarWriter(str(tmp_path / name)) as writer:
            for row in rows:
                writer.write(row)
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of shards, with large members."""
    return write(tmp_path_factory.mktemp("elsewhere") / "large")


@pytest.fixture(scope="session")
def small_originals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of shards, with members of which many come in one request."""
    return write(tmp_path_factory.mktemp("elsewhere") / "small", 500)


@pytest.fixture
def large(originals: str, tmp_path: Path) -> str:
    """A copy of the shards with large members, without indexes."""
    return str(shutil.copytree(originals, tmp_path / "shards", ignore=shutil.ignore_patterns("*.index")))


@pytest.fixture
def small(small_originals: str, tmp_path: Path) -> str:
    """A copy of the shards with small members, without indexes."""
    return str(shutil.copytree(small_originals, tmp_path / "small", ignore=shutil.ignore_patterns("*.index")))


@pytest.fixture(params=["faulty", "memory", "s3"])
def elsewhere(request: pytest.FixtureRequest, small: str, tmp_path: Path) -> Iterator[str]:
    """The URL of the small shards, on several kinds of storage."""
    if request.param == "faulty":
        shutil.copytree(small, tmp_path / "faulty")
        with faulty_storage(str(tmp_path / "faulty")):
            yield "faulty://"
        return
    root = request.getfixturevalue("s3") if request.param == "s3" else f"memory://{secrets.token_hex(8)}"
    files = fsspec.filesystem(request.param)
    for path in Path(small).glob(TARS):
        files.pipe_file(f"{root}/{path.name}", path.read_bytes())
    yield f"{root}/"
    files.rm(root, recursive=True)
