"""Streams: every sample as often as it should come, drawn anew each time, whatever stands in the chain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import kdpipes as kdp


def stream(size: int) -> Any:
    return IterableWrapper([(number, number % 2) for number in range(size)]).to_samples(fields="x y")


def draw(x: float, rng: Any) -> float:
    return float(rng.random())


@kdp.sample_pipe("touch_x")
def touch_x(sample: kdp.Sample) -> kdp.Sample:
    """A user's pipe that reads a field as the sample passes."""
    sample["x"] = sample["x"]
    return sample


def epochs(pipe: Any, number: int = 2) -> list[list[Any]]:
    return [[item for batch in pipe for (item,) in batch] for _ in range(number)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stock_shuffle_loses_nothing_and_shuffles_anew(num_workers: int) -> None:
    pipe = IterableWrapper([(number,) for number in range(60)]).shuffle().to_samples(fields="x")
    dealt = pipe.repeat_until(repetitions=2).select("x").deal(batch_size=10, seed=4)
    expected = epochs(dealt)
    assert all(Counter(epoch) == Counter([*range(60)] * 2) for epoch in expected)
    assert len({tuple(rows) for epoch in expected for rows in (epoch[:60], epoch[60:])}) == 4
    dealt.set_epoch(0)
    with kdp.Loader(dealt, num_workers=num_workers) as loader:
        assert epochs(loader) == expected


@pytest.mark.parametrize("place", ["after the cache", "before the cache"])
def test_a_cache_does_not_change_what_stock_pipes_draw(place: str) -> None:
    def order(is_cached: bool) -> list[Any]:
        pipe: Any = IterableWrapper([(f"sample {number}", number) for number in range(40)])
        pipe = pipe.shuffle(buffer_size=20) if place == "before the cache" else pipe
        pipe = pipe.to_samples(key=lambda item: item[0], fields={"x": lambda item: item[1]})
        pipe = pipe.cache_in_memory() if is_cached else pipe
        pipe = pipe.shuffle(buffer_size=20) if place == "after the cache" else pipe
        return epochs(pipe.select("x").deal(batch_size=8, seed=3))

    assert order(is_cached=True) == order(is_cached=False)


def test_a_cycle_of_a_random_pipe_is_rejected() -> None:
    with pytest.raises(kdp.ChainError, match=r"cycle.*repeat_until"):
        stream(4).shuffle().cycle(2).deal(batch_size=2)
    assert len(list(stream(4).cycle(2).deal(batch_size=2))) == 4


def test_an_early_field_depends_on_seed_epoch_and_repetition() -> None:
    def drawn(seed: int, num_workers: int) -> list[list[float]]:
        pipe = stream(5).repeat_until(repetitions=2).transform("x", draw).touch_x().select("x")
        with kdp.Loader(pipe.deal(batch_size=2, seed=seed), num_workers=num_workers) as loader:
            return epochs(loader)

    first = drawn(1, 0)
    assert len({x for epoch in [*first, *drawn(2, 0)] for x in epoch}) == 40
    assert drawn(1, 2) == first


@pytest.mark.parametrize(
    ("keep", "times"),
    [(lambda pipe: pipe.in_memory_cache(), 1), (lambda pipe: pipe.repeat(3), 3), (lambda pipe: pipe.cycle(3), 3)],
    ids=["in_memory_cache", "repeat", "cycle"],
)
def test_samples_that_a_stock_pipe_keeps_are_not_changed(keep: Any, times: int) -> None:
    pipe = (
        keep(stream(3))
        .transform("x", lambda x: x + 10)
        .add_field("z", lambda sample, rng: rng.random())
        .select("x z ordinal")
    )
    for _ in range(2):
        rows = [row for batch in pipe.deal(batch_size=4) for row in batch]
        assert Counter(x for x, _, _ in rows) == Counter([10, 11, 12] * times)
        assert len({z for _, z, _ in rows}) == 3 * times
        assert [ordinal for _, _, ordinal in rows] == list(range(3 * times))


def test_repeated_whole_samples_are_separate_samples() -> None:
    (batch,) = stream(1).repeat(3).deal(batch_size=3)
    assert [sample.ordinal for sample in batch] == [0, 1, 2]


def test_repetitions_of_a_shared_item_load_it_once_each() -> None:
    loads: list[int] = []

    def load(item: tuple[int, int]) -> tuple[int, int]:
        loads.append(item[0])
        return item

    source = stream(1).add_field("item", lambda sample: load((sample["x"], 7)))
    both = source.add_field("a", lambda s: s["item"][0]).add_field("b", lambda s: s["item"][1])
    pipe = both.oversample(class_counts={0: 1, 1: 2}).select("a b")
    assert list(pipe) == [(0, 7), (0, 7)]
    assert loads == [0, 0]


def test_workers_of_a_sharding_filter_augment_on_their_own() -> None:
    pipe = IterableWrapper([(n,) for n in range(6)]).sharding_filter().to_samples(fields="x")
    drawn = list(DataLoader(pipe.transform("x", draw).select("x"), batch_size=None, num_workers=2))
    assert len({x for (x,) in drawn}) == 6
    assert sorted(map(tuple, drawn)) == sorted(pipe.transform("x", draw).select("x"))


def test_a_round_robin_dispatcher_shards_already() -> None:
    pipe = stream(4).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    with pytest.raises(kdp.ChainError, match="`sharding_round_robin_dispatch` upstream shards it as well"):
        pipe.deal(batch_size=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_that_was_told_by_hand_stays_the_rank(num_workers: int) -> None:
    seen = []
    for rank in range(2):
        pipe = kdp.from_dataset([(number, 0) for number in range(8)]).select("x").deal(batch_size=2)
        pipe.apply_sharding(2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        seen += [x for batch in DataLoader(pipe, batch_size=None, num_workers=num_workers) for (x,) in batch]
    assert sorted(seen) == list(range(8))


def test_epochs_continue_when_a_chain_leaves_a_dataloader() -> None:
    pipe = kdp.from_dataset([(number, 0) for number in range(9)]).select("x").deal(batch_size=2, shuffle=True)
    expected = epochs(pipe, 6)
    pipe.set_epoch(0)
    loader = DataLoader(pipe, batch_size=None, num_workers=1)
    assert epochs(loader, 2) == expected[:2]
    assert epochs(pipe, 1) == expected[2:3]
    assert epochs(loader, 1) == expected[3:4]
    assert epochs(DataLoader(pipe, batch_size=None), 2) == expected[4:]
