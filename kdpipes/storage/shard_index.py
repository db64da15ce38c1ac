"""The index of a tar shard or a part of records: where the fields of each sample are. Many indexes are joined into one.

A sidecar `NAME.index` is plain data: a mark, a header in JSON, little-endian arrays and a CRC-32 of it all.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.entries import entry_of, field_of
from kdpipes.core.errors import DataError, FieldError, is_sequence
from kdpipes.core.map_pipe import as_column
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.decoding import decode_member
from kdpipes.storage.local import crc32, map_file
from kdpipes.storage.readers import Version

UNCHECKED = -1  # in place of a checksum that was not computed
_MAGIC, _MAGIC_OF_MANY = b"kdpindex", b"kdpjoind"
_FORMATS = (1, 2)  # without columns, and with columns
_ALIGNMENT = 8
_RESERVE = 1.25  # times the size that the shards so far let expect


@dataclass(frozen=True)
class Places:
    """Where one field of each sample lies, and its values, as far as they are known without reading it.

    Args:
        offsets: The offsets of the contents in the shard, `[n] int64`; -1 if a sample lacks the field.
        sizes: The sizes of the contents in bytes, `[n]`.
        checksums: The CRC-32 of the contents, `[n] uint32`; None if they were not computed. Of several shards `int64`,
            with `UNCHECKED` for each that was not.
        values: The values, if all samples have one and all are integers: labels, `[n] int64`.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[Any]
    checksums: NDArray[Any] | None = None
    values: NDArray[np.int64] | None = None


def by_gaps(fields: Mapping[str, Any], positions: NDArray[Any]) -> Iterator[tuple[list[int], frozenset[str]]]:
    """Yield the numbers of samples with the fields that they lack: first those that lack none, then each other one."""
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
        version: The version of the tar that it describes.
        keys: The samples' keys, `[n]`.
        fields: The places of each field.
        columns: The values of fields, or of entries of fields, that `kdpipes index --columns` keeps.
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
        header = {"size": self.version.size, "tag": self.version.tag, "num_samples": len(self.keys)}
        arrays = _arrays_of(self.keys, self.fields, self.columns)
        return _packed(_MAGIC, header | _names_of(self.fields, self.columns), arrays)

    @classmethod
    def from_bytes(cls, content: bytes, url: str) -> ShardIndex:
        """Return the index that a sidecar holds; its arrays are views of the content.

        Raises:
            DataError: The content is not an index, damaged, or of another format.
        """
        header, arrays = _unpacked(_MAGIC, content, url)
        try:
            keys, fields, columns = _contents_of(header, arrays)
            places = {name: known for name, known in fields.items() if isinstance(known, Places)}
            if len(keys) != header["num_samples"] or len(places) != len(fields):
                raise ValueError("it is not complete")
            return cls(Version(int(header["size"]), str(header["tag"])), keys, places, columns)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"Index {url!r} is damaged: {error}. Write it again with `kdpipes index`.") from error


def _packed(magic: bytes, header: dict[str, Any], arrays: Iterable[tuple[str, NDArray[Any]]]) -> bytes:
    """Return a mark, a header in JSON, named arrays of numbers and a checksum as one content."""
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
    return content + np.array([crc32(content)], dtype="<u4").tobytes()


def _unpacked(magic: bytes, content: bytes | mmap.mmap, url: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the header and the arrays of what `_packed` has made; the arrays are views of it."""
    view, head = memoryview(content), len(magic) + 8
    if view[: len(magic)] != magic or len(view) < head + 4:
        raise DataError(f"{url!r} is not the index of a shard.")
    number, length = np.frombuffer(view, dtype="<u4", count=2, offset=len(magic)).tolist()
    if number not in _FORMATS:
        raise DataError(f"Index {url!r} is of format {number}, but this kdpipes reads formats up to {_FORMATS[-1]}.")
    if crc32(view[:-4]) != int(np.frombuffer(view[-4:], dtype="<u4")[0]):
        raise DataError(f"Index {url!r} is damaged: its checksum does not fit.")
    try:
        header = json.loads(bytes(view[head : head + length]).decode("utf-8", "surrogateescape"))
        arrays: dict[str, NDArray[Any]] = {}
        start = head + length
        for name, kind, count in header["arrays"]:
            dtype = np.dtype(kind)
            if dtype.kind not in "biuf":
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

    def add(
        self, key: str, members: Iterable[tuple[str, int, int, int | None, int | None]], number: int | None = None
    ) -> None:
        """Add a sample, or fields of an earlier one, with name, offset, size, checksum and value of each field.

        A checksum that was not computed is None, as is a value that is not an integer. `number` is that of the sample;
        None is a new one.
        """
        number = len(self._keys) if number is None else number
        for name, offset, size, checksum, value in members:
            self._has_checksums &= checksum is not None
            self._rows[name].extend((number, offset, size, checksum or 0))
            if value is not None:
                self._values[name].append(value)
        if number == len(self._keys):
            self._keys.append(key)

    def repeated(self) -> tuple[str, str, int] | None:
        """Return field, key and offset of a member whose sample has another one of that field; None without one."""
        for name, numbers in self._rows.items():
            samples = np.frombuffer(numbers, dtype=np.int64)[::4]
            _, firsts = np.unique(samples, return_index=True)
            if len(firsts) < len(samples):
                row = int(np.setdiff1d(np.arange(len(samples)), firsts)[0])
                return name, self._keys[samples[row]], numbers[4 * row + 1]
        return None

    def index(self, version: Version, starts: NDArray[np.int64] | None = None) -> ShardIndex:
        """Return the index of the samples so far; with `starts`, offsets are relative to the start of each sample."""
        fields = {}
        for name, numbers in self._rows.items():
            rows = np.frombuffer(numbers, dtype=np.int64).reshape(-1, 4)
            columns = np.zeros((3, len(self._keys)), dtype=np.int64)
            columns[0] = -1
            columns[:, rows[:, 0]] = rows[:, 1:].T
            if starts is not None:
                columns[0, rows[:, 0]] += starts[rows[:, 0]]
            checksums = columns[2].astype(np.uint32) if self._has_checksums else None
            values = None
            if len(self._values.get(name, ())) == len(self._keys):
                values = np.empty(len(self._keys), dtype=np.int64)
                values[rows[:, 0]] = np.frombuffer(self._values[name], dtype=np.int64)
            fields[name] = Places(columns[0], columns[1], checksums, values)
        return ShardIndex(version, PackedStrings(self._keys), fields)


@dataclass(frozen=True)
class Catalog:
    """The indexes of many shards, joined: where each field of each sample lies.

    Args:
        versions: The versions of the shards when they were opened.
        shards: The number of the shard of each sample, `[n]`.
        short_keys: The samples' keys in their shards, `[n]`.
        fields: The places of each field; or its values, `[n] int64`, if the indexes hold all of them: labels.
        columns: The columns that the indexes of all shards have.
        sources: The versions of the data-set indexes that the indexes were read from.
        names: The names of the shards in keys.
        urls: The URLs of the shards.
    """

    versions: Sequence[Version]
    shards: NDArray[np.int32]
    short_keys: PackedStrings
    fields: dict[str, Places | NDArray[np.int64]]
    columns: dict[str, Column] = field(default_factory=dict)
    sources: Sequence[Version] = ()
    names: Sequence[str] = ()
    urls: Sequence[str] = ()

    @classmethod
    def of(cls, indexes: Iterable[ShardIndex], num_shards: int) -> Catalog:
        """Join the indexes of so many shards; each index can be freed before the next one is read."""
        versions: list[Version] = []
        counts: list[int] = []
        # The first shards reserve zeros for all; pages that are not used cost nothing. So 0 stands for missing values.
        grown: dict[tuple[str, str], NDArray[Any]] = {}
        lacking: set[str] = set()  # fields without values in some shard
        columns: dict[str, list[Column]] | None = None

        def grow(name: str, part: str, values: NDArray[Any], start: int, dtype: Any = np.int64) -> None:
            stop, column = start + len(values), grown.get((name, part), np.zeros(0, dtype=dtype))
            if dtype == np.uint32 and values.max(initial=0) > np.iinfo(np.uint32).max:
                column = column.astype(np.int64, copy=False)
            if stop > len(column):
                larger = np.zeros(int(stop * max(1, _RESERVE * num_shards / len(versions))), dtype=column.dtype)
                larger[: len(column)] = column
                column = larger
            column[start:stop] = values
            grown[name, part] = column

        num_letters = start = 0
        for index in indexes:
            versions.append(index.version)
            counts.append(len(index.keys))
            ends, letters = index.keys.arrays()
            grow("", "ends", ends + num_letters, start)
            grow("", "letters", letters, num_letters, np.uint8)
            for name, places in index.fields.items():
                grow(name, "offsets", places.offsets + 1, start)
                grow(name, "sizes", places.sizes, start, np.uint32)
                if places.checksums is not None:
                    grow(name, "checksums", places.checksums + np.int64(1), start)
                if places.values is None:
                    lacking.add(name)
                else:
                    grow(name, "values", places.values, start)
            if counts[-1]:
                known = {name: [] for name in index.columns} if columns is None else columns
                columns = {
                    name: [*parts, index.columns[name]] for name, parts in known.items() if name in index.columns
                }
            num_letters, start = num_letters + len(letters), start + counts[-1]
        fields: dict[str, Places | NDArray[np.int64]] = {}
        for name, part in list(grown):
            grow(name, part, np.zeros(0, dtype=np.uint8), num_letters if part == "letters" else start)
            grown[name, part] = grown[name, part][: num_letters if part == "letters" else start]
        for name in dict.fromkeys(name for name, _ in grown if name):
            offsets, checksums = grown[name, "offsets"], grown.get((name, "checksums"))
            offsets -= 1
            is_there = offsets >= 0
            if name not in lacking and is_there.all():
                fields[name] = grown[name, "values"]
                continue
            if checksums is not None:
                checksums -= 1  # now UNCHECKED for missing ones
                checksums[~is_there] = 0
                if checksums.min(initial=0) >= 0:
                    checksums = checksums.astype(np.uint32)
            fields[name] = Places(offsets, grown[name, "sizes"], checksums)
        empty = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8)
        keys = PackedStrings.of_arrays(grown.get(("", "ends"), empty[0]), grown.get(("", "letters"), empty[1]))
        shards = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        joined = {name: joined_column(parts) for name, parts in (columns or {}).items()}
        return cls(versions, shards, keys, fields, joined)

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def gaps(self) -> frozenset[str]:
        """The fields that some samples lack."""
        places = {name: known for name, known in self.fields.items() if isinstance(known, Places)}
        return frozenset(name for name, known in places.items() if len(known.offsets) and known.offsets.min() < 0)

    def key(self, index: int) -> str:
        """Return the key of a sample: the shard's name, a slash and its key there."""
        return f"{self.names[int(self.shards[index])]}/{self.short_keys[index]}"

    def to_bytes(self) -> bytes:
        """Return the content of a file in the local cache; `names` and `urls` are not part of it."""
        header = {"versions": list(self.versions), "sources": list(self.sources)}
        arrays = chain([("shards", self.shards)], _arrays_of(self.short_keys, self.fields, self.columns))
        return _packed(_MAGIC_OF_MANY, header | _names_of(self.fields, self.columns), arrays)

    @classmethod
    def from_file(cls, path: Path) -> Catalog:
        """Return the catalog in a file, whose pages are shared by all processes that map it.

        Raises:
            DataError: The file is something else, or damaged.
            OSError: It cannot be mapped.
        """
        with path.open("rb") as file:
            content = map_file(file.fileno())
        header, arrays = _unpacked(_MAGIC_OF_MANY, content, str(path))
        versions, sources = (
            [Version(int(size), str(tag)) for size, tag in header[name]] for name in ("versions", "sources")
        )
        keys, fields, columns = _contents_of(header, arrays)
        return cls(versions, arrays["shards"], keys, fields, columns, sources)


def _names_of(fields: Mapping[str, Any], columns: Mapping[str, Column]) -> dict[str, list[str]]:
    return {"fields": list(fields), **({"columns": list(columns)} if columns else {})}


def _arrays_of(
    keys: PackedStrings, fields: Mapping[str, Places | NDArray[np.int64]], columns: Mapping[str, Column]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of an index or catalog, each with its name in the file."""
    ends, letters = keys.arrays()
    yield from (("ends", ends), ("keys", letters))
    for number, known in enumerate(fields.values()):
        parts = vars(known) if isinstance(known, Places) else {"values": known}
        yield from ((f"{number}.{name}", values) for name, values in parts.items() if values is not None)
    for number, column in enumerate(columns.values()):
        if isinstance(column, PackedStrings):
            ends, letters = column.arrays()
            yield from ((f"column {number}.ends", ends), (f"column {number}.letters", letters))
        else:
            yield f"column {number}", column


def _contents_of(
    header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> tuple[PackedStrings, dict[str, Places | NDArray[np.int64]], dict[str, Column]]:
    """Return keys, fields and columns; raise KeyError or ValueError if they are incomplete."""
    keys = PackedStrings.of_arrays(arrays["ends"], arrays["keys"])
    fields: dict[str, Places | NDArray[np.int64]] = {}
    for number, name in enumerate(header["fields"]):
        offsets, sizes, checksums, values = (
            arrays.get(f"{number}.{part}") for part in ("offsets", "sizes", "checksums", "values")
        )
        if offsets is not None and sizes is not None:
            fields[str(name)] = Places(offsets, sizes, checksums, values)
        else:
            fields[str(name)] = arrays[f"{number}.values"]
    columns: dict[str, Column] = {}
    for number, name in enumerate(header.get("columns", ())):
        if f"column {number}" in arrays:
            columns[str(name)] = arrays[f"column {number}"]
        else:
            ends, letters = arrays[f"column {number}.ends"], arrays[f"column {number}.letters"]
            columns[str(name)] = PackedStrings.of_arrays(ends, letters)
    parts = [
        values
        for known in fields.values()
        for values in (vars(known).values() if isinstance(known, Places) else [known])
    ]
    if any(values is not None and len(values) != len(keys) for values in (*parts, *columns.values())):
        raise ValueError("its columns are of different lengths")
    return keys, fields, columns


MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "<missing>"})()
# Numbers of one type are an array; other columns are the values in JSON, and an empty text for a missing value.
Column: TypeAlias = NDArray[Any] | PackedStrings


def column_of(values: Sequence[Any]) -> Column:
    """Return the column of some values, of which `MISSING` is one that a sample lacks."""
    kinds = set(map(type, values))
    if kinds in ({int}, {float}, {bool}):
        return np.array(values, dtype={int: np.int64, float: np.float64, bool: np.bool_}[kinds.pop()])
    return PackedStrings(["" if value is MISSING else json.dumps(value) for value in values])


def joined_column(parts: Sequence[Column]) -> Column:
    """Return the values of several columns, one column after the other."""
    parts = [part for part in parts if len(part)] or parts[:1]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({part.dtype for part in arrays}) == 1:
        return np.concatenate(arrays)
    texts = (
        PackedStrings(list(map(json.dumps, part.tolist()))) if isinstance(part, np.ndarray) else part for part in parts
    )
    return PackedStrings.joined(list(texts))


def missing_in(column: Column) -> NDArray[np.intp]:
    """Return the positions of the samples that lack the value."""
    ends = np.arange(1, len(column) + 1) if isinstance(column, np.ndarray) else column.arrays()[0]
    return np.flatnonzero(np.diff(ends, prepend=0) == 0)


def values_of(column: Column) -> NDArray[Any]:
    """Return the values as `as_column` returns them, with None for missing ones."""
    if isinstance(column, np.ndarray) and len(column):
        return column
    return as_column([json.loads(text) if text else None for text in column])


class ColumnBuilder:
    """Collects the columns of one shard, sample by sample.

    Args:
        url: The URL of the shard, for errors.
        names: The names of the columns: fields, "cls", or entries of fields, "json.width".
    """

    def __init__(self, url: str, names: Iterable[str]) -> None:
        self._url = url
        self._values: dict[str, list[Any]] = {name: [] for name in names}
        self._there: set[str] = set()  # what could have been meant by a column that no sample has

    def needs(self, field: str) -> bool:
        """Return whether the content of a field is needed."""
        return any(name == field or name.startswith(f"{field}.") for name in self._values)

    def add(self, key: str, contents: Mapping[str, bytes], number: int | None = None) -> None:
        """Add a sample, or members of an earlier one, with the contents of the members by field.

        Fields that are not needed may be missing. `number` is that of the sample; None is a new one.

        Raises:
            DataError: A member cannot be decoded, or a value cannot be kept.
        """
        decoded: dict[str, Any] = {}
        for name, values in self._values.items():
            field = name if name in contents else field_of(name, contents)
            try:
                if field is not None and field not in decoded:
                    decoded[field] = decode_member(field, contents[field])
                value = MISSING if field is None else self._entry(decoded[field], name, field)
                if value is not MISSING and type(value) not in (type(None), bool, int, float, str):
                    raise ValueError(f"it is a {type(value).__name__}")
                if type(value) is int and not -(1 << 63) <= value < 1 << 63:
                    raise ValueError("the integer does not fit into 64 bits")
                if type(value) is str:
                    value.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
            except ValueError as error:
                raise DataError(
                    f"Column {name!r} of sample {key!r} in {self._url!r} cannot be kept in the index: {error}. Columns "
                    "hold numbers, booleans, texts and null."
                ) from error
            if number is None or number == len(values):
                values.append(value)
            elif value is not MISSING:
                values[number] = value

    def _entry(self, value: Any, name: str, field: str) -> Any:
        if name == field:
            return value
        try:
            return entry_of(value, name[len(field) + 1 :], name)
        except (DataError, FieldError):
            if isinstance(value, dict):
                self._there.update(f"{field}.{entry}" for entry in value)
            return MISSING

    def columns(self) -> dict[str, Column]:
        """Return the columns.

        Raises:
            FieldError: No sample has a value of a column.
        """
        for name, values in self._values.items():
            if values and all(value is MISSING for value in values):
                known = f" It has {', '.join(map(repr, sorted(self._there)[:20]))}." if self._there else ""
                raise FieldError(f"No sample of shard {self._url!r} has a value for the column {name!r}.{known}")
        return {name: column_of(values) for name, values in self._values.items()}


def check_columns(columns: Any) -> tuple[str, ...]:
    """Return the names of columns, each once.

    Raises:
        TypeError: They are not names.
    """
    names = columns.split(",") if isinstance(columns, str) else columns
    if not is_sequence(names) or not all(isinstance(name, str) and name.strip(". ") for name in names):
        raise TypeError(
            f'`columns` must be the names of columns, like "json.label,json.width" or a list, but is {columns!r} '
            "instead."
        )
    return tuple(dict.fromkeys(name.strip() for name in names))
