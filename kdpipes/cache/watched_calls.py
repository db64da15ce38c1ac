"""What calls upstream of a cache leave behind: generators that have drawn, and objects that have changed."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kdpipes._fingerprint import digest
from kdpipes._graph import walk
from kdpipes._iter_pipe import IterPipe
from kdpipes._map_pipe import MapPipe
from kdpipes._sample_pipe import SampleMapper
from kdpipes.cache.private_generators import PrivateGenerator, private_generators

__all__ = ["WatchedCalls"]

_NUM_LOOKS = 2  # per process: some functions make their generator when they are first called


class WatchedCalls:
    """Looks at the functions upstream of a cache while a value is loaded. A copy looks anew.

    Args:
        source: What the cache reads from.
        warns_of_changed: Whether other chains may want to find the entries: to warn where they would not.
    """

    def __init__(self, source: Any, *, warns_of_changed: bool) -> None:
        self._source = source
        self._warns_of_changed = warns_of_changed
        self._looking = threading.Lock()
        self._process = os.getpid()
        self._num_looks = 0
        self._generators: list[tuple[str, PrivateGenerator]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._source, self._warns_of_changed)

    @contextmanager
    def watching(self) -> Iterator[Callable[[], tuple[str, str] | None]]:
        """Yield what returns the names of an operation and of its generator that has drawn since, or None."""
        if self._process != os.getpid():  # the lock may be held by a thread that was not forked
            self._process, self._looking = os.getpid(), threading.Lock()
        with self._looking:
            known = self._known_by() if self._warns_of_changed and self._num_looks == 0 else None
            if self._num_looks < _NUM_LOOKS:
                self._look()
        before = [(pipe, generator, generator.state()) for pipe, generator in self._generators]
        yield lambda: next(((pipe, each.name) for pipe, each, state in before if each.state() != state), None)
        if known is not None:
            _warn_of_changed(known, self._known_by())

    def _look(self) -> None:
        self._num_looks += 1
        self._generators = [
            (_name_of(pipe), generator)
            for pipe in walk(self._source)
            if not getattr(pipe, "is_plan", False) and isinstance(pipe, MapPipe | IterPipe)
            for generator in private_generators(pipe)
        ]

    def _known_by(self) -> list[tuple[str, bytes]]:
        mappers = (pipe for pipe in walk(self._source) if isinstance(pipe, SampleMapper))
        operations = ((pipe._name, pipe._operation) for pipe in mappers)
        return [(name, digest(each)) for name, each in operations if not getattr(each, "changes_no_sample", False)]


def _restored(source: Any, warns_of_changed: bool) -> WatchedCalls:
    return WatchedCalls(source, warns_of_changed=warns_of_changed)


def _name_of(pipe: Any) -> str:
    return str(getattr(pipe, "_name", type(pipe).__name__))


def _warn_of_changed(before: list[tuple[str, bytes]], after: list[tuple[str, bytes]]) -> None:
    for (name, one), (_, other) in zip(before, after, strict=True):
        if one != other:
            warnings.warn(
                f"What `{name}` calls has changed its own attributes or closure when it was called. A cache knows its "
                "entries by these, so chains that are made of it from now on would not find them. Let it keep what "
                "changes elsewhere, or say itself what it is known by: a method `fingerprinted()` that returns it.",
                stacklevel=2,
            )
            return
