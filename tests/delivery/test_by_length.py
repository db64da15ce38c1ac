"""`kdp.by_length`: batches of like length, no larger than they may be, each sample once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.delivery.batching import Arguments
from kdpipes.delivery.grouped import GroupedEpoch, LengthOrder
from kdpipes.delivery.layout import Sharding

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


class Texts(kdp.SampleSource):
    """Token lists whose lengths are known without them."""

    def __init__(self, lengths: Any = LENGTHS) -> None:
        self._lengths = [int(length) for length in lengths]

    def __len__(self) -> int:
        return len(self._lengths)

    def getitem_x(self, index: int) -> torch.Tensor:
        return torch.arange(self._lengths[index])

    def getitem_length(self, index: int) -> int:
        return self._lengths[index]


def bound(limits: dict[str, int], *, uneven: Any, shuffle: bool) -> Any:
    tokens = {name: limit for name, limit in limits.items() if name.endswith("max_tokens")}
    sizes = limits.get("batch_size"), limits.get("global_batch_size")
    return kdp.by_length("length", **tokens).bind(Texts(), Arguments(*sizes, shuffle, None, 0, uneven))


def epochs(pipe: Any, number: int = 2) -> list[list[list[int]]]:
    return [[[index for (index,) in batch] for batch in pipe] for _ in range(number)]


@given(
    lengths=st.lists(st.integers(0, 30), max_size=80),
    limits=st.sampled_from(
        [
            {"max_tokens": 40},
            {"max_tokens": 60, "batch_size": 3},
            {"batch_size": 4},
            {"global_max_tokens": 120},
            {"global_max_tokens": 130, "global_batch_size": 7},
            {"global_batch_size": 5},
        ]
    ),
    num_ranks=st.integers(1, 4),
    uneven=st.sampled_from(["keep", "pad", "drop"]),
    key=st.none() | st.tuples(st.just(0), st.integers(0, 2)),
)
def test_ranks_share_out_each_sample_once_within_the_limits(
    lengths: list[int], limits: dict[str, int], num_ranks: int, uneven: Any, key: Any
) -> None:
    cut = bound(limits, uneven=uneven, shuffle=key is not None)
    order = LengthOrder(np.asarray(lengths, dtype=np.int64))
    assert [lengths[place] for place in order.positions] == sorted(lengths, reverse=True)
    shares = [
        GroupedEpoch(order.groups(cut, num_ranks), uneven, Sharding(rank, num_ranks), key) for rank in range(num_ranks)
    ]
    positions: list[int] = []
    ordinals: list[int] = []
    padded = 0
    for batch in range(shares[0].num_batches):
        try:
            parts = [(share.ordinals(batch), share.positions(batch)) for share in shares]
        except ValueError:
            assert uneven == "keep"
            assert batch == shares[0].num_batches - 1
            return
        for numbers, places in parts:
            assert len(numbers) == len(places) >= 1
            longest = max(max(lengths[place] for place in places), 1)
            allowed = limits.get("max_tokens", limits.get("global_max_tokens", 10**9) / num_ranks + longest)
            assert len(places) * longest <= allowed
            assert len(places) <= limits.get("batch_size", 10**9)
        assert sum(len(numbers) for numbers, _ in parts) <= limits.get("global_batch_size", 10**9)
        for numbers, places in parts:
            ordinals += numbers
            positions += [
                place for number, place in zip(numbers, places.tolist(), strict=True) if number < len(lengths)
            ]
            padded += sum(number >= len(lengths) for number in numbers)
    assert ordinals == list(range(len(ordinals)))
    assert max(Counter(positions).values(), default=1) == 1
    assert uneven == "pad" or not padded
    if uneven != "drop":
        assert sorted(positions) == list(range(len(lengths)))


def test_the_batches_of_an_epoch_do_not_depend_on_workers() -> None:
    def batches() -> Any:
        return Texts().select("index").deal(shuffle=True, seed=3, batching=kdp.by_length("length", max_tokens=300))

    expected = epochs(batches())
    assert expected[0] != expected[1]
    assert sorted(index for batch in expected[1] for index in batch) == list(range(400))
    for arguments in ({}, {"num_workers": 1}, {"num_workers": 3}, {"num_workers": 1, "start_method": "forkserver"}):
        with kdp.Loader(batches(), **arguments) as loader:
            assert len(loader) == len(expected[0]) == len(expected[1])
            assert epochs(loader) == expected
    torchs = torch.utils.data.DataLoader(batches(), batch_size=None, num_workers=2)
    assert epochs(torchs) == expected


def test_a_state_goes_on_with_the_next_batch_under_other_workers() -> None:
    def batches() -> Any:
        return Texts().select("index").deal(shuffle=True, batching=kdp.by_length("length", global_max_tokens=300))

    with kdp.Loader(batches(), num_workers=2) as loader:
        running = iter(loader)
        for _ in range(5):
            next(running)
        state = loader.state_dict()
        rest = list(running)
    with kdp.Loader(batches()) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest
    for limits in ({"global_max_tokens": 200}, {"max_tokens": 300}, {"global_batch_size": 300}):
        tokens = {name: limit for name, limit in limits.items() if name != "global_batch_size"}
        sizes = {name: limit for name, limit in limits.items() if name not in tokens}
        other = Texts().select("index").deal(shuffle=True, batching=kdp.by_length("length", **tokens), **sizes)
        with kdp.Loader(other) as loader, pytest.raises(ValueError, match=r"taken with batching='kdp.by_length'"):
            loader.load_state_dict(state, strict=False)
    with kdp.Loader(Texts().select("index").deal(4)) as loader, pytest.raises(ValueError, match="global_batch_size=4"):
        loader.load_state_dict(state, strict=False)


def test_a_state_of_batches_per_rank_fits_as_many_ranks_only() -> None:
    with kdp.Loader(Texts().select("index").deal(batching=kdp.by_length("length", max_tokens=300))) as loader:
        state = loader.state_dict()
        assert "global_batch_size" not in state
        with pytest.raises(ValueError, match=r"taken with 2 ranks, but this loader has 1.*global_max_tokens"):
            loader.load_state_dict({**state, "num_ranks": 2})


@given(
    lengths=st.lists(st.integers(0, 30), min_size=4, max_size=200),
    limits=st.sampled_from(
        [
            {"global_max_tokens": 120},
            {"global_max_tokens": 400, "global_batch_size": 24},
            {"global_batch_size": 12},
        ]
    ),
    num_ranks=st.integers(2, 4),
    uneven=st.sampled_from(["keep", "pad", "drop"]),
    key=st.none() | st.just((0, 1)),
)
def test_the_global_batches_are_the_same_for_any_number_of_ranks(
    lengths: list[int], limits: dict[str, int], num_ranks: int, uneven: Any, key: Any
) -> None:
    cut = bound(limits, uneven=uneven, shuffle=key is not None)
    order = LengthOrder(np.asarray(lengths))
    whole, *shares = (
        GroupedEpoch(order.groups(cut, rank[1]), uneven, Sharding(*rank), key)
        for rank in [(0, 1), *((rank, num_ranks) for rank in range(num_ranks))]
    )
    assert {share.num_batches for share in shares} == {whole.num_batches}
    for batch in range(whole.num_batches):
        expected = whole.positions(batch).tolist()
        if len(expected) < num_ranks:  # a short last batch, which is an error
            continue
        assert np.concatenate([share.positions(batch) for share in shares]).tolist() == expected


def test_batches_waste_little_and_meet_others_in_every_epoch() -> None:
    lengths = np.random.default_rng(1).integers(10, 500, 20_000)
    first, second = epochs(
        Texts(lengths).select("index").deal(shuffle=True, batching=kdp.by_length("length", max_tokens=8_000))
    )
    padded = sum(len(batch) * max(lengths[batch]) for batch in first)
    assert lengths.sum() / padded > 0.93
    companions = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    assert not companions
    assert max(np.abs(np.diff([lengths[batch].mean() for batch in first]))) > 100, "batches come in no order of length"


def test_many_short_samples_are_no_batch_that_stays_the_same() -> None:
    lengths = [100] * 100 + [1] * 50
    for uneven in ("keep", "drop"):
        pipe = (
            Texts(lengths)
            .select("index")
            .deal(shuffle=True, uneven=uneven, batching=kdp.by_length("length", max_tokens=1000))
        )
        first, second = epochs(pipe)
        assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
        assert len(first) == len(second) == len(pipe)
        assert sum(map(len, first)) >= 138


def test_a_source_that_fits_into_one_batch_is_one() -> None:
    for uneven, size in (("keep", 3), ("pad", 3), ("drop", 3)):
        pipe = (
            Texts([2, 1, 1])
            .select("index")
            .deal(shuffle=True, uneven=uneven, batching=kdp.by_length("length", max_tokens=10**6))
        )
        assert [[len(batch) for batch in epoch] for epoch in epochs(pipe)] == [[size]] * 2


def test_without_shuffling_the_longest_come_first() -> None:
    pipe = Texts([3, 9, 9, 1, 3]).select("index").deal(batching=kdp.by_length("length", max_tokens=18))
    assert epochs(pipe) == [[[1, 2], [0, 4, 3]]] * 2


def test_batches_of_one_size_are_grouped_by_length_too() -> None:
    pipe = Texts([3, 9, 9, 1, 3]).select("index").deal(2, batching=kdp.by_length("length"))
    assert epochs(pipe) == [[[1, 2], [0, 4], [3]]] * 2


def test_padding_has_list_and_keeps_to_the_limit() -> None:
    pipe = (
        Texts([5, 1, 1, 1])
        .select("x ordinal is_padding")
        .deal(uneven="pad", batching=kdp.by_length("length", max_tokens=5))
    )
    for _ in range(2):
        (longest,), short = list(pipe)
        assert (len(longest[0]), *longest[1:]) == (5, 0, False)
        assert [(len(x), *rest) for x, *rest in short] == [
            (1, 1, False),
            (1, 2, False),
            (1, 3, False),
            (1, 4, True),
            (1, 5, True),
        ]


def test_the_field_may_be_computed_and_passes_plan_and_collate() -> None:
    texts = [("to be or not to be", 0), ("that is the question", 1), ("ay", 0)]
    pipe = (
        kdp.from_dataset(texts)
        .add_field("length", lambda sample: len(sample["x"].split()))
        .repeat_until(repetitions=2)
        .transform("x", lambda text: torch.ones(len(text.split())))
        .select("x y")
        .deal(batching=kdp.by_length("length", max_tokens=8))
        .collate_samples(pad={"x": 0})
    )
    for _ in range(2):
        assert [tuple(x.shape) for x, _ in pipe] == [(1, 6), (1, 6), (2, 4), (2, 1)]


def test_a_sample_that_is_too_long_is_named() -> None:
    pipe = Texts([3, 50]).select("x").deal(batching=kdp.by_length("length", max_tokens=40))
    with pytest.raises(kdp.DataError, match=r"'1' has length 50: with `kdp.by_length\(max_tokens=40\)`"):
        list(pipe)
    source: Any = Texts([3, 50])
    kept = source[source.column("length") <= 40].select("index")
    assert epochs(kept.deal(batching=kdp.by_length("length", max_tokens=40))) == [[[0]]] * 2


def test_lengths_that_are_none_are_rejected() -> None:
    for length in (0.5, None, "long", -1, [1]):
        pipe = Texts([1, 1]).add_field("size", lambda sample, length=length: length if sample.index else 1).select("x")
        with pytest.raises(kdp.DataError, match=r"integers of at least 0, but sample '1' has size .*add_field"):
            list(pipe.deal(batch_size=2, batching=kdp.by_length("size")))
    floats = Texts([1, 3]).add_field("size", lambda sample: float(sample["length"])).select("index")
    assert epochs(floats.deal(batch_size=1, batching=kdp.by_length("size"))) == [[[1], [0]]] * 2


def test_a_field_that_is_none_is_rejected_at_once() -> None:
    with pytest.raises(kdp.FieldError, match=r"no field 'lengths'.*Did you mean 'length'\?.*\.add_field"):
        Texts().select("x").deal(batching=kdp.by_length("lengths", max_tokens=9))


def test_a_state_of_other_lengths_does_not_fit() -> None:
    def batches(lengths: Any) -> Any:
        return Texts(lengths).select("index").deal(shuffle=True, batching=kdp.by_length("length", max_tokens=300))

    with kdp.Loader(batches(LENGTHS)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with kdp.Loader(batches(LENGTHS[::-1])) as other, pytest.raises(ValueError, match="of `Texts` have changed"):
        other.load_state_dict(state)


def test_an_empty_source_has_no_batches() -> None:
    pipe = Texts([]).select("index").deal(shuffle=True, batching=kdp.by_length("length", max_tokens=5))
    assert len(pipe) == 0
    assert epochs(pipe) == [[], []]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"batching": kdp.by_length("length")},
        ValueError,
        "needs `max_tokens`, `batch_size` of `deal` or both.*but got none of them",
    ),
    (
        {"global_batch_size": 4, "batching": kdp.by_length("length", max_tokens=5)},
        ValueError,
        "global_batch_size.*or both; but got",
    ),
    ({"uneven": "stay", "batching": kdp.by_length("length", max_tokens=5)}, ValueError, "`uneven` must be"),
]


@pytest.mark.parametrize(("arguments", "kind", "match"), BAD)
def test_bad_arguments_are_rejected_at_once(arguments: dict[str, Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        Texts().select("x").deal(**arguments)


def test_a_stream_and_a_stock_pipe_say_what_they_lack() -> None:
    with pytest.raises(TypeError, match="It needs an indexed source"):
        IterableWrapper([1]).to_samples(fields="x").deal(batching=kdp.by_length("length", max_tokens=5))
    with pytest.raises(kdp.ChainError, match="needs a source with columns"):
        Texts().map(str).deal(batching=kdp.by_length("length", max_tokens=5))
