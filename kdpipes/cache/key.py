"""Keys of cache entries, and the side effects of users' functions that entries depend on.

A key is derived from the source and the work pipes upstream of the cache, not from the plan. Functions upstream are
watched while they are called: they may draw random numbers or modify objects.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kdpipes.core.chain import Chain
from kdpipes.core.column import Column, Inputs
from kdpipes.core.errors import ChainError
from kdpipes.core.fingerprint import hash_value, lost_attributes
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import warn
from kdpipes.core.pipe import Pipe, prepare_for_workers
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.sample import Sample
from kdpipes.core.stock import Seeded, shards
from kdpipes.core.torch_pipes import PIPES, IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.core.user_code import (
    MISSING,
    Change,
    attributes_of,
    globals_read,
    is_own_generator,
    is_users,
    note_changed_attribute,
    note_changed_global,
    own_members,
    reached_from,
)

PLAIN = (bool, int, float, str, type(None), np.generic)  # values that need no entries
_SIMPLE = (bool, int, float, str, type(None))
_FORMAT = 3  # version of the entries' format; 2: checksums include keys; 3: other hashes of chains
_NUM_LOOKS = 2  # per process: some functions make their generator when they are first called
_MOST = 100  # watched objects, and watched globals
_COLLECTIONS = (dict, list, set)
_MANY = 1000  # entries; changes inside longer collections are not noticed
_warned: set[str] = set()


class Identity:
    """Identifies the values of samples. It is computed once per process, or before a fork.

    Args:
        source: The pipe upstream of the cache.
        notes: The user's `version=`.
        is_shared: Whether other chains may find the entries; if so, a warning names values that cannot be hashed.
    """

    def __init__(self, source: Any, notes: Any, *, is_shared: bool) -> None:
        self._source = source
        self._notes = notes
        self._is_shared = is_shared
        self._of_route: dict[tuple[int, ...], bytes] = {}
        self._users: dict[tuple[int, ...], bool] = {}
        self._needs_keys = _is_numbered_anew(source)

    def prepare(self) -> None:
        """Compute the digests before any sample is read, so that workers inherit them."""
        for pipe in Chain.of(self._source).pipes:
            prepare_for_workers(pipe)
        for route in Chain.of(self._source).routes():
            self._digest(route)

    def unhashed(self) -> list[str]:
        """Return names of what functions read whose changes would not be noticed."""
        names: list[str] = []
        for route in Chain.of(self._source).routes():
            list(_parts(self._source, route, names))
        return list(dict.fromkeys(names)) if self._is_shared else []

    def of(self, sample: Sample) -> bytes:
        """Return 20 bytes that identify a sample, and the pipes that it has passed."""
        if self._needs_keys and sample.has_number:
            raise ChainError(
                "The keys of the samples are numbers in the order of arrival, which changes, so a cache would mix them "
                "up. Give them keys of their own: `.to_samples(key=...)`."
            )
        sample.required_key()
        version = sample.version
        key = sample.shared_key
        if self._is_users(sample.route):  # whose keys may not be unique
            key += f"\0{sample.index}"
        text = f"{len(version)} {version}{key}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(text, key=self._digest(sample.route), digest_size=20).digest()

    def of_field(self, sample: Sample, base: bytes, name: str, inputs: Inputs) -> bytes:
        """Return the key of an entry: of one field of one sample.

        What is still to be loaded from a source is identified by the source and the key of the sample. What a source
        has handed over with the sample, such as a label or the columns of a table, is identified by its value.

        Args:
            sample: The sample.
            base: The bytes that identify it.
            name: The name of the field.
            inputs: What the field is computed from.
        """
        if not inputs.names and not inputs.columns:
            return hashlib.blake2b(name.encode(), key=base, digest_size=20).digest()
        parts = [name.encode()]
        if inputs.names:  # functions that get the whole sample may read its key
            parts.append("\0".join([sample.key, *inputs.names]).encode("utf-8", "surrogateescape"))
        unhashed: list[str] = []
        for column in inputs.columns:
            parts.append(_hash_of(_value_of(column, sample), unhashed))
        if unhashed:
            self._warn(unhashed)
        sizes = [len(part).to_bytes(4, "little") for part in parts]
        return hashlib.blake2b(b"".join([*sizes, *parts]), key=base, digest_size=20).digest()

    def _is_users(self, route: tuple[int, ...]) -> bool:
        """Return whether a user has chosen the keys of the samples of a route, which also have positions."""
        if route not in self._users:
            source = Chain.of(self._source).path_of(route)[-1]
            self._users[route] = isinstance(source.pipe, MapPipe) and bool(
                is_users(type(source.pipe)) or source.upstream
            )
        return self._users[route]

    def _digest(self, route: tuple[int, ...]) -> bytes:
        known = self._of_route.get(route)
        if known is None:
            unhashed: list[str] = []
            parts = list(_parts(self._source, route, unhashed))
            known = self._of_route[route] = _digested([_FORMAT, self._notes, parts], unhashed)
            self._warn(unhashed)
        return known

    def _warn(self, unhashed: list[str]) -> None:
        new = [name for name in dict.fromkeys(unhashed) if self._is_shared and name not in _warned]
        if new:
            _warned.update(new)  # once about each of them
            warn(
                f"What is upstream of a cache holds values that cannot be hashed: {', '.join(new)}. The cache would "
                "not notice a change. Pass `version=` to the cache, and a new version when they change.",
            )


def _value_of(column: Column, sample: Sample) -> Any:
    try:
        return column.get(sample)
    except Exception as error:  # the function that gets the sample may not read this field
        return f"{type(error).__name__}: {error}"


def _hash_of(value: Any, unhashed: list[str]) -> bytes:
    if type(value) in _SIMPLE:
        return f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
    found, names = hash_value(value, globals=True)
    unhashed += [f"{name} in a field of samples" for name in names]
    return found


def _parts(source: Any, route: tuple[int, ...], unhashed: list[str]) -> Iterator[Any]:
    """Yield the identity of each pipe that counts, from the cache to the source of the samples of a route."""
    read_on_the_way: list[Traits] = []
    for node in Chain.of(source).path_of(route):
        if node.operation is not None:
            if not node.traits.is_transparent:
                yield node.name, _digested(node.operation, unhashed)
                read_on_the_way.append(node.traits)
        elif node.traits.is_plan:
            changed = node.traits.changes or ()
            own = own_members(type(node.pipe))
            # The code of a user's class may change fields. What our pipes change is identified by its values.
            if own and not all(traits.ignores(name) for traits in read_on_the_way for name in changed):
                yield node.pipe.value_fingerprint()
                yield own
            for other in node.pipe.other_sources() if isinstance(node.pipe, PlanPipe) else ():
                for its_route in Chain.of(other).routes():
                    yield list(_parts(other, its_route, unhashed))
        elif node.traits.role != "order":
            unhashed += lost_attributes(node.pipe) if is_users(type(node.pipe)) else []
            for each in reversed(Chain.of(node.pipe)):  # the source, with everything that it reads from
                if each.traits.role != "order":
                    yield type(each.pipe).__qualname__, _digested(each.pipe, unhashed)
                    # A source that reads from pipes may read all that they hold.
                    is_read = each.pipe is not node.pipe and isinstance(each.pipe, Pipe)
                    yield from [_digested(each.pipe.fingerprint(), unhashed)] if is_read else []


def _digested(value: Any, unhashed: list[str]) -> bytes:
    found, names = hash_value(value, globals=True)
    unhashed += names
    return found


def _is_numbered_anew(source: Any) -> bool:
    """Return whether samples are made from the items of a stock pipe that shards or reorders them."""
    for pipe in Chain.of(source).pipes:
        upstream = Chain.of(pipe).pipes[1:]
        is_maker = isinstance(pipe, IterPipe) and not any(isinstance(other, IterPipe) for other in upstream)
        streams = (each for each in upstream if isinstance(each, IterDataPipe))
        if is_maker and any(shards(each) or isinstance(each, Seeded) for each in streams):
            return True
    return False


# Side effects


class WatchedCalls:
    """Watches the functions upstream of a cache while they load a value. A copy starts without records.

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
            self._process = os.getpid()
            self._looking = threading.Lock()
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
