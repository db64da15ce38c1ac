"""A folder of record files: what belongs to it, how its files are called, and what all of them hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.progress import shown_if_slow
from kdpipes.storage.drafts import create_file
from kdpipes.storage.joined_indexes import JoinedIndexes
from kdpipes.storage.shard_index import Places, ShardIndex
from kdpipes.storage.shared import PackedStrings

__all__ = [
    "HEADER",
    "Header",
    "Records",
    "create_header",
    "finished_index",
    "header_of",
    "part_name",
    "read_header",
    "read_records",
]

HEADER = "records.json"
_FORMAT, _LAYOUT = 1, "kdpipes records"


class Header(NamedTuple):
    """What the file `records.json` says; it is there before the parts are.

    Args:
        num_parts: How many parts belong to the folder.
        source: The hash of all that the records are made of.
        class_names: The names of the classes 0, 1, ...
    """

    num_parts: int
    source: str
    class_names: tuple[str, ...] | None

    def tag(self, number: int) -> str:
        """Return what a part is to be marked with, if it belongs to the folder."""
        return f"records:{self.source}:{number}/{self.num_parts}"

    def to_bytes(self) -> bytes:
        """Return what the file holds."""
        return json.dumps({"layout": _LAYOUT, "format": _FORMAT, **self._asdict()}, indent=1).encode() + b"\n"


def header_of(content: bytes, place: str) -> Header:
    """Return what a header says.

    Raises:
        DataError: It is that of another version, or no header.
    """
    try:
        said = json.loads(content)
        written = said["layout"], said["format"]
        if written != (_LAYOUT, _FORMAT):
            raise DataError(
                f"{place!r} holds {written[0]} of format {written[1]!r}, but this kdpipes reads format {_FORMAT} of "
                f"{_LAYOUT}. Read it with the version that has written it."
            )
        names = said["class_names"]
        return Header(int(said["num_parts"]), str(said["source"]), None if names is None else tuple(map(str, names)))
    except DataError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{place!r} holds no records, or its {HEADER} is damaged.") from error


def read_header(folder: Path) -> Header | None:
    """Return what the header of a folder says, None if there is none."""
    try:
        content = (folder / HEADER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return header_of(content, str(folder))


def create_header(folder: Path, header: Header) -> None:
    """Make a folder one for records, unless another process has just done so."""
    create_file(folder / HEADER, header.to_bytes(), is_synced=True)


def part_name(number: int) -> str:
    """Return what a part is called; its index has ".index" behind that.

    >>> part_name(3)
    'part-00003.mdb'
    """
    return f"part-{number:05}.mdb"


def finished_index(folder: Path, header: Header, number: int) -> ShardIndex | None:
    """Return the index of a part that is complete, None if it is not.

    Raises:
        DataError: The index is damaged, or that of another input.
    """
    path = folder / f"{part_name(number)}.index"
    try:
        content = path.read_bytes()
        size = path.with_suffix("").stat().st_size
    except FileNotFoundError:
        return None
    index = ShardIndex.from_bytes(content, str(path))
    if index.version.tag != header.tag(number):
        raise DataError(f"{str(path)!r} belongs to other records than {HEADER} beside it.")
    if index.version.size != size:
        name = str(path.with_suffix(""))
        raise DataError(f"{name!r} should have {index.version.size} bytes, but has {size}: it has been cut.")
    return index


@dataclass(frozen=True)
class Records:
    """What the parts of a folder hold, as their indexes say.

    Args:
        paths: Of the parts.
        sizes: Of the parts, in bytes.
        parts: Which part each sample lies in, `[n]`.
        keys: Of the samples, `[n]`.
        fields: The places of each field, `[n]`; or its values, `[n] int64`, where all samples have an integer: labels.
        class_names: The names of the classes 0, 1, ...
    """

    paths: Sequence[str]
    sizes: Sequence[int]
    parts: NDArray[np.int32]
    keys: PackedStrings
    fields: dict[str, Places | NDArray[np.int64]]
    class_names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.parts)

    def contents(self) -> dict[str, Any]:
        """Return what tells the samples' contents from others', without reading them."""
        return {
            name: (known.checksums, known.sizes) if isinstance(known, Places) else known
            for name, known in self.fields.items()
        }

    def version(self, index: int) -> str:
        """Return what tells a sample's contents from what they were before."""
        entries = ((name, known) for name, known in self.fields.items())
        return " ".join(f"{name}:{_version(known, index)}" for name, known in entries)


def _version(known: Any, index: int) -> str:
    if not isinstance(known, Places):
        return str(int(known[index]))
    return f"{int(known.sizes[index])}-{int(known.checksums[index]):08x}"  # type: ignore[index]  # records have them


def read_records(folder: Path) -> Records:
    """Return what the records in a folder are.

    Raises:
        FileNotFoundError: There is no such folder.
        DataError: It holds no records, not all of them, or those of another version; or a part has been cut.
    """
    header = read_header(folder)
    if header is None:
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {str(folder)!r}.")
        raise DataError(f"{str(folder)!r} holds no records: `kdp.write_records` writes them. It has no {HEADER}.")
    joined = JoinedIndexes(header.num_parts)
    for number in shown_if_slow(range(header.num_parts), header.num_parts, "opening records", "parts"):
        index = finished_index(folder, header, number)
        if index is None:
            name = part_name(number)
            raise DataError(
                f"{str(folder)!r} is not complete: {name!r} of {header.num_parts} parts is missing. "
                "`kdp.write_records` with the same arguments goes on where it was broken off."
            )
        joined.add(index)
    paths = [str(folder / part_name(number)) for number in range(header.num_parts)]
    sizes = [version.size for version in joined.versions]
    return Records(paths, sizes, joined.shards(), joined.keys(), joined.fields(), header.class_names)
