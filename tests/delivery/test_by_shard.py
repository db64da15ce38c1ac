"""`deal(shuffle="shards")`: shard after shard, mixed within windows, each sample once, the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.core.map_pipe import shard_numbers_of
from kdpipes.delivery.by_shard import ShardOrder, WindowedOrder


class Sharded(kdp.SampleSource):
    """Samples that lie in shards of some sizes; `x` is the shard."""

    def __init__(self, sizes: list[int]) -> None:
        self.numbers = np.repeat(np.arange(len(sizes)), sizes)

    def __len__(self) -> int:
        return len(self.numbers)

    def getitem_x(self, index: int) -> int:
        return int(self.numbers[index])

    def getitem_y(self, index: int) -> int:
        return index % 3

    def shard_numbers(self) -> np.ndarray:
        return self.numbers


def epoch(pipe: Any) -> list[Any]:
    return [item for batch in pipe for (item,) in batch]


@given(
    numbers=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    window=st.none() | st.integers(1, 90),
    key=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_windows_of_an_order_hold_samples_of_nearby_shards(
    numbers: list[int], window: int | None, key: tuple[int, int]
) -> None:
    shards = np.asarray(numbers)
    order = WindowedOrder(ShardOrder(shards), window, key)
    positions, told = order[np.arange(len(numbers))], np.concatenate([*order.by_shard(0)])
    assert sorted(positions.tolist()) == sorted(set(told.tolist())) == list(range(len(numbers)))
    size = window or -(-8 * len(numbers) // len(set(numbers)))
    num_windows = max(len(numbers) // size, 1)
    bounds = [place * len(numbers) // num_windows for place in range(num_windows + 1)]
    in_windows = [set(shards[positions[start:stop]].tolist()) for start, stop in pairwise(bounds)]
    assert all(stop - start >= min(size, len(numbers)) for start, stop in pairwise(bounds))
    seen = list(dict.fromkeys(shard for some in in_windows for shard in some))
    assert all(len(one & other) <= 1 for one, other in pairwise(in_windows)), "a cut goes through one shard"
    assert sum(map(len, in_windows)) <= len(seen) + num_windows - 1, "which is not come back to"
    for number, some in enumerate(in_windows):
        rest = np.concatenate([*order.by_shard(bounds[number])])
        assert set(shards[rest].tolist()) == set().union(*in_windows[number:])
        if num_windows < len(seen):
            assert set(shards[rest[: len(some)]].tolist()) == some, (
                "a window needs all of its shards from its beginning"
            )


def test_epochs_hold_every_sample_once_in_orders_of_their_own() -> None:
    pipe = Sharded([30] * 12).select("index").deal(batch_size=7, shuffle=kdp.by_shard(window=60), seed=3)
    first, second = epoch(pipe), epoch(pipe)
    assert sorted(first) == sorted(second) == list(range(360))
    assert first != second
    again = Sharded([30] * 12).select("index").deal(batch_size=7, shuffle=kdp.by_shard(window=60), seed=3)
    assert epoch(again) == first


def test_samples_mix_as_the_docstring_says() -> None:
    pipe = Sharded([100] * 100).select("x index").deal(batch_size=50, shuffle=kdp.by_shard(window=1_000), seed=0)
    batches = list(pipe)
    shards = [len({shard for shard, _ in batch}) for batch in batches]
    assert all(len({shard for shard, _ in batch}) <= 10 for batch in batches)  # a window has ten shards
    assert np.mean(shards) == pytest.approx(10 * (1 - 0.9**50), rel=0.02)  # and a batch is drawn from it evenly
    place = {index: place for place, (_, index) in enumerate(item for batch in batches for item in batch)}
    apart = [abs(place[index] - place[index + 1]) for index in range(9_999) if index % 100 != 99]
    assert np.mean(apart) == pytest.approx(1_000 / 3, rel=0.05)


def test_a_window_is_that_of_eight_shards_unless_told() -> None:
    pipe = Sharded([10] * 80).select("x").deal(batch_size=80, shuffle="shards")
    assert [len(set(shards)) for shards in pipe] == [8] * 10


def test_repeated_rounds_and_joined_sources_have_own_shards() -> None:
    source = Sharded([5, 5])
    assert shard_numbers_of(source.repeat_until(repetitions=2)).tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    joined = kdp.concat(source, Sharded([2]), Sharded([]))
    assert shard_numbers_of(joined).tolist() == [0] * 5 + [1] * 5 + [2] * 2
    mixed = shard_numbers_of(source.mix(Sharded([10]), weights=[1, 1]))
    assert mixed[mixed < 2].tolist() == [0] * 5 + [1] * 5
    assert sorted(mixed[:10].tolist()) == [0] * 5 + [2] * 5


def test_plan_and_work_pipes_pass_the_shards_on() -> None:
    chain = Sharded([4, 4, 4]).filter_classes(valid=[0, 1]).add_field("z", lambda sample: 0).oversample(mode="exact")
    assert [sample["x"] for sample in chain] == shard_numbers_of(chain).tolist()
    assert shard_numbers_of(chain[::-1]).tolist() == shard_numbers_of(chain).tolist()[::-1]
    order = epoch(chain[::-1].select("x").deal(batch_size=3, shuffle=kdp.by_shard(window=1)))
    assert np.count_nonzero(np.diff(order)) == 2  # each shard in one stretch, wherever the plan has its samples


@pytest.mark.parametrize(
    ("source", "arguments", "error", "message"),
    [
        (lambda: kdp.from_dataset([(1, 0)]), {"shuffle": "shards"}, kdp.ChainError, "needs a source of shards"),
        (
            lambda: kdp.concat(Sharded([1]), kdp.from_ids(["a"], [0], load=str).rename_fields(x="x")),
            {"shuffle": "shards"},
            kdp.ChainError,
            "in every branch",
        ),
        (lambda: Sharded([1]), {"shuffle": "shard"}, ValueError, "'shards', but is 'shard'"),
    ],
)
def test_what_cannot_be_is_rejected(
    source: Callable[[], Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(source().deal(batch_size=2, **arguments))


def test_lengths_and_shards_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"`shuffle` must be True or False, but is"):
        Sharded([3]).deal(shuffle="shards", batching=kdp.by_length("x", max_tokens=9))


def test_an_empty_source_has_empty_epochs() -> None:
    assert list(Sharded([]).select("x").deal(batch_size=2, shuffle="shards")) == []


def test_a_state_goes_on_and_one_of_another_window_is_rejected() -> None:
    def chain(window: int) -> Any:
        return Sharded([9] * 9).select("index").deal(batch_size=8, shuffle=kdp.by_shard(window=window), seed=1)

    with kdp.Loader(chain(20)) as loader:
        running = iter(loader)
        head = [next(running) for _ in range(3)]
        state, rest = json.loads(json.dumps(loader.state_dict())), list(running)
    with kdp.Loader(chain(20), reading_service=kdp.ThreadReadingService(2)) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest
    assert sorted(index for batch in head + rest for (index,) in batch) == list(range(81))
    with kdp.Loader(chain(30)) as loader, pytest.raises(ValueError, match="have changed"):
        loader.load_state_dict(state)


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    for shard in range(6):
        with TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for sample in range(5):
                writer.write({"__key__": f"{sample}", "txt": "word"})
    return [str(tmp_path / f"{shard}.tar") for shard in range(6)]


def shards_of(keys: list[str]) -> list[str]:
    return list(dict.fromkeys(key.split("/")[0] for key in keys))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_read_their_shards_in_an_order_of_each_epoch(urls: list[str], num_workers: int) -> None:
    chain = kdp.stream_shards(urls).select("key").deal(batch_size=4, shuffle="shards", seed=2)
    plain = kdp.stream_shards(urls).select("key").deal(batch_size=4, seed=2)
    with kdp.Loader(chain, num_workers=num_workers) as loader:
        first, second = epoch(loader), epoch(loader)
    assert sorted(first) == sorted(second) == sorted(epoch(plain))
    assert shards_of(epoch(plain)) == [f"{shard}.tar" for shard in range(6)]
    assert len({tuple(shards_of(keys)) for keys in (first, second, epoch(plain))}) == 3
    assert first == epoch(kdp.stream_shards(urls).select("key").deal(batch_size=4, shuffle="shards", seed=2))


def test_only_streams_of_shards_have_shards_to_shuffle() -> None:
    stream = torch.utils.data.datapipes.iter.IterableWrapper([(1, 0)]).to_samples(fields="x y")
    with pytest.raises(kdp.ChainError, match=r"needs `kdp\.stream_shards` upstream"):
        stream.deal(batch_size=1, shuffle="shards")
    with pytest.raises(kdp.ChainError, match=r"by_shard\(window=\.\.\.\)\)` needs an indexed source"):
        stream.deal(batch_size=1, shuffle=kdp.by_shard(window=2))
    with pytest.raises(ValueError, match="`window` must be"):
        kdp.by_shard(window=0)
