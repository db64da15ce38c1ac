"""What is tallied while the items of several workers are merged."""

from __future__ import annotations

from typing import Any

from kdpipes.loader.merge import Counters


def told(first: int, number: int) -> dict[str, Any]:
    """Return what a worker tells of `number` batches."""
    pieces = [(place, 0.1, 0.2) for place in range(first, first + number)]
    return {"id": "one", "worker": 0, "events": pieces, "batches": pieces}


def test_of_the_pieces_of_a_long_run_the_latest_are_kept() -> None:
    counters = Counters()
    for first in range(0, 30_000, 1000):
        counters.note_times(told(first, 1000))
    for name in ("events", "batches"):
        kept = [place for place, _, _ in counters.times["one"][name]]
        assert kept == list(range(10_000, 30_000))


def test_pieces_are_appended_where_they_are_kept() -> None:
    counters = Counters()
    counters.note_times(told(0, 2))
    before = counters.times["one"]["batches"]
    counters.note_times(told(2, 2))
    assert counters.times["one"]["batches"] is before, "and a long run costs no more than a short one"
    assert [place for place, _, _ in before] == [0, 1, 2, 3]
