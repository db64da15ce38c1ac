"""Repeat a stream of shards whose contents are cached, without opening a shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kdpipes.cache.store import CacheStore, bound_to
from kdpipes.core.fingerprint import digest
from kdpipes.core.randomness import SampleKey, using_key
from kdpipes.core.sample import Lazy, Sample
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode
from kdpipes.storage.shared import PackedStrings

__all__ = ["Replayable", "Replayed"]

_MOST = 1_000_000  # samples that are recorded


@runtime_checkable
class Replayable(Protocol):
    """A stream of shards that can be repeated without opening a shard."""

    cursor: tuple[int, int, int]

    def place(self) -> Any:
        """Return data that identifies the samples of the next iteration; None if they are not known before it."""


class Replayed:
    """The raw samples of a stream of shards, read from the shards or repeated from an earlier epoch.

    At the end of an epoch, the keys, fields and cursors of its samples are stored, without the contents. If the cache
    lacks a content in a repeated epoch, it is read from its shard.

    Args:
        shards: The stream.
        store: The store of the cache, which also keeps what is recorded of an epoch.
    """

    def __init__(self, shards: Any, store: CacheStore) -> None:
        self._shards = shards
        self._store = store
        self._again: Iterator[Sample] = iter(())
        self._num_again = 0
        self._last: Sample | None = None

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of one epoch."""
        place = self._shards.place()
        if place is None:
            yield from self._shards.samples()
            return
        key = digest(["passed", place])
        entry, is_damaged = self._store_entry(key)
        if entry is not None:
            yield from self._repeated(entry)
            return
        passed = _Passed()
        for sample in self._shards.samples():
            passed.add(sample, self._shards.cursor)
            yield sample
        if self._shards.num_lost == 0 and len(passed.keys) <= _MOST:
            self._store.put(key, encode(passed.notes(), key=bound_to(key)), replace=is_damaged)

    def _store_entry(self, key: bytes) -> tuple[dict[str, Any] | None, bool]:
        try:
            entry = self._store.get(key)
            return (None if entry is None else decode(entry, key=bound_to(key))), False
        except (DamagedError, PickledError):
            return None, True

    def _repeated(self, notes: dict[str, Any]) -> Iterator[Sample]:
        keys = PackedStrings.of_arrays(notes["ends"], notes["letters"])
        kinds = zip(notes["kinds"].tolist(), notes["cursors"].tolist(), strict=True)
        for number, (kind, cursor) in enumerate(kinds):
            names, lacking, version = notes["distinct"][kind]
            fields = {name: Lazy(partial(self._read, number, name), what=f"reading {name!r} again") for name in names}
            sample = Sample(fields, key=keys[number], index=cursor[2] - 1, version=version)
            if lacking:
                sample.lack(lacking, "its shard")
            self._shards.cursor = tuple(cursor)
            yield sample

    def _read(self, number: int, name: str, sample: Sample) -> Any:
        """Return a field of the sample of a number, from its shard."""
        cursor = self._shards.cursor
        try:
            with using_key(SampleKey(position=number)):  # or the samples that follow would get other draws
                last = self._last if number == self._num_again - 1 else None
                if last is None and number < self._num_again:
                    self._num_again = 0
                if not self._num_again:
                    self._again = self._shards.samples()
                while last is None or self._num_again <= number:
                    last = next(self._again)
                    self._num_again += 1
        finally:
            self._shards.cursor = cursor
        self._last = last
        return last[name]


class _Passed:
    """Collects what is recorded of the samples of an epoch."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._kinds: list[int] = []
        self._cursors: list[tuple[int, int, int]] = []
        self._distinct: dict[Any, int] = {}

    def add(self, sample: Sample, cursor: tuple[int, int, int]) -> None:
        """Record a sample, without loading anything."""
        if len(self.keys) > _MOST:
            return
        kind = tuple(sample), tuple(sorted(sample.lacking)), sample.version
        self.keys.append(sample.key)
        self._kinds.append(self._distinct.setdefault(kind, len(self._distinct)))
        self._cursors.append(cursor)

    def notes(self) -> dict[str, Any]:
        """Return everything as plain data."""
        ends, letters = PackedStrings(self.keys).arrays()
        return {
            "ends": ends,
            "letters": letters,
            "kinds": np.asarray(self._kinds, dtype=np.int64),
            "cursors": np.asarray(self._cursors, dtype=np.int64).reshape(-1, 3),
            "distinct": list(self._distinct),
        }
