"""The index of a tar shard or a part of records, with the locations of each sample's fields, and joined indexes.

A sidecar `NAME.index` is an entry of `codec`: plain data with a CRC-32 of the whole.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.codec import DamagedError, decode, encode
from kdpipes.storage.decoding import Column, joined_column
from kdpipes.storage.readers import Version, map_file

_WIDTH = 6  # numbers of a row of `IndexBuilder`
UNCHECKED = -1  # placeholder for a checksum that was not computed
_INDEX = "index of a shard"
_CATALOG = "index of several shards"
_SHARDS = ""  # no field has this name


@dataclass(frozen=True)
class Places:
    """The location of one field of each sample, and those of its values that are known without reading it.

    Args:
        offsets: The offsets of the contents in the shard, `[n] int64`; -1 if a sample lacks the field.
        sizes: The sizes of the contents in bytes, `[n]`.
        checksums: The CRC-32 of the contents, `[n] uint32`; None if they were not computed. For several shards, they
            are `int64`, with `UNCHECKED` for those that were not computed.
        values: The values, `[n] int64`, if they are integers in all samples, such as labels.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[Any]
    checksums: NDArray[Any] | None = None
    values: NDArray[np.int64] | None = None

    def copied(self) -> Places:
        """Return a copy that does not keep the index in memory, with sizes of 32 bits if they fit."""
        parts = {name: values.copy() for name, values in vars(self).items() if values is not None}
        if self.sizes.max(initial=0) <= np.iinfo(np.uint32).max:
            parts["sizes"] = self.sizes.astype(np.uint32)
        return Places(**parts)


Fields = dict[str, Places | NDArray[np.int64]]  # locations, or values if all samples have an integer
MemberRow = tuple[str, int, int, int | None, int | None]  # field, offset, size, checksum, value


def by_gaps(fields: Mapping[str, Any], positions: NDArray[Any]) -> Iterator[tuple[list[int], frozenset[str]]]:
    """Yield (row numbers, missing fields): first the samples that lack no field, then each other sample on its own."""
    lacks = {name: places.offsets[positions] < 0 for name, places in fields.items() if isinstance(places, Places)}
    is_short = np.any(list(lacks.values()), axis=0) if lacks else np.zeros(len(positions), dtype=bool)
    if not is_short.all():
        yield np.flatnonzero(~is_short).tolist(), frozenset()
    for number in np.flatnonzero(is_short).tolist():
        yield [number], frozenset(name for name in lacks if lacks[name][number])


@dataclass(frozen=True)
class ShardIndex:
    """The index of one version of a shard.

    Args:
        version: The version of the indexed tar.
        keys: The samples' keys, `[n]`.
        fields: The locations of each field.
        columns: The values of fields, or of entries of fields, requested by `kdpipes index --columns`.
    """

    version: Version
    keys: PackedStrings
    fields: dict[str, Places] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)

    def checksums(self) -> dict[int, int] | None:
        """Return the CRC-32 of each member by its content's offset; None if checksums were not computed."""
        found: dict[int, int] = {}
        for places in self.fields.values():
            if places.checksums is None:
                return None
            is_there = places.offsets >= 0
            found.update(zip(places.offsets[is_there].tolist(), places.checksums[is_there].tolist(), strict=True))
        return found

    def to_bytes(self) -> bytes:
        """Return the content of the sidecar."""
        return _encoded(_INDEX, [[self.version]], self.keys, self.fields, self.columns)

    @classmethod
    def from_bytes(cls, content: bytes, url: str) -> ShardIndex:
        """Return the index in a sidecar. Its arrays are views of the content.

        Raises:
            DamagedError: The content is not an index, is damaged, or has another format.
        """
        versions, keys, fields, columns = _decoded(_INDEX, content, url)
        places = {name: values for name, values in fields.items() if isinstance(values, Places)}
        return cls(versions[0][0], keys, places, columns)


class IndexBuilder:
    """Collects the samples of a shard in order."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        # For each field, a flat sequence of sample, offset, size, checksum, value, and whether there is a value.
        self._rows = defaultdict[str, "array[int]"](lambda: array("q"))
        self._has_checksums = True

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str, members: Iterable[MemberRow], number: int | None = None) -> None:
        """Add a sample, or fields of an earlier one, given the name, offset, size, checksum and value of each field.

        A checksum that was not computed is None, as is a value that is not an integer. `number` is the number of the
        sample; None adds a new one.
        """
        number = len(self._keys) if number is None else number
        for name, offset, size, checksum, value in members:
            self._has_checksums &= checksum is not None
            self._rows[name].extend((number, offset, size, checksum or 0, value or 0, value is not None))
        if number == len(self._keys):
            self._keys.append(key)

    def repeated(self) -> tuple[str, str, int] | None:
        """Return field, key and offset of a member whose sample has another one of that field; None without one."""
        for name, numbers in self._rows.items():
            samples = np.frombuffer(numbers, dtype=np.int64)[::_WIDTH]
            _, firsts = np.unique(samples, return_index=True)
            if len(firsts) < len(samples):
                row = int(np.setdiff1d(np.arange(len(samples)), firsts)[0])
                return name, self._keys[samples[row]], numbers[_WIDTH * row + 1]
        return None

    def index(self, version: Version, starts: NDArray[np.int64] | None = None) -> ShardIndex:
        """Return the index of the samples so far. With `starts`, offsets are relative to the start of each sample."""
        fields = {}
        for name, numbers in self._rows.items():
            rows = np.frombuffer(numbers, dtype=np.int64).reshape(-1, _WIDTH)
            columns = np.zeros((_WIDTH - 1, len(self._keys)), dtype=np.int64)
            columns[0] = -1
            columns[:, rows[:, 0]] = rows[:, 1:].T
            if starts is not None:
                columns[0, rows[:, 0]] += starts[rows[:, 0]]
            offsets, sizes, checksums, values, has_value = columns
            sums = checksums.astype(np.uint32) if self._has_checksums else None
            fields[name] = Places(offsets, sizes, sums, values if has_value.all() else None)
        return ShardIndex(version, PackedStrings(self._keys), fields)


@dataclass(frozen=True)
class Catalog:
    """The joined indexes of many shards: the locations of the fields of all samples.

    Args:
        versions: The versions of the shards when they were opened.
        shards: The shard number of each sample, `[n]`.
        short_keys: The samples' keys in their shards, `[n]`.
        fields: The locations of each field, or its values, `[n] int64`, if the indexes hold all of them, such as
            labels.
        columns: The columns present in the indexes of all shards.
        sources: The versions of the data-set indexes that the indexes were read from.
        names: The names of the shards in keys.
        urls: The URLs of the shards.
    """

    versions: Sequence[Version]
    shards: NDArray[np.int32]
    short_keys: PackedStrings
    fields: Fields
    columns: dict[str, Column] = field(default_factory=dict)
    sources: Sequence[Version] = ()
    names: Sequence[str] = ()
    urls: Sequence[str] = ()

    @classmethod
    def of(cls, indexes: Iterable[ShardIndex]) -> Catalog:
        """Join the indexes of shards. Each index can be freed before the next one is read."""
        versions: list[Version] = []
        counts: list[int] = []
        keys: list[PackedStrings] = []
        places: dict[str, list[tuple[int, Places]]] = defaultdict(list)  # with the number of the first sample
        columns: list[dict[str, Column]] = []
        size = 0
        for index in indexes:
            for name, known in index.fields.items():
                places[name].append((size, known.copied()))
            size += len(index.keys)
            versions.append(index.version)
            counts.append(len(index.keys))
            keys.append(PackedStrings.of_arrays(*(array.copy() for array in index.keys.arrays())))
            if counts[-1]:
                columns.append(index.columns)
        names = [name for name in (columns[0] if columns else ()) if all(name in part for part in columns)]
        joined = {name: joined_column([part[name] for part in columns]) for name in names}
        # Each field is freed before the next one is joined.
        fields = {name: _joined_places(places.pop(name), size) for name in list(places)}
        shards = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        return cls(versions, shards, PackedStrings.joined(keys), fields, joined)

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def gaps(self) -> frozenset[str]:
        """The fields missing in some samples."""
        places = {name: known for name, known in self.fields.items() if isinstance(known, Places)}
        return frozenset(name for name, known in places.items() if len(known.offsets) and known.offsets.min() < 0)

    def key(self, index: int) -> str:
        """Return the key of a sample: the shard's name, a slash, and the sample's key in the shard."""
        return f"{self.names[int(self.shards[index])]}/{self.short_keys[index]}"

    def to_bytes(self) -> bytes:
        """Return the content of a file for the local cache. `names` and `urls` are not part of it."""
        versions = [self.versions, self.sources]
        return _encoded(_CATALOG, versions, self.short_keys, {**self.fields, _SHARDS: self.shards}, self.columns)

    @classmethod
    def from_file(cls, path: Path) -> Catalog:
        """Return the catalog in a file, whose pages are shared by all processes that map it.

        Raises:
            DamagedError: The file is not a catalog, or is damaged.
            OSError: The file cannot be mapped.
        """
        with path.open("rb") as file:
            content = map_file(file.fileno())
        (versions, sources), keys, fields, columns = _decoded(_CATALOG, content, str(path))
        shards: Any = fields.pop(_SHARDS)
        return cls(versions, shards, keys, fields, columns, sources)


def _joined_places(parts: Sequence[tuple[int, Places]], size: int) -> Places | NDArray[np.int64]:
    """Join the locations of a field in shards, each with the number of its first sample; values if all have one."""

    def joined(name: str, fill: int) -> NDArray[Any]:
        columns = [getattr(places, name) for _, places in parts]
        dtype = np.result_type(*(np.int64 if column is None else column.dtype for column in columns))
        whole = np.full(size, fill, dtype)
        for (start, places), column in zip(parts, columns, strict=True):
            whole[start : start + len(places.offsets)] = UNCHECKED if column is None else column
        return whole

    if sum(len(places.offsets) for _, places in parts if places.values is not None) == size:
        return joined("values", 0)
    has_checksums = any(places.checksums is not None for _, places in parts)
    return Places(joined("offsets", -1), joined("sizes", 0), joined("checksums", 0) if has_checksums else None)


def _encoded(
    kind: str,
    versions: Sequence[Sequence[Version]],
    keys: PackedStrings,
    fields: Mapping[str, Any],
    columns: Mapping[str, Column],
) -> bytes:
    """Return an index or catalog as an entry of `codec`."""
    header = [[tuple(version) for version in group] for group in versions]
    parts = {name: vars(known) if isinstance(known, Places) else {"values": known} for name, known in fields.items()}
    texts = {name: column.arrays() for name, column in columns.items() if isinstance(column, PackedStrings)}
    return b"".join(encode((kind, header, keys.arrays(), parts, {**columns, **texts})))


def _decoded(kind: str, content: Any, url: str) -> tuple[list[list[Version]], PackedStrings, Fields, dict[str, Column]]:
    """Return versions, keys, fields and columns of an index or catalog. The arrays are views of the content.

    Raises:
        DamagedError: The content is something else, is damaged, or has another format.
    """
    try:
        kind_found, header, arrays, parts, packed = decode(content)
        if kind_found != kind:
            raise ValueError(f"It is no {kind}")
        versions = [[Version(int(size), str(tag)) for size, tag in group] for group in header]
        keys = PackedStrings.of_arrays(*map(_checked, arrays))
        fields: Fields = {}
        for name, values in parts.items():
            places = {part: _checked(array, len(keys)) for part, array in values.items() if array is not None}
            fields[name] = Places(**places) if "offsets" in places else places["values"]
        columns: dict[str, Column] = {}
        for name, column in packed.items():
            is_text = isinstance(column, tuple)
            columns[name] = PackedStrings.of_arrays(*map(_checked, column)) if is_text else _checked(column)
            if len(columns[name]) != len(keys):
                raise ValueError("Its columns have different lengths")
    except (DataError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".")
        text = f"Index {url!r} is damaged or has another format: {reason}."
        raise DamagedError(f"{text} Write it again with `kdpipes index`.") from error
    return versions, keys, fields, columns


def _checked(array: Any, length: int | None = None) -> NDArray[Any]:
    """Return an array of an index; raise ValueError unless it holds `length` numbers."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "biuf":
        raise ValueError("It holds something other than columns of numbers")
    if length not in (None, len(array)):
        raise ValueError("Its columns have different lengths")
    return array
