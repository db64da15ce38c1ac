"""Shards of any chain: the same bytes whoever writes them, within the limits, read by webdataset."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import tarfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

import kdpipes as kdp
from kdpipes.core.errors import ChainError
from kdpipes.storage.catalog import make_index
from kdpipes.storage.files import version_of
from kdpipes.storage.index_home import index_url
from kdpipes.storage.shard_index import ShardIndex
from tests.write.shards import LIMITS, QUIET, names_in, tars_in, write

pytestmark = QUIET


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_write_the_bytes_that_one_process_writes(
    photo_folder: Path, tmp_path: Path, references: Any, limits: dict[str, int], num_workers: int
) -> None:
    result = write(kdp.image_folder(photo_folder), tmp_path, **{"max_samples": None, **limits}, num_workers=num_workers)
    assert tars_in(tmp_path) == references[str(limits)]
    assert (result.num_samples, result.num_bytes) == (160, sum(map(len, tars_in(tmp_path).values())))
    assert len(result.urls) == len(tars_in(tmp_path)) >= 4


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_any_executor_writes_the_same_bytes(photo_folder: Path, tmp_path: Path, references: Any, kind: Any) -> None:
    with kind(2) as executor:
        write(kdp.image_folder(photo_folder), tmp_path, max_samples=None, max_bytes=150_000, executor=executor)
    assert tars_in(tmp_path) == references[str(LIMITS[1])]


def test_processes_of_its_own_may_be_spawned(
    photo_folder: Path, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = partial(ProcessPoolExecutor, mp_context=get_context("spawn"))
    monkeypatch.setattr("kdpipes.storage.jobs.ProcessPoolExecutor", spawned)
    write(kdp.image_folder(photo_folder), tmp_path, num_workers=1)
    assert tars_in(tmp_path) == references[str(LIMITS[0])]


def test_a_stream_gives_the_bytes_of_the_index(photo_shards: str, tmp_path: Path) -> None:
    key: Callable[[Any], str] = lambda sample: sample.key.rpartition("/")[2]  # noqa: E731
    for name, source in (("index", kdp.open_shards(photo_shards)), ("stream", kdp.stream_shards(photo_shards))):
        for limits in LIMITS:
            write(source, tmp_path / name / str(len(limits)), **{"max_samples": None, **limits}, key=key)
            shutil.move(tmp_path / name / str(len(limits)), tmp_path / f"{name} {limits}")
    for limits in LIMITS:
        assert tars_in(tmp_path / f"index {limits}") == tars_in(tmp_path / f"stream {limits}")
        assert len(tars_in(tmp_path / f"index {limits}")) >= 4


def test_tars_keep_to_the_limits_and_fill_them(photo_folder: Path, references: Any) -> None:
    for limits in LIMITS:
        tars = list(references[str(limits)].values())
        sizes = [len(wds_samples(tar)) for tar in tars]
        assert max(sizes) <= limits.get("max_samples", 160)
        assert max(map(len, tars)) <= limits.get("max_bytes", 10**9)
    assert [len(wds_samples(tar)) for tar in references[str(LIMITS[0])].values()] == [30] * 5 + [10]
    both = list(references[str(LIMITS[1])].values())
    for tar, following in pairwise(both):
        first = wds_samples(following)[0]
        size = sum(512 + -(-len(content) // 512) * 512 for name, content in first.items() if name in ("jpg", "cls"))
        assert len(tar) + size > 150_000


def wds_samples(tar: bytes) -> list[dict[str, Any]]:
    stream = ({"url": "tar", "stream": io.BytesIO(content)} for content in [tar])
    return list(wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(stream)))


def test_a_sample_that_is_too_large_is_alone_in_its_shard(tmp_path: Path) -> None:
    items = [(bytes(size), size) for size in (10, 9000, 10, 10)]
    result = write(kdp.from_dataset(items), tmp_path, max_samples=None, max_bytes=8000, extensions={"x": "bin"})
    assert [len(kdp.open_shards(url)) for url in result.urls] == [1, 1, 2]


def test_the_headers_tell_nothing_of_who_wrote_them_and_when(references: Any) -> None:
    tar = next(iter(references[str(LIMITS[0])].values()))
    with tarfile.open(fileobj=io.BytesIO(tar)) as file:
        members = file.getmembers()
    assert {(each.mtime, each.uid, each.gid, each.uname, each.gname, each.mode) for each in members} == {
        (0, 0, 0, "", "", 0o644)
    }
    assert [each.name.partition(".")[2] for each in members] == ["cls", "jpg"] * 30


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_index_beside_a_shard_is_the_one_that_would_be_made(
    photo_folder: Path, tmp_path: Path, num_workers: int
) -> None:
    for url in write(kdp.image_folder(photo_folder), tmp_path, num_workers=num_workers).urls:
        written = Path(index_url(url)).read_bytes()
        assert make_index(url, with_checksums=True).to_bytes() == written
        assert ShardIndex.from_bytes(written, url).version == version_of(url)


def test_webdataset_reads_what_is_written(photo_folder: Path, tmp_path: Path) -> None:
    folder = kdp.image_folder(photo_folder)
    result = write(folder, tmp_path)
    samples = list(wds.WebDataset(result.urls, shardshuffle=False).decode())
    assert [(f"{sample['__key__']}.jpg", sample["cls"]) for sample in samples] == list(folder.select("key y"))
    raw = list(wds.WebDataset(result.urls, shardshuffle=False))
    assert [sample["jpg"] for sample in raw] == [x for (x,) in folder.select("x")]


def test_open_shards_reads_what_is_written(photo_folder: Path, tmp_path: Path) -> None:
    folder = kdp.image_folder(photo_folder)
    result = write(folder, tmp_path)
    back = kdp.open_shards(result.urls, class_names=result.class_names).rename_fields(x="jpg", y="cls")
    assert list(back.select("x y")) == list(folder.select("x y"))
    assert back.class_names() == folder.class_names()
    assert json.loads((tmp_path / "train-shards.json").read_text())["class_names"] == list(folder.class_names())


def test_what_webdataset_has_written_is_written_again(photo_shards: str, tmp_path: Path) -> None:
    result = write(kdp.open_shards(photo_shards), tmp_path)
    first, again = (
        [(sample["jpg"], sample["cls"]) for sample in kdp.open_shards(urls)] for urls in (photo_shards, result.urls)
    )
    assert first == again
    streamed = kdp.from_webdataset(wds.WebDataset(result.urls, shardshuffle=False))
    write(streamed, tmp_path / "again", key=lambda sample: sample.key.partition("/")[2])
    assert tars_in(tmp_path / "again") == tars_in(tmp_path)


def test_a_full_disk_says_how_much_is_free_and_leaves_nothing(
    photo_folder: Path, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_path = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = open_path(path, *args, **kwargs)
        if path.suffix == ".part" and "000002" in path.name:
            file.close()
            return open_path(Path("/dev/full"), "wb", buffering=0)
        return file

    for num_workers in (0, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", full)
            with pytest.raises(OSError, match=r"'train-000002\.tar' needs .* bytes, and [0-9]+ are free") as caught:
                write(kdp.image_folder(photo_folder), tmp_path, num_workers=num_workers)
        assert caught.value.errno == errno.ENOSPC
        assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()
    write(kdp.image_folder(photo_folder), tmp_path)
    assert tars_in(tmp_path) == references[str(LIMITS[0])]


def test_an_interrupt_leaves_no_part(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(sample: Any) -> str:
        if sample.index == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return str(sample.index)

    with pytest.raises(KeyboardInterrupt):
        write(kdp.image_folder(photo_folder), tmp_path, key=interrupt)
    assert names_in(tmp_path) == {"train-000000.tar", "train-000000.tar.index", "train-shards.json"}


def test_an_empty_chain_gives_no_shard(letters: Any, tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"num_workers": 2}, {"max_samples": None, "max_bytes": 100}]):
        result = write(letters[:0], tmp_path / str(number), **options)
        assert (result.urls, result.num_samples) == ([], 0)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"urls": "train.tar"}, ValueError, "`urls` must be a path or URL of tars with one number in the file name"),
    ({"urls": "train-%06d.tar.gz"}, ValueError, "compressed ones cannot be read by position"),
    ({"urls": "%d/train-%06d-%d.tar"}, ValueError, "with one number in the file name"),
    ({"urls": "pipe:cat > train-%06d.tar"}, ValueError, "`urls` must be"),
    ({"urls": 3}, TypeError, "`urls` must be a path or URL, but is 3 instead"),
    ({"max_samples": None}, ValueError, "`max_samples` or `max_bytes` must be given"),
    ({"max_samples": 0}, ValueError, "`max_samples` must be an integer of at least 1"),
    ({"max_bytes": -1}, ValueError, "`max_bytes` must be an integer of at least 1"),
    ({"num_workers": -1}, ValueError, "`num_workers` must be an integer of at least 0"),
    ({"executor": "dask"}, TypeError, "`executor` must be a concurrent.futures.Executor"),
    ({"fields": ["x"]}, TypeError, "`fields` must be names in one string"),
    ({"fields": "x z"}, KeyError, "The chain has no field 'z'"),
    ({"encode": {"x": "pgn"}}, ValueError, r"`encode\['x'\]` must be one of .* Did you mean 'png'"),
    ({"encode": ["x"]}, TypeError, "`encode` must be a mapping by field names"),
    ({"encode": {"x": 3}}, TypeError, r"`encode\['x'\]` must be a callable"),
    ({"extensions": {"x": "a/b"}}, ValueError, r"`extensions\['x'\]` must be an extension"),
    ({"key": "name"}, TypeError, "`key` must be a callable"),
]


@pytest.mark.parametrize(("arguments", "error", "told"), BAD, ids=[str(arguments) for arguments, *_ in BAD])
def test_bad_arguments_are_rejected_before_anything_is_written(
    letters: Any, tmp_path: Path, arguments: dict[str, Any], error: type[Exception], told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=told):
        kdp.write_shards(letters, **{"urls": "train-%06d.tar", "max_samples": 4, **arguments})
    assert not names_in(tmp_path)


def test_chains_that_give_no_samples_are_rejected(letters: Any, photo_shards: str, tmp_path: Path) -> None:
    with pytest.raises(ChainError, match=r"Pass it the chain before `\.select\(\)`"):
        write(letters.select("x y"), tmp_path)
    with pytest.raises(ChainError, match="made batches of them"):
        write(letters.deal(batch_size=2), tmp_path)
    with pytest.raises(TypeError, match="must be a datapipe"):
        write([1, 2], tmp_path)
    for options in ({"num_workers": 2}, {"executor": ThreadPoolExecutor(1)}):
        with pytest.raises(ValueError, match="must be left out for a stream"):
            write(kdp.stream_shards(photo_shards), tmp_path, **options)
