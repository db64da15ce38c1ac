"""What calls upstream of a cache leave behind: generators that have drawn, and objects that have changed."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kdpipes.cache.private_generators import PrivateGenerator, private_generators, reached_from
from kdpipes.core.chain import Chain
from kdpipes.core.fingerprint import attributes_of, digest_with_globals
from kdpipes.core.first_values import MISSING, Change, note_changed_attribute, note_changed_global
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.sample_pipe import SampleMapper
from kdpipes.core.user_code import globals_read, is_users

__all__ = ["WatchedCalls"]

_NUM_LOOKS = 2  # per process: some functions make their generator when they are first called
_MOST = 100  # objects to look at, and as many globals
_COLLECTIONS = (dict, list, set)
_MANY = 1000  # entries; changes inside longer collections are not noticed


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
        self._holders: list[Any] = []
        self._globals: list[tuple[dict[str, Any], str]] = []

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
        attributes = [(holder, _kept(attributes_of(holder))) for holder in self._holders]
        namespaces = [
            (namespace, _kept({name: namespace[name]})) for namespace, name in self._globals if name in namespace
        ]
        yield lambda: next(((pipe, each.name) for pipe, each, state in before if each.state() != state), None)
        for holder, kept in attributes:
            for name, change in _changes(kept, attributes_of(holder)):
                note_changed_attribute(holder, name, change)
        for namespace, kept in namespaces:
            for name, change in _changes(kept, {name: namespace[name] for name in kept if name in namespace}):
                note_changed_global(namespace, name, change)
        if known is not None:
            _warn_of_changed(known, self._known_by())

    def _look(self) -> None:
        self._num_looks += 1
        self._generators = [
            (node.name, generator)
            for node in reversed(Chain.of(self._source))
            if not node.traits.is_plan and isinstance(node.pipe, MapPipe | IterPipe)
            for generator in private_generators(node.pipe)
        ]
        reached = [
            (node.pipe, part)
            for node in reversed(Chain.of(self._source))
            if not node.traits.is_plan
            for _, part in reached_from(node.pipe)
        ]
        self._holders = [
            part
            for pipe, part in reached
            if is_users(type(part)) and not isinstance(part, type) and not isinstance(pipe, SampleMapper)
        ][:_MOST]
        read = [each for _, part in reached for each in globals_read(part)]
        self._globals = list({(id(namespace), name): (namespace, name) for namespace, name in read}.values())[:_MOST]

    def _known_by(self) -> list[tuple[str, bytes]]:
        return [
            (node.name, digest_with_globals(node.operation)[0])
            for node in reversed(Chain.of(self._source))
            if node.operation is not None and not node.traits.is_transparent
        ]


def _restored(source: Any, warns_of_changed: bool) -> WatchedCalls:
    return WatchedCalls(source, warns_of_changed=warns_of_changed)


def _kept(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with a copy if it is a short collection, which may change in place."""
    return {
        name: (value, value.copy() if type(value) in _COLLECTIONS and len(value) <= _MANY else value)
        for name, value in attributes.items()
    }


def _changes(kept: dict[str, tuple[Any, Any]], now: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    """Yield the name and the change of each attribute that has changed."""
    for name, (value, copied) in kept.items():
        if name not in now or now[name] is not value or not _is_as_before(value, copied):
            yield name, Change(value, copied, now.get(name, MISSING))
    for name in now.keys() - kept.keys():
        yield name, Change(MISSING, MISSING, now[name])


def _is_as_before(value: Any, copied: Any) -> bool:
    if value is copied:
        return True
    if len(value) != len(copied):
        return False
    if isinstance(value, set):
        return bool(value == copied)
    one, other = (list(each.values()) if isinstance(each, dict) else each for each in (value, copied))
    return all(each is before for each, before in zip(one, other, strict=True))


def _warn_of_changed(before: list[tuple[str, bytes]], after: list[tuple[str, bytes]]) -> None:
    for (name, one), (_, other) in zip(before, after, strict=True):
        if one != other:
            warnings.warn(
                f"A callable of `{name}` has changed its own attributes, its closure or an object that it reads during "
                "a call. Cache entries are identified by these, so new chains with this callable would not find them. "
                "Keep the changing state somewhere else, or give the callable a method `fingerprinted()` that "
                "returns the data which identifies it.",
                stacklevel=2,
            )
            return
