"""Reading plain webdataset tars: front to back, or by member through an index of their headers."""

from __future__ import annotations

import json
import lzma
import os
import re
import tarfile
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from webdataset.tariterators import base_plus_ext

from kdpipes.errors import DataError
from kdpipes.storage.files import open_url
from kdpipes.storage.shared import PackedStrings

__all__ = ["Member", "TarIndex", "decode_member", "index_tars", "read_groups"]

_BLOCK = 512
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_UNREADABLE = (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error)
_COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


@dataclass(frozen=True)
class Member:
    """One file in a shard."""

    key: str
    field: str
    name: str
    offset: int
    size: int


def decode_member(field: str, content: bytes) -> Any:
    """Return the content of a member as webdataset's basic decoders do: numbers, text and JSON; bytes for all else.

    A class (`.cls`) that is no number is taken for the name of one.
    """
    kind = field.rsplit(".", 1)[-1].lower()
    if kind in _NUMBERS:
        text = content.decode("utf-8").strip()
        return int(text) if re.fullmatch(r"-?[0-9]+", text) else text
    if kind in _TEXTS:
        return content.decode("utf-8")
    return json.loads(content) if kind in {"json", "jsn"} else content


class _Front:
    """A file that is read front to back: knows where it is, and the last that it gave."""

    _KEPT = 128 * _BLOCK

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._position = 0
        self._chunks: deque[bytes] = deque()
        self._kept = 0
        self.size: int | None = None

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._position += len(content)
        self._chunks.append(content)
        self._kept += len(content)
        while self._kept - len(self._chunks[0]) >= self._KEPT:
            self._kept -= len(self._chunks.popleft())
        return content

    def block(self, offset: int) -> bytes:
        """Return the block at an offset that has been read just now."""
        start = self._kept - (self._position - offset)
        return b"".join(self._chunks)[start : start + _BLOCK] if start >= 0 else b""


class _Anywhere:
    """A file with positions: knows its size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size: int | None = file.seek(0, os.SEEK_END)
        file.seek(0)

    def block(self, offset: int) -> bytes:
        """Return the block at an offset."""
        self._file.seek(offset)
        return self._file.read(_BLOCK)


def _members(url: str, tar: tarfile.TarFile, source: _Front | _Anywhere) -> Iterator[tuple[Member, tarfile.TarInfo]]:
    """Yield the members that belong to samples; a tar that ends before its end mark is an error, not an end."""
    while True:
        try:
            info = tar.next()
        except _UNREADABLE as error:
            raise DataError(f"Shard {url!r} cannot be read from offset {tar.offset} on: {error}.") from error
        if info is None:
            break
        if source.size is not None and info.offset_data + info.size > source.size:
            raise DataError(
                f"Shard {url!r} is truncated in member {info.name!r} at offset {info.offset_data}: "
                f"{info.size} bytes are due, {source.size - info.offset_data} are there."
            )
        key, field = base_plus_ext(info.name)
        if key is not None and field and (info.issparse() or info.islnk() or info.issym()):
            raise DataError(
                f"Member {info.name!r} of shard {url!r} is a link or has holes: it has no content of its own."
            )
        if info.isfile() and key is not None and field:
            yield Member(key, field.lower(), info.name, info.offset_data, info.size), info
    last = source.block(tar.offset)
    if last != bytes(_BLOCK):
        what = "is damaged: no header of a member stands" if len(last) == _BLOCK else "is truncated: no end mark stands"
        raise DataError(f"Shard {url!r} {what} at offset {tar.offset}.")


def _grouped(url: str, members: Iterator[tuple[Member, Any]]) -> Iterator[list[tuple[Member, Any]]]:
    """Yield the members of one sample at a time: neighbours with the same key, as webdataset groups them."""
    group: list[tuple[Member, Any]] = []
    seen: set[str] = set()
    for member, content in members:
        if group and group[0][0].key != member.key:
            yield group
            group = []
        if not group and member.key in seen:
            raise DataError(
                f"Shard {url!r} has members of sample {member.key!r} in two places; they must stand together. "
                f"The second is {member.name!r} at offset {member.offset}."
            )
        seen.add(member.key)
        if any(other.field == member.field for other, _ in group):
            raise DataError(
                f"Shard {url!r} has two members for field {member.field!r} of sample {member.key!r}: "
                f"the second is {member.name!r} at offset {member.offset}."
            )
        group.append((member, content))
    if group:
        yield group


def read_groups(url: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, content of each field) of a tar's samples, front to back; compressed tars by their suffix.

    Raises:
        DataError: The tar is truncated, or is none; two members of a sample have the same extension.
    """
    compression = next((name for suffix, name in _COMPRESSIONS.items() if url.endswith(suffix)), None)
    with open_url(url, compression=compression) as file:
        source = _Front(file)
        try:
            tar = tarfile.open(fileobj=source, mode="r|", bufsize=64 * _BLOCK)  # type: ignore[call-overload]  # noqa: SIM115
        except _UNREADABLE as error:
            raise DataError(f"{url!r} cannot be read as a tar: {error}.") from error

        def contents() -> Iterator[tuple[Member, bytes]]:
            for member, info in _members(url, tar, source):
                try:
                    content = tar.extractfile(info).read()
                except _UNREADABLE as error:
                    raise DataError(
                        f"Shard {url!r} is truncated in member {member.name!r} at offset {member.offset}: {error}."
                    ) from error
                tar.members.clear()  # tarfile keeps every header that it has read
                yield member, content

        with tar:
            for group in _grouped(url, contents()):
                yield group[0][0].key, {member.field: content for member, content in group}


@dataclass(frozen=True)
class TarIndex:
    """Where each field of each sample lies.

    Args:
        keys: The samples' keys, `[n]`.
        shards: Which shard each sample lies in, `[n]`.
        offsets: Of each field, the offset of its content in the shard, `[n]`; -1 where a sample lacks it.
        sizes: Of each field, the size of its content in bytes, `[n]`.
    """

    keys: PackedStrings
    shards: NDArray[np.int32]
    offsets: dict[str, NDArray[np.int64]]
    sizes: dict[str, NDArray[np.int64]]


def _header_groups(url: str) -> Iterator[list[Member]]:
    with open_url(url) as file:
        source = _Anywhere(file)
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
        except _UNREADABLE as error:
            hint = (
                " Compressed tars have no positions: read them with `kdp.stream_shards`."
                if _is_compressed(file)
                else ""
            )
            raise DataError(f"{url!r} cannot be read as a plain tar: {error}.{hint}") from error
        with tar:
            for group in _grouped(url, _members(url, tar, source)):
                tar.members.clear()  # type: ignore[attr-defined]
                yield [member for member, _ in group]


def _is_compressed(file: IO[bytes]) -> bool:
    file.seek(0)
    return file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd"))


def index_tars(urls: list[str], names: list[str]) -> TarIndex:
    """Read the headers of all members of the tars, and return where they lie; contents are skipped."""
    keys: list[str] = []
    shards: list[int] = []
    places: dict[str, array[int]] = {}  # for each member, three numbers one after the other: sample, offset, size
    for shard, url in enumerate(urls):
        for group in _header_groups(url):
            key = group[0].key
            for member in group:
                places.setdefault(member.field, array("q")).extend((len(keys), member.offset, member.size))
            keys.append(f"{names[shard]}/{key}")
            shards.append(shard)
    offsets, sizes = {}, {}
    for field, entries in places.items():
        table = np.frombuffer(entries, dtype=np.int64).reshape(-1, 3)
        offsets[field], sizes[field] = np.full(len(keys), -1, dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
        offsets[field][table[:, 0]], sizes[field][table[:, 0]] = table[:, 1], table[:, 2]
    return TarIndex(PackedStrings(keys), np.array(shards, dtype=np.int32), offsets, sizes)
