"""Repeat a stream of shards whose contents are cached, without opening a shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kdpipes.cache.store import Entries, bound_to
from kdpipes.core.column import Column
from kdpipes.core.fingerprint import digest
from kdpipes.core.labels import Names, number_fields
from kdpipes.core.randomness import SampleKey, using_key
from kdpipes.core.sample import Sample
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode

_MOST = 1_000_000  # maximum number of recorded samples


@runtime_checkable
class Replayable(Protocol):
    """A stream of shards that can be repeated without opening a shard."""

    cursor: tuple[int, int, int]
    given_names: Names

    def place(self) -> Any:
        """Return data that identifies the samples of the next iteration; None if they are unknown in advance."""


class Replayed:
    """The raw samples of a stream of shards, read from the shards or repeated from an earlier epoch.

    At the end of an epoch, the keys, fields and cursors of its samples are stored, without their contents. Contents
    that are missing in the cache are read from the shard in a repeated epoch.
    """

    def __init__(self, shards: Any, entries: Entries) -> None:
        self._shards = shards
        self._entries = entries
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
        is_damaged = False
        try:
            if (entry := self._entries.get(key)) is not None:
                entry = decode(entry, key=bound_to(key))
        except (DamagedError, PickledError):
            entry = None
            is_damaged = True
        if entry is not None:
            yield from self._repeated(entry)
            return
        keys: list[str] = []
        kinds: list[int] = []
        cursors: list[tuple[int, int, int]] = []
        distinct: dict[Any, int] = {}
        for sample in self._shards.samples():
            if len(keys) <= _MOST:
                kind = tuple(sample), tuple(sorted(sample.lacking)), sample.version
                keys.append(sample.key)
                kinds.append(distinct.setdefault(kind, len(distinct)))
                cursors.append(self._shards.cursor)
            yield sample
        if self._shards.num_lost == 0 and len(keys) <= _MOST:
            ends, letters = PackedStrings(keys).arrays()
            notes = {
                "ends": ends,
                "letters": letters,
                "kinds": np.asarray(kinds, dtype=np.int64),
                "cursors": np.asarray(cursors, dtype=np.int64).reshape(-1, 3),
                "distinct": list(distinct),
            }
            self._entries.put(key, encode(notes, key=bound_to(key)), replace=is_damaged)

    def _repeated(self, notes: dict[str, Any]) -> Iterator[Sample]:
        keys = PackedStrings.of_arrays(notes["ends"], notes["letters"])
        kinds = zip(notes["kinds"].tolist(), notes["cursors"].tolist(), strict=True)
        for number, (kind, cursor) in enumerate(kinds):
            names, lacking, version = notes["distinct"][kind]
            fields: dict[str, Any] = {
                name: Column(partial(self._read, number, name), what=f"reading {name!r} again") for name in names
            }
            number_fields(fields, self._shards.given_names)
            sample = Sample(fields, key=keys[number], index=cursor[2] - 1, version=version)
            if lacking:
                sample.lack(lacking, "its shard")
            self._shards.cursor = tuple(cursor)
            yield sample

    def _read(self, number: int, name: str, sample: Sample) -> Any:
        """Return a field of sample `number`, read from its shard."""
        cursor = self._shards.cursor
        try:
            with using_key(SampleKey(position=number)):  # otherwise, later samples would draw different numbers
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
