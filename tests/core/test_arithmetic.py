"""Index arithmetic, against list versions that are obviously right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpipes.core.arithmetic import (
    UNLABELLED,
    Permutation,
    class_counts,
    draw_weighted,
    keep_classes,
    oversample_exact,
    oversample_multiply,
    smallest_int,
)

Labels = list[int] | list[str]

few = settings(max_examples=60, deadline=None, database=None)
labels_of_any_kind = st.one_of(st.lists(st.integers(-2, 4), max_size=30), st.lists(st.sampled_from("abc"), max_size=30))


def _positions(labels: Labels) -> dict[Any, list[int]]:
    names = [name for name in sorted(set(labels)) if name != UNLABELLED]
    return {name: [place for place, label in enumerate(labels) if label == name] for name in names}


@few
@given(labels_of_any_kind, st.sets(st.integers(-3, 5)), st.sets(st.sampled_from("abx")))
def test_classes_are_kept_or_dropped_in_order(labels: Labels, numbers: set[int], names: set[str]) -> None:
    classes: list[Any] = sorted(names) if labels and isinstance(labels[0], str) else sorted(numbers)
    kept = keep_classes(np.array(labels), classes, keep=True)
    dropped = keep_classes(np.array(labels), classes, keep=False)
    assert kept.tolist() == [place for place, label in enumerate(labels) if label in classes]
    assert dropped.tolist() == [place for place, label in enumerate(labels) if label not in classes]


@few
@given(labels_of_any_kind)
def test_classes_are_counted_in_ascending_order(labels: Labels) -> None:
    assert list(class_counts(np.array(labels)).items()) == sorted(Counter(labels).items())


@few
@given(labels_of_any_kind)
def test_multiply_repeats_rarer_classes_by_whole_numbers(labels: Labels) -> None:
    groups = _positions(labels)
    largest = max(map(len, groups.values()), default=0)
    expected = list(range(len(labels)))
    for group in groups.values():
        expected += group * (largest // len(group) - 1)
    assert oversample_multiply(np.array(labels)).tolist() == expected


@few
@given(labels_of_any_kind)
def test_exact_repeats_each_class_to_the_size_of_the_largest(labels: Labels) -> None:
    groups = _positions(labels)
    largest = max(map(len, groups.values()), default=0)
    expected = [(group * largest)[place] for group in groups.values() for place in range(largest)]
    assert oversample_exact(np.array(labels)).tolist() == expected


def test_positions_take_the_smallest_integer_that_holds_them() -> None:
    assert [smallest_int(stop) for stop in (0, 2**31 - 1, 2**31)] == [np.int32, np.int32, np.int64]
    for plan in (oversample_exact, oversample_multiply):
        assert [plan(np.array(labels, dtype=int)).dtype for labels in ([], [0, 0, 1])] == [np.int32, np.int32]


def test_a_permutation_gives_each_element_once() -> None:
    for size in (0, 1, 2, 3, 4_095, 4_096, 4_097, 10_000, 70_000):
        permutation = Permutation(size, key=b"epoch 0")
        order = permutation[np.arange(size)]
        assert len(permutation) == len(order) == size
        assert np.array_equal(np.sort(order), np.arange(size))
        assert size < 4 or not np.array_equal(order, np.arange(size))


@pytest.mark.parametrize("size", [100, 5_000])
def test_a_key_makes_the_order(size: int) -> None:
    everything = np.arange(size)
    order = Permutation(size, key=b"epoch 0")[everything]
    assert np.array_equal(order, Permutation(size, key=b"epoch 0")[everything])
    assert np.mean(order == Permutation(size, key=b"epoch 1")[everything]) < 0.1


@few
@given(st.sampled_from([7, 4_096, 4_097, 20_000]), st.data())
def test_a_part_of_a_permutation_agrees_with_the_whole(size: int, data: st.DataObject) -> None:
    permutation = Permutation(size, key=b"key")
    part = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    assert permutation[part].tolist() == permutation[np.arange(size)][np.array(part, dtype=int)].tolist()


def test_small_permutations_reach_every_order_equally_often() -> None:
    orders = Counter(tuple(Permutation(4, key=str(seed).encode())[np.arange(4)].tolist()) for seed in range(2_400))
    assert len(orders) == 24
    assert min(orders.values()) > 60
    assert max(orders.values()) < 150


def test_neighbours_of_a_large_permutation_end_up_anywhere() -> None:
    size = 20_000
    order = Permutation(size, key=b"epoch 0")[np.arange(size)]
    assert np.mean(np.abs(np.diff(order))) == pytest.approx(size / 3, rel=0.05)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.03


def test_a_single_position_agrees_with_the_whole() -> None:
    for size in (10, 5_000):
        permutation = Permutation(size, key=b"key")
        assert [int(permutation[place]) for place in range(10)] == permutation[np.arange(10)].tolist()


def test_labels_of_a_narrow_type_do_not_wrap_around() -> None:
    labels = np.array([-100, 100, 100], dtype=np.int8)
    assert class_counts(labels) == {-100: 1, 100: 2}
    assert keep_classes(labels, [100], keep=True).tolist() == [1, 2]
    assert oversample_exact(labels).tolist() == [0, 0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1e6) | st.just(0.0) | st.floats(0, 1e-9), min_size=1, max_size=300),
    st.integers(0, 400),
    st.integers(0, 2**32),
)
def test_weighted_draws_are_numpys(weights: list[float], number: int, seed: int) -> None:
    weights[0] = weights[0] or 1.0
    shares = np.asarray(weights) / np.sum(weights)
    drawn = draw_weighted(np.random.default_rng(seed), shares, number, replacement=True)
    assert np.array_equal(drawn, np.random.default_rng(seed).choice(len(shares), number, p=shares))
    number = min(number, np.count_nonzero(shares))
    drawn = draw_weighted(np.random.default_rng(seed), shares, number, replacement=False)
    assert np.array_equal(drawn, np.random.default_rng(seed).choice(len(shares), number, replace=False, p=shares))


@pytest.mark.parametrize("power", [0, 1, 40])
def test_many_weighted_draws_are_numpys(power: int) -> None:
    shares = np.random.default_rng(0).random(200_000) ** power
    shares /= shares.sum()
    drawn = draw_weighted(np.random.default_rng(1), shares, 150_000, replacement=True)
    assert np.array_equal(drawn, np.random.default_rng(1).choice(len(shares), 150_000, p=shares))
    drawn = draw_weighted(np.random.default_rng(1), shares, 60_000, replacement=False)
    assert np.array_equal(drawn, np.random.default_rng(1).choice(len(shares), 60_000, replace=False, p=shares))
