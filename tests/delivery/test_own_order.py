"""`deal(num_batches=)` and `kdp.own_order`: epochs of a chosen length, and orders of the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import kdpipes as kdp
from tests.resuming import of_rank


def numbers(size: int) -> Any:
    return kdp.from_dataset(list(range(size)), "x", labels=[number % 3 for number in range(size)]).select("x")


def values(batches: Any) -> list[list[int]]:
    return [[x for (x,) in batch] for batch in batches]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_each_sample_is_seen_once_before_any_is_seen_twice(
    size: int, batch_size: int, num_batches: int, shuffle: bool
) -> None:
    pipe = numbers(size).deal(batch_size=batch_size, num_batches=num_batches, shuffle=shuffle, seed=3)
    seen: list[int] = []
    while len(seen) < 3 * size:
        epoch = values(pipe)
        assert [len(batch) for batch in epoch] == [batch_size] * num_batches
        seen += [x for batch in epoch for x in batch]
    for start in range(0, 3 * size, size):
        assert sorted(seen[start : start + size]) == list(range(size))


def test_num_batches_is_the_length_and_an_epoch_is_set_directly() -> None:
    pipe = numbers(10).deal(batch_size=4, num_batches=7, shuffle=True)
    epochs = [values(pipe) for _ in range(3)]
    assert len(pipe) == 7
    pipe.set_epoch(2)
    assert values(pipe) == epochs[2]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_steps_are_the_same_with_workers_and_after_a_resume(num_workers: int) -> None:
    pipe = numbers(10).deal(batch_size=4, num_batches=5, shuffle=True, seed=2)
    with kdp.Loader(pipe) as loader:
        epochs = [values(loader) for _ in range(3)]
    with kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(num_workers)) as loader:
        assert len(loader) == 5
        assert values(loader) == epochs[0]
        running = iter(loader)
        head = values([next(running), next(running)])
        state = loader.state_dict()
    with kdp.Loader(pipe) as loader:
        loader.load_state_dict(state)
        assert head + values(loader) == epochs[1]
        assert values(loader) == epochs[2]


def test_the_state_of_other_steps_is_rejected() -> None:
    with kdp.Loader(numbers(10).deal(batch_size=4, num_batches=5)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with kdp.Loader(numbers(10).deal(batch_size=4, num_batches=6)) as loader, pytest.raises(ValueError, match="`deal`"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_global_batches_are_the_same_for_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    whole = values(numbers(10).deal(global_batch_size=4, num_batches=5, shuffle=True, seed=1))
    parts = []
    for rank in range(num_ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        parts.append(values(numbers(10).deal(global_batch_size=4, num_batches=5, shuffle=True, seed=1)))
    assert [list(chain.from_iterable(batches)) for batches in zip(*parts, strict=True)] == whole


def test_steps_go_shard_by_shard(photo_shards: str) -> None:
    keys = kdp.open_shards(photo_shards).select("key")
    pipe = keys.deal(batch_size=30, num_batches=3, shuffle=kdp.by_shard(window=20), seed=1)
    size = len(keys)
    seen = [key for _ in range(4) for batch in pipe for (key,) in batch]
    assert Counter(Counter(seen[:size]).values()) == {1: size}
    assert len({key.partition(".tar")[0] for key in seen[:20]}) <= 2  # a window holds the samples of few shards


def test_a_plan_that_draws_anew_keeps_its_first_samples() -> None:
    drawn = kdp.from_dataset(list(range(9)), "x").sample_weighted([1.0] * 9, seed=1).select("x")
    pipe = drawn.deal(batch_size=9, num_batches=1)
    with pytest.warns(UserWarning, match=r"`sample_weighted` gives the same samples in every epoch"):
        first = values(pipe)
    assert values(pipe) == first


def test_a_function_gives_the_order_of_each_epoch() -> None:
    pipe = numbers(6).deal(batch_size=2, batching=kdp.own_order(lambda epoch: np.roll([0, 2, 4, 5], epoch)))
    assert len(pipe) == 2
    assert [values(pipe) for _ in range(2)] == [[[0, 2], [4, 5]], [[5, 0], [2, 4]]]


def test_an_order_with_rng_is_new_in_each_epoch_in_any_worker() -> None:
    pipe = numbers(20).deal(batch_size=3, seed=4, batching=kdp.own_order(lambda epoch, rng: rng.permutation(20)))
    with kdp.Loader(pipe) as loader:
        epochs = [values(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    with kdp.Loader(pipe, num_workers=2) as loader:
        assert [values(loader) for _ in range(2)] == epochs
    theirs = DataLoader(pipe, batch_size=None, num_workers=1)
    assert values(theirs) == epochs[0]
    other = numbers(20).deal(batch_size=3, seed=5, batching=kdp.own_order(lambda epoch, rng: rng.permutation(20)))
    assert values(other) != epochs[0]


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(20)),
        RandomSampler(range(20), generator=torch.Generator().manual_seed(1)),
        DistributedSampler(range(20), num_replicas=2, rank=1, seed=3),
    ],
)
def test_samplers_of_torch_keep_to_the_epoch(sampler: Any) -> None:
    def epochs(num_threads: int) -> list[list[list[int]]]:
        pipe = numbers(20).deal(batch_size=4, batching=kdp.own_order(sampler))
        service = kdp.ThreadReadingService(num_threads) if num_threads else None
        with kdp.Loader(pipe, reading_service=service) as loader:
            return [values(loader) for _ in range(2)]

    first = epochs(0)
    assert first[0] != first[1]
    assert epochs(0) == first == epochs(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_distributed_sampler_deals_to_ranks_itself(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler: Any = DistributedSampler(range(20), num_replicas=2, rank=rank, seed=3)
    pipe = numbers(20).deal(batch_size=4, ranks=1, batching=kdp.own_order(sampler))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [x for batch in values(pipe) for x in batch] == list(sampler)
    doubly = numbers(20).deal(batch_size=4, batching=kdp.own_order(sampler))
    for use in (len, list):
        with pytest.raises(kdp.ChainError, match=r"sampler for 2 ranks.*ranks=1"):
            use(doubly)
    alone: Any = DistributedSampler(range(20), num_replicas=1, rank=0)
    assert len(numbers(20).deal(batch_size=4, batching=kdp.own_order(alone))) == 3


def test_the_batches_of_a_batch_sampler_can_be_dealt() -> None:
    batches = BatchSampler(SequentialSampler(range(8)), 4, False)
    pipe = numbers(8).deal(
        batch_size=4, batching=kdp.own_order(lambda epoch: [place for batch in batches for place in batch])
    )
    assert values(pipe) == list(batches)


def test_weighted_samplers_draw_anew_and_the_same_anywhere() -> None:
    def chain() -> Any:
        return numbers(20).deal(
            batch_size=5, seed=1, batching=kdp.own_order(WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 15))
        )

    epochs = [values(pipe) for pipe in [chain()] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert max(x for epoch in epochs for batch in epoch for x in batch) < 10
    with kdp.Loader(chain(), num_workers=2) as loader:
        assert [values(loader) for _ in range(2)] == epochs


class Rolled:
    """A sampler as other libraries write them: not torch's, with `set_epoch` and its own division between ranks."""

    def __init__(self, world_size: int) -> None:
        self.epoch, self.world_size = 0, world_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.roll(range(6), self.epoch).tolist())


def test_samplers_of_other_libraries_have_set_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = numbers(6).deal(batch_size=3, batching=kdp.own_order(Rolled(1)))
    assert [values(pipe) for _ in range(2)] == [[[0, 1, 2], [3, 4, 5]], [[5, 0, 1], [2, 3, 4]]]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(kdp.ChainError, match="sampler for 2 ranks"):
        list(numbers(6).deal(batch_size=3, batching=kdp.own_order(Rolled(2))))


def test_threads_that_share_a_sampler_do_not_disturb_each_other() -> None:
    sampler = RandomSampler(range(400), generator=torch.Generator())
    pipe = numbers(400).deal(batch_size=4, batching=kdp.own_order(sampler))
    with kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(4)) as loader:
        for _ in range(6):
            assert sorted(x for batch in values(loader) for x in batch) == list(range(400))


def test_a_state_knows_the_order() -> None:
    with kdp.Loader(numbers(8).deal(batch_size=2, batching=kdp.own_order(lambda epoch: [3, 1, 0, 5]))) as loader:
        running = iter(loader)
        next(running)
        state, rest = loader.state_dict(), values(running)
    with kdp.Loader(numbers(8).deal(batch_size=2, batching=kdp.own_order(lambda epoch: [3, 1, 0, 5]))) as loader:
        loader.load_state_dict(state)
        assert values(loader) == rest
    other = kdp.Loader(numbers(8).deal(batch_size=2, batching=kdp.own_order(lambda epoch: [3, 1, 0, 6])))
    with other, pytest.raises(ValueError, match="`deal`"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"num_batches": 0}, ValueError, "`num_batches` must be an integer of at least 1"),
        ({"num_batches": 2, "uneven": "drop"}, ValueError, "`uneven` has no effect with `num_batches`"),
        (
            {"num_batches": 2, "batching": kdp.own_order(list)},
            ValueError,
            "`num_batches` cannot be used with `kdp.own_order",
        ),
        (
            {"shuffle": True, "batching": kdp.own_order(list)},
            ValueError,
            "`shuffle` cannot be used with `kdp.own_order",
        ),
        ({"batching": 3}, TypeError, "`batching` must be an object like"),
        (
            {"batching": kdp.own_order(lambda epoch: [0.5])},
            TypeError,
            "`order` must return a 1-D array of integer positions",
        ),
        ({"batching": kdp.own_order(lambda epoch: [0, 8])}, IndexError, "gave position 8 for epoch 0"),
    ],
)
def test_what_it_rejects(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(numbers(8).deal(batch_size=2, **arguments))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (3, "`order` must be"),
        (BatchSampler(SequentialSampler(range(4)), 2, False), "of samples, not of batches"),
    ],
)
def test_what_is_no_order_is_rejected(order: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        kdp.own_order(order)


def by_twos(epoch: int, rng: np.random.Generator) -> Any:
    return np.split(rng.permutation(8), [2, 5])


def test_own_batches_have_any_size_and_resume() -> None:
    pipe = numbers(8).deal(batching=kdp.own_batches(by_twos))
    expected = [values(pipe) for _ in range(2)]
    assert expected[0] != expected[1]
    assert [[len(batch) for batch in epoch] for epoch in expected] == [[2, 3, 3]] * 2
    with kdp.Loader(numbers(8).deal(batching=kdp.own_batches(by_twos))) as loader:
        loader.set_epoch(1)
        next(iter(loader))
        state = loader.state_dict()
    with kdp.Loader(numbers(8).deal(batching=kdp.own_batches(by_twos))) as loader:
        loader.load_state_dict(state)
        assert values(loader) == expected[1][1:]


def test_ranks_share_out_own_batches() -> None:
    halves = [values(of_rank(numbers(8).deal(batching=kdp.own_batches(by_twos)), 2, rank)) for rank in range(2)]
    joined = [[*one, *other] for one, other in zip(*halves, strict=True)]
    assert joined == values(numbers(8).deal(batching=kdp.own_batches(by_twos)))


def test_a_sampler_of_batches_gives_own_batches() -> None:
    sampler = BatchSampler(RandomSampler(range(8)), 3, drop_last=False)
    pipe = numbers(8).deal(batching=kdp.own_batches(sampler))
    epochs = [values(pipe) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[3, 3, 2]] * 2
    assert values(numbers(8).deal(batching=kdp.own_batches(sampler))) == epochs[0]


@pytest.mark.parametrize(
    ("batches", "kind", "words"),
    [
        (3, TypeError, "`batches` must be"),
        (lambda epoch: [[0], []], ValueError, "gave an empty batch for epoch 0"),
        (lambda epoch: [[8]], IndexError, "`batches` gave position 8"),
        (lambda epoch: [[[1]]], TypeError, "1-D array of integer positions"),
    ],
)
def test_own_batches_that_are_wrong_are_errors(batches: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        list(numbers(8).deal(batching=kdp.own_batches(batches)))


def test_a_sampler_that_does_not_end_is_an_error() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return cycle([0, 1])

    pipe = numbers(2).deal(batch_size=2, batching=kdp.own_order(Endless()))
    with pytest.raises(ValueError, match="`order` must end, but is a sampler that gave more than 1,000,020 positions"):
        len(pipe)


def test_epochs_of_different_lengths_are_an_error_with_a_hint() -> None:
    pipe = numbers(8).deal(batch_size=2, batching=kdp.own_order(lambda epoch: list(range(4 + epoch))))
    list(pipe)
    with pytest.raises(ValueError, match=r"returned 4 for epoch 0 and 5 for epoch 1.*num_batches"):
        list(pipe)


def test_an_empty_source_has_no_steps() -> None:
    with pytest.raises(kdp.ChainError, match="its source is empty"):
        list(numbers(0).deal(batch_size=2, num_batches=1))
