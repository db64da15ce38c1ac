"""Detect side effects of users' functions upstream of a cache: random draws and modified objects."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kdpipes.core.chain import Chain
from kdpipes.core.fingerprint import hash_value
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import warn
from kdpipes.core.torch_pipes import PIPES
from kdpipes.core.user_code import (
    MISSING,
    Change,
    attributes_of,
    globals_read,
    is_own_generator,
    is_users,
    note_changed_attribute,
    note_changed_global,
    reached_from,
)

_NUM_LOOKS = 2  # per process: some functions make their generator when they are first called
_MOST = 100  # watched objects, and watched globals
_COLLECTIONS = (dict, list, set)
_MANY = 1000  # entries; changes inside longer collections are not noticed


class WatchedCalls:
    """Watches the functions upstream of a cache while they load a value. A copy starts anew.

    Args:
        source: The pipe upstream of the cache.
        warns_of_changed: Whether to warn about functions whose entries other chains would not find again.
    """

    def __init__(self, source: Any, warns_of_changed: bool) -> None:
        self._source = source
        self._warns_of_changed = warns_of_changed
        self._looking = threading.Lock()
        self._process = os.getpid()
        self._num_looks = 0
        self._generators: list[tuple[str, str, Any]] = []
        self._holders: list[Any] = []
        self._globals: list[tuple[dict[str, Any], str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedCalls, (self._source, self._warns_of_changed)

    @contextmanager
    def watching(self) -> Iterator[Callable[[], tuple[str, str] | None]]:
        """Yield a function that returns the names of an operation and its generator that has drawn since, or None."""
        if self._process != os.getpid():  # the lock may be held by a thread that was not forked
            self._process, self._looking = os.getpid(), threading.Lock()
        with self._looking:
            known = self._known_by() if self._warns_of_changed and self._num_looks == 0 else []
            if self._num_looks < _NUM_LOOKS:
                self._look()
        before = [(pipe, name, generator, _state(generator)) for pipe, name, generator in self._generators]
        attributes = [(holder, _kept(attributes_of(holder))) for holder in self._holders]
        namespaces = [
            (namespace, _kept({name: namespace[name]})) for namespace, name in self._globals if name in namespace
        ]
        yield lambda: next(((pipe, name) for pipe, name, each, state in before if _state(each) != state), None)
        for holder, kept in attributes:
            for name, change in _changes(kept, attributes_of(holder)):
                note_changed_attribute(holder, name, change)
        for namespace, kept in namespaces:
            for name, change in _changes(kept, {name: namespace[name] for name in kept if name in namespace}):
                note_changed_global(namespace, name, change)
        for (name, one), (_, other) in zip(known, self._known_by() if known else [], strict=True):
            if one != other:
                warn(
                    f"A callable of `{name}` has changed its own attributes, its closure or an object that it reads "
                    "during a call. Cache entries are identified by these, so new chains with this callable would not "
                    "find them. Keep the changing state somewhere else, or give the callable a method "
                    "`fingerprinted()` that returns the data which identifies it.",
                )
                break

    def _look(self) -> None:
        self._num_looks += 1
        work = [node for node in reversed(Chain.of(self._source)) if not node.traits.is_plan]
        reached = [(node, each.name, each.value) for node in work for each in reached_from(node.pipe, beyond=PIPES)]
        self._generators = [
            (node.name, name, part)
            for node, name, part in reached
            if isinstance(node.pipe, MapPipe | IterPipe) and is_own_generator(part)
        ]
        self._holders = [
            part
            for node, _, part in reached
            if is_users(type(part)) and not isinstance(part, type) and node.operation is None
        ][:_MOST]
        read = [each for _, _, part in reached for each in globals_read(part)]
        self._globals = list({(id(namespace), name): (namespace, name) for namespace, name in read}.values())[:_MOST]

    def _known_by(self) -> list[tuple[str, bytes]]:
        return [
            (node.name, hash_value(node.operation, globals=True)[0])
            for node in reversed(Chain.of(self._source))
            if node.operation is not None and not node.traits.is_transparent
        ]


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
    if value is copied or isinstance(value, set):
        return bool(value is copied or value == copied)
    one, other = (list(each.values()) if isinstance(each, dict) else each for each in (value, copied))
    return len(one) == len(other) and all(each is before for each, before in zip(one, other, strict=True))


def _state(generator: Any) -> Any:
    """Return data that changes when a generator draws."""
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state().numpy().tobytes()
