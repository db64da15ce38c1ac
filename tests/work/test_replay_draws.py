"""`replay` draws again what was drawn, also early in a stream, in a source or a dataset; nobody else's draws change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp
from kdpipes.core.randomness import seeded_globals
from kdpipes.delivery import split_ctx
from tests.work.replaying import (
    Shift,
    assert_replayed,
    assert_replayed_or_rejected,
    both_flavours,
    delivered,
    indexed,
    plus_random,
    plus_rng,
    stream,
    travelled,
)

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


def test_what_replaying_draws_leaves_the_global_generators_alone() -> None:
    pipe = indexed().record_ctx().transform("x", plus_random).select("x", return_ctx=True)
    _, ctx = pipe[3]
    with seeded_globals(b"a"):
        expected = random.random(), np.random.rand(), torch.rand(()).item()
    with seeded_globals(b"a"):
        kdp.replay("3", ctx, pipe)
        assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_samples_behind_bad_ones_of_a_stream_are_made_again() -> None:
    pipe = stream([(0, 0), (1, 0), (0, 1), (3, 1)]).record_ctx().transform("x", lambda x: 6 / x, Shift())
    items = delivered(pipe.on_error("skip").select("key x", return_ctx=True).deal(batch_size=2))
    assert [key for (key, _), _ in items] == ["1", "3"] * 2
    assert_replayed(pipe.select("key x", return_ctx=True), items)


@both_flavours
def test_random_getters_of_a_source_are_drawn_again(make: Any) -> None:
    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            return 6

        def getitem_x(self, index: int, rng: Any) -> float:
            return index + float(rng.random())

        def getitem_y(self, index: int, ctx: Any) -> float:
            ctx["y"] = random.random()
            return float(ctx["y"])

    for source in (Source(), kdp.from_dataset(Source())):
        pipe = source.repeat_until(repetitions=2).record_ctx().transform("x", Shift())
        selected = pipe.select("key x y", return_ctx=True)
        dealt = selected.deal(batch_size=5, shuffle=True, seed=2)
        assert_replayed(dealt, delivered(dealt))


def test_own_two_step_transforms_read_early_are_replayed() -> None:
    pipe = stream().shuffle().record_ctx().transform("x", Shift()).replay_test_read_x().transform("x", Shift())
    dealt = pipe.select("key x", return_ctx=True).deal(batch_size=4, seed=5)
    assert_replayed(dealt, delivered(dealt))


def test_seeds_of_early_draws_of_lanes_are_recorded(photo_shards: str) -> None:
    source = kdp.stream_shards(photo_shards).rename_fields(x="cls").record_ctx()
    pipe = source.transform("x", plus_rng).replay_test_read_x().select("key x", return_ctx=True)
    with kdp.Loader(pipe.deal(batch_size=40, seed=1), num_workers=2) as loader:
        for _ in range(2):
            items = [item for batch in loader for item in batch]
            assert len({ctx["early_draws"]["plus_rng"]["seed"] for _, ctx in items}) == 4
            for fields, ctx in items[::20]:
                assert kdp.replay(fields[0], travelled(ctx), pipe)[0] == fields


class Noisy(torch.utils.data.Dataset[Any]):
    """A dataset with random transforms of its own."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index + random.random() + np.random.rand() + torch.rand(()).item(), index % 2


def test_random_transforms_of_a_dataset_are_redrawn_or_an_error() -> None:
    pipe = kdp.from_dataset(Noisy()).record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    for item in delivered(pipe.deal(batch_size=4, shuffle=True)):
        assert_replayed_or_rejected(item, lambda item=item: kdp.replay(item[0][0], item[1], pipe))  # type: ignore[misc]


def test_recorded_transforms_of_a_dataset_are_drawn_again() -> None:
    pipe = kdp.from_dataset(Noisy()).record_ctx().transform("x", plus_rng).select("key x", return_ctx=True)
    assert_replayed(pipe, delivered(pipe.deal(batch_size=4, shuffle=True)))


@pytest.mark.parametrize("seed", [1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_largest_seeds_are_collated(seed: int, num_workers: int) -> None:
    pipe = indexed().record_ctx().transform("x", plus_rng).select("key x", return_ctx=True)
    dealt = pipe.deal(batch_size=4, seed=seed)
    with kdp.Loader(dealt.collate_samples(), num_workers=num_workers) as loader:
        for _ in range(2):
            for (keys, x), ctx in loader:
                for key, value, sample_ctx in zip(keys, x.tolist(), split_ctx(ctx), strict=True):
                    assert kdp.replay(key, travelled(sample_ctx), dealt) == ((key, value), sample_ctx)


@pytest.mark.parametrize("function", [plus_rng, plus_random])
def test_callables_read_early_are_replayed_with_their_ctx(function: Any) -> None:
    pipe = stream().shuffle().record_ctx().transform("x", function).replay_test_read_x()
    dealt = pipe.select("key x", return_ctx=True).deal(batch_size=4, seed=5)
    assert_replayed(dealt, delivered(dealt))


@pytest.mark.parametrize("function", [plus_rng, plus_random])
def test_callables_read_early_in_a_stream_give_equal_values(function: Any) -> None:
    pipe = stream().shuffle().record_ctx().transform("x", function).replay_test_read_x().transform("y", function)
    dealt = pipe.select("key x y", return_ctx=True).deal(batch_size=4, seed=5)
    for item, ctx in delivered(dealt):
        assert kdp.replay(item[0], travelled(ctx), dealt)[0] == item


@pytest.mark.parametrize("function", [plus_rng, Shift()], ids=["rng", "two steps"])
def test_fields_that_a_stock_filter_reads_are_made_again(function: Any) -> None:
    pipe = stream().record_ctx().transform("x", function).filter(lambda sample: sample["x"] >= 0)
    dealt = pipe.transform("y", Shift()).select("key x", return_ctx=True).deal(batch_size=4, seed=5)
    assert_replayed(dealt, delivered(dealt))


def test_replaying_is_no_epoch() -> None:
    def chain() -> Any:
        pipe = stream().record_ctx().transform("x", plus_rng).filter(lambda sample: sample["x"] >= 0)
        return pipe.select("key x", return_ctx=True)

    expected, pipe = chain(), chain()
    assert list(pipe) == list(expected)
    kdp.replay("0", {"draw": {"seed": 0, "epoch": 0, "ordinal": 0}}, pipe)
    assert list(pipe) == list(expected)


def test_samples_that_a_stream_repeats_have_own_early_draws() -> None:
    early = stream().record_ctx().transform("x", plus_rng).replay_test_read_x()
    pipe = early.oversample(class_counts={0: 1, 1: 3}).transform("y", plus_rng).replay_test_read_y()
    dealt = pipe.select("key x y", return_ctx=True).deal(batch_size=20)
    for item, ctx in delivered(dealt):
        assert kdp.replay(item[0], travelled(ctx), dealt)[0] == item


def test_a_raw_sample_can_be_replayed_again_under_another_draw() -> None:
    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_x(self, index: int, rng: Any) -> float:
            return index + float(rng.random())

    pipe = Source().record_ctx().transform("x", Shift()).select("key x", return_ctx=True)
    raw = [Source()[index] for index in range(4)]
    for (key, x), ctx in delivered(pipe.deal(batch_size=3)):
        assert kdp.replay(raw[int(key)], ctx, pipe) == ((key, x), ctx)


@pytest.mark.parametrize("make", [indexed, stream])
def test_samples_can_be_replayed_while_the_chain_is_iterated(make: Any) -> None:
    dealt = make().record_ctx().transform("x", Shift()).select("key x", return_ctx=True).deal(batch_size=2)
    for _ in range(2):
        numbers = []
        for batch in dealt:
            assert_replayed(dealt, batch)
            numbers += [key for (key, _), _ in batch]
        assert numbers == [str(number) for number in range(6)]


def test_a_bad_sample_elsewhere_is_in_nobodys_way() -> None:
    pipe = indexed([(1, 0), (2, 0), (0, 0)]).record_ctx().transform("x", lambda x: 1 / x).replay_test_read_x()
    dealt = pipe.transform("x", Shift()).on_error("skip").select("key x", return_ctx=True).deal(batch_size=2)
    items = delivered(dealt)
    assert len(items) == 4
    assert_replayed(dealt, items)
