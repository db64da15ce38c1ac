"""The keys of cache entries: derived from the source and the work pipes upstream of the cache, not from the plan."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterDataPipe

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError
from kdpipes.core.fingerprint import hash_value
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.pipe import Pipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.sample import Sample
from kdpipes.core.stock import Seeded, shards
from kdpipes.core.traits import Traits
from kdpipes.core.user_code import own_members

PLAIN = (bool, int, float, str, type(None), np.generic)  # values that need no entries
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
        """Return 20 bytes that identify the sample's values downstream of all of the pipes."""
        if self._needs_keys and sample.has_number:
            raise ChainError(
                "The keys of the samples are numbers in the order of arrival, which changes, so a cache would mix them "
                "up. Give them keys of their own: `.to_samples(key=...)`."
            )
        version = sample.version
        text = f"{len(version)} {version}{sample.required_key('cache')}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(text, key=self._digest(sample.route), digest_size=20).digest()

    def _digest(self, route: tuple[int, ...]) -> bytes:
        known = self._of_route.get(route)
        if known is None:
            unhashed: list[str] = []
            parts = list(_parts(self._source, route, unhashed))
            known = self._of_route[route] = _digested([_FORMAT, self._notes, parts], unhashed)
            new = [name for name in dict.fromkeys(unhashed) if self._is_shared and name not in _warned]
            if new:
                _warned.update(new)  # once about each of them
                warnings.warn(
                    f"Functions upstream of a cache read values that cannot be hashed: {', '.join(new)}. The cache "
                    "would not notice a change. Pass `version=` to the cache, and a new version when they change.",
                    stacklevel=2,
                )
        return known


def key_of(base: bytes, field: str) -> bytes:
    """Return the key of an entry: of one field of one sample."""
    return hashlib.blake2b(field.encode(), key=base, digest_size=20).digest()


def _parts(source: Any, route: tuple[int, ...], unhashed: list[str]) -> Iterator[Any]:
    """Yield the identity of each pipe that counts, from the cache to the source of the samples of a route."""
    read_on_the_way: list[Traits] = []
    for node in Chain.of(source).path_of(route):
        if node.operation is not None:
            if not node.traits.is_transparent:
                yield node.name, _digested(node.operation, unhashed)
                read_on_the_way.append(node.traits)
        elif node.traits.is_plan:
            changed = node.traits.changes or ()  # of `map_classes`, which decides on labels
            if not all(traits.ignores(name) for traits in read_on_the_way for name in changed):
                yield node.pipe.value_fingerprint()
                yield from [own for own in [own_members(type(node.pipe))] if own]  # the code of a user's class
            for other in node.pipe.other_sources() if isinstance(node.pipe, PlanPipe) else ():
                for its_route in Chain.of(other).routes():
                    yield list(_parts(other, its_route, unhashed))
        elif node.traits.role != "order":
            for each in reversed(Chain.of(node.pipe)):  # the source, with everything that it reads from
                if each.traits.role != "order":
                    yield type(each.pipe).__qualname__, _digested(each.pipe, unhashed)


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
