"""Runs go on where they were: of chains without `deal`, of several of them, of endless streams, of no or one sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.resuming import (
    FORKED,
    dealt,
    digests,
    inline,
    jitter,
    number_chain,
    processes,
    resumed_everywhere,
    states_of,
    stock,
    threads,
    travelled,
)

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_stock_chain_resumes_in_one_order_from_each_item(number: int) -> None:
    with kdp.Loader(stock(), reading_service=processes(number)()) as loader:
        loader.seed(4)
        states = states_of(loader)
        loader.load_state_dict(states[0])
        epochs = [list(loader) for _ in range(3)]
    assert all(sorted(epoch) == [*range(-11, 1)] for epoch in epochs)
    assert epochs[0] != epochs[1]
    with kdp.Loader(stock(), reading_service=threads(number)()) as loader:
        resumed_everywhere(loader, states, [digests(epoch) for epoch in epochs])


@settings(max_examples=25)
@given(size=st.integers(0, 12), number=st.integers(1, 4), kept=st.sets(st.integers(0, 11)), taken=st.integers(0, 13))
def test_workers_of_uneven_lengths_lose_and_double_nothing(size: int, number: int, kept: set[int], taken: int) -> None:
    def chain() -> Any:
        return IterableWrapper(range(size)).sharding_filter().filter(kept.__contains__)

    parts = [[n for n in range(worker, size, number) if n in kept] for worker in range(number)]
    expected = [part[place] for place in range(size) for part in parts if place < len(part)]
    with kdp.Loader(chain(), reading_service=threads(number)()) as loader:
        assert [list(loader), list(loader)] == [expected, expected]
        assert list(islice(loader, taken)) == expected[:taken]
        state = loader.state_dict()
    with kdp.Loader(chain(), reading_service=threads(number)()) as loader:
        loader.load_state_dict(travelled(state))
        assert list(loader) == (expected[taken:] if taken <= len(expected) else expected)


def test_two_dealt_chains_side_by_side_have_one_order_and_go_on() -> None:
    def chain() -> Any:
        return number_chain(batch_size=4).zip(dealt(24))

    pipe = chain()
    epochs = [digests(pipe) for _ in range(3)]
    assert len(epochs[0]) == 8
    for service in (inline, FORKED[1], threads(2), threads(3)):
        with kdp.Loader(chain(), reading_service=service()) as loader:
            states = states_of(loader)
            assert digests(loader) == epochs[1]
            resumed_everywhere(loader, states, epochs)


class Endless(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


@pytest.mark.parametrize("service", [inline, FORKED[1], threads(2)], ids=lambda make: make.__name__)
def test_an_endless_stream_is_left_and_gone_on_with(service: Any) -> None:
    def chain() -> Any:
        return Endless().shuffle(buffer_size=5).to_samples(fields="x").select("x").deal(batch_size=3, seed=1)

    pipe = chain()
    epochs = [list(islice(pipe, 6)) for _ in range(2)]
    with kdp.Loader(chain(), reading_service=service()) as loader:
        assert list(islice(loader, 2)) == epochs[0][:2]
        state = loader.state_dict()
        assert list(islice(loader, 6)) == epochs[1]
        loader.load_state_dict(state)
        assert list(islice(loader, 4)) == epochs[0][2:]


@pytest.mark.parametrize("service", [inline, FORKED[3], threads(3)], ids=lambda make: make.__name__)
@pytest.mark.parametrize("size", [0, 1])
def test_no_sample_and_one_sample_are_epochs_too(size: int, service: Any) -> None:
    streamed = IterableWrapper(range(size)).to_samples(fields="x").select("x").deal(batch_size=2)
    indexed = kdp.from_dataset([(n, 0) for n in range(size)]).select("x").deal(batch_size=2)
    for pipe in (streamed, indexed, indexed.unbatch()):
        expected = list(pipe)
        with kdp.Loader(pipe, reading_service=service()) as loader:
            assert [list(loader), list(loader)] == [expected, expected]
            state = loader.state_dict()
            loader.load_state_dict(travelled(state))
            assert [list(loader), list(loader)] == [expected, expected]
            assert loader.state_dict()["epoch"] == state["epoch"] + 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_without_deal_resumes_in_the_epoch_set_before(num_workers: int) -> None:
    def chain() -> Any:
        return IterableWrapper(range(6)).to_samples(fields="x").transform("x", jitter).select("x")

    pipe = chain()
    pipe.set_epoch(3)
    expected = list(pipe)
    pipe.set_epoch(3)
    with kdp.Loader(pipe, num_workers) as loader:
        assert list(islice(loader, 2)) == expected[:2]
        state = loader.state_dict()
    with kdp.Loader(chain(), num_workers) as loader:
        loader.load_state_dict(state)
        assert list(loader) == expected[2:]


def test_set_epoch_counts_from_0_also_after_a_look() -> None:
    pipe = IterableWrapper(range(6)).to_samples(fields="x").transform("x", jitter).select("x")
    epochs = [list(pipe) for _ in range(3)]
    with kdp.Loader(pipe) as loader:
        loader.set_epoch(1)
        assert list(loader) == epochs[1]


def fails_at_7(value: int) -> int:
    if value % 10 == 7:
        raise ValueError("bad")
    return value


HOLDING: dict[str, Any] = {
    "batch": lambda pipe: pipe.batch(2),
    "shuffle": lambda pipe: pipe.shuffle(buffer_size=4),
    "unbatch": lambda pipe: pipe.shuffle(buffer_size=4).unbatch(),
    "filter": lambda pipe: pipe.batch(2).filter(lambda batches: len(batches[0]) > 3),
}


@pytest.mark.parametrize("end", HOLDING)
@pytest.mark.parametrize("action", ["skip", "substitute"])
@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_skipped_samples_lose_no_items_that_are_held_back(end: str, action: str, kind: str) -> None:
    rows = [(n, 0) for n in range(64)]
    if kind == "stream" and action == "substitute":
        return
    source: Any = kdp.from_dataset(rows) if kind == "indexed" else IterableWrapper(rows).to_samples(fields="x y")
    pipe = source.transform("x", fails_at_7).on_error(action).select("x", bare=True)
    chain = HOLDING[end](pipe.deal(batch_size=4) if kind == "indexed" else pipe.deal(batch_size=4, split="samples"))
    kept = sorted(flat(list(copy.deepcopy(chain)))) if end != "filter" else None  # which does not count epochs
    services = [None, kdp.ThreadReadingService(1), kdp.ThreadReadingService(3)]
    for service in services:
        with kdp.Loader(chain, reading_service=service) as loader:
            whole = [list(loader), list(loader)]
            if kept is not None:
                assert sorted(flat(whole[0])) == kept
                assert len(flat(whole[1])) == len(kept)
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": 3})
            assert len(list(loader)) == max(len(whole[0]) - 3, 0)


def flat(item: Any) -> list[Any]:
    return [x for part in item for x in flat(part)] if isinstance(item, list) else [item]
