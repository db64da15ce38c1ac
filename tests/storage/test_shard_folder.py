"""The folder of whole shards: filled by many, its limit kept, what is needed last removed first."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdpipes.storage import shard_cache
from kdpipes.storage.files import HeldFile
from kdpipes.storage.readers import Version
from kdpipes.storage.shard_cache import Shard, ShardCache, ShardFolder, StoredFile
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.processes import fork, in_child
from tests.storage.kept_shards import (
    CONTENTS,
    NUMBER,
    SIZE,
    has_read,
    kept,
    made,
    moved,
    settle,
    shard,
    shards,
    size_of,
)

pytestmark = pytest.mark.usefixtures("no_waits", "forgets_tags", "small_ranges")


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


def test_what_is_not_needed_goes_first_then_what_is_last(storage: FaultyFileSystem, place: Path) -> None:
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


def test_the_default_limit_bears_shards_that_vanish(storage: FaultyFileSystem, place: Path) -> None:
    class Shared(ShardFolder):
        def entries(self) -> list[StoredFile]:
            found = super().entries()
            for entry in found:  # as other processes do at any time
                entry.path.unlink()
            return found

    assert has_read(made(place), shards()[0])
    assert Shared(place, None).max_bytes() > 0
    assert kept(place) == []


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
    honest, others = HeldFile.hold, count()

    def hold_late(self: HeldFile, **kwargs: Any) -> bool:
        if kwargs.get("is_alone") and self.path.suffix == ".part" and next(others) == 0:
            self.path.unlink()  # as who downloaded it does when the disk is full
        return honest(self, **kwargs)

    monkeypatch.setattr(HeldFile, "hold", hold_late)
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


def test_a_process_killed_in_a_download_keeps_no_lock(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink = os.pipe()

    def die(file: int, content: bytes) -> None:
        fork(lambda: os.close(sink) or os.read(source, 1))  # type: ignore[func-returns-value]
        os.kill(os.getpid(), signal.SIGKILL)

    one = shard(0)
    with monkeypatch.context() as patch:
        patch.setattr(shard_cache, "write_all", die)
        assert in_child(lambda: made(place).read(one, 0, 9)) == -signal.SIGKILL
    with HeldFile(place / f"{one.name}.part") as file:
        assert file.hold(is_alone=True)
    os.close(sink)
    assert has_read(made(place), one)
    os.close(source)


def test_a_download_that_is_held_up_is_not_awaited_forever(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_PATIENCE_S", 0.05)
    cache, one = made(place), shard(0)
    place.mkdir()
    with HeldFile(place / f"{one.name}.part", os.O_RDWR | os.O_CREAT) as part:
        assert part.hold(is_alone=True)
        assert not has_read(cache, one)
    assert has_read(made(place), one), "the next one goes on with it"


def test_a_download_that_goes_on_is_waited_for(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_PATIENCE_S", 0.3)
    one, turns = shard(0), iter(range(60))
    place.mkdir()
    with HeldFile(place / f"{one.name}.part", os.O_RDWR | os.O_CREAT | os.O_APPEND) as part:
        assert part.hold(is_alone=True)

        def go_on(seconds: float) -> None:
            if (turn := next(turns, None)) is None:
                part.close()
            else:
                os.write(part.descriptor, CONTENTS[0][turn * 100 : turn * 100 + 100])
            threading.Event().wait(seconds)

        monkeypatch.setattr(shard_cache.time, "sleep", go_on)
        assert has_read(made(place), one)
    assert next(turns, None) is None
