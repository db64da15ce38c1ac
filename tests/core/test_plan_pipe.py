"""What follows from `plan`: length, samples, columns, class names, shards and prefetching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.core.map_pipe import redrawing_name
from kdpipes.core.order import Order
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.randomness import planning


class Told(kdp.MapPipe):
    """A source in shards of four samples that records what it is to prefetch, and how often a column is read."""

    def __init__(self, size: int, first: int = 0) -> None:
        self._size, self._first = size, first
        self._told: list[tuple[bool, list[int]]] = []
        self._reads: list[str] = []

    def __len__(self) -> int:
        return self._size

    def fetch(self, index: int) -> kdp.Sample:
        return kdp.Sample({"x": self._first + index, "y": index % 3}, key=str(self._first + index), index=index)

    def shard_numbers(self) -> Any:
        return np.arange(self._size) // 4

    def prefetch(self, order: Order) -> None:
        self._told += [(order.is_epoch, window.tolist()) for window in order]

    def read_column(self, name: str) -> Any:
        self._reads.append(name)
        return np.arange(self._size) % 3 if name == "y" else self._first + np.arange(self._size)

    def class_names(self) -> tuple[str, ...]:
        return ("heron", "stork", "gull")


class EveryOther(PlanPipe):
    goes_by = "number"

    def plan(self, epoch: int) -> Any:
        return np.arange(epoch % 2, len(self.source) - 1 + epoch % 2, 2)


class Zipped(PlanPipe):
    """The first samples of two sources, in turn."""

    goes_by = "number"

    def plan(self, epoch: int) -> Any:
        size = min(map(len, self.sources))
        return np.tile([0, 1], size), np.repeat(np.arange(size), 2)


def test_a_plan_of_ones_own_needs_only_positions() -> None:
    source = Told(10)
    pipe = EveryOther(source)
    assert (len(pipe), pipe.column("x").tolist(), pipe.class_names()) == (5, [0, 2, 4, 6, 8], source.class_names())
    assert [sample["x"] for sample in pipe] == [0, 2, 4, 6, 8]
    assert pipe.shard_numbers() is not None
    assert pipe.shard_numbers().tolist() == [0, 0, 1, 1, 2]  # type: ignore[union-attr]
    pipe.prefetch(Order.of_next(np.array([4, 1])))
    assert source._told == [(False, [8, 2])]
    assert pipe.filter_classes(valid=["heron"]).column("x").tolist() == [0, 6]


def test_a_plan_that_redraws_maps_each_epochs_order() -> None:
    source = Told(10)
    chain = EveryOther(source, redraws=True)
    assert redrawing_name(chain) is not None
    dealt = chain.select("x", bare=True).deal(batch_size=5)
    assert [batch for _ in range(2) for batch in dealt] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    with planning(1):
        order = Order(lambda: (np.arange(5),), is_epoch=True)
        chain.prefetch(order)
    assert source._told == [(True, [1, 3, 5, 7, 9])]


def test_a_plan_over_two_sources_sends_each_its_part_of_an_order() -> None:
    one, other = Told(3), Told(2, 100)
    pipe = Zipped(one, other)
    assert [sample["x"] for sample in pipe] == pipe.column("x").tolist() == [0, 100, 1, 101]
    assert pipe.shard_numbers().tolist() == [0, 1, 0, 1]  # type: ignore[union-attr]
    pipe.prefetch(Order(lambda: (np.array([3, 2]), np.array([0])), is_epoch=True))
    assert one._told == [(True, [1]), (True, [0])]
    assert other._told == [(True, [1])]


def test_columns_go_through_a_long_chain_of_plans_in_one_step() -> None:
    source = Told(3_000)
    pipe: Any = source
    expected = np.arange(3_000)
    for number in range(12):
        pipe = [pipe.take_percent(from_percent=0.1), pipe[5:], pipe.permute(number), pipe[::-1]][number % 4]
        cut = len(expected) - len(pipe)
        expected = [expected[cut:], expected[cut:], expected, expected[::-1]][number % 4]
        if number % 4 == 2:
            np.random.default_rng(number).shuffle(expected := expected.copy())
    assert pipe.column("x").tolist() == expected.tolist()
    assert pipe.column("x").tolist() == [sample["x"] for sample in pipe]
    assert source._reads == ["x", "x"]


def test_columns_stop_at_a_plan_that_changes_them() -> None:
    pipe = (
        Told(9).map_classes({"heron": "bird", "gull": "sea"}, unmapped="drop").permute(3).filter_classes(valid=["sea"])
    )
    assert set(pipe.column("y").tolist()) == {1}
    assert set(pipe.column("x") % 3) == {2}


def test_a_slice_of_many_samples_keeps_no_positions() -> None:
    many = kdp.from_ids(range(10**12), load=int)
    pipe = many[5:-7:3][::-1].repeat_until(repetitions=2).take_percent(to_percent=0.75)
    assert len(pipe) == 3 * len(many[5:-7:3]) // 2
    assert [sample["x"] for sample in pipe[len(pipe) // 2 : len(pipe) // 2 + 2]]
    assert pipe[0]["x"] == 10**12 - 8 - (10**12 - 8 - 5) % 3
    chain = pipe.select("x", bare=True).deal(batch_size=3, shuffle=True)
    with kdp.Loader(chain) as loader:
        batch = next(iter(loader))
    assert all((number - 5) % 3 == 0 for number in batch)


def test_a_single_source_can_be_concatenated() -> None:
    pipe = kdp.concat(Told(6)).filter_classes(valid=["stork"]).filter_classes(valid=["stork"])
    assert pipe.column("x").tolist() == [1, 4]


def test_plans_are_known_by_their_arguments() -> None:
    assert Told(9).take_percent(to_percent=0.5).fingerprint() == Told(90).take_percent(to_percent=0.5).fingerprint()
    assert Told(9).take_percent(to_percent=0.5).fingerprint() != Told(9).take_percent(to_percent=0.6).fingerprint()


class Planned(kdp.PlanPipe):
    """Chooses what it is given."""

    def __init__(self, source_datapipe: kdp.MapPipe, chosen: Any) -> None:
        super().__init__(source_datapipe)
        self.chosen_by_hand = chosen

    def plan(self, epoch: int) -> Any:
        return self.chosen_by_hand


@pytest.mark.parametrize(
    ("chosen", "error", "text"),
    [
        (np.array([0, 99]), IndexError, "`Planned` returned position 99 for sample 1, which lies outside the source"),
        (np.array([-1]), IndexError, "position -1 for sample 0"),
        (np.array([True, False, True]), TypeError, r"returned bool of shape \[3\] instead. A mask gives positions"),
        (np.array([0.0, 2.0]), TypeError, "must return integer positions"),
        (None, TypeError, "must return integer positions"),
    ],
)
def test_a_plan_of_anything_but_positions_is_an_error(chosen: Any, error: type[Exception], text: str) -> None:
    pipe = Planned(kdp.from_dataset(["a", "b", "c"], "x"), chosen)
    with pytest.raises(error, match=text):
        pipe[0]
    with pytest.raises(error, match=text):
        pipe.column("x")


def test_a_plan_may_be_a_list() -> None:
    pipe = Planned(kdp.from_dataset(["a", "b", "c"], "x"), [2, 0])
    assert pipe.column("x").tolist() == [sample["x"] for sample in pipe] == ["c", "a"]
    assert len(Planned(kdp.from_dataset(["a"], "x"), [])) == 0
