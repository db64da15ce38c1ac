"""`deal`: cut, epochs, padding and errors. Order across loaders is in test_elastic_order.py."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data.graph_settings
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.datapipes.utils.snapshot import _simple_graph_snapshot_restoration

import kdpipes as kdp


def source(flavour: str, size: int) -> Any:
    items = [(number, number % 3) for number in range(size)]
    if flavour == "map":
        return kdp.from_dataset(items)
    return IterableWrapper(items, deepcopy=False).to_samples(fields="x y")


both = pytest.mark.parametrize("flavour", ["map", "iter"])


def as_rank(pipe: Any, rank: int, num_ranks: int) -> Any:
    return torch.utils.data.graph_settings.apply_sharding(pipe, num_ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)


@both
@pytest.mark.parametrize(
    ("uneven", "expected"),
    [
        ("keep", [[0, 1, 2], [3, 4, 5], [6]]),
        ("drop", [[0, 1, 2], [3, 4, 5]]),
        ("pad", [[0, 1, 2], [3, 4, 5], [6, 0, 1]]),
    ],
)
def test_a_short_batch_is_kept_dropped_or_padded(flavour: str, uneven: Any, expected: list[list[int]]) -> None:
    pipe = source(flavour, 7).select("x").deal(batch_size=3, uneven=uneven)
    for _ in range(2):
        assert [[x for (x,) in batch] for batch in pipe] == expected
    assert len(pipe) == len(expected)


@both
def test_padding_has_list_and_has_ordinals_of_its_own(flavour: str) -> None:
    pipe = source(flavour, 2).select("x ordinal is_padding").deal(batch_size=5, uneven="pad")
    assert list(pipe) == [[(0, 0, False), (1, 1, False), (0, 2, True), (1, 3, True), (0, 4, True)]]


@both
@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
def test_an_empty_source_has_no_batches(flavour: str, uneven: Any) -> None:
    assert list(source(flavour, 0).select("x").deal(batch_size=3, uneven=uneven)) == []


@both
def test_ranks_split_a_short_last_batch_evenly(flavour: str) -> None:
    parts = [list(as_rank(source(flavour, 7).select("x").deal(batch_size=2), rank, 2)) for rank in range(2)]
    assert [[x for (x,) in part[-1]] for part in parts] == [[4], [5, 6]]


@both
def test_a_rank_that_would_get_nothing_is_an_error_on_every_rank(flavour: str) -> None:
    for rank in range(2):
        with pytest.raises(ValueError, match=r"1 sample for 2 ranks"):
            list(as_rank(source(flavour, 5).select("x").deal(batch_size=2), rank, 2))


def test_shuffled_epochs_hold_each_sample_once_in_own_orders() -> None:
    pipe = source("map", 50).select("x").deal(batch_size=8, shuffle=True, seed=1)
    epochs = [[x for batch in pipe for (x,) in batch] for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_epoch_can_be_set() -> None:
    pipe = source("map", 50).select("x").deal(batch_size=8, shuffle=True, seed=1)
    epochs = [list(pipe) for _ in range(3)]
    pipe.set_epoch(1)
    assert [list(pipe), list(pipe)] == epochs[1:]


@both
def test_a_sample_met_twice_in_an_epoch_is_augmented_twice(flavour: str) -> None:
    pipe = source(flavour, 1).repeat_until(repetitions=4).transform("x", lambda x, rng: rng.random()).select("x")
    drawn = [x for batch in pipe.deal(batch_size=4) for (x,) in batch]
    assert len(set(drawn)) == 4


@both
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "Exactly one of `batch_size` or `global_batch_size`"),
        ({"batch_size": 2.5}, TypeError, "`batch_size` must be an integer of at least 1, but is 2.5"),
        ({"batch_size": 2, "seed": -1}, ValueError, "`seed` must be an integer of at least 0"),
        ({"batch_size": 2, "seed": 1 << 64}, ValueError, "`seed` must be below"),
        ({"batch_size": 2, "shuffle": "yes"}, ValueError, "`shuffle` must be one of True, False, 'shards'"),
        ({"batch_size": 2, "uneven": "no"}, ValueError, "`uneven` must be one of"),
    ],
)
def test_bad_arguments_are_rejected(
    flavour: str, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        source(flavour, 3).deal(**arguments)


def test_shuffling_a_stream_says_the_way_out() -> None:
    with pytest.raises(kdp.ChainError, match=r"stream\. Put `\.shuffle\(buffer_size=1000\)` before"):
        source("iter", 3).deal(batch_size=2, shuffle=True)


def test_a_chain_that_shards_twice_is_rejected() -> None:
    with pytest.raises(kdp.ChainError, match="`sharding_filter` upstream shards it as well"):
        source("iter", 3).sharding_filter().deal(batch_size=2)


@both
def test_an_error_names_sample_operation_and_batch(flavour: str) -> None:
    def explode(x: int) -> int:
        if x == 3:
            raise ArithmeticError("boom", 7)
        return x

    pipe = source(flavour, 5).transform("x", explode).select("x").deal(batch_size=2, seed=9)
    with pytest.raises(ArithmeticError) as caught:
        list(pipe)
    assert caught.value.args == ("boom", 7)
    notes = "\n".join(caught.value.__notes__)
    assert "while applying 'explode' to field 'x' of sample '3' (ordinal 3)" in notes
    assert "while making batch 1 of epoch 0 (seed 9)" in notes


def test_a_stream_loads_only_the_samples_of_this_worker() -> None:
    loaded: list[int] = []

    def load(x: int) -> int:
        loaded.append(x)
        return x

    pipe = source("iter", 8).transform("x", load).select("x").deal(batch_size=2)
    torch.utils.data.graph_settings.apply_sharding(pipe, 2, 1, SHARDING_PRIORITIES.MULTIPROCESSING)
    assert len(list(pipe)) == 2
    assert loaded == [2, 3, 6, 7]


class Endless:
    """Numbers without end, and without a length."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        number = 0
        while True:
            yield number, 0
            number += 1


def test_an_endless_stream_is_dealt_as_it_comes() -> None:
    pipe = IterableWrapper(Endless(), deepcopy=False).to_samples(fields="x y").select("x").deal(batch_size=2)
    batches = iter(pipe)
    assert [next(batches), next(batches)] == [[(0,), (1,)], [(2,), (3,)]]


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")
def test_stock_pipes_may_stand_between_work_and_deal() -> None:
    pipe = source("map", 4).select("x y").map(lambda pair: pair[0] * 10).deal(batch_size=2)
    assert list(pipe) == [[0, 10], [20, 30]]
    stream = source("iter", 4).select("x y").map(lambda pair: pair[0] * 10).deal(batch_size=3)
    assert list(stream) == [[0, 10, 20], [30]]


def test_more_workers_than_batches_do_no_harm() -> None:
    pipe = source("map", 3).select("x").deal(batch_size=2)
    with kdp.Loader(pipe, num_workers=4) as loader:
        assert [list(loader), list(loader)] == [[[(0,), (1,)], [(2,)]]] * 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("with_deal", [True, False])
def test_a_stream_that_workers_would_double_is_rejected(with_deal: bool) -> None:
    pipe = source("iter", 4).select("x")
    pipe = pipe.deal(batch_size=1) if with_deal else pipe
    error = error_of(DataLoader(pipe, batch_size=None, num_workers=2))
    assert (error == "") == with_deal
    assert with_deal or re.search(r"Each of the 2 workers would (yield|give) every sample.*\.deal\(", error)


def error_of(loader: Any) -> str:
    try:
        list(loader)
    except kdp.ChainError as error:
        traceback.clear_frames(error.__traceback__)  # or torch's iterator waits seconds for its workers when collected
        return str(error)
    return ""


def test_an_epoch_that_drops_everything_says_so() -> None:
    pipe = source("map", 3).select("x").deal(batch_size=5, uneven="drop")
    with pytest.warns(UserWarning, match="makes no batch of 3 samples: a global batch has 5"):
        assert list(pipe) == []


@pytest.mark.parametrize("name", ["select", "transform", "filter_classes"])
def test_pipes_of_samples_behind_deal_say_where_they_belong(name: str) -> None:
    arguments = {"select": ("x",), "transform": ("x", abs), "filter_classes": ()}[name]
    keywords = {"valid": [0]} if name == "filter_classes" else {}
    batches = source("map", 3).select("x y").deal(batch_size=2)
    with pytest.raises(kdp.ChainError, match=rf"made batches of them\. Put `\.{name}\(\)` before `\.deal\(\)`"):
        getattr(batches, name)(*arguments, **keywords)
    with pytest.raises(kdp.ChainError, match=r"made batches of them"):
        getattr(batches.collate_samples(), name)(*arguments, **keywords)
    stock = getattr(batches.map(list), name)(*arguments, **keywords)
    with pytest.raises(kdp.ChainError, match=rf"These are batches: put `\.{name}\(\)` before `\.deal\(\)`"):
        list(stock)


@both
def test_an_index_into_batches_is_an_error_with_a_hint(flavour: str) -> None:
    batches = source(flavour, 3).select("x").deal(batch_size=2)
    for pipe in (batches, batches.collate_samples()):
        with pytest.raises(TypeError, match=r"is a stream and cannot be indexed. `next\(iter\(pipe\)\)`"):
            pipe[0]


@both
def test_torch_fast_forwards_a_chain_to_a_snapshot(flavour: str) -> None:
    epochs = source(flavour, 7).transform("x", lambda x, rng: rng.random()).select("x").deal(batch_size=2, seed=1)
    expected = [list(epochs), list(epochs)]
    epochs.set_epoch(0)
    _simple_graph_snapshot_restoration(epochs, 3)
    assert [list(epochs), list(epochs)] == [expected[0][3:], expected[1]]


def test_torch_fast_forwards_a_stream_without_deal() -> None:
    stream = source("iter", 5).select("x")
    _simple_graph_snapshot_restoration(stream, 2)
    assert [list(stream), list(stream)] == [[(2,), (3,), (4,)], [(0,), (1,), (2,), (3,), (4,)]]
