"""States with absurd values in any entry: an error that says so, or an epoch, at once."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.demo import write_photo_shards
from tests.torchdata_parts import needs_torchdata

DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]

NUMBERS = [-1, 2**31, 2**32 - 1, 2**53 - 1, 2**53, 2**63, 10**9 - 1, 10**400, 0]
VALUES = [*NUMBERS, float("nan"), float("inf"), None, True, "x", [], [0] * 7, DEEP, {}]


def numbers(label: int, num: int = 20) -> Any:
    return kdp.from_dataset([(number, label) for number in range(num)])


def length_of(sample: Any) -> int:
    return len(sample["x"])


def texts() -> Any:
    return kdp.from_dataset([(list(range(number % 5 + 1)), 0) for number in range(30)]).add_field("length", length_of)


CHAINS: dict[str, Callable[[Path], Any]] = {
    "endless": lambda path: kdp.stream_shards(write_shards(path)).cycle().deal(batch_size=4),
    "endless steps": lambda path: kdp.stream_shards(write_shards(path)).cycle().deal(batch_size=4, num_batches=5),
    "indexed": lambda _: numbers(0).deal(batch_size=4, shuffle=True, seed=0),
    "mix": lambda _: numbers(0).mix(numbers(1, 30)).deal(batch_size=4, shuffle=True, seed=0),
    "packed": lambda _: texts().deal(batching=kdp.packed("length", 6)),
    "stream": lambda path: kdp.stream_shards(write_shards(path)).deal(batch_size=4),
    "steps": lambda path: kdp.stream_shards(write_shards(path)).deal(batch_size=4, num_batches=5),
}


def write_shards(path: Path) -> list[str]:
    if not path.exists():
        write_photo_shards(path)
    return sorted(map(str, path.glob("*.tar")))


def entries_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each entry of a state, lists included."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from entries_of(child, (*path, key))


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    state = copy.deepcopy(state)
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return state


def raise_timeout(*_: Any) -> None:
    raise TimeoutError("a state took longer than 5 s")


@pytest.fixture
def alarm() -> Iterator[Callable[[], Any]]:
    before = signal.signal(signal.SIGALRM, raise_timeout)
    yield lambda: signal.alarm(5)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_torchdata if name.startswith("endless") else ()) for name in CHAINS]
)
def test_absurd_entries_are_errors_or_epochs_at_once(name: str, alarm: Callable[[], Any], tmp_path: Path) -> None:
    chain = CHAINS[name](tmp_path / "shards")
    loader = kdp.Loader(chain)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    errors = 0
    for path in entries_of(state):
        for value in VALUES:
            alarm()
            resumed = kdp.Loader(CHAINS[name](tmp_path / "shards"))
            try:
                resumed.load_state_dict(replaced(state, path, value))
                next(iter(resumed), None)
            except (ValueError, kdp.DataError):
                errors += 1
    assert errors > 50
