"""The global generators are seeded only for functions that were seen to draw from them; results do not change."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp
from kdpipes.core import randomness

SIZE = 64


def draws_by_random(x: int) -> float:
    return x + random.random()


def draws_by_numpy(x: int) -> float:
    return x + float(np.random.rand())


def draws_half_of_a_pair(x: int) -> float:
    return x + float(np.random.randn())  # NumPy keeps the second number of a pair


def draws_by_torch(x: int) -> float:
    return x + float(torch.rand(()))


def draws_seldom(x: int) -> float:
    return x + random.random() if x % 31 == 30 else x


def fails_by_chance(x: int) -> float:
    value = random.random()
    if value < 0:
        raise ValueError(value)
    return value


DRAWING = [draws_by_random, draws_by_numpy, draws_half_of_a_pair, draws_by_torch, draws_seldom, fails_by_chance]


class Numbers:
    """A dataset that may draw."""

    def __init__(self, change: Callable[[int], float] = lambda x: x) -> None:
        self.change = change

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[float, int]:
        return self.change(index), index


@pytest.fixture(autouse=True)
def forgets_vain_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_num_vain_trials", 0)


def chain(change: Any, batch_size: int = 16) -> Any:
    pipe = kdp.from_dataset(Numbers()).transform("x", change)
    return pipe.select("x y").deal(batch_size=batch_size, shuffle=True, seed=3)


def one_by_one(change: Any) -> list[Any]:
    """The items of an epoch, each of which is made alone, in a batch that is too small for a trial."""
    return [item for batch in chain(change, batch_size=1) for item in batch]


@pytest.mark.parametrize("change", DRAWING)
def test_a_function_that_draws_gives_the_numbers_of_its_samples(change: Any) -> None:
    expected = one_by_one(change)
    for batch_size in (7, 16, SIZE):
        assert [item for batch in chain(change, batch_size) for item in batch] == expected
    with kdp.Loader(chain(change), num_workers=2) as loader:
        assert [item for batch in loader for item in batch] == expected


@pytest.mark.parametrize("change", DRAWING)
def test_a_dataset_that_draws_gives_the_numbers_of_its_samples(change: Any) -> None:
    def epoch(batch_size: int) -> list[Any]:
        pipe = kdp.from_dataset(Numbers(change)).select("x y").deal(batch_size=batch_size, seed=1)
        return [item for batch in pipe for item in batch]

    assert epoch(16) == epoch(1)


@pytest.mark.parametrize("change", DRAWING)
def test_the_global_generators_are_left_as_they_were(change: Any) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    list(chain(change))
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == states


def test_a_function_that_does_not_draw_is_never_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(key: bytes) -> Any:
        raise AssertionError("seeded")

    monkeypatch.setattr(randomness, "seeded_globals", seeded)
    pipe = kdp.from_dataset(Numbers()).transform("x", lambda x: 2 * x).add_field("z", lambda sample: sample["x"] + 1)
    items = [item for batch in pipe.select("z y").deal(batch_size=16) for item in batch]
    assert items == [(2 * y + 1, y) for y in range(SIZE)]


def test_only_the_first_batch_of_a_drawing_function_comes_twice() -> None:
    calls: list[int] = []

    def change(x: int) -> float:
        calls.append(x)
        return x + random.random()

    list(chain(change))
    assert len(calls) == SIZE + 16


def test_a_seeded_function_beside_an_unseeded_one_is_unchanged() -> None:
    def epoch(batch_size: int, other: Any) -> list[Any]:
        pipe = kdp.from_dataset(Numbers()).transform("x", draws_by_random).transform("y", other)
        return [x for batch in pipe.select("x y").deal(batch_size=batch_size) for x, _ in batch]

    assert epoch(16, lambda y: y) == epoch(1, lambda y: y) == epoch(16, draws_by_random) == epoch(16, draws_by_torch)


def test_a_function_that_reads_a_chain_has_own_random_numbers() -> None:
    inner = kdp.from_dataset(Numbers()).transform("x", draws_by_numpy)

    def read(x: int) -> Any:
        return inner[int(x)]["x"]

    assert [item for batch in chain(read) for item in batch] == one_by_one(read)


def test_draws_of_the_training_loop_do_not_matter() -> None:
    def change(x: int) -> float:
        torch.default_generator.manual_seed(len(calls))  # as another thread may do at any time
        calls.append(x)
        return 2 * x

    calls: list[int] = []
    assert [item for batch in chain(change) for item in batch] == one_by_one(lambda x: 2 * x)


def test_an_error_of_a_function_without_draws_is_raised_once() -> None:
    calls: list[int] = []

    def change(x: int) -> float:
        calls.append(x)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        list(chain(change))
    assert len(calls) <= 2  # for the samples together, and for the first one alone
    assert any("while applying 'change' to field 'x' of sample" in note for note in caught.value.__notes__)
