"""`kdp.packed`: rows of several samples, planned from their lengths, with segment IDs and positions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kdpipes as kdp
from kdpipes.delivery import split_ctx
from kdpipes.delivery.collate_samples import row_places
from kdpipes.delivery.grouped import LengthOrder
from kdpipes.delivery.packed import Packs
from tests.resuming import assert_resumes_with_threads


def texts(lengths: list[int]) -> Any:
    rows = [([number] * length, number, length) for number, length in enumerate(lengths)]
    return kdp.from_dataset(rows, "x y length")


def packed(lengths: list[int], max_tokens: int, **arguments: Any) -> Any:
    chain = texts(lengths).select("x y")
    return chain.deal(batching=kdp.packed("length", max_tokens), **{"shuffle": True, **arguments})


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=60)


@given(LENGTHS, st.integers(12, 30), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_each_sample_is_in_one_row_and_no_row_is_too_long(
    lengths: list[int], max_tokens: int, num_rows: int, shuffle: bool, seed: int
) -> None:
    pipe = packed(lengths, max_tokens, batch_size=num_rows, shuffle=shuffle, seed=seed)
    batches = list(pipe)
    assert len(batches) == len(pipe)
    assert sorted(y for batch in batches for _, y in batch) == list(range(len(lengths)))
    counts = []
    for batch in batches:
        sizes = [max(len(x), 1) for x, _ in batch]
        rows = row_places([len(x) for x, _ in batch], max_tokens)
        counts.append(rows[-1][0] + 1)
        tokens = Counter[int]()
        for (row, start), size in zip(rows, sizes, strict=True):
            assert start == tokens[row]
            tokens[row] += size
        assert max(tokens.values()) <= max_tokens
    assert counts[:-1] == [num_rows] * (len(batches) - 1)
    assert 1 <= counts[-1] <= num_rows


@given(LENGTHS, st.integers(12, 40))
def test_no_more_rows_than_first_fit_decreasing_needs_and_one(lengths: list[int], max_tokens: int) -> None:
    free: list[int] = []
    for length in sorted((max(length, 1) for length in lengths), reverse=True):
        place = next((place for place, space in enumerate(free) if space >= length), None)
        if place is None:
            free.append(max_tokens)
            place = len(free) - 1
        free[place] -= length
    assert len(packed(lengths, max_tokens)) <= len(free) + 1


def test_rows_of_a_log_normal_distribution_are_98_percent_full() -> None:
    rng = np.random.default_rng(0)
    for mean in (4.5, 5.5, 6.5):
        lengths = np.clip(rng.lognormal(mean, 1.0, 20_000).astype(int), 1, 4096)
        packs = Packs(LengthOrder(lengths), 4096)
        assert lengths.sum() / (len(packs) * 4096) >= 0.98
        assert sorted(packs.filled((0, 1)).tolist()) == list(range(20_000))


def test_rows_are_joined_with_segments_and_positions() -> None:
    chain = packed([3, 2, 4, 1], 6, shuffle=False, batch_size=2).collate_samples(pad={"x": -1})
    [(x, y, segment_ids, positions)] = chain
    assert x.tolist() == [[2, 2, 2, 2, 1, 1], [0, 0, 0, 3, -1, -1]]
    assert y.tolist() == [2, 1, 0, 3]
    assert segment_ids.tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 2, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert x.dtype == segment_ids.dtype == positions.dtype == torch.int64


def test_dictionaries_bare_values_and_ctx_keep_their_form() -> None:
    pipe = texts([2, 1])
    how: dict[str, Any] = {"batching": kdp.packed("length", 4)}
    [batch] = pipe.select("x y", as_dict=True).deal(**how).collate_samples(pad={"x": 0})
    assert list(batch) == ["x", "y", "segment_ids", "positions"]
    [(x, segment_ids, _)] = pipe.select("x", bare=True).deal(**how).collate_samples(pad={"x": 0})
    assert (x.tolist(), segment_ids.tolist()) == ([[0, 0, 1, 0]], [[1, 1, 2, 0]])
    recorded = pipe.record_ctx().select("x", return_ctx=True).deal(**how).collate_samples(pad={"x": 0})
    [((x, _, _), ctx)] = recorded
    assert x.shape == (1, 4)
    assert ctx == {} or len(split_ctx(ctx)) == 2


def test_several_fields_are_joined_alike() -> None:
    rows = [(list(range(size)), [[1.0, 2.0]] * size, size) for size in (3, 2)]
    chain = kdp.from_dataset(rows, "x vectors length").select("x vectors")
    chain = chain.deal(batching=kdp.packed("length", 5)).collate_samples(pad={"x": 0, "vectors": 0})
    [(x, vectors, _, positions)] = chain
    assert x.tolist() == positions.tolist() == [[0, 1, 2, 0, 1]]
    assert vectors.shape == (1, 5, 2)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_the_same_for_any_workers_and_after_a_resume(num_threads: int) -> None:
    lengths = [number % 7 + 1 for number in range(80)]

    def chain() -> Any:
        return packed(lengths, 12, batch_size=2, seed=2)

    assert_resumes_with_threads(chain, num_threads)


def test_ranks_share_the_rows_of_a_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [number % 7 + 1 for number in range(81)]
    whole, parts = list(packed(lengths, 12, global_batch_size=4)), []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        parts.append(list(packed(lengths, 12, global_batch_size=4)))
    for batch, halves in zip(whole, zip(*parts, strict=True), strict=True):
        assert sorted(y for _, y in batch) == sorted(y for half in halves for _, y in half)


def test_rows_that_fill_no_batch_are_dropped_on_request() -> None:
    pipe = packed([5] * 7, 5, batch_size=3, uneven="drop")
    assert len(pipe) == 2
    assert [len(batch) for batch in pipe] == [3, 3]


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: packed([9], 8), kdp.DataError, r"Sample '0' has length 9, more than the `max_tokens=8` of a row"),
        (lambda: kdp.packed(None, 4), TypeError, "`field` must be the name of a field"),  # type: ignore[arg-type]
        (lambda: packed([1], 8, uneven="pad"), ValueError, '`uneven="pad"` cannot be used with `kdp.packed'),
        (lambda: packed([1], 8, shuffle="shards"), ValueError, "`shuffle` must be True or False"),
        (lambda: packed([1], 8).collate_samples(), kdp.ChainError, "must know which fields to join"),
        (
            lambda: packed([1, 2], 8).collate_samples(pad={"x": 0, "y": 0}),
            kdp.DataError,
            "Field 'y' must have as many entries as 'x' in each sample",
        ),
        (
            lambda: (
                texts([3])
                .add_field("n", lambda sample: 1)
                .select("x")
                .deal(batching=kdp.packed("n", 2))
                .collate_samples(pad={"x": 0})
            ),
            kdp.DataError,
            "A sample has 3 tokens, more than the 2 of a row",
        ),
        (
            lambda: texts([1]).on_error("substitute").select("x").deal(batching=kdp.packed("length", 2)),
            kdp.ChainError,
            'Use `on_error\\("skip"\\)`',
        ),
    ],
)
def test_what_cannot_be_packed_is_an_error(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(make())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ordinals_and_random_numbers_do_not_depend_on_the_ranks(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 70).tolist()

    def batches(rank: int, num_ranks: int) -> list[Any]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        chain = texts(lengths).add_field("drawn", lambda sample, rng: int(rng.integers(1000)))
        arguments: Any = {"global_batch_size": 4, "uneven": "drop", "shuffle": True}
        return list(chain.select("key ordinal drawn").deal(batching=kdp.packed("length", 10), **arguments))

    parts = [batches(rank, num_ranks) for rank in range(num_ranks)]
    joined = [[sample for part in batch for sample in part] for batch in zip(*parts, strict=True)]
    assert joined == batches(0, 1)
