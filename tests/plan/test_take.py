"""Shares, orders and numbers of samples, against KappaData's rules and naive versions written down here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdpipes as kdp

LABELS = st.lists(st.integers(-1, 4), max_size=30)


def source(labels: list[Any]) -> kdp.MapPipe:
    class Unread:
        """Whoever opens an item is wrong."""

        def __len__(self) -> int:
            return len(labels)

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("an item was opened")

    return kdp.from_dataset(Unread(), "x", labels=labels)


def positions(pipe: Any) -> list[int]:
    return pipe.locate(np.arange(len(pipe)), 0)[1].tolist()


SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.25, 0.29, 0.5, 1.0])


@given(st.integers(0, 200), SHARES, SHARES, st.booleans(), st.booleans())
def test_a_share_is_kappadatas(size: int, one: float, other: float, ceil_from: bool, ceil_to: bool) -> None:
    begin, end = sorted([one, other])
    first = np.ceil(begin * size) if ceil_from else int(begin * size)
    last = np.ceil(end * size) if ceil_to else int(end * size)
    pipe = source([0] * size).take_percent(
        from_percent=begin, to_percent=end, ceil_from_index=ceil_from, ceil_to_index=ceil_to
    )
    assert positions(pipe) == list(range(int(first), int(last)))


@given(LABELS, st.integers(1, 5), st.none() | st.integers(0, 3))
def test_so_many_of_each_class_are_taken_in_the_sources_order(labels: list[int], number: int, seed: int | None) -> None:
    taken = positions(source(labels).take_per_class(num_samples=number, seed=seed))
    assert taken == sorted(set(taken))
    for label in {*labels} - {-1}:
        members = [place for place, other in enumerate(labels) if other == label]
        chosen = [place for place in taken if labels[place] == label]
        assert len(chosen) == min(number, len(members))
        assert seed is not None or chosen == members[:number]
    assert all(labels[place] != -1 for place in taken)


@given(LABELS, st.floats(0.01, 1))
def test_a_share_of_each_class_is_rounded_up(labels: list[int], share: float) -> None:
    taken = [labels[place] for place in positions(source(labels).take_per_class(share=share))]
    for label in {*labels} - {-1}:
        assert taken.count(label) == int(np.ceil(labels.count(label) * share))


def test_a_choice_at_random_does_not_depend_on_other_classes() -> None:
    labels = [0, 1, 2] * 20
    pipe = source(labels)
    everything = {place for place in positions(pipe.few_shot(3, seed=7)) if labels[place] == 1}
    alone = pipe.filter_classes(valid=[1])
    assert {positions(alone)[place] for place in positions(alone.few_shot(3, seed=7))} == everything
    assert positions(pipe.few_shot(3, seed=7)) != positions(pipe.few_shot(3, seed=8))
    assert positions(pipe.few_shot(3, seed=7)) == positions(source(labels).few_shot(3, seed=7))


def test_too_few_shots_are_an_error_that_names_the_class() -> None:
    named = kdp.from_dataset([*"abcd"], "x", labels=[0, 0, 1, -1], class_names=["heron", "stork"])
    with pytest.raises(kdp.DataError, match=r"Class 'stork' has 1 sample, fewer than the 2.*\.take_per_class"):
        len(named.few_shot(2))
    assert positions(source([0, 1, -1, None]).few_shot(1)) == [0, 1]


def test_shares_may_be_numbers_of_numpys() -> None:
    pipe = kdp.from_dataset(["a", "b"], "x", labels=[0, 0])
    assert [len(pipe.take_percent(to_percent=np.float32(0.5))), len(pipe.take_percent(to_percent=np.int64(1)))] == [
        1,
        2,
    ]
    assert len(pipe.take_per_class(share=np.float32(0.5))) == 1


def test_unlabelled_samples_are_no_class_to_balance() -> None:
    labels = [0, 0, 1, -1, None]
    assert positions(source(labels).oversample()) == [0, 1, 2, 3, 4, 2]
    assert positions(source(labels).oversample(mode="exact")) == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda pipe: pipe.take_percent(to_percent=25), ValueError, r"Write 25 % as 0\.25"),
        (lambda pipe: pipe.take_percent(from_percent=0.5, to_percent=0.2), ValueError, "a share from 0.5 to 1.0"),
        (lambda pipe: pipe.take_percent(from_percent="a"), TypeError, "`from_percent` must be a share"),
        (lambda pipe: pipe.permute(-1), ValueError, "`seed`"),
        (lambda pipe: pipe.take_per_class(), ValueError, "Exactly one of `num_samples` or `share`"),
        (lambda pipe: pipe.take_per_class(share=0), ValueError, "`share` must be above 0.0"),
        (lambda pipe: pipe.take_per_class(share="all"), TypeError, "`share` must be above 0.0"),
        (lambda pipe: pipe.few_shot(0), ValueError, "`shots` must be an integer of at least 1"),
    ],
)
def test_bad_arguments_are_rejected_where_the_chain_is_built(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(source([0, 1]))
