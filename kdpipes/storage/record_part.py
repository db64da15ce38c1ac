"""One part of a record folder: an LMDB file that is written once, and the index of where each field lies in it.

The file is a plain LMDB environment. Its keys are the numbers 0, 1, ... as 8 bytes, big-endian; a value is entries of
the codec, each at a multiple of 64 bytes: first `[number, key, names of the fields]`, then one for each field. Since a
part is never changed, its index knows for good where in the file each entry begins. Readers look there themselves:
without locks, look-ups, or LMDB's map, whose views must not outlive it.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.storage.batches import in_batches
from kdpipes.storage.codec import checksum_of, encode
from kdpipes.storage.files import Version
from kdpipes.storage.shard_index import Places, ShardIndex
from kdpipes.storage.shared import PackedStrings

__all__ = ["Record", "write_part"]

_NUMBER = struct.Struct(">Q")
_ALIGNMENT = 64
_HEAD = 64  # bytes, in which no two records are equal
_AT_ONCE = 1 << 24  # bytes of a transaction, which LMDB keeps in memory
_SLACK = 1 << 22
_INT64 = range(-(1 << 63), 1 << 63)


class Record(NamedTuple):
    """A sample to be written.

    Args:
        key: Of the sample.
        fields: Its fields, which the codec knows.
    """

    key: str
    fields: dict[str, Any]


def write_part(path: Path, records: Iterable[Record], tag: str) -> ShardIndex:
    """Write an LMDB file, which must not be there, and return its index. The same records make the same bytes.

    Args:
        path: Of the file.
        records: In the order in which they are to lie.
        tag: What tells the part from those of other inputs.

    Raises:
        TypeError: A field is no plain data.
        OSError: The file cannot be written.
    """
    contents = _Contents()
    options: dict[str, Any] = {"subdir": False, "lock": False, "sync": False, "metasync": False, "mode": 0o666}
    try:
        with lmdb.open(str(path), map_size=1 << 20, meminit=True, **options) as env:
            for batch in in_batches(map(contents.add, records), _AT_ONCE):
                _make_room(env, batch)
                with env.begin(write=True) as transaction:
                    for number, content in batch:
                        transaction.put(_NUMBER.pack(number), content, append=True)
            env.sync(True)
            starts = _starts(env, path)
    except lmdb.Error as error:
        raise OSError(f"{str(path)!r} cannot be written: {error}") from error
    return contents.index(starts, Version(path.stat().st_size, tag))


def _make_room(env: Any, batch: list[tuple[int, bytes]]) -> None:
    """Let the file become as large as a transaction may need it: the size is a function of the records alone."""
    info, page_size = env.info(), env.stat()["psize"]
    needed = (info["last_pgno"] + 1) * page_size + _SLACK + sum(2 * len(content) + 64 for _, content in batch)
    size = info["map_size"]
    while size < needed:
        size *= 2
    if size > info["map_size"]:
        env.set_mapsize(size)


def _starts(env: Any, path: Path) -> NDArray[np.int64]:
    """Return where in the file the records begin, in order."""
    with env.begin(buffers=True) as transaction, path.open("rb") as file:
        addresses = np.fromiter(map(_address, _values(transaction)), dtype=np.int64)
        if not len(addresses):
            return addresses
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            first = bytes(next(_values(transaction))[:_HEAD])
            found = content.find(first)
            while found >= 0:
                starts: NDArray[np.int64] = addresses - (addresses[0] - found)
                if starts.min() >= 0 and all(
                    content[start : start + _HEAD] == value[:_HEAD]
                    for start, value in zip(starts.tolist(), _values(transaction), strict=True)
                ):
                    return starts
                found = content.find(first, found + 1)  # that was an older copy of a page
    raise DataError(f"{str(path)!r} is not what LMDB was told to write.")


def _values(transaction: Any) -> Iterator[memoryview]:
    values: Iterator[memoryview] = transaction.cursor().iternext(keys=False)
    return values


def _address(value: memoryview) -> int:
    return int(np.frombuffer(value, np.uint8).__array_interface__["data"][0])


class _Contents:
    """Packs records, and remembers what the index is to say."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._fields: dict[str, _Field] = {}

    def add(self, record: Record) -> tuple[int, bytes]:
        """Return the number of a record, and its bytes."""
        number = len(self._keys)
        parts = _padded(encode([number, record.key, list(record.fields)]))
        for name, value in record.fields.items():
            start = sum(map(len, parts))
            entry = _entry(record.key, name, value)
            size = sum(map(len, entry))
            self._fields.setdefault(name, _Field()).add(number, start, size, checksum_of(entry), value)
            parts += _padded(entry)
        self._keys.append(record.key)
        return number, b"".join(parts)

    def index(self, starts: NDArray[np.int64], version: Version) -> ShardIndex:
        """Return the index, from where the records begin in the file."""
        fields = {name: field.places(starts) for name, field in self._fields.items()}
        return ShardIndex(version, PackedStrings(self._keys), fields)


def _padded(entry: list[Any]) -> list[Any]:
    return [*entry, bytes(-sum(map(len, entry)) % _ALIGNMENT)]


def _entry(key: str, name: str, value: Any) -> list[Any]:
    try:
        return encode(value)
    except TypeError as error:
        what = str(error).split(" Make a dict")[0]
        way_out = "`encode=` takes a function that makes bytes, numbers, text or arrays of it."
        raise TypeError(f"Field {name!r} of sample {key!r}: {what} {way_out}") from error


class _Field:
    """Where a field lies in the records, from their beginnings on."""

    def __init__(self) -> None:
        self._offsets, self._sizes = array("q"), array("q")
        self._checksums, self._values = array("I"), array("q")
        self._is_integer = True

    def add(self, number: int, offset: int, size: int, checksum: int, value: Any) -> None:
        """Add the field of a record, those before which there was none aside."""
        self._fill(number)
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) in _INT64
        self._is_integer &= is_integer
        self._append(offset, size, checksum, int(value) if is_integer else 0)

    def _fill(self, stop: int) -> None:
        while len(self._offsets) < stop:
            self._is_integer = False
            self._append(-1, 0, 0, 0)

    def _append(self, *numbers: int) -> None:
        columns = (self._offsets, self._sizes, self._checksums, self._values)
        for column, number in zip(columns, numbers, strict=True):
            column.append(number)

    def places(self, starts: NDArray[np.int64]) -> Places:
        """Return where the field lies in the file."""
        self._fill(len(starts))
        offsets = np.array(self._offsets, dtype=np.int64)
        return Places(
            np.where(offsets < 0, offsets, offsets + starts),
            np.array(self._sizes, dtype=np.int64),
            np.array(self._checksums, dtype=np.uint32),
            np.array(self._values, dtype=np.int64) if self._is_integer else None,
        )
