"""Torch's `.map` and `.collate` on kdpipes' pipes: the same random numbers, whoever calls the function."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper
from torch.utils.data.datapipes.map import Mapper as MapMapper

import kdpipes as kdp
from tests.hashes import fingerprints
from tests.torchdata_parts import DataLoader2


def noisy(item: Any) -> Any:
    return item, random.random(), float(np.random.rand()), torch.rand(()).item()


def from_rng(item: Any, rng: np.random.Generator) -> Any:
    return item, rng.random()


def collated(items: list[Any]) -> Any:
    return len(items), torch.rand(()).item()


def same(item: Any) -> Any:
    return item


def first(item: Any) -> Any:
    return item[0]


def indexed() -> Any:
    return kdp.from_dataset([(number, 0) for number in range(24)])


def stream() -> Any:
    return IterableWrapper([(number, 0) for number in range(24)]).to_samples(fields="x y")


CHAINS: dict[str, Callable[[Any], Any]] = {
    "map": lambda source: source.select("x").deal(batch_size=4, seed=3).map(noisy),
    "rng": lambda source: source.select("x").deal(batch_size=4, seed=3).map(from_rng),
    "twice": lambda source: source.select("x").deal(batch_size=4, seed=3).collate_samples().map(noisy).map(noisy),
    "collate": lambda source: source.select("x").deal(batch_size=4, seed=3).collate(collated).map(from_rng),
    "column": lambda source: source.select("x").deal(batch_size=4, seed=3).map(first).map(noisy, 0),
    "before deal": lambda source: source.select("x").map(noisy).map(from_rng).deal(batch_size=4, seed=3),
    "samples": lambda source: source.map(noise_in).transform("x", float).select("x").deal(batch_size=4, seed=3),
}
EACH = pytest.mark.parametrize("name", CHAINS)
BOTH = pytest.mark.parametrize("source", [indexed, stream])


def noise_in(sample: Any) -> Any:
    sample["x"] = sample["x"] + random.random()
    return sample


def chain_of(name: str, source: Any) -> Any:
    return CHAINS[name](source())


def chains(source: Any) -> list[str]:
    return [name for name in CHAINS if name != "samples" or source is stream]


def drawn(batches: Any) -> list[str]:
    return [repr(batch) for batch in batches]


@BOTH
def test_numbers_are_the_same_for_all_loaders(source: Any) -> None:
    for name in chains(source):
        chain = chain_of(name, source)
        with kdp.Loader(chain) as loader:
            expected = [drawn(loader) for _ in range(2)]
        assert len({*expected[0], *expected[1]}) == 12, name
        for how in ({"num_workers": 1}, {"num_workers": 2}, {"reading_service": kdp.ThreadReadingService(2)}):
            with kdp.Loader(chain, **how) as loader:
                assert [drawn(loader) for _ in range(2)] == expected, (name, how)


@BOTH
def test_torchs_loaders_draw_the_same_numbers(source: Any) -> None:
    for name in chains(source):
        expected = drawn(chain_of(name, source))
        for num_workers in (0, 2):
            how: Any = {"batch_size": None, "num_workers": num_workers, "collate_fn": same}
            assert drawn(DataLoader(chain_of(name, source), **how)) == expected
        assert drawn(DataLoader2(chain_of(name, source))) == expected


@BOTH
def test_a_resumed_epoch_draws_the_same_numbers(source: Any) -> None:
    for name in chains(source):
        chain = chain_of(name, source)
        with kdp.Loader(chain, num_workers=2) as loader:
            batches = iter(loader)
            next(batches), next(batches)
            state, rest = loader.state_dict(), drawn(batches)
        for num_workers in (0, 1):
            with kdp.Loader(chain, num_workers=num_workers) as loader:
                loader.load_state_dict(state)
                assert drawn(loader) == rest


def test_two_maps_seeds_and_epochs_draw_different_numbers() -> None:
    items = indexed().select("x").deal(batch_size=24).map(noisy).map(noisy)
    ((((_, *inner), *outer),), (((_, *later), *_),)) = ([*items] for _ in range(2))
    other = next(iter(indexed().select("x").deal(batch_size=24, seed=1).map(noisy)))
    assert len({*inner, *outer, *later, *other[1:]}) == 12


def test_the_global_generators_stay_as_they_are() -> None:
    chain = chain_of("map", indexed)
    random.seed(3)
    state = random.getstate(), torch.get_rng_state().tolist()
    for _ in chain:
        assert (random.getstate(), torch.get_rng_state().tolist()) == state


def test_functions_that_draw_nothing_are_called_as_they_are() -> None:
    def drawing(batch: Any) -> float:
        return random.random()

    drawing.is_random = False  # type: ignore[attr-defined]
    random.seed(7)
    expected = random.Random(7).random()
    assert next(iter(indexed().select("x").deal(batch_size=4).map(drawing))) == expected


def test_a_stream_without_deal_draws_by_position_and_epoch() -> None:
    source = IterableWrapper([(number, 0) for number in range(24)]).sharding_filter()
    stream = source.to_samples(fields="x y").select("x").map(noisy)
    expected = [drawn(stream) for _ in range(2)]
    assert len({*expected[0], *expected[1]}) == 48
    for num_workers in (1, 2):
        stream.datapipe.set_epoch(0)
        with kdp.Loader(stream, num_workers=num_workers) as loader:
            assert [drawn(loader) for _ in range(2)] == expected


def test_it_is_torchs_own_class_with_its_states_and_errors() -> None:
    dealt = indexed().select("x").deal(batch_size=4)
    assert isinstance(dealt.map(len), Mapper)
    assert fingerprints(dealt.map(len)) == fingerprints(Mapper(dealt, len))
    assert fingerprints(indexed().map(len)) == fingerprints(MapMapper(indexed(), len))
    with pytest.raises(ValueError, match="output_col"):
        dealt.map(len, output_col=1)
    with pytest.raises(ValueError, match="takes 2 positional parameters"):
        dealt.map(isinstance_of)
    chain = pickle.loads(pickle.dumps(chain_of("rng", indexed)))
    assert drawn(chain) == drawn(chain_of("rng", indexed))


def isinstance_of(one: Any, other: Any) -> bool:
    return one is other


def test_an_indexed_map_draws_by_the_epoch_that_is_set() -> None:
    source = indexed()
    mapped = source.select("x").map(noisy)
    first_epoch = mapped[5]
    mapped.datapipe.set_epoch(1)
    assert mapped[5] != first_epoch
    mapped.datapipe.set_epoch(0)
    assert mapped[5] == first_epoch
