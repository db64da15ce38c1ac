"""Runs go on where they were behind `deal`, too: in tails with and without a memory, and under DataLoader2."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

import kdpipes as kdp
from tests.resuming import FORKED, dealt, digests, inline, number_chain, resumed_everywhere, states_of, stock, threads
from tests.torchdata_parts import DataLoader2, SequentialReadingService

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


def _is_kept(x: int) -> bool:
    return x % 5 < 3


def _kept(batch: list[Any]) -> bool:
    return batch[0][0] % 3 > 0


def _doubled(item: Any) -> list[Any]:
    return [item, item] if item[0] % 2 else []


TAILS: dict[str, Callable[[Any], Any]] = {
    "map": lambda pipe: pipe.map(lambda batch: [x * 2 for (x,) in batch]),
    "filter": lambda pipe: pipe.filter(_kept),
    "unbatch": lambda pipe: pipe.unbatch(),
    "flatmap": lambda pipe: pipe.unbatch().flatmap(_doubled),
    "all_of_them": lambda pipe: pipe.filter(_kept).unbatch().map(list).flatmap(_doubled).filter(lambda x: x[0] > 3),
    "nothing_is_left": lambda pipe: pipe.filter(lambda batch: False),
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_tail_without_memory_goes_on_from_each_of_its_items(tail: str) -> None:
    pipe = TAILS[tail](dealt())
    epochs = [digests(pipe) for _ in range(3)]
    states = states_of(kdp.Loader(TAILS[tail](dealt()), reading_service=threads(2)()))
    assert len(states) == len(epochs[0]) + 2
    for service in (inline, FORKED[2], threads(2)):
        with kdp.Loader(TAILS[tail](dealt()), reading_service=service()) as loader:
            resumed_everywhere(loader, states, epochs)


@pytest.mark.parametrize("tail", ["unbatch", "flatmap"])
def test_after_the_last_item_of_an_only_batch_comes_an_epoch(tail: str) -> None:
    pipe = TAILS[tail](dealt(3))
    epochs = [list(pipe) for _ in range(2)]
    loader = kdp.Loader(TAILS[tail](dealt(3)))
    list(islice(loader, len(epochs[0])))
    resumed = kdp.Loader(TAILS[tail](dealt(3)))
    resumed.load_state_dict(loader.state_dict())
    assert [list(resumed), resumed.epoch, list(resumed)] == [[], 1, epochs[1]]


MEMORIES: dict[str, Callable[[Any], Any]] = {
    "shuffle": lambda pipe: pipe.shuffle(),
    "batch": lambda pipe: pipe.batch(2),
    "header": lambda pipe: pipe.header(2),
    "prefetch": lambda pipe: pipe.prefetch(2),
    "enumerate": lambda pipe: pipe.enumerate(),
}


@pytest.mark.parametrize("tail", MEMORIES)
def test_a_tail_with_memory_resumes_with_equal_workers_only(tail: str) -> None:
    with kdp.Loader(MEMORIES[tail](dealt()), reading_service=FORKED[1]()) as loader:
        loader.seed(3)
        states = states_of(loader)
        epochs = [digests(loader) for _ in range(2)]
        loader.load_state_dict(states[0])
        epochs.insert(0, digests(loader))
    with kdp.Loader(MEMORIES[tail](dealt()), reading_service=threads(2)()) as loader:
        resumed_everywhere(loader, states, epochs)
    with pytest.raises(ValueError, match="taken with 2 workers, but this loader has 3"):
        kdp.Loader(MEMORIES[tail](dealt()), reading_service=threads(3)()).load_state_dict(states[1])


@pytest.mark.parametrize("is_new", [False, True])
def test_a_dataloader2_goes_on_with_the_very_next_batch(is_new: bool) -> None:
    pipe = number_chain()
    epochs = [digests(pipe) for _ in range(2)]
    loader = DataLoader2(number_chain(), reading_service=kdp.ProcessReadingService(2))
    states = states_of(loader)
    loader.shutdown()
    for number in (0, 1, 3, len(epochs[0])):
        if is_new:
            resumed = DataLoader2.from_state(states[number], kdp.ProcessReadingService(3))
        else:
            resumed = DataLoader2(number_chain(), reading_service=kdp.ProcessReadingService(3))
            resumed.load_state_dict(states[number])
        assert resumed.state_dict() == states[number]
        assert digests(resumed) == (epochs[0][number:] or epochs[1])
        if number < len(epochs[0]):
            assert digests(resumed) == epochs[1]
        resumed.shutdown()


def test_a_service_inside_a_sequential_one_keeps_its_state() -> None:
    pipe = number_chain()
    epochs = [digests(pipe) for _ in range(3)]
    loader = DataLoader2(number_chain(), reading_service=SequentialReadingService(kdp.ThreadReadingService(2)))
    next(iter(loader))
    state = loader.state_dict()
    loader.shutdown()
    resumed = DataLoader2.from_state(state, SequentialReadingService(kdp.ThreadReadingService(3)))
    assert [digests(resumed), digests(resumed)] == [epochs[0][1:], epochs[1]]
    resumed.shutdown()


def test_a_dataloader2_over_a_stock_chain_resumes_in_order() -> None:
    loader = DataLoader2(stock(), reading_service=kdp.ThreadReadingService(2))
    loader.seed(4)
    items = iter(loader)
    seen = list(islice(items, 5))
    state = loader.state_dict()
    resumed = DataLoader2.from_state(state, kdp.ThreadReadingService(2))
    assert sorted(seen + list(resumed)) == [*range(-11, 1)]
    loader.shutdown()
    resumed.shutdown()


@pytest.mark.parametrize("service", [FORKED[1], threads(2)], ids=lambda make: make.__name__)
@pytest.mark.parametrize("make_loader", [kdp.Loader, DataLoader2])
def test_a_limit_pauses_the_epoch_at_the_right_state(make_loader: Any, service: Any) -> None:
    expected = digests(number_chain())
    loader = make_loader(number_chain(), reading_service=service())
    batches = iter(loader)
    batches.limit(2)
    assert digests(batches) == expected[:2]
    state = loader.state_dict()
    batches.resume()
    assert digests(batches) == expected[2:4]
    resumed = make_loader(number_chain(), reading_service=service())
    resumed.load_state_dict(state)
    assert digests(resumed) == expected[2:]
    loader.shutdown()
    resumed.shutdown()


def test_a_loader_that_was_paused_goes_on_where_a_state_says() -> None:
    expected = digests(number_chain())
    with kdp.Loader(number_chain()) as loader:
        batches = iter(loader)
        batches.limit(2)
        list(batches)
        loader.load_state_dict(loader.state_dict())
        assert digests(loader) == expected[2:]
