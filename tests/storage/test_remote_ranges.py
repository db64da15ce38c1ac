"""Parts of files elsewhere: each byte asked for once, neighbors together, faults outlasted, damage named."""

from __future__ import annotations

import pickle
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.core.errors import DataError
from kdpipes.storage import remote
from kdpipes.storage.remote import RangeReader, Span, read_range
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.processes import in_child

CONTENT = random.Random(0).randbytes(20_000)
URL = "faulty://a.bin"
TRIES = 6

Waits = list[float]


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """How long was waited for, in place of waiting."""
    waited: Waits = []
    monkeypatch.setattr("kdpipes.storage.access.time.sleep", waited.append)
    return waited


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with a file a.bin."""
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return str(tmp_path)


@pytest.fixture
def storage(folder: str) -> Iterator[FaultyFileSystem]:
    """The file as `faulty://a.bin`, without faults."""
    with faulty_storage(folder) as files:
        yield files


def asked(files: FaultyFileSystem) -> list[tuple[int, int]]:
    """Return the ranges that were asked for, sorted."""
    return sorted((request.start, request.stop) for request in files.requests() if request.kind == "range")


def read(reader: RangeReader, *places: tuple[int, int]) -> None:
    """Read spans, and compare them with what is there."""
    for start, stop in places:
        assert reader.read(Span(URL, start, stop)) == CONTENT[start:stop]


@st.composite
def members(draw: st.DrawFn) -> list[Span]:
    """Return members of two files, as tars have them: side by side, some prefetched twice, in any order."""
    found = []
    for url in ("faulty://a.bin", "faulty://b.bin"):
        place = 0
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), max_size=12)):
            found.append(Span(url, place + gap, place + gap + size))
            place += gap + size
    again = draw(st.lists(st.sampled_from(found), max_size=3)) if found else []
    return draw(st.permutations([*found, *again]))


@given(members(), st.integers(0, 300), st.integers(1, 1_000))
def test_every_span_lies_in_one_request_and_no_byte_in_two(spans: list[Span], max_gap: int, max_span: int) -> None:
    requests: list[Span] = []

    def note(span: Span, **_: Any) -> bytes:
        requests.append(span)
        return (CONTENT + CONTENT)[span.start : span.stop]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "read_range", note)
        reader = RangeReader(max_gap=max_gap, max_span=max_span)
        reader.prefetch(spans)
        for span in spans:
            assert reader.read(span) == (CONTENT + CONTENT)[span.start : span.stop]
    holders = [
        [one for one in requests if one.url == s.url and one.start <= s.start and s.stop <= one.stop] for s in spans
    ]
    assert all(len(found) == 1 for found in holders)
    for one in requests:
        inside = sorted({span for span, found in zip(spans, holders, strict=True) if found == [one]})
        assert inside[0].start == one.start
        assert inside[-1].stop == one.stop, "nothing is read beyond what was prefetched"
        assert all(after.start - before.stop <= max_gap for before, after in pairwise(inside))
        assert len(inside) == 1 or one.stop - one.start <= max_span
    for url in {span.url for span in requests}:
        ends = sorted((one.start, one.stop) for one in requests if one.url == url)
        assert all(before[1] <= after[0] for before, after in pairwise(ends))


@given(members())
def test_any_spans_are_read_right_prefetched_or_not(spans: list[Span]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "read_range", lambda span, **_: (CONTENT + CONTENT)[span.start : span.stop])
        reader = RangeReader(max_bytes=500, max_gap=50)
        for number, span in enumerate(spans):
            reader.prefetch(spans[number : number + 3 : 2])
            assert reader.read(span) == (CONTENT + CONTENT)[span.start : span.stop]


def test_neighbours_come_in_one_request_and_are_read_from_it(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=100)
    places = [(0, 50), (150, 200), (301, 400), (400, 410)]
    reader.prefetch(Span(URL, *place) for place in places)
    read(reader, *places, (20, 180))
    assert asked(storage) == [(0, 200), (301, 410)]
    read(reader, (1_000, 1_100))
    assert asked(storage)[2:] == [(1_000, 1_100)], "what was not prefetched is read when it is asked for"


def test_what_was_prefetched_is_not_asked_for_again(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=0)
    for _ in range(2):
        reader.prefetch([Span(URL, 0, 50), Span(URL, 100, 150)])
    read(reader, (0, 50), (100, 150), (0, 50))
    assert asked(storage) == [(0, 50), (100, 150)]


def test_a_new_neighbour_of_known_bytes_is_asked_for_alone(storage: FaultyFileSystem) -> None:
    reader = RangeReader()
    reader.prefetch([Span(URL, 0, 50)])
    reader.prefetch([Span(URL, 0, 50), Span(URL, 60, 100)])
    read(reader, (0, 50), (60, 100))
    assert asked(storage) == [(0, 50), (60, 100)]


@pytest.mark.parametrize("errors", ["builtin", "s3fs"])
@pytest.mark.parametrize("kind", ["reset", "reset_midway", "timeout", "unavailable", "too_many_requests", "truncate"])
@pytest.mark.parametrize("is_prefetched", [False, True])
def test_what_passes_is_outlasted(folder: str, waits: Waits, kind: Any, errors: Any, is_prefetched: bool) -> None:
    with faulty_storage(folder, faults=[Fault(kind, times=TRIES - 1)], errors=errors) as storage:
        reader = RangeReader()
        if is_prefetched:
            reader.prefetch([Span(URL, 100, 300)])
        read(reader, (100, 300))
    assert storage.stats().faults == {kind: TRIES - 1}
    assert len(waits) == TRIES - 1
    factors = [wait / (0.1 * 2**number) for number, wait in enumerate(waits)]
    assert all(0.499 < factor < 1.501 for factor in factors), factors


@pytest.mark.parametrize("errors", ["builtin", "s3fs"])
@pytest.mark.parametrize("kind", ["reset", "reset_midway", "timeout", "unavailable", "too_many_requests", "truncate"])
def test_what_does_not_pass_is_named_with_file_and_offset(folder: str, kind: Any, errors: Any) -> None:
    ours = r"^Shard 'faulty://a\.bin' cannot be read at offset 100: .+\.$"
    with (
        faulty_storage(folder, faults=[Fault(kind)], errors=errors) as storage,
        pytest.raises(DataError, match=ours) as caught,
    ):
        read_range(Span(URL, 100, 300))
    assert storage.stats().requests >= TRIES  # a thread that reads ahead for an earlier test may add one
    assert caught.value.__cause__ is not None


def test_a_file_that_ends_before_says_how_much_came(storage: FaultyFileSystem) -> None:
    with pytest.raises(DataError, match=r"at offset 19990: 100 bytes were requested, 10 received\.$"):
        RangeReader().read(Span(URL, 19_990, 20_090))


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, IsADirectoryError])
def test_what_cannot_pass_is_not_tried_again(
    storage: FaultyFileSystem, waits: Waits, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    calls: list[str] = []

    def reject(self: Any, path: str, **kwargs: Any) -> bytes:
        calls.append(path)
        raise error(f"{path} is not to be had")

    monkeypatch.setattr(FaultyFileSystem, "cat_file", reject)
    with pytest.raises(
        DataError, match=r"'faulty://a\.bin' cannot be read at offset 5: .*a\.bin is not to be had\)?\."
    ):
        RangeReader().read(Span(URL, 5, 9))
    assert (len(calls), waits) == (1, [])


def test_a_file_that_is_missing_is_not_tried_again(folder: str, waits: Waits) -> None:
    with faulty_storage(folder, faults=[Fault("missing")]) as storage, pytest.raises(DataError, match="offset 5"):
        read_range(Span(URL, 5, 9))
    assert (storage.stats().requests, waits) == (1, [])


def test_the_oldest_bytes_go_when_newer_ones_come(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=0, max_bytes=250)
    for start in (0, 1_000, 2_000):
        reader.prefetch([Span(URL, start, start + 100)])
        read(reader, (start, start + 100))
    read(reader, (1_000, 1_100), (2_000, 2_100))
    assert len(asked(storage)) == 3
    read(reader, (0, 100))
    assert asked(storage) == [(0, 100), (0, 100), (1_000, 1_100), (2_000, 2_100)]
    reader.prefetch([Span(URL, 5_000, 9_000)])
    read(reader, (5_000, 9_000), (6_000, 7_000))
    assert len(asked(storage)) == 5, "one span may be larger"


def test_what_has_been_read_goes_before_what_is_due(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=0, max_bytes=1_000, max_spent=250)
    places = [(start, start + 100) for start in range(0, 2_000, 200)]
    reader.prefetch(Span(URL, *place) for place in places)
    for place in places * 3:
        read(reader, place)
        reader.prefetch([Span(URL, *place)])
    read(reader, *places)
    assert asked(storage) == places, "each was due once more than it had been read"
    read(reader, *places[-2:])
    assert len(asked(storage)) == len(places), "what was read last stays for a while"
    read(reader, *places[:-2])
    assert len(asked(storage)) == 2 * len(places) - 2


def test_what_is_prefetched_again_is_kept_as_if_it_were_new(storage: FaultyFileSystem) -> None:
    """Else the second epoch of more than is kept would wait for every span that the first one has left."""
    reader = RangeReader(max_gap=0, max_bytes=500)
    first, second = ([(start, start + 100) for start in range(begin, begin + 1_000, 200)] for begin in (0, 1_000))
    reader.prefetch(Span(URL, *place) for place in first)
    reader.prefetch(Span(URL, *place) for place in (first[0], *second[:4]))
    read(reader, first[0], *second[:4])
    found = Counter(asked(storage))
    assert [found[place] for place in (first[0], *second[:4])] == [1] * 5


def test_neighbours_in_one_request_are_kept_until_read(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_spent=0)
    places = [(start, start + 100) for start in range(0, 500, 100)]
    reader.prefetch(Span(URL, *place) for place in places)
    read(reader, *places)
    assert asked(storage) == [(0, 500)]
    read(reader, places[0])
    assert asked(storage) == [(0, 100), (0, 500)], "and no longer"


def test_who_comes_back_takes_nothing_from_those_that_wait(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_spent=300)
    places, other = [(start, start + 100) for start in (0, 100, 200)], (5_000, 5_100)
    reader.prefetch(Span(URL, *place) for place in places)
    read(reader, *places, *[places[0]] * 3)
    reader.prefetch(Span(URL, *place) for place in (*places, other))
    read(reader, places[0], (150, 150), (150, 150), other, *places[1:])
    assert asked(storage) == [(0, 300), other]


def test_more_than_is_kept_is_read_once_all_the_same(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=0, max_bytes=500)
    places = [(start, start + 100) for start in range(0, 10_000, 200)]
    reader.prefetch(Span(URL, *place) for place in places)
    read(reader, *places)
    assert asked(storage) == places


def test_what_failed_once_is_tried_when_it_is_asked_for_later(folder: str) -> None:
    with faulty_storage(folder, faults=[Fault("unavailable", times=TRIES)]):
        reader = RangeReader()
        reader.prefetch([Span(URL, 0, 100)])
        read(reader, (0, 100))
        reader.prefetch([Span(URL, 0, 100)])
        read(reader, (0, 100))


def test_a_file_of_several_samples_is_read_once() -> None:
    urls: list[str] = []

    def read_file(span: Span) -> bytes:
        urls.append(span.url)
        if span.url == "missing":
            raise FileNotFoundError(span.url)
        return b"content"

    reader = RangeReader(read_file)
    there, missing = Span("there", 0, 7), Span("missing", 0, 7)
    reader.prefetch([there, missing] * 3)
    assert [reader.read(there) for _ in range(3)] == [b"content"] * 3
    assert urls.count("there") == 1
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            reader.read(missing)


def test_each_reader_gets_an_error_of_its_own(folder: str) -> None:
    with faulty_storage(folder, faults=[Fault("unavailable")]):
        reader = RangeReader()
        reader.prefetch([Span(URL, 0, 100), Span(URL, 100, 200)])
        errors = []
        for start in (0, 100):
            with pytest.raises(DataError, match=f"at offset {start}:") as caught:
                reader.read(Span(URL, start, start + 100))
            errors.append(caught.value)
    assert errors[0] is not errors[1], "notes would pile up on it"


def test_no_bytes_need_no_request(storage: FaultyFileSystem) -> None:
    assert RangeReader().read(Span(URL, 7, 7)) == b""
    assert asked(storage) == []


def test_an_empty_part_of_an_s3_object_is_empty(s3: str) -> None:
    fsspec.filesystem("s3").pipe(f"{s3}/a.bin", CONTENT)
    assert read_range(Span(f"{s3}/a.bin", 7, 7)) == b""


def test_many_threads_prefetch_and_read_at_once(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=64, max_span=2_000, num_threads=4)
    places = [(start, start + 90) for start in range(0, 19_900, 100)]

    def work(seed: int) -> None:
        order = random.Random(seed).sample(places, len(places))
        for number in range(0, len(order), 10):
            reader.prefetch(Span(URL, *place) for place in order[number : number + 10])
            read(reader, *order[number : number + 10])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_a_waiting_thread_gets_its_bytes_despite_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open, waiting = threading.Event(), threading.Event()

    def slow(span: Span, **_: Any) -> bytes:
        is_open.wait(20)
        return CONTENT[span.start : span.stop]

    monkeypatch.setattr(remote, "read_range", slow)
    reader = RangeReader(max_gap=0, max_bytes=250, num_threads=1)
    reader.prefetch([Span(URL, 0, 100), Span(URL, 1_000, 1_100)])
    known = reader._ahead[Span(URL, 1_000, 1_100)].coming
    result = known.result

    def tell(timeout: float | None = None) -> bytes:
        waiting.set()
        return result(timeout)

    monkeypatch.setattr(known, "result", tell)
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(reader.read, Span(URL, 1_000, 1_100))
        assert waiting.wait(20)
        reader.prefetch([Span(URL, start, start + 100) for start in (2_000, 3_000)])
        is_open.set()
        assert got.exception() is None
        assert got.result() == CONTENT[1_000:1_100]


def test_a_child_reads_on_with_threads_of_its_own(storage: FaultyFileSystem) -> None:
    reader = RangeReader()
    reader.prefetch([Span(URL, 0, 100)])

    def work() -> None:
        read(reader, (0, 100), (500, 600))
        reader.prefetch([Span(URL, 1_000, 1_100)])
        read(reader, (1_000, 1_100))

    assert in_child(work) == 0
    assert in_child(lambda: (reader.prefetch([Span(URL, 200, 300)]), read(reader, (200, 300)))[1]) == 0
    read(reader, (0, 100))


@pytest.mark.parametrize(
    "first",
    [
        "read",
        "prefetch",
    ],
)
def test_a_child_forked_while_the_reader_was_held_does_not_hang(storage: FaultyFileSystem, first: str) -> None:
    reader = RangeReader()
    argument: Any = [Span(URL, 0, 9)] if first == "prefetch" else Span(URL, 0, 9)
    reader.prefetch([Span(URL, 0, 100)])
    with reader._lock:
        assert in_child(lambda: getattr(reader, first)(argument) and None) == 0
    read(reader, (0, 100))


def test_threads_of_a_child_begin_without_the_parents_lock(
    storage: FaultyFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RangeReader()
    new_lock = threading.Lock

    def work() -> None:
        has_read = threading.Event()

        def lock_late() -> Any:
            monkeypatch.undo()  # the other thread comes while this one is between the process and the lock
            other = threading.Thread(target=lambda: (read(reader, (0, 9)), has_read.set()), daemon=True)
            other.start()
            assert has_read.wait(20)
            return new_lock()

        monkeypatch.setattr(remote.threading, "Lock", lock_late)
        read(reader, (0, 9))

    with reader._lock:
        assert in_child(work) == 0


def test_a_copy_knows_the_sizes_and_nothing_else(storage: FaultyFileSystem) -> None:
    reader = RangeReader(max_gap=1, max_span=300, max_bytes=400, num_threads=2)
    reader.prefetch([Span(URL, 0, 100)])
    read(reader, (0, 100))
    twin: RangeReader = pickle.loads(pickle.dumps(reader))
    read(twin, (0, 100))
    twin.prefetch([Span(URL, 500, 600), Span(URL, 602, 700), Span(URL, 701, 790)])
    read(twin, (500, 600), (602, 700), (701, 790))
    assert Counter(asked(storage)) == Counter({(0, 100): 2, (500, 600): 1, (602, 790): 1})


EXIT = """
import sys, threading, fsspec
from kdpipes.storage.remote import RangeReader, Span
from fsspec.implementations.memory import MemoryFileSystem
def cat_file(self, path, start=None, end=None, **kwargs):
    begun.set()
    threading.Event().wait(float(sys.argv[1]))
    return bytes(end - start)
begun = threading.Event()
MemoryFileSystem.cat_file = cat_file
reader = RangeReader(max_gap=0, num_threads=1)
reader.prefetch([Span("memory://a.bin", start, start + 5) for start in range(0, 100, 10)])
begun.wait()
"""


@pytest.mark.parametrize("seconds", ["0", "120"], ids=["idle", "hanging"])
def test_a_process_ends_though_requests_are_idle_or_hang(seconds: str, interpreter: Any) -> None:
    status, _, told = interpreter.run(EXIT, seconds)
    assert status == 0, told
