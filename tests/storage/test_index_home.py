"""One object holds the indexes of a data set, and one mapped file serves all processes of a machine."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.cli import main
from kdpipes.storage import index_home
from kdpipes.storage.catalog import DATA_SET_INDEX, open_catalog
from kdpipes.storage.files import locked
from kdpipes.storage.shard_index import Catalog
from tests.faulty_storage import faulty_storage
from tests.processes import exit_status, fork, in_child
from tests.proxy import Proxy, counted_s3

pytestmark = pytest.mark.usefixtures("cache")

NUM_SHARDS = 40


def tar(shard: int, *, label: int | None = None) -> bytes:
    """Return a shard of three samples."""
    file = io.BytesIO()
    with TarWriter(file) as writer:
        for index in range(3):
            row = {"jpg": bytes([shard, index] * 50), "cls": (shard + index) % 5 if label is None else label}
            writer.write({"__key__": f"{index:02}", **row})
    return file.getvalue()


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that counts requests to a store with many shards."""
    with counted_s3({f"{s3}/birds-{shard:03}.tar": tar(shard) for shard in range(NUM_SHARDS)}, monkeypatch) as proxy:
        yield proxy


def urls_in(s3: str, number: int = NUM_SHARDS) -> str:
    return f"{s3}/birds-{{000..{number - 1:03}}}.tar"


def index(*urls: str) -> None:
    assert main(["index", *urls]) == 0


def empty(cache: Path) -> None:
    for path in (cache / "indexes").glob("*"):
        path.unlink()


@pytest.mark.parametrize("number", [NUM_SHARDS, 7])
def test_many_shards_open_with_a_handful_of_requests(s3: str, proxy: Proxy, cache: Path, number: int) -> None:
    index(urls_in(s3))
    empty(cache)
    num_before = len(proxy.requests())
    shards = kdp.open_shards(urls_in(s3, number))
    assert shards.column("cls").tolist() == [(shard + sample) % 5 for shard in range(number) for sample in range(3)]
    assert len(proxy.requests()) - num_before <= 4
    assert shards[5]["jpg"] == bytes([1, 2] * 50)


def test_the_data_sets_index_equals_the_shards_indexes(s3: str, proxy: Proxy, cache: Path) -> None:
    alone = kdp.open_shards(urls_in(s3)).fingerprint()
    index(urls_in(s3))
    empty(cache)
    joined = kdp.open_shards(urls_in(s3)).fingerprint()
    for one, other in zip(alone, joined, strict=True):
        if isinstance(one, np.ndarray):
            assert one.tolist() == other.tolist()
    assert list(alone[2]) == list(joined[2])
    assert {name: known.tolist() for name, known in alone[3].items()} == {
        name: known.tolist() for name, known in joined[3].items()
    }


def test_a_shard_that_has_changed_since_is_indexed_again(s3: str, proxy: Proxy, cache: Path) -> None:
    index(urls_in(s3))
    fsspec.filesystem("s3").pipe(f"{s3}/birds-003.tar", tar(3, label=4))
    for _ in range(2):
        assert kdp.open_shards(urls_in(s3)).column("cls").tolist()[9:12] == [4, 4, 4]
    empty(cache)
    assert kdp.open_shards(urls_in(s3)).column("cls").tolist()[9:12] == [4, 4, 4]


def test_processes_that_open_together_send_the_requests_of_one(s3: str, proxy: Proxy, cache: Path) -> None:
    index(urls_in(s3))
    empty(cache)
    kdp.open_shards(urls_in(s3)).column("cls")
    lock = next((cache / "indexes").glob("*.joined")).with_suffix(".lock")
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def open_it() -> None:
        def waits(path: Path) -> Any:
            sender.send(None)
            return locked(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_home, "locked", waits)
            assert len(kdp.open_shards(urls_in(s3))) == 3 * NUM_SHARDS

    num_before = len(proxy.requests())
    with locked(lock):
        children = [fork(open_it) for _ in range(4)]
        for _ in children:
            receiver.recv()
    assert [exit_status(child) for child in children] == [0] * 4
    assert len(proxy.requests()) - num_before <= 2


def shards_of(folder: Path, label: int) -> str:
    """Write two shards on storage without indexes, which runs keep in the local cache."""
    for shard in range(2):
        (folder / f"{shard}.tar").write_bytes(tar(shard, label=label))
        (folder / f"{shard}.tar.index").unlink(missing_ok=True)
    return "faulty://{0..1}.tar"


def test_a_run_after_another_one_sees_new_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for label in (0, 1):
        urls = shards_of(tmp_path, label)

        def open_it(urls: str = urls, label: int = label) -> None:
            assert set(kdp.open_shards(urls).column("cls").tolist()) == {label}

        with faulty_storage(str(tmp_path)):
            assert [in_child(open_it) for _ in range(2)] == [0, 0]


def test_drafts_of_killed_processes_are_removed(tmp_path: Path, cache: Path) -> None:
    def die(path: Path, target: Path) -> None:
        if target.suffix == ".joined":
            os._exit(9)
        shutil.move(path, target)

    def open_it() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", die)
            len(kdp.open_shards(urls))

    urls = shards_of(tmp_path, 0)
    with faulty_storage(str(tmp_path)):
        assert in_child(open_it) == in_child(open_it) == 9
        drafts = list((cache / "indexes").glob(".*.part"))
        assert len(drafts) == 1, "the second process has removed the draft of the first one"
        others = [cache / "indexes" / name for name in (".old.index.0f.part", ".new.index.0f.part")]
        for other in others:
            other.write_bytes(b"")
        os.utime(others[0], (0, 0))
        len(kdp.open_shards(urls))
    assert list((cache / "indexes").glob(".*.part")) == others[1:], "a process may be writing the new one"


def test_the_local_cache_of_indexes_keeps_to_its_limit(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = shards_of(tmp_path, 0)
    with faulty_storage(str(tmp_path)):
        len(kdp.open_shards("faulty://0.tar"))
        joined = next((cache / "indexes").glob("*.joined"))
        others = [cache / "indexes" / f"{number}.joined" for number in range(3)]
        for number, other in enumerate(others):
            other.write_bytes(bytes(1_000_000))
            os.utime(other, (number, number))
        monkeypatch.setattr(index_home, "_MAX_BYTES", 1_500_000)
        len(kdp.open_shards(urls))
    assert [other.exists() for other in others] == [False, False, True]
    assert joined.exists()


@mock.patch.object(index_home, "_MAX_BYTES", 1_000)
@mock.patch.object(index_home, "_BETWEEN_SWEEPS", 1)
def test_streams_keep_the_local_cache_of_indexes_to_its_limit(tmp_path: Path, cache: Path) -> None:
    shards_of(tmp_path, 0)
    with faulty_storage(str(tmp_path)):
        for number in range(2):
            assert list(kdp.stream_shards(f"faulty://{number}.tar"))
            assert len(list((cache / "indexes").glob("*.index"))) == 1


def test_a_later_run_fetches_no_index(s3: str, proxy: Proxy) -> None:
    assert in_child(lambda: len(kdp.open_shards(urls_in(s3)))) == 0
    num_before = len(proxy.requests())
    assert len(kdp.open_shards(urls_in(s3))) == 3 * NUM_SHARDS
    requests = proxy.requests()[num_before:]
    assert not [request for request in requests if ".tar.index" in request]
    assert (
        len([request for request in requests if request.startswith("HEAD") and request.endswith(".tar")]) == NUM_SHARDS
    )


def test_a_damaged_joined_file_is_made_anew(s3: str, proxy: Proxy, cache: Path) -> None:
    len(kdp.open_shards(urls_in(s3)))
    path = next((cache / "indexes").glob("*.joined"))
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-10] + bytes(10)):
        path.unlink()
        path.write_bytes(damaged)
        assert len(kdp.open_shards(urls_in(s3))) == 3 * NUM_SHARDS
        assert path.read_bytes() == content


def test_a_damaged_index_of_a_data_set_is_not_used(s3: str, proxy: Proxy, cache: Path) -> None:
    index(urls_in(s3))
    empty(cache)
    fsspec.filesystem("s3").pipe(f"{s3}/{DATA_SET_INDEX}", b"nothing of a tar" * 100)
    assert len(kdp.open_shards(urls_in(s3))) == 3 * NUM_SHARDS


def test_an_unwritable_cache_does_not_keep_shards_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(3):
        (tmp_path / f"birds-00{shard}.tar").write_bytes(tar(shard))
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "file"))
    with faulty_storage(str(tmp_path)):
        assert len(kdp.open_shards("faulty://birds-{000..002}.tar")) == 9


def test_a_process_that_is_killed_while_it_opens_leaves_no_lock(s3: str, proxy: Proxy) -> None:
    def die(*_: Any) -> None:
        os._exit(9)

    def open_it() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kdpipes.storage.catalog.Catalog.of", die)
            len(kdp.open_shards(urls_in(s3)))

    assert in_child(open_it) == 9
    assert len(kdp.open_shards(urls_in(s3))) == 3 * NUM_SHARDS


def test_joined_indexes_are_read_as_they_were_written(tmp_path: Path) -> None:
    for shard in range(3):
        (tmp_path / f"{shard}.tar").write_bytes(tar(shard))
    urls = [str(tmp_path / f"{shard}.tar") for shard in range(3)]
    catalog = open_catalog(urls, urls)
    (tmp_path / "joined").write_bytes(catalog.to_bytes())
    assert Catalog.from_file(tmp_path / "joined").to_bytes() == catalog.to_bytes()
