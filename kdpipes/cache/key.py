"""The keys of cache entries: derived from the source and the work pipes upstream of the cache, not from the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kdpipes.core.chain import Chain
from kdpipes.core.column import Column, Inputs
from kdpipes.core.errors import ChainError
from kdpipes.core.fingerprint import hash_value, lost_attributes
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import warn
from kdpipes.core.pipe import Pipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.sample import Sample
from kdpipes.core.stock import Seeded, shards
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.core.user_code import is_users, own_members

PLAIN = (bool, int, float, str, type(None), np.generic)  # values that need no entries
_SIMPLE = (bool, int, float, str, type(None))
_FORMAT = 3  # version of the entries' format; 2: checksums include keys; 3: other hashes of chains
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
        for pipe in Chain.of(self._source).of_type(Pipe):
            pipe.prepare_for_workers()
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
        """Return whether the samples of a route come from a source that a user has written, with positions."""
        if route not in self._users:
            source = Chain.of(self._source).path_of(route)[-1].pipe
            self._users[route] = isinstance(source, MapPipe) and is_users(type(source))
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
            changed, own = node.traits.changes or (), own_members(type(node.pipe))
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
