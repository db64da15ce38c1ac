"""Detect side effects of users' functions upstream of a cache: random draws and modified objects."""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from kdpipes.core.callback import Callback
from kdpipes.core.chain import Chain
from kdpipes.core.fingerprint import attributes_of, hash_value
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import warn
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.user_code import (
    MISSING,
    Change,
    globals_read,
    is_kdpipes,
    is_users,
    note_changed_attribute,
    note_changed_global,
)

_NUM_LOOKS = 2  # per process: some functions make their generator when they are first called
_MOST = 100  # objects to watch, and as many globals
_MOST_REACHED = 20_000  # objects
_COLLECTIONS = (dict, list, set)
_MANY = 1000  # entries; of longer collections, the rest is not looked at, and changes inside are not noticed
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_PIPES = (IterDataPipe, MapDataPipe)


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
        reached = [(node, name, part) for node in work for name, part in reached_from(node.pipe)]
        self._generators = [
            (node.name, name or type(part).__name__, part)
            for node, name, part in reached
            if isinstance(node.pipe, MapPipe | IterPipe) and isinstance(part, _GENERATORS) and not _is_global(part)
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


def _is_global(generator: Any) -> bool:
    # NumPy gives its global generator no public name.
    return generator is np.random.mtrand._rand or generator is torch.default_generator


def _state(generator: Any) -> Any:
    """Return data that changes when a generator draws."""
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state().numpy().tobytes()


def reached_from(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each object that a pipe, an operation or a function reaches, once, with the name that users know it by.

    Nothing is called. The search follows closures, defaults, globals that the code names, arguments of
    `functools.partial`, collections, and attributes of objects of the user's own classes; but neither attributes of
    modules nor other pipes.
    """
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting and len(seen) < _MOST_REACHED:
        name, part = waiting.pop()
        if id(part) in seen or (isinstance(part, _PIPES) and part is not value):
            continue
        seen[id(part)] = part  # held, so that no other object gets its address
        yield name, part
        if not isinstance(part, _GENERATORS):
            with suppress(Exception):  # an object of a library may run any code when it is looked at
                waiting += [(inner or name, each) for inner, each in _parts(name, part)]


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a value refers to, with the names that a user knows."""
    if isinstance(value, Callback):
        yield "", value.function
    elif isinstance(value, functools.partial):
        yield from (("", value.func), *(("", each) for each in value.args), *value.keywords.items())
    elif isinstance(value, MethodType):
        yield from (("", value.__func__), ("", value.__self__))
    elif isinstance(value, FunctionType):
        yield from _named_in(value)
    elif isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in itertools.islice(value.items(), _MANY))
    elif isinstance(value, list | tuple | Set):
        yield from (("", each) for each in itertools.islice(value, _MANY))
    elif is_users(type(value)):
        classes = [each for each in reversed(type(value).__mro__) if is_users(each)]
        members = {name: part for each in classes for name, part in vars(each).items()}
        attributes = {name: part for name, part in members.items() if isinstance(part, (FunctionType, *_GENERATORS))}
        attributes |= attributes_of(value)
        yield from ((f"{name}.{attribute}".lstrip("."), each) for attribute, each in attributes.items())
    elif is_kdpipes(type(value)):
        yield from (("", each) for each in attributes_of(value).values())


def _named_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a function that calls itself, seen while it is being made
            continue
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _global_names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> set[str]:
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
