"""What a real S3 store holds comes as from the local disk: in this process, and in workers forked and spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.demo import write_photo_shards
from kdpipes.storage.access import NUM_TRIES
from kdpipes.storage.files import list_files, read_url
from kdpipes.storage.remote import RemoteStream
from tests.faulty_storage import Fault, faulty_storage

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "start_method": "fork"},
    {"num_workers": 2, "start_method": "spawn"},
]

READS: list[Any] = [read_url, RemoteStream, lambda url: list_files(url, (".jpg",))]


@pytest.fixture
def remote_shards(s3: str, photo_shards: str) -> str:
    """The photo shards in a bucket, as a brace range."""
    folder, name = photo_shards.rsplit("/", 1)
    fsspec.filesystem("s3").put(f"{folder}/", f"{s3}/", recursive=True)
    return f"{s3}/{name}"


@pytest.fixture
def remote_folder(s3: str, photo_folder: Path) -> str:
    """The photo folder in a bucket."""
    fsspec.filesystem("s3").put(f"{photo_folder}/", f"{s3}/photos/", recursive=True)
    return f"{s3}/photos"


def epochs(chain: Any, **workers: Any) -> list[list[Any]]:
    """Return the batches of two epochs."""
    with kdp.Loader(chain, **workers) as loader:
        return [list(loader) for _ in range(2)]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_shards_stream_as_from_the_disk(remote_shards: str, photo_shards: str, workers: dict[str, Any]) -> None:
    remote, local = (
        kdp.stream_shards(urls).select("jpg cls").deal(batch_size=16) for urls in (remote_shards, photo_shards)
    )
    got = epochs(remote, **workers)
    assert got == epochs(local, num_workers=workers["num_workers"])
    assert len({sample for batch in got[0] for sample in batch}) == 160


@pytest.mark.parametrize("workers", WORKERS[:2], ids=str)
def test_image_folders_come_as_from_the_disk(remote_folder: str, photo_folder: Path, workers: dict[str, Any]) -> None:
    remote, local = (kdp.image_folder(root) for root in (remote_folder, photo_folder))
    assert remote.class_names() == local.class_names()
    orders = [
        folder.select("x y", return_ctx=True).deal(batch_size=16, shuffle=True, seed=1) for folder in (remote, local)
    ]
    assert epochs(orders[0], **workers) == epochs(orders[1])


def test_a_store_stays_usable_after_workers_were_forked(remote_folder: str) -> None:
    folder = kdp.image_folder(remote_folder).select("x y")
    before = [folder[index] for index in range(8)]
    with kdp.Loader(folder.deal(batch_size=16), num_workers=2, start_method="fork") as loader:
        batches = iter(loader)
        samples = list(next(batches))
        assert samples[:8] == before == [folder[index] for index in range(8)]
        assert sum(len(batch) for batch in batches) == 144
    assert before == [folder[index] for index in range(8)]


@pytest.mark.parametrize("read", READS[:2], ids=["read", "open"])
def test_what_is_missing_is_named(s3: str, read: Any) -> None:
    for url, more in (
        (f"{s3}/missing.jpg", ""),
        ("s3://nowhere/missing.jpg", r" Its bucket does not .* right\?"),
    ):
        with pytest.raises(FileNotFoundError, match=rf"^There is no file '{url}'\.{more}$"):
            read(url)
    with pytest.raises(FileNotFoundError, match=rf"^There is no folder '{s3}/gulls'\.$"):
        list_files(f"{s3}/gulls", (".jpg",))


@pytest.mark.parametrize("read", READS, ids=["read", "open", "list"])
def test_a_store_that_rejects_or_is_not_there_is_named(s3: str, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    options = fsspec.config.conf["s3"]
    nowhere = {"endpoint_url": "http://127.0.0.1:1", "config_kwargs": {"retries": {"max_attempts": 0}}}
    for wrong, words in (
        ({"secret": "wrong"}, r"rejected \(.*(Forbidden|signature).*\)\. .*`AWS_ACCESS_KEY_ID`"),
        (nowhere, "127.0.0.1:1"),
    ):
        monkeypatch.setitem(fsspec.config.conf, "s3", {**options, **wrong})
        with pytest.raises(DataError, match=rf"^'{s3}/1\.jpg' cannot be read: .*{words}"):
            read(f"{s3}/1.jpg")
    monkeypatch.setitem(fsspec.config.conf, "s3", options)


def test_an_empty_file_is_read(s3: str) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/empty", b"")
    assert read_url(f"{s3}/empty") == b""
    with RemoteStream(f"{s3}/empty") as stream:
        assert stream.read(9) == b""


def test_a_store_is_read_through_storage_that_fails(
    remote_shards: str, photo_shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    folder, name = remote_shards.rsplit("/", 1)
    with faulty_storage(folder, faults=[Fault("unavailable", on="range", paths="*-003.tar")]) as storage:
        stream = kdp.stream_shards(f"faulty://{name}").deal(batch_size=16)
        with kdp.Loader(stream, num_workers=2) as loader, pytest.raises(DataError, match=r"photos-003.*Unavailable"):
            list(loader)
    assert storage.stats().faults == {"unavailable": NUM_TRIES}
    local = sum(Path(path).stat().st_size for path in Path(photo_shards).parent.glob("*-00[012].tar"))
    assert 0 < storage.stats().bytes_delivered <= local


@pytest.mark.parametrize("workers", WORKERS[:2], ids=str)
def test_shards_open_by_position_as_from_the_disk(
    remote_shards: str, photo_shards: str, workers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path))
    remote, local = (
        kdp.open_shards(urls).rename_fields(x="jpg", y="cls").filter_classes(valid=[1, 3]).oversample()
        for urls in (remote_shards, photo_shards)
    )
    assert remote.column("y").tolist() == local.column("y").tolist()
    orders = [chain.select("x y key").deal(batch_size=16, shuffle=True, seed=2) for chain in (remote, local)]
    assert epochs(orders[0], **workers) == epochs(orders[1])
    bucket = remote_shards.rsplit("/", 1)[0]
    assert fsspec.filesystem("s3").exists(f"{bucket}/photos-000.tar.index")


@pytest.mark.parametrize("open_pipe", [kdp.open_shards, kdp.stream_shards])
def test_a_glob_opened_again_sees_another_clients_files(remote_shards: str, tmp_path: Path, open_pipe: Any) -> None:
    folder = remote_shards.rsplit("/", 1)[0]
    few = Path(write_photo_shards(tmp_path, num_shards=20)).parent
    other = s3fs.S3FileSystem(skip_instance_cache=True)

    def num_samples() -> int:
        fsspec.filesystem("s3").ls(folder)  # a listing that is kept
        return sum(1 for _ in open_pipe(f"{folder}/*.tar"))

    assert num_samples() == 160
    other.put(str(few / "photos-000.tar"), f"{folder}/photos-000.tar")  # 8 samples in the place of 40
    other.put(str(few / "photos-001.tar"), f"{folder}/photos-004.tar")
    assert num_samples() == 8 + 3 * 40 + 8
    other.rm(f"{folder}/photos-001.tar")
    assert num_samples() == 8 + 2 * 40 + 8


def test_a_glob_over_folders_sees_another_clients_files(s3: str, photo_shards: str, tmp_path: Path) -> None:
    shards = [write_photo_shards(tmp_path, num_shards=20), photo_shards]
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    for urls, num_samples in zip(shards, (8, 40), strict=True):
        other.put(str(Path(urls).parent / "photos-000.tar"), f"{s3}/birds/0.tar")
        fsspec.filesystem("s3").ls(f"{s3}/birds")  # a listing that is kept
        assert len(kdp.open_shards(f"{s3}/*/*.tar")) == num_samples
        assert sum(1 for _ in kdp.stream_shards(f"{s3}/*/*.tar")) == num_samples
