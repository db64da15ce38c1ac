"""The index of a tar shard or of a part of records: its samples, and where their fields lie. Built, saved and joined.

A sidecar `NAME.index` is plain data: a mark, a header in JSON, little-endian arrays and a CRC-32 of it all.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.storage.columns import Column
from kdpipes.storage.files import Version
from kdpipes.storage.shared import PackedStrings

__all__ = [
    "UNCHECKED",
    "IndexBuilder",
    "JoinedIndexes",
    "Places",
    "ShardIndex",
    "arrays_of",
    "columns_in",
    "packed",
    "unpacked",
]

UNCHECKED = -1  # in place of a checksum that was not computed
_MAGIC = b"kdpindex"
_FORMATS = (1, 2)  # without columns, as kdpipes 0.1 writes and reads them, and with columns
_ALIGNMENT = 8
_RESERVE = 1.25  # times the size that the shards so far let expect

Buffer = bytes | memoryview | mmap


@dataclass(frozen=True)
class Places:
    """Where one field of each sample lies, and its values, as far as they are known without reading it.

    Args:
        offsets: Of the contents in the shard, `[n] int64`; -1 where a sample lacks the field.
        sizes: Of the contents in bytes, `[n] int64`.
        checksums: CRC-32 of the contents, `[n] uint32`; None if they were not computed. Of several shards `int64`, with
            `UNCHECKED` for each that was not.
        values: The values themselves, where all samples have one and all are integers: labels, `[n] int64`.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[Any] | None = None
    values: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard.

    Args:
        version: Of the tar that it describes.
        keys: The samples' keys, `[n]`.
        fields: The places of each field.
        columns: Values of fields, or of entries of fields, that `kdpipes index --columns` keeps.
    """

    version: Version
    keys: PackedStrings
    fields: dict[str, Places] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)

    def checksums(self) -> dict[int, int] | None:
        """Return the CRC-32 of each member by the offset of its content; None if they were not computed."""
        found: dict[int, int] = {}
        for places in self.fields.values():
            if places.checksums is None:
                return None
            is_there = places.offsets >= 0
            found.update(zip(places.offsets[is_there].tolist(), places.checksums[is_there].tolist(), strict=True))
        return found

    def to_bytes(self) -> bytes:
        """Return the content of the sidecar."""
        header = {
            "size": self.version.size,
            "tag": self.version.tag,
            "num_samples": len(self.keys),
            "fields": list(self.fields),
            **({"columns": list(self.columns)} if self.columns else {}),
        }
        return packed(_MAGIC, header, self._arrays())

    def _arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        ends, letters = self.keys.arrays()
        yield from (("ends", ends), ("keys", letters))
        for number, places in enumerate(self.fields.values()):
            for name in ("offsets", "sizes", "checksums", "values"):
                values = getattr(places, name)
                if values is not None:
                    yield f"{number}.{name}", values
        yield from arrays_of(self.columns)

    @classmethod
    def from_bytes(cls, content: bytes, url: str) -> ShardIndex:
        """Return the index that a sidecar holds.

        Args:
            content: Of the sidecar. The index holds views of it.
            url: Of the sidecar, for errors.

        Raises:
            DataError: It is not an index, damaged, or of another format.
        """
        header, arrays = unpacked(_MAGIC, content, url)
        try:
            fields = {
                str(name): Places(
                    arrays[f"{number}.offsets"],
                    arrays[f"{number}.sizes"],
                    arrays.get(f"{number}.checksums"),
                    arrays.get(f"{number}.values"),
                )
                for number, name in enumerate(header["fields"])
            }
            keys = PackedStrings.of_arrays(arrays["ends"], arrays["keys"])
            columns = columns_in(header, arrays)
            parts = [values for places in fields.values() for values in vars(places).values() if values is not None]
            if any(len(values) != header["num_samples"] for values in (keys, *parts, *columns.values())):
                raise ValueError("its columns are of different lengths")
            return cls(Version(int(header["size"]), str(header["tag"])), keys, fields, columns)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"Index {url!r} cannot be read: {type(error).__name__}: {error}.") from error


def arrays_of(columns: dict[str, Column]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of columns, each with its name in a file."""
    for number, column in enumerate(columns.values()):
        yield from ((f"column {number}.{name}", values) for name, values in column.arrays().items())


def columns_in(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> dict[str, Column]:
    """Return the columns in a file.

    Raises:
        KeyError: An array is missing.
        ValueError: Arrays do not make a column.
    """
    found = {}
    for number, name in enumerate(header.get("columns", ())):
        parts = {part: arrays.get(f"column {number}.{part}") for part in ("kinds", "numbers", "ends", "letters")}
        found[str(name)] = Column.of_arrays({part: values for part, values in parts.items() if values is not None})
    return found


def packed(magic: bytes, header: dict[str, Any], arrays: Iterable[tuple[str, NDArray[Any]]]) -> bytes:
    """Return a mark, a header in JSON, named arrays of integers and a checksum as one content."""
    known = [(name, np.ascontiguousarray(values)) for name, values in arrays]
    kinds = [[name, values.dtype.newbyteorder("<").str, len(values)] for name, values in known]
    text = json.dumps({**header, "arrays": kinds}, ensure_ascii=False).encode("utf-8", "surrogateescape")
    number = _FORMATS["columns" in header]
    parts = [magic, np.array([number, len(text)], dtype="<u4").tobytes(), text]
    size = sum(map(len, parts))
    for _, values in known:
        parts += [bytes(-size % _ALIGNMENT), values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()]
        size += len(parts[-2]) + len(parts[-1])
    content = b"".join(parts)
    return content + np.array([zlib.crc32(content)], dtype="<u4").tobytes()


def unpacked(magic: bytes, content: Buffer, url: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the header and the arrays of what `packed` has made; the arrays are views of it.

    Raises:
        DataError: It is something else, damaged, or of another format.
    """
    view, head = memoryview(content), len(magic) + 8
    if view[: len(magic)] != magic or len(view) < head + 4:
        raise DataError(f"{url!r} is not the index of a shard.")
    number, length = np.frombuffer(view, dtype="<u4", count=2, offset=len(magic)).tolist()
    if number not in _FORMATS:
        raise DataError(f"Index {url!r} is of format {number}, but this kdpipes reads formats up to {_FORMATS[-1]}.")
    if zlib.crc32(view[:-4]) != int(np.frombuffer(view[-4:], dtype="<u4")[0]):
        raise DataError(f"Index {url!r} is damaged: its checksum does not fit.")
    try:
        header = json.loads(bytes(view[head : head + length]).decode("utf-8", "surrogateescape"))
        arrays: dict[str, NDArray[Any]] = {}
        start = head + length
        for name, kind, count in header["arrays"]:
            dtype = np.dtype(kind)
            if dtype.kind not in "iu":
                raise ValueError(f"array {name!r} is of {dtype}")
            start += -start % _ALIGNMENT
            arrays[name] = np.frombuffer(view, dtype=dtype, count=count, offset=start)
            start += count * dtype.itemsize
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"Index {url!r} cannot be read: {type(error).__name__}: {error}.") from error
    return header, arrays


class IndexBuilder:
    """Collects the samples of a shard, in order."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        # Of each field: sample, offset, size and checksum, one after the other.
        self._rows = defaultdict[str, "array[int]"](lambda: array("q"))
        self._values = defaultdict[str, "array[int]"](lambda: array("q"))
        self._has_checksums = True

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str, members: Iterable[tuple[str, int, int, int | None, int | None]]) -> None:
        """Add a sample.

        Args:
            key: Of the sample.
            members: Of each field: name, offset, size, checksum and value; None for a checksum that was not computed,
                and for a value that is not an integer.
        """
        for name, offset, size, checksum, value in members:
            self._has_checksums &= checksum is not None
            self._rows[name].extend((len(self._keys), offset, size, checksum or 0))
            if value is not None:
                self._values[name].append(value)
        self._keys.append(key)

    def index(self, version: Version, starts: NDArray[np.int64] | None = None) -> ShardIndex:
        """Return the index of the samples so far.

        Args:
            version: Of the shard.
            starts: Where each sample starts, if offsets were given from there.
        """
        fields = {}
        for name, numbers in self._rows.items():
            rows = np.frombuffer(numbers, dtype=np.int64).reshape(-1, 4)
            columns = np.zeros((3, len(self._keys)), dtype=np.int64)
            columns[0] = -1
            columns[:, rows[:, 0]] = rows[:, 1:].T
            if starts is not None:
                columns[0, rows[:, 0]] += starts[rows[:, 0]]
            values = np.frombuffer(self._values[name], dtype=np.int64) if name in self._values else ()
            checksums = columns[2].astype(np.uint32) if self._has_checksums else None
            has_all = len(values) == len(self._keys)
            fields[name] = Places(columns[0], columns[1], checksums, np.asarray(values) if has_all else None)
        return ShardIndex(version, PackedStrings(self._keys), fields)


class JoinedIndexes:
    """The indexes of many shards, one after the other, in one array per column.

    Args:
        num_shards: How many there will be. The first ones reserve room for all, and reserved pages that are not used
            cost nothing: 2,000 indexes of 500 samples join in 0.07 s, against 0.12 s with columns that grow by a
            quarter.
    """

    def __init__(self, num_shards: int) -> None:
        self.versions: list[Version] = []
        self._num_shards = num_shards
        self._counts: list[int] = []
        self._num_samples = 0
        self._ends, self._letters = _Column(np.int64), _Column(np.uint8)
        self._fields: dict[str, _Field] = {}
        self._columns: dict[str, list[Column]] | None = None

    def add(self, index: ShardIndex) -> None:
        """Add the index of the next shard; it is copied."""
        self.versions.append(index.version)
        self._counts.append(len(index.keys))
        self._num_samples += len(index.keys)
        ends, letters = index.keys.arrays()
        before, growth = self._letters.size, _RESERVE * self._num_shards / len(self.versions)
        self._ends.extend(ends + before, len(self), growth)
        self._letters.extend(letters, before + len(letters), growth)
        for name, places in index.fields.items():
            self._fields.setdefault(name, _Field()).extend(places, len(self), growth)
        if len(index.keys):
            known = {name: [] for name in index.columns} if self._columns is None else self._columns
            self._columns = {name: parts for name, parts in known.items() if name in index.columns}
            for name, parts in self._columns.items():
                parts.append(index.columns[name])

    def __len__(self) -> int:
        return self._num_samples

    def shards(self) -> NDArray[np.int32]:
        """Return the number of the shard of each sample."""
        return np.repeat(np.arange(len(self._counts), dtype=np.int32), self._counts)

    def keys(self) -> PackedStrings:
        """Return the keys that the samples have in their shards."""
        return PackedStrings.of_arrays(self._ends.array(len(self)), self._letters.array(self._letters.size))

    def fields(self) -> dict[str, Places | NDArray[np.int64]]:
        """Return the places of each field, or its values where all samples have one."""
        return {name: column.joined(len(self)) for name, column in self._fields.items()}

    def columns(self) -> dict[str, Column]:
        """Return the columns that all shards have."""
        return {name: Column.joined(parts) for name, parts in (self._columns or {}).items()}


class _Column:
    """A NumPy array that grows. Values that do not fit its dtype widen it to `int64`.

    Args:
        dtype: Of the values.
        missing: The value of samples for which none is given.
    """

    def __init__(self, dtype: Any, missing: int = 0) -> None:
        self._values: NDArray[Any] = np.empty(0, dtype=dtype)
        self._missing = missing
        self.size = 0

    def extend(self, values: NDArray[Any], stop: int, growth: float) -> None:
        """Add values up to the size `stop`, with missing ones before them, and room for `growth` times as many."""
        is_wider = len(values) > 0 and values.dtype.itemsize > self._values.dtype.itemsize
        if is_wider and int(values.max()) > np.iinfo(self._values.dtype).max:
            self._values = self._values.astype(np.int64)
        if stop > len(self._values):
            grown = np.empty(max(stop, int(stop * growth)), dtype=self._values.dtype)
            grown[: self.size] = self._values[: self.size]
            self._values = grown
        start = stop - len(values)
        self._values[self.size : start] = self._missing
        self._values[start:stop] = values
        self.size = stop

    def array(self, size: int) -> NDArray[Any]:
        """Return the values up to `size`."""
        if self.size < size:
            self.extend(np.empty(0, dtype=np.uint8), size, 1.0)
        return self._values[:size]


class _Field:
    """The places and values of one field."""

    def __init__(self) -> None:
        self._offsets, self._sizes = _Column(np.int64, -1), _Column(np.uint32)
        self._checksums, self._values = _Column(np.uint32), _Column(np.int64)
        self._has_values = True
        self._unchecked: list[slice] = []  # samples of shards whose indexes have no checksums

    def extend(self, places: Places, stop: int, growth: float) -> None:
        """Add the places of one shard."""
        self._offsets.extend(places.offsets, stop, growth)
        self._sizes.extend(places.sizes, stop, growth)
        if places.checksums is None:
            self._unchecked.append(slice(stop - len(places.offsets), stop))
        else:
            self._checksums.extend(places.checksums, stop, growth)
        self._has_values &= places.values is not None
        if self._has_values and places.values is not None:
            self._values.extend(places.values, stop, growth)

    def joined(self, size: int) -> Places | NDArray[np.int64]:
        """Return what is known of the field in so many samples."""
        offsets = self._offsets.array(size)
        if self._has_values and self._values.size == size == np.count_nonzero(offsets >= 0):
            return self._values.array(size)
        checksums = None
        if self._checksums.size:
            checksums = self._checksums.array(size)
            if self._unchecked:
                checksums = checksums.astype(np.int64)
                for samples in self._unchecked:
                    checksums[samples] = UNCHECKED
        return Places(offsets, self._sizes.array(size), checksums)
