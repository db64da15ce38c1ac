"""The indexes of shards, put one behind the other as they come, in columns that take no more memory than they must."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.storage.files import Version
from kdpipes.storage.shard_index import Places, ShardIndex
from kdpipes.storage.shared import PackedStrings

__all__ = ["UNCHECKED", "JoinedIndexes"]

UNCHECKED = -1  # in the place of a checksum that nobody has computed
_RESERVE = 1.25  # more than the first shards let expect; memory that is not written to is none


class _Column:
    """An array that grows.

    Args:
        dtype: What its values are; one that is too narrow is widened to `int64`.
        missing: The value where none is given.
    """

    def __init__(self, dtype: Any, missing: int = 0) -> None:
        self._values: NDArray[Any] = np.empty(0, dtype=dtype)
        self._missing = missing
        self.size = 0

    def extend(self, values: NDArray[Any] | None, stop: int, expected: int) -> None:
        """Add values up to the size `stop`, and missing ones before them.

        Args:
            values: The last ones; None for none.
            stop: The size that this column is to have.
            expected: The size that it will have, probably.
        """
        if values is not None and self._is_too_narrow_for(values):
            self._values = self._values.astype(np.int64)
        if stop > len(self._values):
            self._grow(max(stop, expected))
        start = stop - (0 if values is None else len(values))
        self._values[self.size : start] = self._missing
        if values is not None:
            self._values[start:stop] = values
        self.size = stop

    def _is_too_narrow_for(self, values: NDArray[Any]) -> bool:
        is_wider = len(values) > 0 and values.dtype.itemsize > self._values.dtype.itemsize
        return is_wider and int(values.max()) > np.iinfo(self._values.dtype).max

    def _grow(self, capacity: int) -> None:
        grown = np.empty(capacity, dtype=self._values.dtype)
        grown[: self.size] = self._values[: self.size]
        self._values = grown

    def array(self, size: int) -> NDArray[Any]:
        """Return the values up to `size`."""
        if self.size < size:
            self.extend(None, size, size)
        return self._values[:size]


class _Field:
    """The places of one field, or its values."""

    def __init__(self) -> None:
        self.offsets, self.sizes = _Column(np.int64, -1), _Column(np.uint32)
        self.checksums, self.values = _Column(np.uint32), _Column(np.int64)
        self.has_values = True
        self._unchecked: list[slice] = []  # samples of shards whose indexes have no checksums

    def extend(self, places: Places, stop: int, expected: int) -> None:
        """Add the places of one shard."""
        for name in ("offsets", "sizes", "checksums", "values"):
            values = getattr(places, name)
            if values is not None:
                getattr(self, name).extend(values, stop, expected)
        self.has_values &= places.values is not None
        if places.checksums is None:
            self._unchecked.append(slice(stop - len(places.offsets), stop))

    def joined(self, size: int) -> Places | NDArray[np.int64]:
        """Return what is known of the field of so many samples."""
        offsets = self.offsets.array(size)
        if self.has_values and self.values.size == size == np.count_nonzero(offsets >= 0):
            return self.values.array(size)
        return Places(offsets, self.sizes.array(size), self._joined_checksums(size))

    def _joined_checksums(self, size: int) -> NDArray[Any] | None:
        if not self.checksums.size:
            return None
        checksums = self.checksums.array(size)
        if self._unchecked:
            checksums = checksums.astype(np.int64)
            for samples in self._unchecked:
                checksums[samples] = UNCHECKED
        return checksums


class JoinedIndexes:
    """The indexes of shards, one behind the other.

    Args:
        num_shards: How many there will be.
    """

    def __init__(self, num_shards: int) -> None:
        self.versions: list[Version] = []
        self._num_shards = num_shards
        self._counts: list[int] = []
        self._ends, self._letters = _Column(np.int64), _Column(np.uint8)
        self._fields: dict[str, _Field] = {}

    def add(self, index: ShardIndex) -> None:
        """Add the index of the next shard, of which nothing is kept."""
        self.versions.append(index.version)
        self._counts.append(len(index.keys))
        ends, letters = index.keys.arrays()
        stop, before = len(self), self._letters.size
        self._ends.extend(ends + before, stop, self._expected(stop))
        self._letters.extend(letters, before + len(letters), self._expected(before + len(letters)))
        for name, places in index.fields.items():
            self._fields.setdefault(name, _Field()).extend(places, stop, self._expected(stop))

    def _expected(self, size: int) -> int:
        return int(size * _RESERVE * self._num_shards / len(self._counts))

    def __len__(self) -> int:
        return sum(self._counts)

    def shards(self) -> NDArray[np.int32]:
        """Return which shard each sample lies in."""
        return np.repeat(np.arange(len(self._counts), dtype=np.int32), self._counts)

    def keys(self) -> PackedStrings:
        """Return the keys that the samples have in their shards."""
        return PackedStrings.of_arrays(self._ends.array(len(self)), self._letters.array(self._letters.size))

    def fields(self) -> dict[str, Places | NDArray[np.int64]]:
        """Return the places of each field, or its values where every sample's is known."""
        return {name: field.joined(len(self)) for name, field in self._fields.items()}
