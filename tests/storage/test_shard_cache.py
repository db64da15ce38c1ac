"""Whole shards on this machine: each byte moved once, by one process; breaks resumed, damage noticed, limits kept."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdpipes.storage import download, shard_folder
from kdpipes.storage.download import ReplacedError
from kdpipes.storage.files import Version, version_of
from kdpipes.storage.held_files import HeldFile
from kdpipes.storage.shard_cache import Shard, ShardCache
from kdpipes.testing import Fault, FaultyFileSystem, faulty_storage

SIZE, RANGE, NUMBER = 20_000, 1_000, 6
CONTENTS = [random.Random(seed).randbytes(SIZE) for seed in range(NUMBER)]
FOR_ALL = 100 * SIZE


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waits, and no knowledge of tags from other tests."""
    monkeypatch.setattr("kdpipes.storage.retries._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(download, "_without_md5", set())


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


def made(place: Path, max_bytes: int = FOR_ALL, **sizes: int) -> ShardCache:
    return ShardCache(str(place), max_bytes, **{"num_ahead": 0, "num_ranges": 4, "range_size": RANGE, **sizes})


def shard(number: int) -> Shard:
    url = f"faulty://{number}.tar"
    return Shard(url, version_of(url))


def shards() -> list[Shard]:
    return [shard(number) for number in range(NUMBER)]


def has_read(cache: ShardCache, one: Shard) -> bool:
    """Return whether a shard could be read, and compare it."""
    number, got = int(one.url[9:-4]), cache.read(one, 100, SIZE - 100)
    assert got is None or got == CONTENTS[number][100:]
    return got is not None


def kept(place: Path, *suffixes: str) -> list[str]:
    """Return the names of the files with whole shards, or with other suffixes."""
    return sorted(path.stem for path in place.iterdir() if path.suffix in (suffixes or (".tar",)))


def moved(files: FaultyFileSystem, since: int = 0) -> int:
    return sum(request.delivered for request in files.requests()[since:] if request.kind == "range")


def size_of(place: Path) -> int:
    """Return how many bytes a folder has, while others change it."""
    size = 0
    for path in place.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def settle() -> None:
    """Wait for the threads that look ahead."""
    for thread in threading.enumerate():
        if thread.name == "kdpipes-shards":
            thread.join(20)


def in_child(work: Callable[[], object]) -> int:
    """Return the exit status of a forked process that does `work`; one that hangs is ended by SIGALRM."""
    child = fork(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            work()
        except BaseException:  # nothing of the test may run on in the child
            os._exit(1)
        os._exit(0)
    return child


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


@pytest.mark.parametrize("kind", ["reset", "reset_midway", "timeout", "unavailable", "too_many_requests", "truncate"])
def test_what_passes_is_outlasted(origin: str, place: Path, kind: Any) -> None:
    with faulty_storage(origin, faults=[Fault(kind, every=3, on="range")], sleep=lambda _: None) as files:
        assert all(has_read(made(place), one) for one in shards())
        assert files.stats().faults[kind] > NUMBER
        wasted = sum(one.delivered for one in files.requests() if one.faults)
        assert moved(files) == NUMBER * SIZE + wasted, "a range alone is asked for again"


def test_a_download_that_fails_goes_on_later(origin: str, place: Path) -> None:
    with faulty_storage(origin, faults=[Fault("unavailable", after=9, times=6, on="range")]) as files:
        cache, one = made(place, num_ranges=1), shard(0)
        assert not has_read(cache, one)
        assert not has_read(cache, one), "not tried again in this epoch"
        assert len([request for request in files.requests() if request.kind == "range"]) == 9 + 6
        assert kept(place, ".part") == [one.name]
        cache.expect([one])
        assert has_read(cache, one)
        assert files.stats().bytes_repeated == 0
        assert moved(files) == SIZE


@pytest.mark.parametrize("num_ranges", [1, 4])
def test_a_killed_download_is_resumed(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch, num_ranges: int
) -> None:
    one, write, num_written = shard(0), download._write, 0

    def die(file: HeldFile, content: bytes) -> None:
        nonlocal num_written
        num_written += 1
        write(file, content[: len(content) // 2] if num_written == 8 else content)
        if num_written == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(download, "_write", die)
        assert in_child(lambda: made(place, num_ranges=num_ranges).read(one, 0, 9)) == -signal.SIGKILL
    assert (place / f"{one.name}.part").stat().st_size == 7 * RANGE + RANGE // 2
    assert has_read(made(place, num_ranges=num_ranges), one)
    assert 0 < storage.stats().bytes_repeated <= num_ranges * RANGE
    assert kept(place, ".tar", ".part") == [one.name]


def test_a_shard_that_is_replaced_meanwhile_is_refused(origin: str, place: Path) -> None:
    for kind in ("new_etag", "new_size"):
        with faulty_storage(origin, faults=[Fault(kind, after=1, on="info")]):  # type: ignore[arg-type]
            with pytest.raises(ReplacedError, match=r"Shard 'faulty://0\.tar' has been replaced since its index was"):
                made(place).read(shard(0), 0, 9)
            assert kept(place, ".tar", ".part") == []


def test_a_shard_that_is_removed_meanwhile_is_refused(storage: FaultyFileSystem, origin: str, place: Path) -> None:
    one = shard(0)
    place.mkdir()
    (place / f"{one.name}.part").write_bytes(CONTENTS[0])
    Path(origin, "0.tar").unlink()
    with pytest.raises(ReplacedError, match=r"Shard 'faulty://0\.tar' has been removed"):
        made(place).read(one, 0, 9)


def test_a_part_of_another_version_is_not_resumed(storage: FaultyFileSystem, origin: str, place: Path) -> None:
    before = shard(0)
    place.mkdir()
    (place / f"{before.name}.part").write_bytes(CONTENTS[1][: SIZE // 2])
    Path(origin, "0.tar").write_bytes(CONTENTS[0])
    assert shard(0).name != before.name
    assert has_read(made(place), shard(0))


@pytest.mark.parametrize("length", [0, SIZE - 10, SIZE + 10])
def test_a_copy_of_another_length_is_made_anew(storage: FaultyFileSystem, place: Path, length: int) -> None:
    one = shard(0)
    for name in (f"{one.name}.tar", f"{one.name}.part"):
        place.mkdir(exist_ok=True)
        (place / name).write_bytes((CONTENTS[0] + bytes(10))[:length] if name.endswith("tar") else bytes(SIZE + 10))
        assert has_read(made(place), one)
        (place / f"{one.name}.tar").unlink()


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


def tag_by(monkeypatch: pytest.MonkeyPatch, tag_of: Callable[[bytes], str]) -> None:
    """Let the storage say tags that are computed from the contents."""
    honest = FaultyFileSystem.info

    def info(self: FaultyFileSystem, path: str, **kwargs: Any) -> dict[str, Any]:
        number = int(path.rsplit("/", 1)[-1].removesuffix(".tar"))
        return {**honest(self, path, **kwargs), "ETag": f'"{tag_of(CONTENTS[number])}"'}

    monkeypatch.setattr(FaultyFileSystem, "info", info)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def test_damage_on_the_way_is_seen_by_the_tag(origin: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tag_by(monkeypatch, md5)
    with faulty_storage(origin, faults=[Fault("flip_bit", after=3, times=1)]) as files:
        assert has_read(made(place), shard(0))
        assert moved(files) == 2 * SIZE
    with faulty_storage(origin, faults=[Fault("flip_bit", probability=0.5)]):
        assert not has_read(made(place), shard(1))
    assert len(kept(place)) == 1


def test_a_tag_that_only_looks_like_a_checksum_costs_one_download(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag_by(monkeypatch, lambda content: md5(content[::-1]))
    assert all(has_read(made(place), one) for one in shards())
    assert moved(storage) == (NUMBER + 1) * SIZE


def test_checksums_of_s3_are_those_of_the_content(s3: str, place: Path) -> None:
    import fsspec

    fsspec.filesystem("s3").pipe(f"{s3}/a.tar", CONTENTS[0])
    one = Shard(f"{s3}/a.tar", version_of(f"{s3}/a.tar"))
    assert md5(CONTENTS[0]) in one.version.tag
    assert made(place).read(one, 0, SIZE) == CONTENTS[0]
    assert download._without_md5 == set()


def test_many_processes_and_threads_fill_one_folder(origin: str, place: Path) -> None:
    with faulty_storage(origin, faults=[Fault("latency", seconds=0.001, on="range")]) as files:
        wanted = shards()

        def work() -> None:
            cache = made(place, num_ahead=2)
            cache.expect(wanted)
            with ThreadPoolExecutor(3) as threads:
                assert all(threads.map(lambda one: has_read(cache, one), [*wanted, *wanted]))
            settle()

        children = [fork(work) for _ in range(2)]
        work()
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        stats = files.stats()
    assert (stats.bytes_repeated, stats.bytes_delivered) == (0, NUMBER * SIZE)
    assert kept(place, ".tar", ".part") == sorted(one.name for one in wanted)


def test_what_is_not_needed_goes_first_and_then_what_is_needed_last(storage: FaultyFileSystem, place: Path) -> None:
    a, b, c, d, old, older = shards()
    cache = made(place, 4 * SIZE)
    for age, one in enumerate((old, older), 1):
        has_read(cache, one)
        os.utime(place / f"{one.name}.tar", (1e9 - age, 1e9 - age))
    del cache  # which would hold them

    cache = made(place, 4 * SIZE)
    cache.expect([a, b, c, d])
    names = {one.name: letter for one, letter in zip(shards(), "abcdxy", strict=True)}
    there = []
    for one in (a, b, c, d):
        assert has_read(cache, one)
        there.append("".join(sorted(names[name] for name in kept(place))))
    assert there == ["axy", "abxy", "abcx", "abcd"], "y was used last"
    cache = made(place, 3 * SIZE)
    cache.expect([a, b, c, d, old])
    for one in (a, b, c, d, old):
        assert has_read(cache, one)
    assert set(kept(place)) == {a.name, d.name, old.name}, "b went for d while c had just been read, c for the last"


def test_what_is_being_read_stays(storage: FaultyFileSystem, place: Path) -> None:
    a, b, c, *_ = shards()
    reader, cache = made(place, 2 * SIZE), made(place, 2 * SIZE)
    assert has_read(reader, a)
    assert all([has_read(cache, b), has_read(cache, c)])
    assert kept(place) == sorted([a.name, c.name])
    assert has_read(reader, c)
    assert not has_read(cache, b), "no room"
    assert kept(place, ".tar", ".part") == sorted([a.name, c.name])
    del reader
    assert has_read(cache, b)


def test_what_is_removed_takes_no_space_though_it_is_open(storage: FaultyFileSystem, place: Path) -> None:
    a, b, *_ = shards()
    cache = made(place, SIZE)
    assert has_read(cache, a)
    with (place / f"{a.name}.tar").open("rb") as file:
        assert has_read(cache, b)
        assert os.fstat(file.fileno()).st_blocks == 0


def test_the_limit_holds_at_every_moment(origin: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, limit, honest = [], 3 * SIZE, FaultyFileSystem.cat_file

    def measured(self: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        seen.append(size_of(place))
        return honest(self, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", measured)
    draws = random.Random(0)
    with faulty_storage(origin):
        wanted = shards()
        place.mkdir()
        (place / f"{wanted[5].name}.part").write_bytes(CONTENTS[5][:7_000])

        def work(order: list[Shard]) -> None:
            cache = made(place, limit, num_ahead=2)
            cache.expect(order)
            for one in order:
                has_read(cache, one)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(work, [draws.choices(wanted, k=20) for _ in range(2)]))
        settle()
    assert 0 < max(seen) <= limit
    assert size_of(place) <= limit


def test_a_part_that_was_left_behind_makes_room_or_is_completed(storage: FaultyFileSystem, place: Path) -> None:
    a, b, *_ = shards()
    place.mkdir()
    (place / f"{a.name}.part").write_bytes(CONTENTS[0][: SIZE // 2])
    assert has_read(made(place, SIZE), b)
    assert kept(place, ".tar", ".part") == [b.name]


def test_a_part_that_is_removed_before_it_is_held_is_begun_anew(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, others = HeldFile.hold_alone, count()

    def hold_late(self: HeldFile, **kwargs: Any) -> bool:
        if self.path.suffix == ".part" and next(others) == 0:
            self.path.unlink()  # as who downloaded it does when the disk is full
        return honest(self, **kwargs)

    monkeypatch.setattr(HeldFile, "hold_alone", hold_late)
    assert has_read(made(place), shard(0))
    assert kept(place, ".tar", ".part") == [shard(0).name]


def test_a_shard_that_is_too_large_is_not_begun(storage: FaultyFileSystem, place: Path) -> None:
    cache = made(place, SIZE - 1)
    assert not cache.takes(shard(0))
    assert not has_read(cache, shard(0))
    assert moved(storage) == 0


def test_half_of_what_is_free_is_taken_at_most(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=30_000))
    a, b, *_ = shards()
    assert has_read(made(place), a)
    cache = ShardCache(str(place))
    assert cache.takes(b._replace(version=Version((30_000 + SIZE) // 2, "")))
    assert not cache.takes(b._replace(version=Version((30_000 + SIZE) // 2 + 1, "")))


def test_a_full_disk_is_told_once_and_left_as_it_was(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_written = download._write, 0

    def fill(file: HeldFile, content: bytes) -> None:
        nonlocal num_written
        num_written += 1
        if num_written > 5:
            write(file, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    cache = made(place, num_ranges=1)
    with monkeypatch.context() as patch:
        patch.setattr(download, "_write", fill)
        with pytest.warns(UserWarning, match=r"^Shards cannot be kept in '.*kept': .*No space left on device\. Memb"):
            assert not has_read(cache, shard(0))
        assert kept(place, ".tar", ".part") == []
        before = len(storage.requests())
        cache.announce(shards())
        assert not has_read(cache, shard(1))
        assert moved(storage, before) == 0, "not again in this epoch"
    cache.expect(shards())
    assert has_read(cache, shard(0))


def test_a_folder_that_cannot_be_made_is_told_once(storage: FaultyFileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = made(tmp_path / "file" / "kept", num_ahead=2)
    cache.expect(shards())
    settle()
    with pytest.warns(UserWarning, match=r"cannot be kept in '.*file/kept': .*Not a directory"):
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
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begun, may_go_on = set(threading.enumerate()), threading.Event(), threading.Event()
    numbers, honest = count(1), FaultyFileSystem.cat_file

    def halt(self: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if next(numbers) == 9:
            begun.set()
            assert may_go_on.wait(20)
        return honest(self, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", halt)
    cache = made(place, num_ahead=5, num_ranges=1)
    cache.expect(shards())
    assert begun.wait(20)
    del cache
    gc.collect()
    may_go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) <= before
    assert kept(place, ".tar", ".part") == [shard(0).name]
    assert size_of(place) == 9 * RANGE, "given up after the range that was under way"
    for path in place.iterdir():
        with HeldFile(path) as file:
            assert file.hold_alone()


def test_a_child_forked_in_a_download_neither_hangs_nor_keeps_the_lock(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, honest, parent = threading.Event(), threading.Event(), FaultyFileSystem.cat_file, os.getpid()

    def halt(self: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if os.getpid() == parent and path == "0.tar":
            begun.set()
            assert may_go_on.wait(20)
        return honest(self, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", halt)
    cache, (a, b, *_) = made(place, num_ranges=1), shards()
    source, sink = os.pipe()
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(has_read, cache, a)
        assert begun.wait(20)
        assert in_child(lambda: has_read(cache, b) or os._exit(1)) == 0
        idle = fork(lambda: os.close(sink) or os.read(source, 1))  # type: ignore[func-returns-value]
        may_go_on.set()
        assert coming.result()
    with HeldFile(place / f"{b.name}.tar") as file:
        assert file.hold_alone()
    cache.forget()
    with HeldFile(place / f"{a.name}.tar") as file:
        assert file.hold_alone(), "the idle child does not hold it"
    os.close(sink)
    assert os.waitpid(idle, 0)[1] == 0
    os.close(source)


def test_a_process_killed_in_a_download_keeps_no_lock_through_its_children(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink = os.pipe()

    def die(file: HeldFile, content: bytes) -> None:
        fork(lambda: os.close(sink) or os.read(source, 1))  # type: ignore[func-returns-value]
        os.kill(os.getpid(), signal.SIGKILL)

    one = shard(0)
    with monkeypatch.context() as patch:
        patch.setattr(download, "_write", die)
        assert in_child(lambda: made(place).read(one, 0, 9)) == -signal.SIGKILL
    with HeldFile(place / f"{one.name}.part") as file:
        assert file.hold_alone()
    os.close(sink)
    assert has_read(made(place), one)
    os.close(source)


EXIT = """
import sys, threading, fsspec
from kdpipes.storage.shard_cache import Shard, ShardCache
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


def test_a_download_that_somebody_holds_up_is_not_waited_for_without_end(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_folder, "_PATIENCE_S", 0.05)
    cache, one = made(place), shard(0)
    place.mkdir()
    with HeldFile(place / f"{one.name}.part", os.O_RDWR | os.O_CREAT) as part:
        assert part.hold_alone()
        assert not has_read(cache, one)
    assert has_read(made(place), one), "the next one goes on with it"


def test_a_download_that_goes_on_is_waited_for(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_folder, "_PATIENCE_S", 0.3)
    one, turns = shard(0), iter(range(60))
    place.mkdir()
    with HeldFile(place / f"{one.name}.part", os.O_RDWR | os.O_CREAT | os.O_APPEND) as part:
        assert part.hold_alone()

        def go_on(seconds: float) -> None:
            if (turn := next(turns, None)) is None:
                part.close()
            else:
                os.write(part.descriptor, CONTENTS[0][turn * 100 : turn * 100 + 100])
            threading.Event().wait(seconds)

        monkeypatch.setattr(shard_folder.time, "sleep", go_on)
        assert has_read(made(place), one)
    assert next(turns, None) is None
