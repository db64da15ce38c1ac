"""Runs to break off, for tests: services of every kind, states that have travelled, and short forms of batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import kdpipes as kdp
from kdpipes.testing import verify_receipts


def digest(value: Any) -> str:
    """Return a hash of every byte, type and shape in a batch."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        value = (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, dict):
        value = {name: digest(part) for name, part in value.items()}
    elif isinstance(value, list | tuple):
        value = (type(value).__name__, [digest(part) for part in value])
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def digests(batches: Any) -> list[str]:
    return [digest(batch) for batch in batches]


def inline() -> None:
    return None


def processes(number: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return kdp.ProcessReadingService(number, **options)

    make.__name__ = f"processes{number}{''.join(map(str, options.values()))}"
    return make


def threads(number: int) -> Callable[[], Any]:
    def make() -> Any:
        return kdp.ThreadReadingService(number)

    make.__name__ = f"threads{number}"
    return make


FORKED = [processes(number, start_method="fork") for number in (1, 2, 3, 4)]
FRESH = processes(2, start_method="forkserver")
THREADS = [threads(number) for number in (1, 2, 3)]
SERVICES = [inline, *FORKED, *THREADS]
every_service = pytest.mark.parametrize("service", SERVICES, ids=lambda make: make.__name__)


def of_rank(pipe: Any, num_ranks: int, rank: int) -> Any:
    graph_settings.apply_sharding(pipe, num_ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return pipe


def travelled(state: Any) -> Any:
    """Return a state as a checkpoint on disk gives it back."""
    return json.loads(json.dumps(state))


def states_of(loader: Any) -> list[Any]:
    """Return the state before the first batch, after each one, and after the end of the epoch."""
    batches = iter(loader)
    states = [loader.state_dict()]
    for _ in batches:
        states.append(loader.state_dict())
    return [*states, loader.state_dict()]


def without_seed(state: Any) -> Any:
    return {name: value for name, value in state.items() if name != "seed"}


def resumed_everywhere(loader: Any, states: list[Any], epochs: list[list[str]]) -> None:
    """Load each state of the first epoch, and compare what is left of it and the next epoch."""
    for number, state in enumerate(states):
        loader.load_state_dict(travelled({"seed": 0, **state}))
        expected = [epochs[1], epochs[2]] if state["epoch"] else [epochs[0][number:], epochs[1]]
        assert [digests(loader), digests(loader)] == expected, f"after {number} batches"


def jitter(x: int, rng: np.random.Generator) -> float:
    return x + rng.random()


def number_chain(**cut: Any) -> Any:
    source = kdp.from_dataset([(number, number % 3) for number in range(45)]).filter_classes(valid=[0, 2])
    chain = source.transform("x", jitter).select("x y key ordinal is_padding")
    return chain.deal(**(cut or {"global_batch_size": 8}), shuffle=True, seed=5).collate_samples()


def dealt(size: int = 17) -> Any:
    return kdp.from_dataset([(n, 0) for n in range(size)]).transform("x", int).select("x").deal(3, shuffle=True, seed=1)


def negative(x: int) -> int:
    return -x


def stock(size: int = 12) -> Any:
    return IterableWrapper(range(size)).shuffle().sharding_filter().map(negative)


def assert_resumes_with_threads(chain: Callable[[], Any], num_threads: int) -> None:
    """Check that threads deliver the two different epochs of a chain, and that a loader resumes in the second."""
    one = chain()
    epochs = [list(one) for _ in range(2)]
    assert epochs[0] != epochs[1]
    service = kdp.ThreadReadingService(num_threads) if num_threads else None
    with kdp.Loader(chain(), reading_service=service) as loader:
        assert list(loader) == epochs[0]
        assert verify_receipts([loader.receipt()]).is_complete
        running = iter(loader)
        head = [next(running), next(running)]
        state = loader.state_dict()
    with kdp.Loader(chain()) as loader:
        loader.load_state_dict(state)
        assert head + list(loader) == epochs[1]
