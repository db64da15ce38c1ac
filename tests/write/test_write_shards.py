"""Shards of any chain: the same bytes whoever writes them, read by webdataset, gone on with where they broke off."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import tarfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count, pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

import kdpipes as kdp
from kdpipes.errors import ChainError, DataError
from kdpipes.storage.catalog import index_url, make_index
from kdpipes.storage.files import read_url, version_of
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.testing import Fault, faulty_storage
from kdpipes.write import _shard_job, _shard_places, _tar_shard

pytestmark = [  # webdataset leaves files to the garbage collector
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]

LIMITS: list[dict[str, int]] = [
    {"max_samples": 30},
    {"max_bytes": 150_000},
    {"max_samples": 40, "max_bytes": 150_000},
]


@pytest.fixture(scope="module")
def references(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The tars for each of the limits, as one process writes them."""
    found = {}
    for limits in LIMITS:
        folder = tmp_path_factory.mktemp("reference")
        kdp.write_shards(kdp.image_folder(photo_folder), folder / "train-%06d.tar", **limits)
        found[str(limits)] = tars_in(folder)
    return found


def tars_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".tar"}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def members_of(tar: Path | str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(read_url(str(tar)))) as file:
        return {member.name: file.extractfile(member).read() for member in file}


def write(pipe: Any, folder: Path, **options: Any) -> kdp.ShardsResult:
    return kdp.write_shards(pipe, folder / "train-%06d.tar", **{"max_samples": 30, **options})


def one(folder: Path, sample: dict[str, Any], **options: Any) -> dict[str, bytes]:
    """Return the members of one sample."""
    pipe = kdp.from_dataset([sample], fields=" ".join(sample))
    return members_of(write(pipe, folder, **options).urls[0])


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
    monkeypatch.setattr("kdpipes.write.jobs.ProcessPoolExecutor", spawned)
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


def killed(write_all: Callable[[], object], patches: Callable[[pytest.MonkeyPatch], object]) -> None:
    """Run something in a process that is killed as `patches` say."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patches(patch)
                write_all()
        finally:  # nothing of the test may run on in the child
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_at(place: Any, name: str, number: int, *, is_parent: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets the `number`-th call of a method in a process end it, or its parent, before it does anything."""
    action, calls = getattr(place, name), count(1)

    def die(*args: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getppid() if is_parent else os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        return action(*args)

    return lambda patch: patch.setattr(place, name, die)


@pytest.mark.parametrize(
    "place", [(_shard_places, "_write_index", 2), (_tar_shard.TarShard, "_added", 45)], ids=["index", "tar"]
)
@pytest.mark.parametrize(
    "options",
    [{"max_samples": 30}, {"max_bytes": 150_000}, {"max_samples": 30, "num_workers": 2}],
    ids=str,
)
def test_a_run_that_was_killed_is_gone_on_with(
    photo_folder: Path, tmp_path: Path, references: Any, place: Any, options: dict[str, int]
) -> None:
    again = partial(kdp.write_shards, kdp.image_folder(photo_folder), tmp_path / "train-%06d.tar", **options)
    killed(again, kill_at(*place, is_parent="num_workers" in options))
    reference = references[str({name: value for name, value in options.items() if name != "num_workers"})]
    before = tars_in(tmp_path)
    assert before.items() <= reference.items()
    assert 1 <= len(before) < len(reference)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.suffix == ".index"}
    result = again()
    assert result.num_found == len(stamps) >= 1
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert tars_in(tmp_path) == reference
    expected = {name for tar in reference for name in (tar, f"{tar}.index")} | {"train-shards.json"}
    assert names_in(tmp_path) == expected


def test_a_run_is_gone_on_with_by_other_workers(
    photo_folder: Path, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, index: Any) -> None:
        if "000002" in url:
            raise OSError("the storage is gone")
        keep(url, index)

    keep = _shard_places._write_index
    again = partial(write, kdp.image_folder(photo_folder), tmp_path, max_samples=None, max_bytes=150_000)
    monkeypatch.setattr(_shard_places, "_write_index", fail)
    for num_workers in (0, 2, 0):
        with pytest.raises(OSError, match="gone"):
            again(num_workers=num_workers)
        assert names_in(tmp_path) >= {"train-000000.tar.index", "train-000001.tar.index", "train-000002.tar"}
        assert "train-000002.tar.index" not in names_in(tmp_path)
    monkeypatch.undo()
    assert again(num_workers=2).num_found >= 2
    assert tars_in(tmp_path) == references[str(LIMITS[1])]


def test_a_stream_is_gone_on_with(photo_shards: str, tmp_path: Path) -> None:
    write(kdp.stream_shards(photo_shards), tmp_path)
    whole = tars_in(tmp_path)
    for name in ("train-000003.tar.index", "train-000004.tar", "train-000004.tar.index"):
        (tmp_path / name).unlink()
    assert write(kdp.stream_shards(photo_shards), tmp_path).num_found == 3
    assert tars_in(tmp_path) == whole


def test_a_stream_that_does_not_give_what_it_gave_is_an_error(photo_shards: str, tmp_path: Path) -> None:
    write(kdp.stream_shards(photo_shards).shuffle().set_seed(1), tmp_path)
    (tmp_path / "train-000002.tar.index").unlink()
    with pytest.raises(DataError, match="The chain does not give what it gave: sample "):
        write(kdp.stream_shards(photo_shards).shuffle().set_seed(2), tmp_path)


STREAMS: dict[str, Callable[[str], Any]] = {
    "rng": lambda url: kdp.stream_shards(url).transform("jpg", lambda x, rng: rng.bytes(8)),
    "shuffle": lambda url: kdp.stream_shards(url).shuffle(),
    "both": lambda url: kdp.stream_shards(url).shuffle().to_samples().transform("jpg", lambda x, rng: rng.bytes(8)),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_random_stream_gives_the_same_bytes_wherever_it_stands(kind: str, photo_shards: str, tmp_path: Path) -> None:
    stream = STREAMS[kind](photo_shards)
    options = {"extensions": {"jpg": "bin"}}
    for name in ("first", "second"):
        write(stream, tmp_path / name, **options)
        next(iter(stream))
    assert tars_in(tmp_path / "first") == tars_in(tmp_path / "second")
    (tmp_path / "first" / "train-000002.tar.index").unlink()
    assert write(stream, tmp_path / "first", **options).num_found == 2
    assert tars_in(tmp_path / "first") == tars_in(tmp_path / "second")


def test_writing_a_stream_does_not_move_it_on(photo_shards: str, tmp_path: Path) -> None:
    stream, same = STREAMS["rng"](photo_shards), STREAMS["rng"](photo_shards)
    write(stream, tmp_path, extensions={"jpg": "bin"})
    assert [sample["jpg"] for sample in stream] == [sample["jpg"] for sample in same]


def test_shards_that_are_there_are_looked_at_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Index:
        keys = ("a", "b")
        version = SimpleNamespace(size=7)

    asked, alive = list[str](), weakref.WeakSet[Index]()

    def look(url: str) -> Index:
        asked.append(url)
        index = Index()
        alive.add(index)
        return index

    monkeypatch.setattr(_shard_places, "index_beside", look)
    found = _shard_places.ShardPlaces(tmp_path / "train-%06d.tar").finished(range(1000))
    with closing(found):
        assert next(found) == (0, (("a", "b"), 7))
        assert len(asked) < 100
        for _ in range(500):
            next(found)
        assert len(alive) < 100


def test_a_run_that_was_complete_writes_nothing(photo_folder: Path, tmp_path: Path) -> None:
    first = write(kdp.image_folder(photo_folder), tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for options in ({}, {"num_workers": 2}):
        again = write(kdp.image_folder(photo_folder), tmp_path, **options)
        assert again == first._replace(num_found=6)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == stamps


def test_a_shard_that_was_changed_is_written_again(photo_folder: Path, tmp_path: Path, references: Any) -> None:
    write(kdp.image_folder(photo_folder), tmp_path)
    for name in ("train-000001.tar", "train-000003.tar.index"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1])
    assert write(kdp.image_folder(photo_folder), tmp_path).num_found == 4
    assert tars_in(tmp_path) == references[str(LIMITS[0])]


@pytest.mark.parametrize("is_backwards", [False, True])
def test_shards_that_were_copied_are_not_written_again(
    photo_folder: Path, tmp_path: Path, references: Any, is_backwards: bool
) -> None:
    write(kdp.image_folder(photo_folder), tmp_path / "here")
    there = Path(shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copy))
    for number, path in enumerate(sorted(there.iterdir(), reverse=is_backwards)):  # a shard before its index, or after
        os.utime(path, ns=(10**18 + number, 10**18 + number))
    stamps = {path: path.stat().st_mtime_ns for path in there.iterdir()}
    assert write(kdp.image_folder(photo_folder), there).num_found == 6
    assert {path: path.stat().st_mtime_ns for path in there.iterdir()} == stamps
    changed = bytearray((there / "train-000002.tar").read_bytes())
    changed[changed.index(b"\xff\xd8") + 100] ^= 1  # of a photo
    (there / "train-000002.tar").write_bytes(changed)
    assert write(kdp.image_folder(photo_folder), there).num_found == 5
    assert tars_in(there) == references[str(LIMITS[0])]


OTHERS: list[tuple[Any, str]] = [
    (lambda folder: (folder[:150], {}), "the chain has changed at SubsetterMap; `num_samples` was 160, and is 150"),
    (lambda folder: (folder.permute(1), {}), "the chain has changed at PermuterMap"),
    (lambda folder: (folder, {"max_samples": 31}), "`max_samples` was 30, and is 31"),
    (lambda folder: (folder, {"max_bytes": 10**6}), "`max_bytes` was None, and is 1000000"),
    (
        lambda folder: (folder, {"key": lambda sample: str(sample.index)}),
        "`fields`, `encode`, `extensions` or `key` is ",
    ),
    (lambda folder: (folder, {"encode": {"x": "png"}}), "`fields`, `encode`, `extensions` or `key` is "),
    (lambda folder: (folder, {"fields": "x"}), "`fields`, `encode`, `extensions` or `key` is "),
]


@pytest.mark.parametrize(("other", "told"), OTHERS, ids=[told for _, told in OTHERS])
def test_another_job_is_refused(photo_folder: Path, tmp_path: Path, other: Any, told: str) -> None:
    folder = kdp.image_folder(photo_folder)
    write(folder, tmp_path)
    before = tars_in(tmp_path)
    pipe, options = other(folder)
    with pytest.raises(FileExistsError) as caught:
        write(pipe, tmp_path, **options)
    assert told in str(caught.value)
    assert tars_in(tmp_path) == before


def test_shards_that_nobody_knows_are_not_overwritten(photo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train-000007.tar").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"There are shards already, 'train-000007\.tar' for one"):
        write(kdp.image_folder(photo_folder), tmp_path)
    assert names_in(tmp_path) == {"train-000007.tar"}


def test_a_mistake_in_the_first_call_does_not_stand_in_the_way_of_the_second(tmp_path: Path) -> None:
    pixels = kdp.from_dataset([(np.zeros((4, 4, 3), np.uint8), 0)]).transform("x", lambda x: x.view(np.recarray))
    with pytest.raises(ValueError, match="`encode"):
        write(pixels, tmp_path, encode={"x": "pgn"})
    with pytest.raises(ChainError, match="is no extension"):
        write(kdp.from_dataset([(b"a", 0)], fields="b/c y"), tmp_path)
    assert write(pixels, tmp_path, encode={"x": "png"}).num_samples == 1


def test_notes_that_are_none_are_refused(photo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train-shards.json").write_text("[1]")
    with pytest.raises(DataError, match=r"train-shards\.json' cannot be read as notes of shards"):
        write(kdp.image_folder(photo_folder), tmp_path)


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


def test_a_real_store_gets_the_same_shards(photo_folder: Path, s3: str, references: Any) -> None:
    urls = f"{s3}/set/train-%06d.tar"
    result = kdp.write_shards(kdp.image_folder(photo_folder), urls, max_samples=30, num_workers=1)
    store = fsspec.filesystem("s3")
    store.invalidate_cache()
    names = [path.rpartition("/")[2] for path in store.find(f"{s3}/set")]
    assert {name: store.cat_file(f"{s3}/set/{name}") for name in names if name.endswith(".tar")} == (
        references[str(LIMITS[0])]
    )
    expected = {name for tar in references[str(LIMITS[0])] for name in (tar, f"{tar}.index")}
    assert set(names) == expected | {"train-shards.json"}
    for url in result.urls:
        index = ShardIndex.from_bytes(read_url(index_url(url)), url)
        assert index.version == version_of(url)
        assert index.version.tag
    back = kdp.open_shards(result.urls).rename_fields(x="jpg", y="cls")
    assert list(back.select("x y")) == list(kdp.image_folder(photo_folder).select("x y"))


def test_a_run_to_a_store_is_gone_on_with(photo_folder: Path, s3: str, references: Any) -> None:
    urls = f"{s3}/train-%06d.tar"
    first = kdp.write_shards(kdp.image_folder(photo_folder), urls, max_samples=30)
    indexes = [read_url(index_url(url)) for url in first.urls]
    store = fsspec.filesystem("s3")
    store.rm([f"{s3}/train-000001.tar", f"{s3}/train-000004.tar.index"])
    result = kdp.write_shards(kdp.image_folder(photo_folder), urls, max_samples=30)
    assert result.num_found == 4
    assert [read_url(index_url(url)) for url in result.urls] == indexes
    assert [read_url(url) for url in result.urls] == list(references[str(LIMITS[0])].values())


def test_a_source_that_fails_now_and_then_changes_nothing(
    photo_shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.retries._FIRST_WAIT_S", 0.0)
    write(kdp.open_shards(photo_shards), tmp_path / "whole")
    folder, name = photo_shards.rsplit("/", 1)
    with faulty_storage(folder, faults=[Fault("reset", every=7), Fault("truncate", every=11)]) as storage:
        write(kdp.open_shards(f"faulty://{name}", fetch="members"), tmp_path / "faulty")
        assert sum(storage.stats().faults.values()) > 3
    assert tars_in(tmp_path / "faulty") == tars_in(tmp_path / "whole")


def test_an_upload_is_tried_again_and_an_error_names_the_shard(
    letters: Any, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.retries._FIRST_WAIT_S", 0.0)
    kind = fsspec.get_filesystem_class("memory")
    put, failing = kind.put_file, iter([True, True])

    def put_file(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(failing, False):
            raise ConnectionResetError("reset")
        put(self, *args, **kwargs)

    monkeypatch.setattr(kind, "put_file", put_file)
    result = kdp.write_shards(letters, f"memory://{s3[5:]}/birds-%d.tar", max_samples=4)
    assert [len(kdp.open_shards(url)) for url in result.urls] == [4, 2]
    failing = iter([True] * 100)
    with pytest.raises(DataError, match=r"birds-0\.tar' cannot be written: reset"):
        kdp.write_shards(letters, f"memory://{s3[5:]}/other/birds-%d.tar", max_samples=4)


def test_damaged_samples_are_errors_or_left_out(tmp_path: Path) -> None:
    def load(x: int) -> str:
        if x in (3, 4):
            raise ValueError("torn")
        return str(x)

    chain = kdp.from_dataset([(x, x) for x in range(10)]).transform("x", load)
    with pytest.raises(ValueError, match="torn") as caught:
        write(chain, tmp_path / "raise", max_samples=4)
    notes = "\n".join(caught.value.__notes__)
    assert "of sample '3'" in notes
    assert "shard " in notes
    for number, limits in enumerate([{"max_samples": 4}, {"max_samples": None, "max_bytes": 9000}]):
        for num_workers in (0, 2):
            folder = tmp_path / f"skip-{number}-{num_workers}"
            result = write(chain.on_error("skip"), folder, **limits, num_workers=num_workers)
            assert (result.num_samples, result.num_left_out) == (8, 2)
            keys = [key.rpartition("/")[2] for key in kdp.open_shards(result.urls).column("key")]
            assert keys == [str(x) for x in range(10) if x not in (3, 4)]
        assert tars_in(tmp_path / f"skip-{number}-0") == tars_in(tmp_path / f"skip-{number}-2")


def test_what_a_stream_leaves_out_is_left_out_when_it_goes_on(photo_shards: str, tmp_path: Path) -> None:
    def load(y: int, rng: Any = None) -> int:
        if y == 3:
            raise ValueError("torn")
        return y

    chain = kdp.stream_shards(photo_shards).transform("cls", load).on_error("skip")
    assert write(chain, tmp_path).num_left_out == 12
    before = tars_in(tmp_path)
    for name in ("train-000002.tar", "train-000003.tar.index"):
        (tmp_path / name).unlink()
    assert write(chain, tmp_path).num_found == 2
    assert tars_in(tmp_path) == before


def test_a_sample_whose_key_cannot_be_made_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    def key(sample: kdp.Sample) -> str:
        if sample["y"] == 1:
            raise DataError("no name")
        return sample.key

    chain = kdp.from_dataset([(str(y), y) for y in range(6)]).on_error("skip")
    options = {"max_samples": None, "max_bytes": 4096, "key": key}
    write(chain, tmp_path, **options)
    before = tars_in(tmp_path)
    (tmp_path / sorted(names_in(tmp_path))[-2]).unlink()  # the last index
    assert write(chain, tmp_path, **options).num_found == len(before) - 1 >= 2
    assert tars_in(tmp_path) == before


class Torn(kdp.MapPipe):
    """Samples of which some cannot be read."""

    def __len__(self) -> int:
        return 6

    def fetch(self, index: int) -> kdp.Sample:
        if index in (0, 3):
            raise OSError("torn")
        return kdp.Sample({"x": str(index), "y": index}, key=str(index), index=index)


@pytest.mark.parametrize("options", [{"max_samples": 2}, {"max_samples": None, "max_bytes": 6000}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_cannot_be_read_are_left_out_and_counted(
    tmp_path: Path, options: dict[str, Any], num_workers: int
) -> None:
    listed = tmp_path / "bad.jsonl"
    chain = Torn().on_error("quarantine", path=listed)
    result = write(chain, tmp_path / "shards", **options, num_workers=num_workers)
    assert (result.num_samples, result.num_left_out) == (4, 2)
    noted = [json.loads(line) for line in listed.read_text().splitlines()]
    assert sorted(entry["key"] for entry in noted) == ["position 0", "position 3"]
    assert {entry["error"] for entry in noted} == {"OSError: torn"}
    with pytest.raises(OSError, match="torn"):
        write(Torn(), tmp_path / "raise", **options, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_counted_where_all_are_left_out(tmp_path: Path, num_workers: int) -> None:
    chain = kdp.from_dataset([(0, 0), (0, 0)]).transform("x", lambda x: 1 / x).on_error("skip")
    result = write(chain, tmp_path, max_samples=None, max_bytes=6000, num_workers=num_workers)
    assert (result.urls, result.num_left_out) == ([], 2)


def test_quarantine_lists_what_was_left_out_once(tmp_path: Path) -> None:
    chain = kdp.from_dataset([(1, 0), (0, 0), (4, 0)]).transform("x", lambda x: 1 / x)
    chain = chain.on_error("quarantine", path=tmp_path / "bad.jsonl")
    result = write(chain, tmp_path, max_samples=None, max_bytes=10**6, num_workers=2)
    assert result.num_samples == 2
    assert [json.loads(line)["key"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()] == ["1"]


def test_an_interrupt_leaves_no_part(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(sample: Any) -> str:
        if sample.index == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return str(sample.index)

    with pytest.raises(KeyboardInterrupt):
        write(kdp.image_folder(photo_folder), tmp_path, key=interrupt)
    assert names_in(tmp_path) == {"train-000000.tar", "train-000000.tar.index", "train-shards.json"}


def test_sources_elsewhere_are_told_what_will_be_read(photo_shards: str, tmp_path: Path) -> None:
    told: list[list[int]] = []

    class Telling(kdp.MapPipe):
        def __len__(self) -> int:
            return 150

        def fetch(self, index: int) -> kdp.Sample:
            return kdp.Sample({"y": index}, key=str(index), index=index)

        def announce(self, positions: Any) -> None:
            told.append(positions.tolist())

    write(Telling(), tmp_path, max_samples=100)
    assert set().union(*told) == set(range(150))
    assert max(map(len, told)) <= 2 * _shard_job._BLOCK


def test_an_empty_chain_gives_no_shard(letters: Any, tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"num_workers": 2}, {"max_samples": None, "max_bytes": 100}]):
        result = write(letters[:0], tmp_path / str(number), **options)
        assert (result.urls, result.num_samples) == ([], 0)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"urls": "train.tar"}, ValueError, "`urls` must be a path or URL of tars with one number in the file name"),
    ({"urls": "train-%06d.tar.gz"}, ValueError, "compressed ones have no positions"),
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
def test_bad_arguments_are_refused_before_anything_is_written(
    letters: Any, tmp_path: Path, arguments: dict[str, Any], error: type[Exception], told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=told):
        kdp.write_shards(letters, **{"urls": "train-%06d.tar", "max_samples": 4, **arguments})
    assert not names_in(tmp_path)


def test_chains_that_give_no_samples_are_refused(letters: Any, photo_shards: str, tmp_path: Path) -> None:
    with pytest.raises(ChainError, match=r"Put `\.write_shards\(\)` before `\.select\(\)`"):
        write(letters.select("x y"), tmp_path)
    with pytest.raises(ChainError, match="Those are batches"):
        write(letters.deal(batch_size=2), tmp_path)
    with pytest.raises(TypeError, match="must be a datapipe"):
        write([1, 2], tmp_path)
    for options in ({"num_workers": 2}, {"executor": ThreadPoolExecutor(1)}):
        with pytest.raises(ValueError, match="must be left out for a stream"):
            write(kdp.stream_shards(photo_shards), tmp_path, **options)


@pytest.mark.parametrize(
    "name", ["a.jpg", "heron/1.cls", "x" * 96 + ".jpg", "x" * 97 + ".jpg", "größe.jpg", "a\udcff.jpg"]
)
@pytest.mark.parametrize("size", [0, 1, 511, 110_000, 8**11 - 1, 8**11])
def test_headers_are_those_of_tarfile(name: str, size: int) -> None:
    made = _tar_shard.as_tar_sample(name.partition(".")[0], [])
    assert made.num_bytes == 0
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    assert _tar_shard._header(name, size) == info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def test_long_and_odd_keys_come_back(tmp_path: Path) -> None:
    keys = ["deep/" * 30 + "a", "größe ☃", "a\udcffb", "f.older/b"]
    pipe = kdp.from_ids(keys, [0, 1, 2, 3], load=lambda key: key.encode("utf-8", "surrogateescape"))
    result = write(pipe, tmp_path, extensions={"x": "bin"}, max_samples=None, max_bytes=10**5)
    back = kdp.open_shards(result.urls)
    assert [key.partition("/")[2] for key in back.column("key")] == keys
    assert make_index(result.urls[0], with_checksums=True).to_bytes() == read_url(index_url(result.urls[0]))


KINDS: list[tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]] = [
    ({"y": 3, "n": np.int64(4)}, {}, {"0.cls": b"3", "0.n.cls": b"4"}),
    ({"y": "heron", "caption": "größe"}, {}, {"0.cls": b"heron", "0.caption.txt": "größe".encode()}),
    ({"meta": {"a": [1, 2.5, None]}, "score": 0.5, "ok": True}, {},
     {"0.meta.json": b'{"a": [1, 2.5, null]}', "0.score.json": b"0.5", "0.ok.json": b"true"}),
    ({"jpg": b"any", "json": '{"a":1}', "txt": "t", "mp3": b"m"}, {},
     {"0.jpg": b"any", "0.json": b'{"a":1}', "0.txt": b"t", "0.mp3": b"m"}),
    ({"x": b"\xff\xd8\xff-", "mask": b"\x89PNG\r\n\x1a\n"}, {},
     {"0.jpg": b"\xff\xd8\xff-", "0.mask.png": b"\x89PNG\r\n\x1a\n"}),
    ({"x": 1, "y": 2}, {"encode": {"x": lambda x: bytes([x])}, "extensions": {"x": "bin"}, "fields": "x"},
     {"0.bin": b"\1"}),
    ({"x": None, "y": 2}, {}, {"0.cls": b"2"}),
]  # fmt: skip


@pytest.mark.parametrize(("sample", "options", "expected"), KINDS, ids=[" ".join(sample) for sample, *_ in KINDS])
def test_what_a_field_becomes_follows_from_its_value(
    tmp_path: Path, sample: dict[str, Any], options: dict[str, Any], expected: dict[str, bytes]
) -> None:
    assert one(tmp_path, sample, **options) == expected


def test_arrays_and_pixels_come_back(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    members = one(tmp_path, {"x": pixels, "depth": pixels[..., 0] / 7}, encode={"x": "png"})
    assert np.array_equal(np.load(io.BytesIO(members["0.depth.npy"])), pixels[..., 0] / 7)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(members["0.png"]))), pixels)
    encoded = {"x": members["0.png"]}
    assert one(tmp_path / "again", encoded, encode={"x": "png"})["0.png"] == members["0.png"]
    with pytest.raises(ChainError, match="Field 'x' holds Image, which has no encoding of its own"):
        one(tmp_path / "pixels", {"x": Image.fromarray(pixels)})
    with pytest.raises(ChainError, match="holds bytes of an unknown kind"):
        one(tmp_path / "bytes", {"x": b"any"})
    with pytest.raises(ChainError, match="An array of objects is not written"):
        one(tmp_path / "objects", {"x": np.array([{}, 1])})
    with pytest.raises(ChainError, match="Two fields of sample '0' would be member 'jpg'"):
        one(tmp_path / "two", {"x": b"\xff\xd8\xff", "jpg": b"a"})


@pytest.mark.parametrize("key", ["a.b", "", "a/", "../a", "/a", "a\n"])
def test_a_key_that_a_tar_cannot_hold_is_refused(letters: Any, tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match="cannot stand in a tar"):
        write(letters, tmp_path, key=lambda sample: key)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_key_that_comes_twice_is_refused(letters: Any, tmp_path: Path, num_workers: int) -> None:
    twice = letters.repeat_until(repetitions=2)
    with pytest.raises(DataError, match=r"Two samples have the key '[0-5]', in shards 0 and 1: keys must be unique"):
        write(twice, tmp_path / "across", max_samples=6, num_workers=num_workers)
    with pytest.raises(DataError, match="Two samples have the key '0', in shard '"):
        write(twice, tmp_path / "within", max_samples=12, num_workers=num_workers)
    key: Callable[[Any], str] = lambda sample: f"{sample.ordinal:09}"  # noqa: E731
    assert write(twice, tmp_path / "named", max_samples=6, num_workers=num_workers, key=key).num_samples == 12


@pytest.mark.parametrize(
    ("value", "encode", "why"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), None, "BFloat16"),
        ("\ud800", None, "surrogates"),
        (np.array([object()]), None, "only pickle could"),
        (Image.new("F", (3, 3)), "png", "cannot write mode F"),
        (Image.new("I;16", (3, 3)), "jpg", "an image of mode 'I;16' would lose values"),
        (Image.new("F", (3, 3)), "webp", "an image of mode 'F' would lose values"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_written_is_told_with_its_field(
    value: Any, encode: str | None, why: str, tmp_path: Path
) -> None:
    chain = kdp.from_dataset([(value, 0)])
    with pytest.raises(kdp.ChainError, match=rf"Field 'x' cannot be written.*{why}.*takes a function") as caught:
        write(chain, tmp_path, encode=None if encode is None else {"x": encode})
    assert ".." not in str(caught.value).replace("...", "")
