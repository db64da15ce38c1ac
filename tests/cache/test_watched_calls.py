"""What functions upstream of a cache leave behind: generators of their own that have drawn, objects that changed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp
from kdpipes.core.user_code import reached_from

of_module = np.random.default_rng(1)


class Holds:
    """Draws from what it holds."""

    def __init__(self, generator: Any) -> None:
        self.rng = generator

    def __call__(self, x: float) -> float:
        return x + float(self.rng.random())


class MakesWhenCalled:
    """Makes its generator when it needs one."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __call__(self, x: float) -> float:
        self.rng = self.rng or torch.Generator().manual_seed(3)
        return x + float(torch.rand((), generator=self.rng))


class OfClass:
    """Has one for all objects."""

    shared = random.Random(1)

    def __call__(self, x: float) -> float:
        return x + self.shared.random()


class DrawsFirst:
    """Holds a generator that it draws from only when it is made."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.shift = self.rng.random()

    def __call__(self, x: float) -> float:
        return x + self.shift


def in_closure() -> Callable[[float], float]:
    own = np.random.RandomState(3)
    return lambda x: x + own.rand()


def by_default(x: float, own: Any = np.random.default_rng(2)) -> float:  # noqa: B008 - as users have it
    return x + float(own.random())


def helper(x: float) -> float:
    return x + of_module.random()


def added(x: float, q: Any) -> float:
    return x + float(q.random())


PRIVATE = [
    (lambda x: x + of_module.random(), "of_module` of `<lambda>"),
    (lambda x: next(helper(each) for each in [x]), "of_module` of `helper"),
    (Holds(random.Random(0)), "Holds.rng"),
    (MakesWhenCalled(), "MakesWhenCalled.rng"),
    (OfClass(), "OfClass.shared"),
    (in_closure(), "own` of `<lambda>"),
    (by_default, "own` of `by_default"),
    (functools.partial(added, q=np.random.default_rng(4)), "added"),
    (Holds(Holds(np.random.default_rng(5))).rng.__call__, "Holds.rng"),
]


def seen(pipe: Any, field: str = "x") -> list[Any]:
    return [sample[field] for sample in pipe]


@pytest.mark.parametrize(("function", "name"), PRIVATE)
def test_a_generator_of_ones_own_that_draws_is_rejected_by_name(function: Any, name: str) -> None:
    ids = [1.5, 2.5, 3.5]
    for pipe, field in (
        (kdp.from_ids(ids, load=float).transform("x", function), "x"),
        (kdp.from_ids(ids, load=function), "x"),
        (kdp.from_ids(ids, load=float).add_field("z", lambda sample: function(sample["x"])), "z"),
    ):
        with pytest.raises(kdp.ChainError, match=rf"its own generator `{name}`.*freeze_randomness=True"):
            seen(pipe.cache_in_memory(), field)
        frozen = pipe.cache_in_memory(freeze_randomness=True)
        assert seen(frozen, field) == seen(frozen, field)


class NoisySource(kdp.SampleSource):
    """Draws for itself."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 3

    def getitem_x(self, index: int) -> float:
        return index + self.rng.random()


def test_a_generator_of_a_source_that_draws_is_rejected() -> None:
    with pytest.raises(kdp.ChainError, match=r"A function of `NoisySource` .*its own generator `NoisySource.rng`"):
        seen(NoisySource().cache_in_memory())


def test_a_generator_of_a_dataset_that_draws_is_rejected() -> None:
    class Noisy:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[float, int]:
            return index + self.rng.random(), 0

    with pytest.raises(kdp.ChainError, match=r"its own generator `Noisy\.rng`"):
        seen(kdp.from_dataset(Noisy()).cache_in_memory())


def test_workers_reject_it_too() -> None:
    pipe = kdp.from_ids([1.5] * 8, load=float).transform("x", Holds(np.random.default_rng(5))).cache_in_memory()
    with (
        kdp.Loader(pipe.select("x").deal(batch_size=4), num_workers=1) as loader,
        pytest.raises(kdp.ChainError, match=r"its own generator `Holds\.rng`"),
    ):
        list(loader)


def test_a_generator_that_does_not_draw_is_no_reason_to_reject() -> None:
    cached = kdp.from_ids([1.5, 2.5], load=float).transform("x", DrawsFirst()).cache_in_memory()
    assert seen(cached) == seen(cached)
    assert cached.stats()[:2] == (2, 2)


def test_what_refers_to_itself_is_looked_at_once() -> None:
    ring: list[Any] = [Holds(random.Random(1))]
    ring.append(ring)
    assert [each.name for each in reached_from(ring) if isinstance(each.value, random.Random)] == ["Holds.rng"]


class Counts:
    """Changes when it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: str) -> str:
        self.calls += 1
        return x.upper()


class CountsAside(Counts):
    """Says itself what it is known by."""

    def fingerprinted(self) -> str:
        return "upper"


def test_values_that_change_when_called_cause_a_warning(tmp_path: Path) -> None:
    source = kdp.from_ids(["a", "b"], load=str)
    with pytest.warns(UserWarning, match=r"A callable of `transform` has changed.*`fingerprinted\(\)`"):
        assert seen(source.transform("x", Counts()).cache_on_disk(tmp_path / "cache")) == ["A", "B"]
    assert seen(source.transform("x", Counts()).cache_in_memory()) == ["A", "B"], "no chain but this one"


def test_what_says_what_it_is_known_by_may_change(tmp_path: Path) -> None:
    function = CountsAside()
    source = kdp.from_ids(["a", "b"], load=str)
    for hits in (0, 2):
        cached = source.transform("x", function).cache_on_disk(tmp_path / "cache")
        assert (seen(cached), cached.stats().hits, function.calls) == (["A", "B"], hits, 2)


def test_a_chain_finds_its_entries_in_later_epochs_and_workers(tmp_path: Path) -> None:
    cached = kdp.from_ids([*"abcdefgh"], load=str).transform("x", Counts()).cache_in_memory()
    assert cached[0]["x"] == "A"
    with kdp.Loader(cached.select("x").deal(batch_size=2), num_workers=2) as loader:
        for _ in range(3):
            list(loader)
    assert cached.stats()[:2] == (17, 8)
