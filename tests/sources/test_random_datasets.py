"""Datasets with random transforms of their own: the same epochs in every loader, each epoch anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import kdpipes as kdp
from tests.torchdata_parts import DataLoader2, InProcessReadingService, MultiProcessingReadingService

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def noise() -> float:
    return random.random() + float(np.random.rand()) + torch.rand(()).item()


class Noisy(torch.utils.data.Dataset[Any]):
    """Items that are drawn from every global generator."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index + noise(), index % 3


class WithCtx(kdp.SampleSource):
    """Fields that are drawn from the global generators, and written down."""

    def __len__(self) -> int:
        return 11

    def getitem_x(self, index: int, ctx: dict[str, Any]) -> float:
        ctx["noise"] = noise()
        return index + float(ctx["noise"])

    def getitem_y(self, index: int) -> int:
        return index % 3


class WithRng(kdp.SampleSource):
    """Fields that are drawn from a generator of their own."""

    def __len__(self) -> int:
        return 11

    def getitem_x(self, index: int, rng: np.random.Generator) -> float:
        return index + float(rng.random())

    def getitem_y(self, index: int, rng: np.random.Generator) -> int:
        return int(rng.integers(1 << 40))


class Plain:
    """The same, as no source of kdpipes'."""

    def __len__(self) -> int:
        return 11

    def getitem_x(self, index: int, ctx: dict[str, Any], rng: np.random.Generator) -> float:
        ctx["noise"] = float(rng.random())
        return index + float(ctx["noise"])

    def getitem_y(self, index: int) -> int:
        return index % 3


SOURCES: dict[str, Callable[[], Any]] = {
    "dataset": lambda: kdp.from_dataset(Noisy()),
    "ctx": WithCtx,
    "rng": WithRng,
    "plain": lambda: kdp.from_dataset(Plain()),
}
every_source = pytest.mark.parametrize("name", SOURCES)


def chain(name: str, *, seed: int = 3) -> Any:
    pipe = SOURCES[name]().repeat_until(repetitions=2).record_ctx().select("x y index", return_ctx=True)
    return pipe.deal(batch_size=4, shuffle=True, seed=seed).collate_samples()


def epochs(loader: Any, number: int = 2) -> list[list[Any]]:
    return [[(x.tolist(), y.tolist(), index.tolist()) for (x, y, index), _ in loader] for _ in range(number)]


LOADERS: dict[str, Callable[[Any], Any]] = {
    **{f"kdp.Loader {number}": lambda pipe, number=number: kdp.Loader(pipe, number) for number in (0, 1, 2, 3)},
    "threads": lambda pipe: kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(3)),
    "not forked": lambda pipe: kdp.Loader(pipe, 2, start_method="forkserver"),
    **{
        f"DataLoader {number}": lambda pipe, number=number: DataLoader(pipe, batch_size=None, num_workers=number)
        for number in (0, 1, 2)
    },
    "DataLoader persistent": lambda pipe: DataLoader(pipe, batch_size=None, num_workers=2, persistent_workers=True),
    "DataLoader2": lambda pipe: DataLoader2(pipe, reading_service=InProcessReadingService()),
    "DataLoader2 2": lambda pipe: DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)),
}


@every_source
def test_each_delivery_is_drawn_anew_without_global_generators(name: str) -> None:
    pipe = chain(name)
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
    first = epochs(pipe)
    assert (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()) == states
    drawn = {value for run in (first, epochs(chain(name, seed=4))) for epoch in run for x, _, _ in epoch for value in x}
    assert len(drawn) == 2 * 2 * 22
    assert epochs(chain(name)) == first


@every_source
@pytest.mark.parametrize("loader", LOADERS)
def test_the_epochs_are_the_same_in_every_loader(name: str, loader: str) -> None:
    expected, made = epochs(chain(name)), LOADERS[loader](chain(name))
    try:
        assert epochs(made) == expected
    finally:
        if isinstance(made, DataLoader2):
            made.shutdown()


@every_source
def test_an_epoch_resumes_and_batches_are_built_again_equally(name: str) -> None:
    pipe = chain(name)
    expected = epochs(pipe)
    with kdp.Loader(chain(name), 2) as loader:
        batches, state = iter(loader), loader.state_dict()
        for _ in range(2):
            next(batches)
        middle = loader.state_dict()
    for number in range(6):
        (x, y, index), _ = kdp.find(chain(name), state, number).load()
        assert (x.tolist(), y.tolist(), index.tolist()) == expected[0][number]
    with kdp.Loader(chain(name)) as loader:
        loader.load_state_dict(middle)
        assert epochs(loader) == [expected[0][2:], expected[1]]


@pytest.mark.parametrize(
    "name",
    [
        "dataset",
        "ctx",
        "rng",
        "plain",
    ],
)
def test_a_sample_is_made_again_from_its_ctx(name: str) -> None:
    pipe = SOURCES[name]().record_ctx().select("key x y", return_ctx=True)
    dealt = pipe.deal(batch_size=4, shuffle=True, seed=3)
    for _ in range(2):
        for batch in dealt:
            for (key, *rest), ctx in batch:
                assert kdp.replay(key, ctx, pipe) == ((key, *rest), ctx)


def test_which_field_is_read_first_changes_no_number() -> None:
    for name in SOURCES:
        forth, back = (SOURCES[name]().select(mode).deal(batch_size=11, seed=3) for mode in ("x y", "y x"))
        assert [(x, y) for batch in forth for x, y in batch] == [(x, y) for batch in back for y, x in batch]
