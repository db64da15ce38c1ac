"""Reading a chain of pipes without pickling it, as torch's own traversal does."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torchdata.datapipes.iter import ShardingRoundRobinDispatcher

from kdpipes.core.randomness import EpochCounter
from kdpipes.sample import Sample

__all__ = ["copy_streams", "handler_in", "random_name", "shards", "sources_of", "walk"]

AnyPipe = IterDataPipe[Any] | MapDataPipe[Any]
_MANY = 1000  # a longer collection holds data, not pipes
_DEEP = 4


def _pipes_in(value: Any, depth: int = 0) -> Iterator[AnyPipe]:
    if isinstance(value, IterDataPipe | MapDataPipe):
        yield value
    elif isinstance(value, Sample):  # in the buffer of a pipe that runs: to look into it would load its fields
        return
    elif isinstance(value, Mapping | list | tuple | set) and len(value) <= _MANY and depth < _DEEP:
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _pipes_in(entry, depth + 1)
        if isinstance(value, Mapping):
            for entry in value:
                yield from _pipes_in(entry, depth + 1)


def shards(pipe: AnyPipe) -> bool:
    """Return whether `pipe` gives each worker a part of its own."""
    return hasattr(pipe, "apply_sharding") or isinstance(pipe, ShardingRoundRobinDispatcher)


def sources_of(pipe: AnyPipe) -> list[AnyPipe]:
    """Return the pipes that `pipe` reads from, as its attributes name them."""
    return [source for value in vars(pipe).values() for source in _pipes_in(value)]


def handler_in(pipe: Any) -> Any:
    """Return what `.on_error(...)` nearest upstream of `pipe` does; None where no sample may be left out."""
    for upstream in walk(pipe):
        operation: Any = getattr(upstream, "_operation", None)
        if getattr(operation, "handles_errors", False):
            return operation if operation.is_tolerant else None
    return None


def random_name(source: Any) -> str | None:
    """Return the name of an operation upstream that draws random numbers; None if a cache freezes its results."""
    for pipe in walk(source):
        operation = getattr(pipe, "_operation", None)
        draws = getattr(operation, "draws", None)
        name: str | None = draws() if draws is not None else None
        is_declared = getattr(operation, "is_random", False) is True
        if getattr(operation, "freezes", False):
            return None
        if name is not None or is_declared:
            return name or str(getattr(pipe, "_name", "an operation"))
    return None


def copy_streams(pipe: AnyPipe) -> AnyPipe:
    """Return a copy of a chain for another thread.

    Streams are copied, with the collections, counters and generators that they change while they are iterated; indexed
    pipes, functions and data are shared.
    """
    return cast(AnyPipe, _copied(pipe, {}))


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, IterDataPipe):
        return _copied_stream(value, copies)
    if isinstance(value, EpochCounter | random.Random | np.random.Generator | torch.Generator):
        return copy.deepcopy(value) if not isinstance(value, torch.Generator) else value.clone_state()
    if isinstance(value, list | dict | set | deque) and len(value) > _MANY:
        return copy.copy(value)
    if isinstance(value, dict):
        parts = {_copied(name, copies): _copied(part, copies) for name, part in value.items()}
        same = copy.copy(value)  # a subclass keeps what it has besides
        same.clear()
        same.update(parts)
        return same
    if isinstance(value, list | deque):
        made = copy.copy(value)
        for place, part in enumerate(value):
            made[place] = _copied(part, copies)
        return made
    if isinstance(value, set):
        return copy.copy(value)
    if isinstance(value, tuple):
        entries = [_copied(part, copies) for part in value]
        return type(value)._make(entries) if hasattr(value, "_make") else tuple(entries)
    return value


def _copied_stream(pipe: IterDataPipe[Any], copies: dict[int, Any]) -> Any:
    """Return a copy of one pipe, made of what it would pickle."""
    if id(pipe) not in copies:
        copies[id(pipe)] = made = type(pipe).__new__(type(pipe))
        state = _copied(pipe.__getstate__(), copies)  # type: ignore[no-untyped-call]
        if hasattr(type(pipe), "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(state)
    return copies[id(pipe)]


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
