"""What is counted while the items of several workers are merged."""

from __future__ import annotations

from kdpipes.loader.merge import Counters
from kdpipes.loader.profile import WorkerTimes


def times(first: int, number: int) -> WorkerTimes:
    """Return what a worker has measured of `number` batches."""
    places = range(first, first + number)
    return WorkerTimes(0, 1, number, 1.0, 0.0, [(n, "", 0.1, 0.2) for n in places], [(n, 0.1, 0.2) for n in places])


def test_of_the_pieces_of_a_long_run_the_latest_are_kept() -> None:
    counters = Counters()
    for first in range(0, 30_000, 1000):
        counters.note_times("one", times(first, 1000), [])
    kept, _ = counters.times["one"]
    assert [place for place, *_ in kept.events] == list(range(10_000, 30_000))
    assert [place for place, *_ in kept.batches] == list(range(10_000, 30_000))


def test_pieces_are_appended_where_they_are_kept() -> None:
    counters = Counters()
    counters.note_times("one", times(0, 2), [])
    before = counters.times["one"][0].batches
    counters.note_times("one", times(2, 2), [])
    assert counters.times["one"][0].batches is before, "and a long run costs no more than a short one"
    assert [place for place, _, _ in before] == [0, 1, 2, 3]
