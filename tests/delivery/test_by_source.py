"""`mix(per_batch=...)` and `mix(batches=...)`: batches with fixed shares of several sources, or of one source each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.resuming import assert_resumes_with_threads


def rows(name: str, size: int) -> Any:
    return kdp.from_dataset([f"{name}{number}" for number in range(size)], "x", labels=[0] * size)


def mixed(sizes: list[int], **arguments: Any) -> Any:
    first, *others = (rows(name, size) for name, size in zip("abc", sizes, strict=False))
    return first.mix(others, **arguments)


def letters(batch: list[str]) -> Counter[str]:
    return Counter(x[0] for x in batch)


@given(st.lists(st.tuples(st.integers(4, 40), st.integers(1, 4)), min_size=2, max_size=3), st.booleans())
def test_every_batch_has_the_given_shares_and_no_sample_twice(sizes: list[tuple[int, int]], shuffle: bool) -> None:
    shares = [share for _, share in sizes]
    pipe = mixed([size for size, _ in sizes], per_batch=shares).select("x", bare=True)
    pipe = pipe.deal(batch_size=sum(shares), shuffle=shuffle)
    batches = list(pipe)
    assert len(batches) == len(pipe) == min(size // share for size, share in sizes)
    used = [x for batch in batches for x in batch]
    assert len(used) == len(set(used))
    for batch in batches:
        assert letters(batch) == dict(zip("abc", shares, strict=False))


def test_shares_continue_where_the_last_epoch_stopped() -> None:
    pipe = mixed([10, 3], per_batch=[2, 1]).select("x", bare=True).deal(batch_size=3)
    seen = Counter(x for _ in range(5) for batch in pipe for x in batch)
    assert {x: count for x, count in seen.items() if x[0] == "a"} == {f"a{number}": 3 for number in range(10)}


def test_what_is_left_out_of_shuffled_epochs_differs() -> None:
    pipe = mixed([40, 8], per_batch=[1, 4]).select("x", bare=True).deal(batch_size=5, shuffle=True)
    first, second = ({x for batch in pipe for x in batch} for _ in range(2))
    assert len(first) == len(second) == 10
    assert first != second


@given(st.integers(8, 40), st.integers(8, 40), st.integers(1, 5), st.booleans())
def test_each_batch_has_samples_of_one_source(first: int, second: int, size: int, shuffle: bool) -> None:
    pipe = mixed([first, second], batches="per_source", stop="all", weights=[first, second])
    counts = [found.num_samples for found in pipe.mixture()]
    batches = list(pipe.select("x", bare=True).deal(batch_size=size, shuffle=shuffle))
    assert {len(letters(batch)) for batch in batches} == {1}
    assert Counter(batch[0][0] for batch in batches) == {
        name: count // size for name, count in zip("ab", counts, strict=True) if count // size
    }


def test_stratified_batches_have_shares_by_weight() -> None:
    pipe = mixed([60, 20], batches="stratified", weights=[3, 1]).select("x", bare=True).deal(batch_size=8, shuffle=True)
    assert len(pipe) == 10
    assert [letters(batch) for batch in pipe] == [{"a": 6, "b": 2}] * 10


def test_batches_of_streams_have_the_given_shares() -> None:
    first, second = (
        IterableWrapper([(f"{name}{number}", 0) for number in range(size)], deepcopy=False).to_samples(fields="x y")
        for name, size in (("a", 20), ("b", 6))
    )
    batches = list(first.mix(second, per_batch=[3, 1]).select("x", bare=True).deal(batch_size=4))
    assert [letters(batch) for batch in batches[:6]] == [{"a": 3, "b": 1}] * 6
    assert [len(batch) for batch in batches[6:]] == [1]  # before the second source is due again, and ends the mix


@pytest.mark.parametrize("arguments", [{"per_batch": [3, 1]}, {"batches": "per_source"}, {"batches": "stratified"}])
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_the_same_for_any_workers_and_after_a_resume(arguments: Any, num_threads: int) -> None:
    def chain() -> Any:
        return mixed([50, 20], **arguments).select("x", bare=True).deal(batch_size=4, shuffle=True, seed=2)

    assert_resumes_with_threads(chain, num_threads)


def test_ranks_share_a_global_batch_and_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain() -> Any:
        pipe = mixed([48, 16], per_batch=[6, 2]).select("x", bare=True)
        return pipe.deal(global_batch_size=8, shuffle=True, seed=1)

    whole, parts = list(chain()), []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        parts.append(list(chain()))
    assert [first + second for first, second in zip(*parts, strict=True)] == whole
    assert {tuple(sorted(letters(batch).items())) for part in parts for batch in part} == {(("a", 3), ("b", 1))}


@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
def test_each_batch_of_each_rank_has_the_given_shares(monkeypatch: pytest.MonkeyPatch, uneven: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipe = mixed([3, 9], per_batch=[1, 2]).select("x is_padding").deal(batch_size=3, uneven=uneven)
    seen = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        batches = list(pipe)
        assert len(batches) == len(pipe) == (2 if uneven == "pad" else 1)
        for batch in batches:
            assert letters([x for x, _ in batch]) == {"a": 1, "b": 2}
        seen += [x for batch in batches for x, is_padding in batch if not is_padding]
        pipe.set_epoch(0)
    assert len(seen) == len(set(seen)) == (9 if uneven == "pad" else 6)


def test_a_mix_with_too_few_batches_for_the_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(kdp.DataError, match=r"fills fewer batches in an epoch \(1\) than there are ranks \(2\)"):
        len(mixed([1, 9], per_batch=[1, 2]).deal(batch_size=3))


def test_samples_may_be_chosen_between_the_mix_and_deal() -> None:
    pipe = mixed([20, 20], per_batch=[1, 1]).filter_samples(columns="x", keep=lambda x: x != "a3").permute(seed=1)
    batches = list(pipe.select("x", bare=True).deal(batch_size=2))
    assert [letters(batch) for batch in batches] == [{"a": 1, "b": 1}] * 19
    assert "a3" not in {x for batch in batches for x in batch}


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: mixed([9, 9], per_batch=[48]), ValueError, "`per_batch` must be 2 numbers, one for each source"),
        (lambda: mixed([9, 9], per_batch=[2, 1]).deal(batch_size=4), ValueError, r"must be 3, the sum of `mix\(per_ba"),
        (
            lambda: mixed([9, 1], per_batch=[2, 2]).deal(batch_size=4),
            kdp.DataError,
            "needs 2 samples of source",
        ),
        (
            lambda: mixed([90, 9], batches="stratified", weights=[99, 1]).deal(batch_size=4),
            ValueError,
            "source 1 would get no sample",
        ),
        (
            lambda: mixed([9, 9], per_batch=[1, 1]).deal(batch_size=2, num_batches=3),
            ValueError,
            "`num_batches` and .* cannot be used after `mix",
        ),
        (
            lambda: mixed([9, 9], batches="per_source").deal(batch_size=2, shuffle="shards"),
            ValueError,
            '`shuffle="shards"` cannot be used after `mix',
        ),
        (
            lambda: mixed([9, 9], per_batch=[1, 1]).mix(rows("c", 9)).deal(batch_size=2),
            kdp.ChainError,
            "joins several sources",
        ),
        (
            lambda: mixed([9, 9], per_batch=[1, 1]).sample_weighted([1.0] * 18).deal(batch_size=2),
            kdp.ChainError,
            "`sample_weighted` chooses other samples in each epoch",
        ),
    ],
)
def test_what_cannot_be_composed_is_an_error(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(make())
