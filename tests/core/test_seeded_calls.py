"""The global generators are seeded for functions that may draw from them, and are left alone by all others."""

import functools
import random
from collections.abc import Callable
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import kdpipes as kdp
from kdpipes.core.user_code import draws_nothing

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


DRAWING = [draws_by_random, draws_by_numpy, draws_half_of_a_pair, draws_by_torch, draws_seldom]


class Numbers:
    """A dataset that may draw."""

    def __init__(self, change: Callable[[int], float] = lambda x: x) -> None:
        self.change = change

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[float, int]:
        return self.change(index), index


@kdp.sample_pipe("doctest_seeded_apply")
def apply(sample: kdp.Sample, change: Any) -> kdp.Sample:
    sample["x"] = change(sample["x"])
    return sample


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


def test_a_function_that_reads_a_chain_has_own_random_numbers() -> None:
    inner = kdp.from_dataset(Numbers()).transform("x", draws_by_numpy)

    def read(x: int) -> Any:
        return inner[int(x)]["x"]

    assert [item for batch in chain(read) for item in batch] == one_by_one(read)


def helper(x: Any) -> Any:
    return np.asarray(x) / 255


class Photos:
    """A dataset with a method of its own."""

    paths = ("a.jpg",)

    def __init__(self, change: Any) -> None:
        self.change = change

    def __getitem__(self, index: int) -> Any:
        return self.load(self.paths[index]).resize((8, 8)), self.change(index)

    def load(self, path: str) -> Any:
        return Image.open(path).convert("RGB")


class Inherited(torch.utils.data.Subset[Any]):
    """Its `__getitem__` is that of a library, and may call anything."""


class Files(fsspec.AbstractFileSystem):  # type: ignore[misc]
    def __getitem__(self, index: int) -> Any:
        return self.copy(index, index)


class Drawn(dict[int, float]):
    def __missing__(self, index: int) -> float:
        return random.random()


def imports(x: int) -> float:
    import random as other

    return other.random()


KNOWN = [
    lambda x: x / 255,
    lambda x: helper(x).sum() + len(str(x)),
    lambda image: functional.interpolate(torch.as_tensor(np.array(image))[None], size=(3, 3)),
    lambda sample: sample["x"] + sample.ordinal,
    lambda parts: [np.asarray(part).mean() for part in parts],
    functools.partial(helper),
    Photos(helper).__getitem__,
]
UNKNOWN = [
    *DRAWING,
    random.random,
    np.random.rand,
    torch.rand,
    torch.nn.Dropout(),
    functools.partial(draws_by_numpy),
    lambda x: draws_by_random(x),
    lambda x: functional.dropout(x),
    lambda x: x.uniform_(),
    lambda x: getattr(random, "random")() + x,  # noqa: B009
    lambda x, draw=np.random.rand: draw(),
    lambda table: table.sample(3),
    lambda x, changes=[draws_by_random]: changes[0](x),
    imports,
    Photos(draws_by_random).__getitem__,
    Inherited(Numbers(), [0]).__getitem__,
    Files().__getitem__,
    lambda x, values=Drawn(): values[x],  # noqa: B008
]


@pytest.mark.parametrize("function", KNOWN)
def test_code_that_only_computes_is_known_to_draw_nothing(function: Any) -> None:
    assert draws_nothing(function)


@pytest.mark.parametrize("function", UNKNOWN)
def test_other_code_may_draw(function: Any) -> None:
    assert not draws_nothing(function)


@pytest.mark.slow
def test_threads_leave_the_programs_generators_alone() -> None:
    def numbers(service: Any) -> list[float]:
        torch.manual_seed(0)
        with kdp.Loader(chain(helper, batch_size=2), reading_service=service) as loader:
            return [float(torch.rand(())) for _ in loader for _ in range(50)]

    assert numbers(kdp.ThreadReadingService(2)) == numbers(None)


@pytest.mark.parametrize("is_random", [False, True])
def test_a_function_is_called_once_for_each_sample(is_random: bool) -> None:
    calls: list[int] = []

    def change(x: int) -> float:
        calls.append(x)
        return x + random.random() if is_random else x

    list(chain(change))
    assert len(calls) == SIZE


def test_a_batch_function_that_draws_gives_the_same_numbers() -> None:
    def add(values: list[Any]) -> list[Any]:
        return [value + np.random.rand() for value in values]

    def epoch(batch_size: int) -> list[Any]:
        pipe = kdp.from_dataset(Numbers()).transform_batch("x", add).select("x y")
        return [item for batch in pipe.deal(batch_size=batch_size, seed=1) for item in batch]

    assert epoch(16) == epoch(1)


def test_arguments_of_a_sample_pipe_may_draw() -> None:
    pipe = kdp.from_dataset(Numbers()).doctest_seeded_apply(draws_by_torch).select("x y")
    epochs = [[item for batch in pipe.deal(batch_size=size) for item in batch] for size in (16, 1)]
    assert epochs[0] == epochs[1]
