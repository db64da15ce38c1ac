"""What a worker is doing can be read by another process, at any moment."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kdpipes.core.activity import Record, read_record
from kdpipes.core.sample import Sample
from kdpipes.loader.channel import SharedFile


@pytest.fixture
def file() -> Iterator[int]:
    file = SharedFile.create()
    os.ftruncate(file.number, os.sysconf("SC_PAGESIZE"))
    yield file.number
    del file  # which closes it


def enter(record: Record, sample: Sample, what: str) -> tuple[Any, str]:
    """Record that work on a sample begins, and return the work before."""
    before = record.now
    record.begin(sample, what)
    return before


def test_what_goes_on_is_told_and_nothing_in_between(file: int) -> None:
    record = Record(file)
    one, other = Sample({}, key="a"), Sample({}, key="longer/b")
    assert read_record(file) == ("", (), "")
    for sample in (one, other, one):
        outside = enter(record, sample, "caching field 'x'")
        assert read_record(file) == (sample.key, (0,), f"caching field 'x' of sample {sample.key!r}")
        inside = enter(record, sample, "loading 'x'")
        assert read_record(file) == (sample.key, (0,), f"loading 'x' of sample {sample.key!r}")
        record.leave(inside)
        assert read_record(file)[2].startswith("caching")
        record.leave(outside)
        assert read_record(file) == ("", (), "")


def test_a_sample_inside_of_another_is_told_apart(file: int) -> None:
    record = Record(file)
    outer, inner = Sample({}, key="outer"), Sample({}, key="inner")
    enter(record, outer, "mixing")
    before = enter(record, inner, "loading")
    assert read_record(file)[0] == "inner"
    record.leave(before)
    assert read_record(file) == ("outer", (0,), "mixing of sample 'outer'")


@pytest.mark.parametrize("key", ["", "\udcff", "k" * 10_000, "\N{SNOWMAN}" * 2_000])
def test_any_key_is_told_as_far_as_there_is_room(file: int, key: str) -> None:
    record = Record(file)
    enter(record, Sample({}, key=key), "loading")
    told, _, doing = read_record(file)
    assert key.encode(errors="replace").startswith(told.rstrip("\ufffd").encode())
    assert doing.startswith("loading of sample")


def test_no_sample_is_blamed_for_what_another_did(file: int) -> None:
    """A key is written in two steps at least, and a process may be killed between any two of them."""
    record, seen = Record(file), set()

    class Memory(bytearray):
        def __setitem__(self, place: slice, content: bytes) -> None:
            os.pwrite(file, content, place.start or 0)
            seen.add(read_record(file))

    record._memory = Memory()
    for key, what in [("a", "loading"), ("b", "decoding"), ("a", "decoding"), ("b", "loading")]:
        record.leave(enter(record, Sample({}, key=key), what))
    assert seen == {("", (), "")} | {
        (key, (0,), f"{what} of sample {key!r}") for key in "ab" for what in ("loading", "decoding")
    }


def test_a_key_that_fails_fails_for_its_own_sample_alone(file: int) -> None:
    def key() -> str:
        raise OSError("there is no list")

    record = Record(file)
    with pytest.raises(OSError, match="there is no list"):
        enter(record, Sample({}, key=key), "loading")
    before = enter(record, Sample({}, key="good"), "loading")
    assert read_record(file)[0] == "good"
    record.leave(before)
    assert read_record(file) == ("", (), "")


def test_threads_of_a_load_do_not_fail_by_each_others_notes(file: int) -> None:
    record, errors = Record(file), list[Exception]()

    def work(thread: int) -> None:
        try:
            for number in range(300):
                record.leave(enter(record, Sample({}, key=f"{thread}"), f"doing {thread} {number}"))
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
