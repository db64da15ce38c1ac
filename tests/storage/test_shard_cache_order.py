"""The order in which shards are needed: found from positions alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.sources._member_reader import Survey
from kdpipes.storage.readers import Version
from kdpipes.storage.shard_cache import NeededShards, Shard

IN_ORDER = np.repeat(np.arange(40), 50)
SIDE_BY_SIDE = np.concatenate([np.tile(np.arange(start, start + 8), 50) for start in range(0, 40, 8)])
ROUNDS = np.tile(np.arange(len(IN_ORDER)), 3)
A, B, C, D = (Shard(f"s3://birds/{name}.tar", Version(10, "")) for name in "abcd")


def survey(shards: Any, window: int = 7, positions: Any = None) -> Survey:
    """Return what an epoch needs that reads all samples in order, or some positions, in short windows."""
    positions = np.arange(len(shards)) if positions is None else positions
    windows = [positions[start : start + window] for start in range(0, len(positions), window)]
    return Survey(np.asarray(shards, dtype=np.int64), np.ones(400, dtype=bool), windows)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 60))
def test_every_sample_lies_in_a_visit_of_its_shard(shards: list[int], window: int) -> None:
    visits = survey(shards, window).visits
    assert (np.diff(visits.starts) > 0).all()
    assert (visits.untils() >= np.arange(len(visits.shards))).all()
    rows = list(zip(*(column.tolist() for column in visits), strict=True))
    for place, shard in enumerate(shards):
        assert sum(one == shard and start <= place < stop for one, start, stop in rows) == 1
    assert all(shards[start] == shards[stop - 1] == one for one, start, stop in rows)


def test_a_shard_needed_again_much_later_is_visited_again() -> None:
    twice = np.concatenate([IN_ORDER, IN_ORDER])
    assert survey(twice).visits.shards.tolist() == [*range(40), *range(40)]
    side_by_side = survey(SIDE_BY_SIDE).visits
    assert side_by_side.shards.tolist() == list(range(40))
    assert side_by_side.untils().tolist() == [8 * (n // 8) + 7 for n in range(40)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 60), st.randoms())
def test_windows_do_not_matter(shards: list[int], window: int, random: Any) -> None:
    positions = np.asarray([random.randrange(len(shards)) for _ in range(50)])
    whole, parts = survey(shards, 60, positions), survey(shards, window, positions)
    assert parts.digest == whole.digest
    assert parts.goes_by_shards() is whole.goes_by_shards()
    assert all(map(np.array_equal, parts.visits, whole.visits))


def test_shards_that_do_not_count_are_left_out() -> None:
    is_counted = np.array([True, False, True])
    found = Survey(np.array([0, 1, 2, 1]), is_counted, [np.array([3, 2]), np.array([1, 1]), np.array([0])])
    assert (found.num_samples, found.counts.tolist(), found.visits.shards.tolist()) == (2, [1, 0, 1], [2, 0])


@pytest.mark.parametrize(
    ("shards", "positions", "is_so"),
    [
        (IN_ORDER, None, True),
        (IN_ORDER[::-1], None, True),
        (np.random.default_rng(0).permutation(40).repeat(50), None, True),
        (IN_ORDER, ROUNDS, True),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], np.tile(np.arange(9), 3), True),
        (SIDE_BY_SIDE, None, True),
        (np.zeros(5, dtype=np.int64), None, True),
        (np.random.default_rng(0).permutation(IN_ORDER), None, False),
        (np.random.default_rng(0).permutation(np.arange(300).repeat(3)), None, False),
        (np.random.default_rng(0).permutation(np.arange(3).repeat(50)), None, False),
        (np.zeros(0, dtype=np.int64), None, False),
    ],
)
def test_orders_that_go_by_shards_are_told_from_others(shards: Any, positions: Any, is_so: bool) -> None:
    assert survey(shards, positions=positions).goes_by_shards() is is_so


def test_need_counts_from_the_shard_that_is_read() -> None:
    order = NeededShards([A, B, C])
    assert [order.need(one.name) for one in (A, B, C, D)] == [0, 1, 2, math.inf]
    assert order.ahead(2) == [A, B]
    assert order.reach(B)
    assert not order.reach(B)
    assert not order.reach(D)
    assert [order.need(one.name) for one in (A, B, C)] == [0, 1, 2], "another worker may still read the one before"
    assert order.reach(C)
    assert [order.need(one.name) for one in (A, B, C)] == [3, 1, 2]
    assert not order.reach(A), "which a slower worker reads"
    assert order.ahead(2) == []


def test_a_shard_that_is_read_beside_later_ones_is_still_needed() -> None:
    order = NeededShards([A, B, C, D, A], [2, 2, 2, 3, 4])
    assert order.reach(C)
    assert not order.reach(A)
    assert [order.need(one.name) for one in (A, B, C, D)] == [0, 1, 2, 3]
    assert order.reach(D)
    assert order.reach(A)
    assert [order.need(one.name) for one in (A, B, C, D)] == [4, 6, 7, 3]
