"""Reading a chain of pipes without pickling it, as torch's own traversal does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torchdata.datapipes.iter import ShardingRoundRobinDispatcher

__all__ = ["shards", "sources_of", "walk"]

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
