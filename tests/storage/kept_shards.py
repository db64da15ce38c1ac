"""Six shards elsewhere and a folder for them, for tests: how they are read, and what was moved and kept."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

from kdpipes.storage.files import version_of
from kdpipes.storage.shard_cache import Shard, ShardCache
from tests.faulty_storage import FaultyFileSystem
from tests.threads import threads_left

SIZE, RANGE, NUMBER = 20_000, 1_000, 6
CONTENTS = [random.Random(seed).randbytes(SIZE) for seed in range(NUMBER)]
FOR_ALL = 100 * SIZE


def made(place: Path, max_bytes: int = FOR_ALL, num_ahead: int = 0) -> ShardCache:
    return ShardCache(str(place), max_bytes, num_ahead)


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
    """Wait for the threads that look ahead, and for the requests of streams that were closed."""
    assert threads_left(name="kdpipes-shards") == []
    assert threads_left(name="kdpipes-stream") == []
