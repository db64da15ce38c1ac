"""The order in which shards are needed: found from positions alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.storage.files import Version
from kdpipes.storage.shard_cache import ShardOrder, goes_by_shards, visits_of
from kdpipes.storage.shard_folder import Shard

IN_ORDER = np.repeat(np.arange(40), 50)
SIDE_BY_SIDE = np.concatenate([np.tile(np.arange(start, start + 8), 50) for start in range(0, 40, 8)])
A, B, C, D = (Shard(f"s3://birds/{name}.tar", Version(10, "")) for name in "abcd")


@given(st.lists(st.integers(0, 5), max_size=60))
def test_every_sample_lies_in_a_visit_of_its_shard(shards: list[int]) -> None:
    visits = visits_of(np.array(shards, dtype=np.int64))
    assert (np.diff(visits.starts) > 0).all()
    assert (visits.untils() >= np.arange(len(visits.shards))).all()
    rows = list(zip(*(column.tolist() for column in visits), strict=True))
    for place, shard in enumerate(shards):
        assert sum(one == shard and start <= place < stop for one, start, stop in rows) == 1
    assert all(shards[start] == shards[stop - 1] == one for one, start, stop in rows)


def test_a_shard_that_is_needed_again_much_later_is_visited_again() -> None:
    twice = np.concatenate([IN_ORDER, IN_ORDER])
    assert visits_of(twice).shards.tolist() == [*range(40), *range(40)]
    side_by_side = visits_of(SIDE_BY_SIDE)
    assert side_by_side.shards.tolist() == list(range(40))
    assert side_by_side.untils().tolist() == [8 * (n // 8) + 7 for n in range(40)]


@pytest.mark.parametrize(
    ("shards", "num_rounds", "is_so"),
    [
        (IN_ORDER, 1, True),
        (IN_ORDER[::-1], 1, True),
        (np.random.default_rng(0).permutation(40).repeat(50), 1, True),
        (np.tile(IN_ORDER, 3), 3, True),
        (np.tile([0, 0, 0, 1, 1, 1, 2, 2, 2], 3), 3, True),
        (SIDE_BY_SIDE, 1, True),
        (np.zeros(5, dtype=np.int64), 1, True),
        (np.random.default_rng(0).permutation(IN_ORDER), 1, False),
        (np.random.default_rng(0).permutation(np.arange(300).repeat(3)), 1, False),
        (np.random.default_rng(0).permutation(np.arange(3).repeat(50)), 1, False),
        (np.zeros(0, dtype=np.int64), 1, False),
    ],
)
def test_orders_that_go_by_shards_are_told_from_others(
    shards: np.ndarray[tuple[int], np.dtype[np.int64]], num_rounds: float, is_so: bool
) -> None:
    assert goes_by_shards(shards, num_rounds) is is_so


def test_need_counts_from_the_shard_that_is_read() -> None:
    order = ShardOrder([A, B, C])
    assert [order.need(one.name) for one in (A, B, C, D)] == [0, 1, 2, None]
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
    order = ShardOrder([A, B, C, D, A], [2, 2, 2, 3, 4])
    assert order.reach(C)
    assert not order.reach(A)
    assert [order.need(one.name) for one in (A, B, C, D)] == [0, 1, 2, 3]
    assert order.reach(D)
    assert order.reach(A)
    assert [order.need(one.name) for one in (A, B, C, D)] == [4, 6, 7, 3]
