"""Shards without indexes: streams and whole downloads record the indexes, so that no byte is read twice."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.storage.catalog import make_index
from kdpipes.storage.shard_index import ShardIndex
from tests.faulty_storage import Fault, faulty_storage
from tests.processes import in_child
from tests.proxy import Proxy, counted_s3
from tests.sources.test_index_shards import tar

pytestmark = pytest.mark.usefixtures("cache")
NUM_SHARDS = 6
URLS = f"faulty://birds-{{0..{NUM_SHARDS - 1}}}.tar"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards without indexes."""
    (tmp_path / "shards").mkdir()
    for shard in range(NUM_SHARDS):
        (tmp_path / "shards" / f"birds-{shard}.tar").write_bytes(tar(shard))
    return tmp_path / "shards"


def recorded(cache: Path) -> list[Path]:
    return sorted((cache / "indexes").glob("*.index"))


def bodies(requests: list[Any]) -> list[str]:
    """Return the shards of which bytes were requested."""
    return sorted({one.path for one in requests if one.kind != "info" and one.path.endswith(".tar")})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_streamed_epoch_records_what_indexing_would_write(folder: Path, cache: Path, num_workers: int) -> None:
    with faulty_storage(str(folder)) as files:
        chain = kdp.stream_shards(URLS).select("key").deal(batch_size=3)
        with kdp.Loader(chain, num_workers=num_workers) as loader:
            assert sum(map(len, loader)) == 4 * NUM_SHARDS
        found = {path.read_bytes() for path in recorded(cache)}
        before = len(files.requests())
        shards = kdp.open_shards(URLS, fetch="members")
        assert shards.column("cls").tolist() == [number % 5 for number in range(4 * NUM_SHARDS)]
        later = files.requests()[before:]
        assert not bodies(later)
        assert not [one for one in later if one.path.endswith(".tar.index")]
        assert found == {make_index(f"faulty://birds-{shard}.tar").to_bytes() for shard in range(NUM_SHARDS)}
        assert [sample["json"]["width"] for sample in shards] == [10 * number for number in range(4 * NUM_SHARDS)]


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that counts the requests to a store with shards."""
    with counted_s3({f"{s3}/birds-{shard}.tar": tar(shard) for shard in range(NUM_SHARDS)}, monkeypatch) as proxy:
        yield proxy


def test_streamed_shards_open_with_a_listing(s3: str, proxy: Proxy) -> None:
    urls = f"{s3}/birds-{{0..{NUM_SHARDS - 1}}}.tar"
    assert len(list(kdp.stream_shards(urls))) == 4 * NUM_SHARDS
    num_before = len(proxy.requests())
    assert len(kdp.open_shards(urls)) == 4 * NUM_SHARDS
    assert len(proxy.requests()) - num_before <= 4  # is there an index of the data set? a listing


def test_only_shards_that_were_read_to_their_end_are_recorded(folder: Path, cache: Path) -> None:
    with faulty_storage(str(folder)):
        stream = iter(kdp.stream_shards(URLS))
        for _ in range(4 + 2):
            next(stream)
        del stream
        assert len(recorded(cache)) == 1
        assert len(kdp.open_shards(URLS)) == 4 * NUM_SHARDS


def test_a_killed_process_leaves_whole_indexes_or_none(folder: Path, cache: Path) -> None:
    def read_and_die() -> None:
        for number, _ in enumerate(kdp.stream_shards(URLS)):
            if number == 9:
                os._exit(9)

    with faulty_storage(str(folder)):
        assert in_child(read_and_die) == 9
        assert len(recorded(cache)) == 2
        for path in recorded(cache):
            assert len(ShardIndex.from_bytes(path.read_bytes(), "").keys) == 4
        assert len(list(kdp.stream_shards(URLS))) == 4 * NUM_SHARDS
        assert len(recorded(cache)) == NUM_SHARDS


def test_a_shard_that_has_changed_is_recorded_anew(folder: Path, cache: Path) -> None:
    with faulty_storage(str(folder)):
        list(kdp.stream_shards(URLS))
        (folder / "birds-2.tar").write_bytes(tar(9))
        assert kdp.open_shards(URLS)[8]["json"]["width"] == 10 * 4 * 9
    with faulty_storage(str(folder)):
        (folder / "birds-3.tar").write_bytes(tar(8))
        list(kdp.stream_shards(URLS))
        assert len(recorded(cache)) == NUM_SHARDS
        shards = kdp.open_shards(URLS)
        assert [shards[place]["json"]["width"] for place in (8, 12)] == [360, 320]


def test_a_damaged_shard_is_not_recorded(folder: Path, cache: Path) -> None:
    content = (folder / "birds-1.tar").read_bytes()
    (folder / "birds-1.tar").write_bytes(content[: len(content) // 2])
    with faulty_storage(str(folder)), pytest.raises(kdp.DataError, match="truncated"):
        list(kdp.stream_shards(URLS))
    assert len(recorded(cache)) == 1


def test_a_recorded_index_names_members_that_changed_silently(folder: Path) -> None:
    with faulty_storage(str(folder)):
        list(kdp.stream_shards(URLS))
        flip = Fault("flip_bit", every=1, on="range", paths="*.tar")
        shards = kdp.open_shards(URLS, fetch="members")
        assert len(shards) == 4 * NUM_SHARDS
    with faulty_storage(str(folder), faults=[flip]), pytest.raises(kdp.DataError, match="differs from the index"):
        shards[5]["jpg"]


def test_a_cache_that_cannot_be_written_does_not_stop_a_stream(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "file"))
    with faulty_storage(str(folder)):
        assert len(list(kdp.stream_shards(URLS))) == 4 * NUM_SHARDS


def test_local_and_compressed_shards_are_not_recorded(folder: Path, cache: Path) -> None:
    (folder / "birds.tar.gz").write_bytes(gzip.compress(tar(0)))
    list(kdp.stream_shards(str(folder / "birds-0.tar")))
    with faulty_storage(str(folder)):
        assert len(list(kdp.stream_shards("faulty://birds.tar.gz"))) == 4
    assert recorded(cache) == []


def test_whole_shards_are_downloaded_once_and_indexed_here(folder: Path, cache: Path) -> None:
    total = sum(path.stat().st_size for path in folder.glob("*.tar"))
    with faulty_storage(str(folder)) as files:
        chain = kdp.open_shards(URLS, fetch="shards").select("jpg cls key").deal(batch_size=4, shuffle="shards", seed=0)
        with kdp.Loader(chain) as loader:
            assert sum(map(len, loader)) == 4 * NUM_SHARDS
        requests = [one for one in files.requests() if one.path.endswith(".tar") and one.kind != "info"]
        assert sum(one.delivered for one in requests) == total
        assert len(list(folder.glob("*.index"))) == NUM_SHARDS
        again = [ShardIndex.from_bytes(path.read_bytes(), "").to_bytes() for path in sorted(folder.glob("*.index"))]
        assert again == [make_index(f"faulty://birds-{shard}.tar").to_bytes() for shard in range(NUM_SHARDS)]


def test_whole_shards_without_room_are_indexed_as_they_are_read(folder: Path, cache: Path) -> None:
    with faulty_storage(str(folder)):
        assert len(kdp.open_shards(URLS, fetch="shards", max_cache_bytes=100)) == 4 * NUM_SHARDS
        assert not list((cache / "shards").glob("*.tar"))
