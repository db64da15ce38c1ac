"""Whole shards on this machine: each byte moved once, ahead of need; nothing held longer than it is needed."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kdpipes.storage import shard_cache
from kdpipes.storage.files import HeldFile
from kdpipes.storage.shard_cache import ShardFolder
from tests.faulty_storage import FaultyFileSystem
from tests.processes import fork, in_child
from tests.storage.kept_shards import CONTENTS, RANGE, SIZE, has_read, kept, made, moved, settle, shard, shards, size_of
from tests.threads import threads_left

pytestmark = pytest.mark.usefixtures("no_waits", "forgets_tags", "small_ranges")


def test_a_shard_comes_once_and_stays_for_others(storage: FaultyFileSystem, place: Path) -> None:
    one = shard(0)
    for cache in (made(place), made(place), pickle.loads(pickle.dumps(made(place)))):
        assert cache.read(one, 5, 10) == CONTENTS[0][5:15]
        assert has_read(cache, one)
    assert in_child(lambda: has_read(made(place), one) or os._exit(1)) == 0
    assert moved(storage) == SIZE
    assert kept(place) == [one.name]
    assert (place / f"{one.name}.tar").read_bytes() == CONTENTS[0]


def test_nothing_is_downloaded_for_who_only_looks(storage: FaultyFileSystem, place: Path) -> None:
    cache, one = made(place), shard(0)
    assert cache.read(one, 0, 9, fetches=False) is None
    assert not cache.has(one)
    assert (moved(storage), place.exists()) == (0, False)


def test_shards_that_are_read_side_by_side_stay_open(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    find = ShardFolder.find
    monkeypatch.setattr(ShardFolder, "find", lambda folder, one: opened.append(one.name) or find(folder, one))
    cache = made(place)
    assert all(has_read(cache, one) for one in shards())
    cache.expect(shards(), [3, 3, 3, 3, 5, 5])
    opened.clear()
    for window in (shards()[:4], shards()[4:]):
        assert all(has_read(cache, one) for one in window * 5)
    assert opened == [one.name for one in shards()]


def test_with_little_room_a_slow_reader_holds_up_nobody(storage: FaultyFileSystem, place: Path) -> None:
    ahead, behind = (made(place, 4 * SIZE) for _ in range(2))
    for cache in (ahead, behind):
        cache.expect(shards(), [2, 2, 2, 5, 5, 5])
    assert all((has_read(ahead, one), has_read(behind, one)) for one in shards()[:3])
    assert sum(has_read(ahead, one) for one in shards()[3:]) == 2, "two shards are open there, and no more"
    settle()


def test_a_damaged_copy_is_repaired_for_all_who_read_it(storage: FaultyFileSystem, place: Path) -> None:
    cache, other, one = made(place), made(place), shard(0)
    assert all((has_read(cache, one), has_read(other, one)))
    with (place / f"{one.name}.tar").open("r+b") as file:
        file.seek(500)
        file.write(bytes(300))
    cache.repair(one, 400, CONTENTS[0][400:900])
    assert all((has_read(cache, one), has_read(other, one)))
    cache.repair(shard(1), 0, b"which is not there")
    assert moved(storage) == SIZE


def test_a_full_disk_is_told_once_and_left_as_it_was(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch, one_range: None
) -> None:
    write, num_written = shard_cache.write_all, 0

    def fill(file: int, content: bytes) -> None:
        nonlocal num_written
        num_written += 1
        if num_written > 5:
            write(file, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    cache = made(place)
    with monkeypatch.context() as patch:
        patch.setattr(shard_cache, "write_all", fill)
        with pytest.warns(UserWarning, match=r"^Shards cannot be cached in '.*kept': .*No space left on device\. Memb"):
            assert not has_read(cache, shard(0))
        assert kept(place, ".tar", ".part") == []
        settle()
        before = len(storage.requests())
        cache.prefetch(shards())
        assert not has_read(cache, shard(1))
        assert moved(storage, before) == 0, "not again in this epoch"
    cache.expect(shards())
    assert has_read(cache, shard(0))


def test_a_folder_that_cannot_be_made_is_told_once(storage: FaultyFileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = made(tmp_path / "file" / "kept", num_ahead=2)
    cache.expect(shards())
    settle()
    with pytest.warns(UserWarning, match=r"cannot be cached in '.*file/kept': .*Not a directory"):
        assert not has_read(cache, shard(0))
    assert not has_read(cache, shard(1))
    assert moved(storage) == 0


def test_systems_without_locks_keep_no_shards(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.shard_cache.CAN_HOLD", False)
    cache = made(place)
    with pytest.warns(UserWarning, match="files cannot be locked on this system"):
        cache.expect(shards())
    assert not has_read(cache, shard(0))
    assert moved(storage) == 0


def test_the_next_shards_come_ahead_of_need(storage: FaultyFileSystem, place: Path) -> None:
    cache, order = made(place, num_ahead=2), shards()
    cache.expect(order)
    settle()
    assert kept(place) == sorted(one.name for one in order[:2])
    before = len(storage.requests())
    assert has_read(cache, order[1])
    settle()
    assert moved(storage, before) == 2 * SIZE
    assert kept(place) == sorted(one.name for one in order[:4])


def test_what_comes_ahead_removes_nothing_that_is_needed_before(storage: FaultyFileSystem, place: Path) -> None:
    cache, order = made(place, 2 * SIZE, num_ahead=3), shards()
    cache.expect(order)
    settle()
    assert kept(place) == sorted(one.name for one in order[:2])
    assert has_read(cache, order[0])
    settle()
    assert kept(place) == sorted(one.name for one in order[:2])


def test_who_is_done_leaves_no_thread_and_no_lock(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch, one_range: None
) -> None:
    before, begun, may_go_on = set(threading.enumerate()), threading.Event(), threading.Event()
    numbers, honest = count(1), FaultyFileSystem.cat_file

    def halt(self: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if next(numbers) == 9:
            begun.set()
            assert may_go_on.wait(20)
        return honest(self, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", halt)
    cache = made(place, num_ahead=5)
    cache.expect(shards())
    assert begun.wait(20)
    del cache
    gc.collect()
    may_go_on.set()
    assert threads_left(before) == []
    assert kept(place, ".tar", ".part") == [shard(0).name]
    assert size_of(place) in (8 * RANGE, 9 * RANGE), "given up after the range that was under way"
    for path in place.iterdir():
        with HeldFile(path) as file:
            assert file.hold(is_alone=True)


def test_a_child_forked_in_a_download_keeps_no_lock(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch, one_range: None
) -> None:
    begun, may_go_on, honest, parent = threading.Event(), threading.Event(), FaultyFileSystem.cat_file, os.getpid()

    def halt(self: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if os.getpid() == parent and path == "0.tar":
            begun.set()
            assert may_go_on.wait(20)
        return honest(self, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", halt)
    cache, (a, b, *_) = made(place), shards()
    source, sink = os.pipe()
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(has_read, cache, a)
        assert begun.wait(20)
        assert in_child(lambda: has_read(cache, b) or os._exit(1)) == 0
        idle = fork(lambda: os.close(sink) or os.read(source, 1))  # type: ignore[func-returns-value]
        may_go_on.set()
        assert coming.result()
    with HeldFile(place / f"{b.name}.tar") as file:
        assert file.hold(is_alone=True)
    cache.forget()
    with HeldFile(place / f"{a.name}.tar") as file:
        assert file.hold(is_alone=True), "the idle child does not hold it"
    os.close(sink)
    assert os.waitpid(idle, 0)[1] == 0
    os.close(source)


EXIT = """
import sys, threading, fsspec
from kdpipes.storage.shard_cache import Shard
from kdpipes.storage.shard_cache import ShardCache
from kdpipes.storage.files import version_of
from fsspec.implementations.memory import MemoryFileSystem
def cat_file(self, path, start=None, end=None, **kwargs):
    begun.set()
    threading.Event().wait(120)
begun = threading.Event()
fsspec.filesystem("memory").pipe("/a.tar", bytes(100))
MemoryFileSystem.cat_file = cat_file
cache = ShardCache(sys.argv[1], 1000)
cache.expect([Shard("memory://a.tar", version_of("memory://a.tar"))])
begun.wait()
"""


def test_a_process_ends_though_downloads_hang(place: Path, interpreter: Any) -> None:
    status, _, told = interpreter.run(EXIT, str(place))
    assert status == 0, told
