"""A chain of pipes as an immutable description."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from types import MethodType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from kdpipes.core.fingerprint import fingerprint
from kdpipes.core.operation import ErrorHandler, Operation, operation_of
from kdpipes.core.pipe import Pipe, a_datapipe
from kdpipes.core.randomness import EpochCounter
from kdpipes.core.registry import Named, pipe_name, short_name
from kdpipes.core.stock import edges_from, is_one_to_one, is_replicable, keeps_items_apart, stock_traits
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.traits import UNDECLARED, Traits

PipeType = TypeVar("PipeType")


@runtime_checkable
class _SetsState(Protocol):
    def __setstate__(self, state: Any) -> None: ...


_SOURCE = Traits(role="source")
_LONG = 1000  # larger collections are copied without searching them for streams


class Node:
    """One pipe of a chain, its number (0 at the end of the chain, increasing upstream) and the nodes it reads from."""

    __slots__ = ("pipe", "place", "upstream")

    def __init__(self, pipe: Any, place: int, upstream: tuple[Node, ...] = ()) -> None:
        self.pipe = pipe
        self.place = place
        self.upstream = upstream

    def __repr__(self) -> str:
        return f"<{self.name} {self.place}>"

    @property
    def name(self) -> str:
        """The name of the pipe in a chain: `deal`, `open_shards`, `shuffle`, or its class."""
        return pipe_name(self.pipe)

    @property
    def traits(self) -> Traits:
        """The traits of the pipe; for stock pipes, those that kdpipes knows."""
        if isinstance(self.pipe, Pipe):
            traits = self.pipe.traits
            return _SOURCE if traits is UNDECLARED and not self.upstream else traits
        return stock_traits(self.pipe, is_source=not self.upstream)

    @property
    def stays_in_main_process(self) -> bool:
        """Whether the pipe must not be copied to workers."""
        return self.traits.role == "device" or not is_replicable(self.pipe)

    @property
    def is_one_to_one(self) -> bool:
        """Whether the pipe makes exactly one item of each batch or item, before it reads the next one."""
        return self.traits.role == "batch" or is_one_to_one(self.pipe)

    @property
    def is_join(self) -> bool:
        """Whether the pipe combines samples of several sources."""
        return self.passes_samples and len(self.upstream) > 1

    @property
    def passes_samples(self) -> bool:
        """Whether the pipe yields samples that were made upstream, changed or not."""
        is_passing = self.operation is not None or self.traits.is_plan or self.traits.role == "order"
        return is_passing and bool(self.upstream)

    @property
    def operation(self) -> Operation | None:
        """The operation of a work pipe; None for all other pipes."""
        return operation_of(self.pipe)


class Chain:
    """The pipes of a chain, traversed once.

    Iteration yields each node after all nodes that it reads from, branch by branch. `reversed(chain)` starts at the end
    of the chain and follows the numbers in `place`.

    Args:
        nodes: The nodes, each once, from the end of the chain upstream.
    """

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._nodes = nodes

    @classmethod
    def of(cls, pipe: Any) -> Chain:
        """Return the chain that ends with `pipe`.

        Raises:
            TypeError: `pipe` is not a datapipe.
        """
        sources = edges_from(a_datapipe(pipe))
        nodes = {id(reader): Node(reader, place) for place, (reader, _) in enumerate(sources)}
        for node, (_, upstream) in zip(nodes.values(), sources, strict=True):
            node.upstream = tuple(nodes[id(source)] for source in upstream)
        return cls(tuple(nodes.values()))

    def __iter__(self) -> Iterator[Node]:
        waiting = [self.end]
        opened = set[int]()
        done = set[int]()
        while waiting:
            node = waiting[-1]
            new = [source for source in node.upstream[::-1] if source.place not in opened | done]
            if node.place not in opened and new:
                opened.add(node.place)
                waiting += new
                continue
            waiting.pop()
            if node.place not in done:
                done.add(node.place)
                yield node

    def __reversed__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, pipe: Any) -> bool:
        return any(node.pipe is pipe for node in self._nodes)

    @property
    def end(self) -> Node:
        """The last node. Its pipe yields the items of the chain."""
        return self._nodes[0]

    @property
    def pipes(self) -> list[Any]:
        """The pipes, starting at the end of the chain."""
        return [node.pipe for node in self._nodes]

    @property
    def sources(self) -> list[Node]:
        """The nodes that read from no other pipe."""
        return [node for node in self._nodes if not node.upstream]

    @property
    def deal(self) -> Node | None:
        """The node of `.deal(...)` nearest to the end; None if there is none."""
        return next((node for node in self._nodes if node.traits.role == "deal"), None)

    def of_type(self, *kinds: type[PipeType]) -> list[PipeType]:
        """Return the pipes of the given classes, starting at the end of the chain."""
        return [node.pipe for node in self._nodes if isinstance(node.pipe, kinds)]

    def operations(self, kind: type[PipeType]) -> list[PipeType]:
        """Return the operations of a class, starting at the end of the chain."""
        return [node.operation for node in self._nodes if isinstance(node.operation, kind)]

    def path(self) -> list[Node]:
        """Return the nodes from the end up to the first one that reads from no pipe or from several."""
        path = [self.end]
        while len(path[-1].upstream) == 1:
            path += path[-1].upstream
        return path

    def one_to_one_path(self) -> list[Node]:
        """Return the nodes from the end up to the first one that is not one-to-one."""
        path = [self.end]
        while path[-1].is_one_to_one and len(path[-1].upstream) == 1:
            path += path[-1].upstream
        return path

    def numbering_deal(self) -> Any:
        """Return the `deal` whose n-th batch is the n-th item of the chain; None if there is no such `deal`."""
        last = self.one_to_one_path()[-1]
        return last.pipe if last.traits.role == "deal" else None

    def resumable_deal(self) -> Any:
        """Return the `deal` after whose batches the chain can resume; None if pipes after it buffer items.

        Pipes after it may drop items, or make several items of a batch, as long as they buffer none.
        """
        node = self.end
        while node.is_one_to_one or keeps_items_apart(node.pipe):
            if len(node.upstream) != 1:
                return None
            (node,) = node.upstream
        return node.pipe if node.traits.role == "deal" else None

    def routes(self) -> Iterator[tuple[int, ...]]:
        """Yield all routes of samples: one source number per join, with the join nearest to the end last."""
        waiting: list[tuple[Node, tuple[int, ...]]] = [(self.end, ())]
        while waiting:
            node, route = waiting.pop()
            if node.is_join:
                waiting += [(source, (number, *route)) for number, source in list(enumerate(node.upstream))[::-1]]
            elif node.passes_samples:
                waiting.append((node.upstream[0], route))
            else:
                yield route

    def path_of(self, route: tuple[int, ...]) -> list[Node]:
        """Return the nodes on a route, from the end of the chain up to the source."""
        path = [self.end]
        left = list(route)
        while path[-1].passes_samples:
            path.append(path[-1].upstream[left.pop() if path[-1].is_join else 0])
        return path

    def error_handler(self) -> ErrorHandler | None:
        """Return the `.on_error(...)` nearest to the end; None if the chain has none."""
        handler = next(iter(self.operations(ErrorHandler)), None)
        return handler if handler is not None and handler.is_tolerant else None

    def random_name(self, *, is_eager: bool = False) -> str | None:
        """Return the name of an operation that draws random numbers; None if there is none or a cache freezes it.

        With `is_eager`, consider only operations that draw when a sample passes.
        """
        for node in self._nodes:
            if node.traits.freezes:
                return None
            if node.traits.random is not None and (node.traits.is_eager or not is_eager):
                return node.traits.random
        return None

    def fingerprints(self) -> list[str]:
        """Return `name:hash` for each pipe that may change samples or batches, starting at the end of the chain.

        They are part of a loader's state. Functions are hashed by code, defaults and closures, without the globals they
        read.
        """
        return [
            f"{node.name if isinstance(node.pipe, Named) else short_name(type(node.pipe))}:{fingerprint(node.pipe)}"
            for node in self._nodes
            if not node.traits.is_transparent
        ]

    def copy_streams(self) -> Any:
        """Return a copy of the last pipe for another thread.

        Streams are copied, including the collections, counters and generators that change during iteration. Indexed
        pipes, functions and data are shared.
        """
        return _copied(self.end.pipe, {}, (IterDataPipe,))

    def copy_pipes(self) -> Any:
        """Return a copy of the last pipe in which all pipes, indexed ones included, may be changed. Data is shared."""
        return _copied(self.end.pipe, {}, (IterDataPipe, MapDataPipe))


def _copied(value: Any, copies: dict[int, Any], kinds: tuple[Any, ...]) -> Any:
    if isinstance(value, kinds):
        return _copied_pipe(value, copies, kinds)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, MethodType) and isinstance(value.__self__, kinds):
        # Profiles put measured methods into the instance. A copy of such a method would still read from the original.
        return MethodType(value.__func__, _copied_pipe(value.__self__, copies, kinds))
    if isinstance(value, EpochCounter | random.Random | np.random.Generator):
        return copy.deepcopy(value)
    if isinstance(value, set) or (isinstance(value, list | dict | deque) and len(value) > _LONG):
        return copy.copy(value)
    if isinstance(value, dict):
        parts = {_copied(name, copies, kinds): _copied(part, copies, kinds) for name, part in value.items()}
        same = copy.copy(value)  # subclasses keep their other attributes
        same.clear()
        same.update(parts)
        return same
    if isinstance(value, list | deque):
        made = copy.copy(value)
        for place, part in enumerate(value):
            made[place] = _copied(part, copies, kinds)
        return made
    if isinstance(value, tuple):
        entries = [_copied(part, copies, kinds) for part in value]
        if all(part is entry for part, entry in zip(value, entries, strict=True)):
            return value
        return type(value)(*entries) if type(value) is not tuple else tuple(entries)
    return value


def _copied_pipe(pipe: Any, copies: dict[int, Any], kinds: tuple[Any, ...]) -> Any:
    """Return a copy of one pipe. A stream is copied through the state that it would pickle."""
    if id(pipe) not in copies:
        kind: Any = type(pipe)
        copies[id(pipe)] = made = object.__new__(kind)  # its attributes may refer to it
        held = vars(pipe)
        if isinstance(pipe, IterDataPipe):
            held = pipe.__getstate__()  # type: ignore[no-untyped-call]
        state = _copied(held, copies, kinds)
        if isinstance(pipe, _SetsState) and isinstance(pipe, IterDataPipe):
            made.__setstate__(state)
        else:
            made.__dict__.update(state)
    return copies[id(pipe)]


@runtime_checkable
class Shards(Protocol):
    """A stream of shards, which can be read in parts."""

    cursor: tuple[int, int, int]

    @property
    def num_shards(self) -> int: ...
    def num_indexed(self) -> int | None: ...
    def read_part(self, part: int, num_parts: int) -> None: ...
    def order_by(self, key: bytes | None) -> None: ...
    def seek(self, cursor: tuple[int, int, int]) -> None: ...
    def start_reading(self) -> None: ...
    def stop_reading(self) -> None: ...


def why_whole(pipe: Any) -> str | None:
    """Return why a stream cannot be cut into lanes, so that every worker reads all of it; None if it can."""
    chain = Chain.of(pipe)
    other = next((node.name for node in chain.sources if not isinstance(node.pipe, Shards)), None)
    if other is not None:
        return f"`{other}` is not a stream of shards, as `kdp.stream_shards` is"
    for node in reversed(chain):
        if node.upstream and (node.traits.counts_whole or node.traits is UNDECLARED):
            return f"`{node.name}` counts over the whole stream, or does not declare that it does not"
    return None
