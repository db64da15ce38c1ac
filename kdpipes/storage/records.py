"""Folders of records: the header, the parts (LMDB files that are written once), and their contents.

A part is a plain LMDB environment. Its keys are the numbers 0, 1, ... as 8 bytes, big-endian. A value consists of codec
entries, each aligned to 64 bytes: first `[number, key, names of the fields]`, then one entry per field. A part is never
changed, so its index can hold the file offset of each entry. Readers map the file and read at these offsets, without
locks, look-ups, or LMDB's own map, whose views must not outlive it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec
import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.messages import shown_if_slow
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.codec import FORMAT, checksum_of, encode, in_batches
from kdpipes.storage.readers import Version, map_file
from kdpipes.storage.shard_index import Catalog, Fields, IndexBuilder, MemberRow, Places, ShardIndex

HEADER = "records.json"
_LAYOUT = "kdpipes records"
_NUMBER = struct.Struct(">Q")
_ALIGNMENT = 64
_HEAD = 64  # in bytes: no two records begin with the same head
_AT_ONCE = 1 << 24  # in bytes per transaction, which LMDB keeps in memory
_SLACK = 1 << 22
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Header:
    """The content of `records.json`, which is written before the parts.

    Args:
        num_parts: The number of parts in the folder.
        source: The hash of everything that the records depend on.
        class_names: The names of the classes 0, 1, ...
    """

    num_parts: int
    source: str
    class_names: tuple[str, ...] | None

    def tag(self, number: int) -> str:
        """Return the tag of a part that belongs to the folder."""
        return f"records:{self.source}:{number}/{self.num_parts}"

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"layout": _LAYOUT, "format": FORMAT, **vars(self)}, indent=1).encode() + b"\n"


def read_header(folder: Path) -> Header | None:
    """Return the header of a folder; None if it is missing.

    Raises:
        DataError: The header is damaged, or of another version.
    """
    place = str(folder)
    try:
        content = (folder / HEADER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        said = json.loads(content)
        written = said["layout"], said["format"]
        if written != (_LAYOUT, FORMAT):
            raise DataError(
                f"{place!r} contains {written[0]!r} in format {written[1]!r}, but this version of kdpipes reads only "
                f"{_LAYOUT!r} in format {FORMAT}. Use the version that wrote it, or write the records again."
            )
        return msgspec.convert(said, Header)
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise DataError(f"{place!r} holds no records, or its {HEADER} is damaged.") from error


def part_name(number: int) -> str:
    """Return the name of a part. The name of its index has the additional suffix ".index".

    >>> part_name(3)
    'part-00003.mdb'
    """
    return f"part-{number:05}.mdb"


def finished_index(folder: Path, header: Header, number: int) -> ShardIndex | None:
    """Return the index of a complete part; None if the part is incomplete.

    Raises:
        DataError: The index is damaged, or belongs to another input.
    """
    path = folder / f"{part_name(number)}.index"
    try:
        content = path.read_bytes()
        size = path.with_suffix("").stat().st_size
    except FileNotFoundError:
        return None
    index = ShardIndex.from_bytes(content, str(path))
    if index.version.tag != header.tag(number):
        raise DataError(f"{str(path)!r} belongs to other records than {HEADER} beside it. Write them again.")
    if index.version.size != size:
        name = str(path.with_suffix(""))
        raise DataError(f"{name!r} should have {index.version.size} bytes, but has {size}. Write or copy it again.")
    return index


@dataclass(frozen=True)
class Records:
    """The contents of a folder, according to the indexes of its parts.

    Args:
        paths: The paths of the parts.
        sizes: The sizes of the parts, in bytes.
        parts: The number of the part of each sample, `[n]`.
        keys: The keys of the samples, `[n]`.
        fields: The locations of each field, `[n]`, or its values, `[n] int64`, if they are integers in all samples,
            such as labels.
        class_names: The names of the classes 0, 1, ...
    """

    paths: Sequence[str]
    sizes: Sequence[int]
    parts: NDArray[np.int32]
    keys: PackedStrings
    fields: Fields
    class_names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.parts)

    def contents(self) -> dict[str, Any]:
        """Return data that identifies the samples' contents, without reading them."""
        return {
            name: (known.checksums, known.sizes) if isinstance(known, Places) else known
            for name, known in self.fields.items()
        }

    def version(self, index: int) -> str:
        """Return text that changes with a sample's contents."""
        texts = []
        for name, known in self.fields.items():
            if isinstance(known, Places):
                assert known.checksums is not None  # records always have checksums
                texts.append(f"{name}:{int(known.sizes[index])}-{int(known.checksums[index]):08x}")
            else:
                texts.append(f"{name}:{int(known[index])}")
        return " ".join(texts)


def read_records(folder: Path) -> Records:
    """Return the records in a folder.

    Raises:
        FileNotFoundError: The folder does not exist.
        DataError: The folder holds no records, incomplete ones, or records of another version, or a part is truncated.
    """
    header = read_header(folder)
    if header is None:
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {str(folder)!r}.")
        raise DataError(f"{str(folder)!r} holds no records: `kdp.write_records` writes them. It has no {HEADER}.")

    def indexes() -> Iterator[ShardIndex]:
        for number in shown_if_slow(range(header.num_parts), header.num_parts, "opening records", "part"):
            index = finished_index(folder, header, number)
            if index is None:
                raise DataError(
                    f"{str(folder)!r} is not complete: {part_name(number)!r} of {header.num_parts} parts is missing. "
                    "`kdp.write_records` with the same arguments goes on where it was broken off."
                )
            yield index

    catalog = Catalog.of(indexes())
    paths = [str(folder / part_name(number)) for number in range(header.num_parts)]
    sizes = [version.size for version in catalog.versions]
    return Records(paths, sizes, catalog.shards, catalog.short_keys, catalog.fields, header.class_names)


class WrittenSample(NamedTuple):
    """A sample to be written."""

    key: str
    fields: dict[str, Any]


def write_part(path: Path, records: Iterable[WrittenSample], tag: str) -> ShardIndex:
    """Write an LMDB file, which must not exist, and return its index. Equal records produce equal bytes.

    Raises:
        TypeError: A field is not plain data.
        OSError: The file cannot be written.
    """
    index = IndexBuilder()
    options: dict[str, Any] = {"subdir": False, "lock": False, "sync": False, "metasync": False, "mode": 0o666}
    try:
        with lmdb.open(str(path), map_size=1 << 20, meminit=True, **options) as env:
            for batch in in_batches((_packed(index, record) for record in records), _AT_ONCE):
                _make_room(env, batch)
                with env.begin(write=True) as transaction:
                    for number, content in batch:
                        transaction.put(_NUMBER.pack(number), content, append=True)
            env.sync(True)
            starts = _starts(env, path)
    except lmdb.Error as error:
        raise OSError(f"{str(path)!r} cannot be written: {error}") from error
    return index.index(Version(path.stat().st_size, tag), starts)


def _make_room(env: Any, batch: list[tuple[int, bytes]]) -> None:
    """Grow the file for a transaction, by a rule that depends only on the records."""
    info = env.info()
    page_size = env.stat()["psize"]
    needed = (info["last_pgno"] + 1) * page_size + _SLACK + sum(2 * len(content) + 64 for _, content in batch)
    size = info["map_size"]
    while size < needed:
        size *= 2
    if size > info["map_size"]:
        env.set_mapsize(size)


def _starts(env: Any, path: Path) -> NDArray[np.int64]:
    """Return the file offsets of the records, in order.

    LMDB does not report offsets, but returns views of its memory map, whose distances are the same as in the file.
    """
    with env.begin(buffers=True) as transaction, path.open("rb") as file:
        arrays = (np.frombuffer(value, np.uint8) for value in _values(transaction))
        addresses = np.fromiter((array.__array_interface__["data"][0] for array in arrays), dtype=np.int64)
        if not len(addresses):
            return addresses
        with map_file(file.fileno()) as content:
            first = bytes(next(_values(transaction))[:_HEAD])
            found = content.find(first)
            while found >= 0:
                starts: NDArray[np.int64] = addresses - (addresses[0] - found)
                if starts.min() >= 0 and all(
                    content[start : start + _HEAD] == value[:_HEAD]
                    for start, value in zip(starts.tolist(), _values(transaction), strict=True)
                ):
                    return starts
                found = content.find(first, found + 1)  # the first match was a stale copy of a page
    raise DataError(f"{str(path)!r} differs from what was written to LMDB. Check the disk.")


def _values(transaction: Any) -> Iterator[memoryview]:
    values: Iterator[memoryview] = transaction.cursor().iternext(keys=False)
    return values


def _packed(index: IndexBuilder, record: WrittenSample) -> tuple[int, bytes]:
    """Add a record to the index, and return its number and encoded bytes."""
    number = len(index)
    parts = _padded(encode([number, record.key, list(record.fields)]))
    size = sum(map(len, parts))
    members: list[MemberRow] = []
    for name, value in record.fields.items():
        try:
            entry = encode(value)
        except TypeError as error:
            what = str(error).split(" Make a dict")[0]
            hint = "`encode=` takes a function that makes bytes, numbers, text or arrays of it."
            raise TypeError(f"Field {name!r} of sample {record.key!r}: {what} {hint}") from error
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) in _INT64
        members.append((name, size, sum(map(len, entry)), checksum_of(entry), int(value) if is_integer else None))
        entry = _padded(entry)
        parts += entry
        size += sum(map(len, entry))
    index.add(record.key, members)
    return number, b"".join(parts)


def _padded(entry: list[Any]) -> list[Any]:
    return [*entry, bytes(-sum(map(len, entry)) % _ALIGNMENT)]
