"""`sample_pipe`: functions and classes of a user's own, whose random numbers do not depend on who runs them."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.hashes import fingerprints


@kdp.sample_pipe("test_add_noise", changes="x")
def add_noise(sample: Any, *, scale: float = 1.0) -> Any:
    sample["x"] = sample["x"] + scale * (random.random() + np.random.rand() + torch.rand(()).item())
    return sample


@kdp.sample_pipe("test_add_rng")
def add_rng(sample: Any, rng: np.random.Generator, *, scale: float, ctx: dict[str, Any]) -> Any:
    ctx["added"] = rng.random()
    sample["x"] = sample["x"] + scale * ctx["added"]
    return sample


@kdp.sample_pipe("test_noise_class")
class NoiseAdder:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, sample: Any) -> Any:
        sample["x"] = sample["x"] + self.scale * random.random()
        return sample


@kdp.sample_pipe("test_rng_class")
class RngAdder:
    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        sample["x"] = sample["x"] + rng.random()
        return sample


@kdp.sample_pipe("test_fixed")
def fixed(sample: Any) -> Any:
    sample["x"] = random.random()
    return sample


fixed.is_random = False


def indexed(size: int = 24) -> Any:
    return kdp.from_dataset([(float(number), 0) for number in range(size)])


def stream(size: int = 24) -> Any:
    return IterableWrapper([(float(number), 0) for number in range(size)]).to_samples(fields="x y")


def noisy(pipe: Any, name: str) -> Any:
    keywords = {"scale": 2.0} if name == "test_add_rng" else {}
    return getattr(pipe, name)(**keywords)


LOADERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2},
    "threads": {"reading_service": kdp.ThreadReadingService(2)},
}
NAMES = pytest.mark.parametrize("name", ["test_add_noise", "test_add_rng", "test_noise_class", "test_rng_class"])


def epochs(chain: Any, **how: Any) -> Iterator[list[Any]]:
    with kdp.Loader(chain, **how) as loader:
        for _ in range(2):
            yield list(loader)


@NAMES
@pytest.mark.parametrize("make", [indexed, stream])
def test_numbers_are_the_same_for_all_loaders(name: str, make: Any) -> None:
    chain = noisy(noisy(make(), name), name).select("x").deal(batch_size=5, seed=3)
    expected = list(epochs(chain))
    drawn = [x - int(x) for epoch in expected for batch in epoch for (x,) in batch]
    assert len(set(drawn)) == 48
    for how in LOADERS.values():
        assert list(epochs(chain, **how)) == expected


@NAMES
def test_a_resumed_epoch_draws_the_same_numbers(name: str) -> None:
    chain = noisy(indexed(), name).select("x").deal(batch_size=5, shuffle=True)
    with kdp.Loader(chain) as loader:
        batches = iter(loader)
        next(batches)
        state, rest = loader.state_dict(), list(batches)
    with kdp.Loader(chain, num_workers=2) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


@pytest.mark.parametrize("make", [indexed, stream])
def test_rng_and_ctx_are_filled_and_replayed(make: Any) -> None:
    for name in ("test_add_rng", "test_add_noise", "test_noise_class"):
        chain = noisy(make().record_ctx(), name).select("key x", return_ctx=True)
        items = [item for batch in chain.deal(batch_size=5, seed=2) for item in batch]
        for (key, x), ctx in items:
            assert x == int(key) + 2.0 * ctx["added"] if name == "test_add_rng" else x > int(key)
            assert kdp.replay(key, ctx, chain) == ((key, x), ctx)


def test_filled_parameters_are_not_arguments_of_the_pipe() -> None:
    assert list(inspect.signature(indexed().test_add_rng).parameters) == ["scale"]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'rng'"):
        indexed().test_add_rng(scale=1.0, rng=np.random.default_rng(0))


def test_global_generators_are_restored_and_fixed_functions_draw() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    noisy(indexed(), "test_add_noise")[3]
    assert indexed().test_fixed()[0]["x"] == expected


def test_pipes_pickle_with_their_parameters() -> None:
    for name in ("test_add_rng", "test_add_noise", "test_noise_class"):
        chain = noisy(indexed(), name)
        again = pickle.loads(pickle.dumps(chain))
        assert again[3]["x"] == chain[3]["x"]
        assert fingerprints(again) == fingerprints(chain)
