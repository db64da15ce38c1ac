"""File systems that fail, clocks that jump, and files of other versions: named, outlasted or made anew."""

from __future__ import annotations

import errno
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from tests.faulty_storage import Fault, faulty_storage
from tests.http_server import tar


@pytest.fixture
def folder(tmp_path: Path, no_waits: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a shard of ten samples, and a photo."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data" / "heron").mkdir(parents=True)
    (tmp_path / "data" / "a.tar").write_bytes(tar("a"))
    (tmp_path / "data" / "heron" / "1.jpg").write_bytes(b"photo")
    return tmp_path / "data"


def keys(chain: Any) -> list[str]:
    return [key for batch in chain.select("jpg key").deal(batch_size=3) for _, key in batch]


def test_an_io_error_that_passes_is_outlasted(folder: Path) -> None:
    for source in (kdp.open_shards, kdp.stream_shards):
        with faulty_storage(str(folder), faults=[Fault("io_error", times=2)]):
            assert keys(source("faulty://a.tar")) == [f"a.tar/{n}" for n in range(10)]


def test_an_io_error_that_stays_names_the_file(folder: Path) -> None:
    len(kdp.open_shards(folder / "a.tar"))
    with faulty_storage(str(folder), faults=[Fault("io_error", on="range")]):
        with pytest.raises(
            kdp.DataError, match=r"'faulty://a\.tar' cannot be read at offset \d+: .*Input/output error"
        ):
            keys(kdp.open_shards("faulty://a.tar", fetch="members"))
        with pytest.raises(kdp.DataError, match=r"'faulty://a\.tar' cannot be read .*: .*Input/output error"):
            keys(kdp.stream_shards("faulty://a.tar"))


def test_an_io_error_of_a_local_disk_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    photo = kdp.image_folder(folder)[0]
    monkeypatch.setattr(os, "pread", fail)
    for source in (kdp.open_shards, kdp.stream_shards):
        with pytest.raises(kdp.DataError, match=r"a\.tar' cannot be read as a .*tar: .*Input/output error"):
            list(source(folder / "a.tar"))
    monkeypatch.setattr("kdpipes.storage.files.open", fail, raising=False)
    with pytest.raises(kdp.DataError, match=r"heron/1\.jpg' cannot be read: .*Input/output error"):
        photo["x"]


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps by weeks, forward and back, at each look at it."""
    honest, numbers = time.time, count()
    monkeypatch.setattr(time, "time", lambda: honest() + (-1) ** next(numbers) * 3e6)


@pytest.mark.usefixtures("jumping")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_clocks_that_jump_change_nothing(folder: Path, tmp_path: Path, num_workers: int) -> None:
    # Making the index takes three requests: a fault at every third one would break each attempt.
    faults = [Fault("reset", every=4), Fault("latency", seconds=0.001)]
    with faulty_storage(str(folder), faults=faults):
        for options in ({"fetch": "shards", "cache_dir": tmp_path / "shards"}, {"fetch": "members"}):
            chain = kdp.open_shards("faulty://a.tar", timeout_s=20, **options).cache_on_disk(tmp_path / "kept")
            chain = chain.select("key").deal(batch_size=5)
            with kdp.Loader(chain, num_workers=num_workers) as loader:
                for _ in range(2):
                    assert [key for batch in loader for (key,) in batch] == [f"a.tar/{n}" for n in range(10)]


def test_an_index_of_another_version_is_made_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = Path(f"{folder}/a.tar.index")
    len(kdp.open_shards(folder / "a.tar"))
    content = index.read_bytes()
    index.write_bytes(content[:3] + b"\x09" + content[4:])
    assert len(kdp.open_shards(folder / "a.tar")) == 10
    assert "The entry is not in format 3, the only one that this version of kdpipes reads." in caplog.text
    assert index.read_bytes() == content


def test_a_shard_cache_of_another_version_is_left_alone(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "shards" / "v2-0123.bin"
    other.parent.mkdir()
    other.write_bytes(b"of another kdpipes")
    with faulty_storage(str(folder)):
        chain = kdp.open_shards("faulty://a.tar", fetch="shards", cache_dir=other.parent, max_cache_bytes=60_000)
        assert len(keys(chain)) == 10
    assert other.read_bytes() == b"of another kdpipes"
