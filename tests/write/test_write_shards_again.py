"""Shards of a run that broke off, or was complete: it goes on where it was, and another job is rejected."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.core.errors import ChainError, DataError
from kdpipes.storage.index_home import index_url
from kdpipes.write import shards
from tests.processes import in_child
from tests.write.shards import LIMITS, QUIET, names_in, tars_in, write

pytestmark = QUIET


def killed(write_all: Callable[[], object], patches: Callable[[pytest.MonkeyPatch], object]) -> None:
    """Run something in a process that is killed as `patches` say, and wait until its workers have ended, too."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        os.close(receiver)
        signal.alarm(20)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patches(patch)
                write_all()
        finally:  # nothing of the test may run on in the child
            os._exit(1)
    os.close(sender)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    # A worker notices the death of its parent a little later, and may complete a shard until then.
    assert not os.read(receiver, 1), "all copies of the other end are closed when the last worker has ended"
    os.close(receiver)


def kill_at(place: Any, name: str, number: int, *, is_parent: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets the `number`-th call of a method in a process end it, or its parent, before it does anything."""
    action, calls = getattr(place, name), count(1)

    def die(*args: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getppid() if is_parent else os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        return action(*args)

    return lambda patch: patch.setattr(place, name, die)


@pytest.mark.parametrize("place", [(shards, "index_url", 2), (shards, "as_tar_sample", 45)], ids=["index", "tar"])
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


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_second_job_at_the_same_time_is_reported(
    kind: str, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = partial(kdp.write_shards, kdp.image_folder(photo_folder), tmp_path / "a-%06d.tar", max_samples=30)
    holder = "this process" if kind == "thread" else f"process {os.getpid()} on "

    def second() -> None:
        with pytest.raises(RuntimeError, match=f"already being written by {holder}.*`write_shards` in one process"):
            again()

    def during(url: str) -> str:
        assert in_child(second) == 0 if kind == "process" else second() is None
        return index_url(url)

    with monkeypatch.context() as patched:
        patched.setattr(shards, "index_url", during)
        first = again()
    assert again().num_found == len(first.urls) > 1
    assert not [name for name in names_in(tmp_path) if "lock" in name or "part" in name]


def test_a_run_is_gone_on_with_by_other_workers(
    photo_folder: Path, tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str) -> str:
        if "000002" in url:
            raise OSError("the storage is gone")
        return index_url(url)

    again = partial(write, kdp.image_folder(photo_folder), tmp_path, max_samples=None, max_bytes=150_000)
    monkeypatch.setattr(shards, "index_url", fail)
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
    with pytest.raises(DataError, match="The chain does not yield the same samples as before: sample "):
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

    monkeypatch.setattr(shards, "index_beside", look)
    found = shards.ShardPlaces(tmp_path / "train-%06d.tar").finished(1000)
    with closing(found):
        first = next(found)
        assert (first.number, len(first.hashes), first.num_bytes) == (0, 2, 7)
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
    (lambda folder: (folder[:150], {}), "the chain has changed at subset; `num_samples` was 160, and is 150"),
    (lambda folder: (folder.permute(1), {}), "the chain has changed at permute"),
    (lambda folder: (folder, {"max_samples": 31}), "`max_samples` was 30, and is 31"),
    (lambda folder: (folder, {"max_bytes": 10**6}), "`max_bytes` was None, and is 1000000"),
    (
        lambda folder: (folder, {"key": lambda sample: str(sample.index)}),
        "`fields`, `encode`, `extensions` or `key` has ",
    ),
    (lambda folder: (folder, {"encode": {"x": "png"}}), "`fields`, `encode`, `extensions` or `key` has "),
    (lambda folder: (folder, {"fields": "x"}), "`fields`, `encode`, `extensions` or `key` has "),
]


@pytest.mark.parametrize(("other", "told"), OTHERS, ids=[told for _, told in OTHERS])
def test_another_job_is_rejected(photo_folder: Path, tmp_path: Path, other: Any, told: str) -> None:
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
    with pytest.raises(FileExistsError, match=r"There are shards already, such as 'train-000007\.tar'"):
        write(kdp.image_folder(photo_folder), tmp_path)
    assert names_in(tmp_path) == {"train-000007.tar"}


def test_a_mistake_in_the_first_call_does_not_block_the_second(tmp_path: Path) -> None:
    pixels = kdp.from_dataset([(np.zeros((4, 4, 3), np.uint8), 0)]).transform("x", lambda x: x.view(np.recarray))
    with pytest.raises(ValueError, match="`encode"):
        write(pixels, tmp_path, encode={"x": "pgn"})
    with pytest.raises(ChainError, match="is not an extension"):
        write(kdp.from_dataset([(b"a", 0)], fields="b/c y"), tmp_path)
    assert write(pixels, tmp_path, encode={"x": "png"}).num_samples == 1


def test_notes_that_are_none_are_rejected(photo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train-shards.json").write_text("[1]")
    with pytest.raises(DataError, match=r"train-shards\.json' cannot be read as notes of shards"):
        write(kdp.image_folder(photo_folder), tmp_path)
