"""`kdp.by_class`: batches of some samples of some classes each, and what remains of an epoch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kdpipes as kdp
from tests.resuming import assert_resumes_with_threads


def labeled(labels: list[Any]) -> Any:
    return kdp.from_dataset(list(range(len(labels))), "x", labels=labels).select("x y")


def deal(labels: list[Any], classes: int, samples: int, **arguments: Any) -> Any:
    return labeled(labels).deal(batching=kdp.by_class(classes, samples), **{"shuffle": True, **arguments})


@given(st.lists(st.integers(-1, 6), max_size=60), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
@pytest.mark.filterwarnings("ignore:`kdp.by_class")
def test_each_batch_has_distinct_classes_of_equal_size(
    labels: list[int], classes: int, samples: int, seed: int
) -> None:
    groups = [count // samples for label, count in Counter(labels).items() if label != -1]
    assume(sum(group > 0 for group in groups) >= classes)
    pipe = deal(labels, classes, samples, seed=seed)
    batches = list(pipe)
    assert len(batches) == len(pipe)
    used = [x for batch in batches for x, _ in batch]
    assert len(used) == len(set(used))
    for batch in batches:
        counts = Counter(y for _, y in batch)
        assert list(counts.values()) == [samples] * classes
        assert -1 not in counts
    # As many batches as distinct classes allow: one more would need groups that are not there.
    more = len(batches) + 1
    assert sum(min(group, more) for group in groups) < classes * more


def test_what_is_left_out_differs_between_epochs() -> None:
    pipe = deal([0] * 10 + [1] * 50, 2, 4)
    first, second = ({x for batch in pipe for x, y in batch if y == 1} for _ in range(2))
    assert len(first) == len(second) == 8
    assert first != second


def test_all_pairs_of_classes_meet() -> None:
    pipe = deal([label for label in range(20) for _ in range(40)], 4, 4, seed=1)
    met = {(a, b) for _ in range(4) for batch in pipe for _, a in batch for _, b in batch if a < b}
    assert len(met) > 0.9 * 20 * 19 / 2


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_the_same_for_any_workers_and_after_a_resume(num_threads: int) -> None:
    assert_resumes_with_threads(lambda: deal([number % 5 for number in range(60)], 3, 2, seed=2), num_threads)


def test_ranks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [number % 4 for number in range(41)]
    whole = list(deal(labels, 2, 3))
    parts = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        parts.append(list(deal(labels, 2, 3)))
    assert [batch for pair in zip(*parts, strict=True) for batch in pair] == whole[: len(whole) // 2 * 2]


def test_without_shuffle_every_epoch_is_the_same() -> None:
    pipe = deal([number % 4 for number in range(40)], 2, 3, shuffle=False)
    assert list(pipe) == list(pipe)


def test_names_are_classes_too_and_rare_ones_are_named() -> None:
    with pytest.warns(UserWarning, match="leaves out 1 class with fewer than 2 samples: 1"):
        batches = list(deal(["cat", "dog", "cat", "owl", "owl"], 2, 2))
    assert [Counter(y for _, y in batch) for batch in batches] == [{0: 2, 2: 2}]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            {"batch_size": 4, "batching": kdp.by_class(2, 2)},
            ValueError,
            r"`batch_size` cannot be used with `kdp\.by_class",
        ),
        ({"shuffle": "shards", "batching": kdp.by_class(2, 2)}, ValueError, "`shuffle` must be True or False"),
        ({"batching": kdp.by_class(4, 2)}, kdp.DataError, "but there are 3"),
    ],
)
def test_what_it_rejects(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(labeled([0, 0, 1, 1, 2, 2, -1, -1]).deal(**arguments))


def test_more_ranks_than_batches_of_classes_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    pipe = kdp.from_dataset(list(range(8)), "x", labels=[0, 1] * 4).select("x")
    cut = pipe.deal(batching=kdp.by_class(2, 2))
    with pytest.warns(UserWarning, match="can make 2 batches, but there are 4 ranks.* Use at most 2 ranks"):
        assert list(cut) == []
