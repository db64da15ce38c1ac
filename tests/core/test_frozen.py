"""Random transforms of an indexed chain that repeat in every epoch are a warning, whatever loader reads the chain."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split

import kdpipes as kdp

REPEATS = r"`{}` draws the same random numbers in every epoch.*\.deal\(.*chain\.set_epoch.*persistent_workers=False"
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def draw(x: int, rng: Any) -> int:
    return x * 1000 + int(rng.integers(1000))


def chain(size: int = 80) -> Any:
    return kdp.from_dataset([(number, 0) for number in range(size)]).transform("x", draw).select("x", bare=True)


def read(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch]


class OwnLoader:
    """Reads item by item, as fastai's does."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        for start in range(0, len(self.dataset), self.batch_size):
            yield [self.dataset[index] for index in range(start, min(start + self.batch_size, len(self.dataset)))]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda items: items,
    "map": lambda items: items.map(int),
    "slice": lambda items: items[10:50],
    "Subset": lambda items: Subset(items, range(40)),
    "Subset of a Subset": lambda items: Subset(Subset(items, range(60)), range(40)),
    "random_split": lambda items: random_split(items, [40, 40])[0],
    "ConcatDataset": lambda items: ConcatDataset([items, chain()]),
}


@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize("view", VIEWS)
def test_a_second_epoch_that_repeats_is_a_warning(view: str, batch_size: int) -> None:
    loader = DataLoader(VIEWS[view](chain()), batch_size=batch_size, shuffle=True)
    first = read(loader)
    with pytest.warns(UserWarning, match=REPEATS.format("draw")) as caught:
        assert sorted(read(loader)) == sorted(first)
    assert {warning.filename for warning in caught} == {__file__}, "torch calls the chain, but the line is the user's"


@pytest.mark.parametrize("view", VIEWS)
def test_a_loader_of_another_library_is_warned(view: str) -> None:
    loader = OwnLoader(VIEWS[view](chain()), 16)
    read(loader)
    with pytest.warns(UserWarning, match=REPEATS.format("draw")):
        read(loader)


@pytest.mark.parametrize("view", ["chain", "map", "Subset"])
def test_new_workers_warn_in_the_second_epoch(view: str) -> None:
    loader = DataLoader(VIEWS[view](chain()), batch_size=16, num_workers=2, multiprocessing_context="fork")
    read(loader)
    with pytest.raises(UserWarning, match=REPEATS.format("draw")):  # warnings are errors, also in workers
        read(loader)
    gc.collect()  # the error keeps torch's iterator, which would hang in a forked worker that collects it
    read(loader)  # said once


def test_new_chains_are_not_taken_for_earlier_ones() -> None:
    kept = [chain(16) for _ in range(300)]
    for number in range(25):  # with the addresses of earlier ones, or near those of others
        for items in (chain(16), kept[number]):
            read(DataLoader(items, batch_size=16, num_workers=1, multiprocessing_context="fork"))


def test_spawned_workers_warn_at_once() -> None:
    loader = DataLoader(Subset(chain(), range(40)), batch_size=16, num_workers=1, multiprocessing_context="forkserver")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(loader)) == 40  # they print it: filters are not passed on


def test_persistent_workers_warn_although_the_epoch_is_set() -> None:
    items = chain()
    items.set_epoch(0)
    loader = DataLoader(
        items, batch_size=16, num_workers=1, persistent_workers=True, multiprocessing_context="fork", shuffle=True
    )
    read(loader)
    items.set_epoch(1)  # which does not reach them
    with pytest.raises(UserWarning, match=REPEATS.format("draw")):
        read(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("view", ["chain", "Subset", "random_split"])
def test_epochs_that_are_set_are_no_warning(view: str, num_workers: int) -> None:
    items = chain()
    loader = DataLoader(VIEWS[view](items), batch_size=16, num_workers=num_workers)
    seen = []
    for epoch in range(3):
        items.set_epoch(epoch)
        seen += read(loader)
    assert len(set(seen)) > 100


def test_a_sampler_may_repeat_samples_of_an_epoch_that_is_set() -> None:
    items = chain()
    loader = DataLoader(items, batch_size=16, sampler=WeightedRandomSampler([1.0] + [1e-9] * 79, 80))
    for epoch in range(3):
        items.set_epoch(epoch)
        read(loader)


def test_one_epoch_that_is_set_may_be_read_again() -> None:
    items = chain()
    items.set_epoch(0)
    assert read(DataLoader(items, batch_size=16)) == read(DataLoader(items, batch_size=16))


def test_looking_at_a_chain_is_no_warning() -> None:
    items = chain()
    for _ in range(5):
        _ = [items[index] for index in range(6)]
        list(items)
        items.peek(8)
        list(items[:4])
        items.column("y")
    for _ in range(100):
        items[3]


def test_epochs_of_deal_are_no_warning() -> None:
    items = chain()
    with kdp.Loader(items.deal(batch_size=16)) as loader:
        for _ in range(4):
            list(loader)
    for _ in range(3):
        list(items.deal(batch_size=16, shuffle=True))


def test_a_chain_without_randomness_is_no_warning() -> None:
    frozen = kdp.from_dataset([(number, 0) for number in range(40)]).transform("x", draw)
    for items in (
        kdp.from_dataset([(number, 0) for number in range(40)]).transform("x", abs).select("x", bare=True),
        frozen.cache_in_memory(freeze_randomness=True).select("x", bare=True),
    ):
        for _ in range(3):
            read(DataLoader(Subset(items, range(40)), batch_size=16))


def test_choices_that_repeat_are_a_warning() -> None:
    items = kdp.from_dataset([(1, 0), (2, 0), (3, 0)]).sample_weighted([1.0, 2.0, 1.0]).select("x", bare=True)
    read(DataLoader(items, batch_size=1))
    with pytest.warns(UserWarning, match=REPEATS.format("sample_weighted")):
        read(DataLoader(items, batch_size=1))


def test_a_chain_that_was_read_is_the_same_chain() -> None:
    items = chain()
    before = items.deal(batch_size=2).state_dict()
    items[0]
    for same in (items, copy.deepcopy(items), pickle.loads(pickle.dumps(items))):
        assert same.deal(batch_size=2).state_dict() == before
        assert same[5] == items[5]
