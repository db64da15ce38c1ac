"""Find the pipes that a pipe reads from.

This is the only traversal of pipes in kdpipes. It depends on torch's pipes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe

AnyPipe = IterDataPipe[Any] | MapDataPipe[Any]
_LOOKED_AT = 8  # if none of the first entries of a collection is a pipe, the collection holds data


def edges_from(pipe: AnyPipe) -> list[tuple[AnyPipe, list[AnyPipe]]]:
    """Return all pipes of the chain ending with `pipe`, that pipe first, each with the pipes that it reads from."""
    edges: dict[int, tuple[AnyPipe, list[AnyPipe]]] = {}
    waiting = deque([pipe])
    while waiting:
        reader = waiting.popleft()
        if id(reader) not in edges:
            edges[id(reader)] = reader, upstream_of(reader)
            waiting.extend(edges[id(reader)][1])
    return list(edges.values())


def upstream_of(pipe: Any) -> list[AnyPipe]:
    """Return the pipes that `pipe` reads from: attributes, and entries of collections in attributes.

    Only collections that begin with pipes are searched, because others hold users' data.
    """
    held = vars(pipe) if hasattr(pipe, "__dict__") else {}
    return [source for value in held.values() for source in _pipes_in(value)]


def _pipes_in(value: Any, depth: int = 0) -> Iterator[AnyPipe]:
    if isinstance(value, IterDataPipe | MapDataPipe):
        yield value
    elif type(value) in (list, tuple, dict, set) and depth < 3:
        parts = (value.values(), value) if isinstance(value, dict) else (value,)
        first = [entry for part in parts for entry in islice(part, _LOOKED_AT)]
        if any(next(_pipes_in(entry, depth + 1), None) is not None for entry in first):
            for part in parts:
                for entry in part:
                    yield from _pipes_in(entry, depth + 1)
