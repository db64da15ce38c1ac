"""Reading a chain of pipes without pickling it, as torch's own traversal does."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from torch.utils.data import IterDataPipe, MapDataPipe
from torchdata.datapipes.iter import ShardingRoundRobinDispatcher

from kdpipes.draw import EpochCounter

__all__ = ["copy_streams", "shards", "sources_of", "walk"]

AnyPipe = IterDataPipe[Any] | MapDataPipe[Any]


def _pipes_in(value: Any) -> Iterator[AnyPipe]:
    if isinstance(value, IterDataPipe | MapDataPipe):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _pipes_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            if isinstance(entry, IterDataPipe | MapDataPipe):
                yield entry


def shards(pipe: AnyPipe) -> bool:
    """Return whether `pipe` gives each worker a part of its own."""
    return hasattr(pipe, "apply_sharding") or isinstance(pipe, ShardingRoundRobinDispatcher)


def sources_of(pipe: AnyPipe) -> list[AnyPipe]:
    """Return the pipes that `pipe` reads from, as its attributes name them."""
    return [source for value in vars(pipe).values() for source in _pipes_in(value)]


def copy_streams(pipe: AnyPipe) -> AnyPipe:
    """Return a copy of a chain for another thread.

    Streams are copied, with the collections, counters and generators that they change while they are iterated; indexed
    pipes, functions and data are shared.
    """
    return cast(AnyPipe, _copied(pipe, {}))


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, IterDataPipe):
        if id(value) not in copies:
            copies[id(value)] = made = type(value).__new__(type(value))
            made.__dict__.update({name: _copied(part, copies) for name, part in vars(value).items()})
        return copies[id(value)]
    if isinstance(value, MapDataPipe):
        return value
    if isinstance(value, EpochCounter | random.Random | np.random.Generator):
        return copy.deepcopy(value)
    if any(True for _ in _pipes_in(value)):
        if isinstance(value, Mapping):
            return type(value)((name, _copied(part, copies)) for name, part in value.items())  # type: ignore[call-arg]
        return type(value)(_copied(part, copies) for part in value)
    return copy.copy(value) if isinstance(value, list | dict | set | deque) else value


def walk(pipe: AnyPipe) -> list[AnyPipe]:
    """Return `pipe` and everything upstream of it, each once, nearest first."""
    found: dict[int, AnyPipe] = {}
    waiting = [pipe]
    while waiting:
        current = waiting.pop(0)
        if id(current) not in found:
            found[id(current)] = current
            waiting.extend(sources_of(current))
    return list(found.values())
