"""Storage that fails: each fault, on the schedule that was asked for, and counted over threads and processes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.faulty_storage import Fault, FaultyFileSystem

CONTENT = bytes(range(200))
BODIES: list[Any] = [
    lambda storage: storage.cat_file("a.bin"),
    lambda storage: storage.cat_file("a.bin", 0, 200),
    lambda storage: storage.open("a.bin").read(),
    lambda storage: storage.cat_ranges(["a.bin"], [0], [200], on_error="raise")[0],
]


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with `a.bin` and `birds/b.bin`, on this machine and in memory."""
    url = str(tmp_path) if request.param == "local" else "memory://test_testing"
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(f"{path}/birds", exist_ok=True)
    filesystem.pipe({f"{path}/a.bin": CONTENT, f"{path}/birds/b.bin": CONTENT})
    yield url
    filesystem.rm(path, recursive=True)


def outcomes(storage: FaultyFileSystem, number: int, path: str = "a.bin") -> list[bool]:
    """Read a body `number` times; return which reads came right."""
    came = []
    for _ in range(number):
        try:
            came.append(storage.cat_file(path) == CONTENT)
        except ConnectionResetError:
            came.append(False)
    return came


@pytest.mark.parametrize("read", BODIES, ids=["whole", "range", "open", "ranges"])
@pytest.mark.parametrize(
    ("kind", "error", "number"),
    [
        ("reset", ConnectionResetError, errno.ECONNRESET),
        ("reset_midway", ConnectionResetError, errno.ECONNRESET),
        ("timeout", TimeoutError, errno.ETIMEDOUT),
        ("unavailable", OSError, errno.EBUSY),
        ("too_many_requests", OSError, errno.EIO),
        ("missing", FileNotFoundError, errno.ENOENT),
    ],
)
def test_errors_come_with_every_kind_of_read(root: str, read: Any, kind: Any, error: Any, number: int) -> None:
    storage = FaultyFileSystem(root, faults=[Fault(kind, paths="*.bin", on="range"), Fault(kind, on="whole")])
    with pytest.raises(error) as caught:
        read(storage)
    assert caught.type is error
    assert caught.value.errno == number
    assert storage.stats().faults == {kind: 1}
    assert storage.stats().bytes_delivered == (100 if kind == "reset_midway" else 0)


@pytest.mark.parametrize("read", BODIES, ids=["whole", "range", "open", "ranges"])
def test_wrong_bytes_come_without_an_error(root: str, read: Any) -> None:
    def read_with(kind: Any) -> Any:
        return read(FaultyFileSystem(root, faults=[Fault(kind)]))

    assert read_with("truncate") == CONTENT[:100]
    flipped = int.from_bytes(read_with("flip_bit"), "big") ^ int.from_bytes(CONTENT, "big")
    assert flipped.bit_count() == 1
    moved = read_with("wrong_range")
    assert moved != CONTENT
    assert moved in CONTENT + CONTENT
    assert len(moved) == 200


def test_a_schedule_says_which_requests_of_a_path_are_hit(root: str) -> None:
    def schedule(*paths: str, **when: Any) -> list[list[bool]]:
        storage = FaultyFileSystem(root, faults=[Fault("reset", **when)])
        return [outcomes(storage, 6, path) for path in paths]

    no, yes = False, True
    assert schedule("a.bin", every=3) == [[yes, yes, no, yes, yes, no]]
    assert schedule("a.bin", every=2, after=1, times=2) == [[yes, yes, no, yes, no, yes]]
    assert schedule("a.bin", times=1) == [[no, yes, yes, yes, yes, yes]]
    assert schedule("a.bin", on="range") == schedule("a.bin", paths="birds/*") == [[yes] * 6]
    assert schedule("a.bin", "birds/b.bin", paths="*b.bin") == [[yes] * 6, [no] * 6]
