"""The interface of file readers, checks that responses contain the requested bytes, and the reader of local files.

Local files are read or mapped into memory shared by processes.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from kdpipes.core.errors import DataError
from kdpipes.storage.access import NoRangesError, TooLargeError, WrongResponseError

Content = bytes | memoryview  # a view of the library's memory if that saves a copy
MAX_BYTES = 1 << 31  # maximum size of a file that is read as a whole
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_MD5 = re.compile(r"tag:\"?([0-9a-f]{32})\"?")
_DATES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")
_TAGS = ("ETag", "etag", "generation", "md5Hash", "crc32c", *_DATES)


_KEPT = 256  # maximum number of maps of one `MappedFiles`, each of which holds a descriptor
_KEPT_SHARDS = 64
_RESIDENT = 1 << 26  # number of viewed bytes after which the pages are removed from this process's memory


class Version(NamedTuple):
    """The version of a file, which distinguishes its content from earlier ones.

    Args:
        size: The size in bytes; -1 if it is unknown.
        tag: The kind and value of its ETag or modification time; empty if the storage has neither.
    """

    size: int
    tag: str


def md5_of(version: Version) -> str | None:
    """Return the hexadecimal MD5 of a file if its tag may be one: the ETag of an object uploaded in one piece."""
    return match[1] if (match := _MD5.fullmatch(version.tag)) else None


class Stat(NamedTuple):
    """The metadata of a file.

    Args:
        version: Its version.
        modified: The time of its last change, in seconds since 1970; None if it is unknown.
        has_ranges: Whether a range takes a single request, without reading the bytes before it.
    """

    version: Version
    modified: float | None = None
    has_ranges: bool = True


class Wanted(NamedTuple):
    """A request for the bytes from `start` to `stop`, or without `stop`, for a whole file of at most `max_bytes`."""

    start: int = 0
    stop: int | None = None
    max_bytes: int = MAX_BYTES

    @property
    def most(self) -> int:
        """The maximum number of bytes of the response."""
        return self.max_bytes if self.stop is None else self.stop - self.start

    @property
    def range_header(self) -> dict[str, str]:
        """The `Range` header of the request; empty for a whole file."""
        return {} if self.stop is None else {"Range": f"bytes={self.start}-{self.stop - 1}"}

    def check_head(self, is_part: bool, content_range: str | None, length: int | None) -> None:
        """Raise an error if the headers describe bytes other than those requested."""
        if self.stop is not None and not is_part and (self.start or (length or 0) > self.most):
            raise NoRangesError(f"{self.most} bytes were requested, but the response is the whole file")
        match = _CONTENT_RANGE.match(content_range or "") if is_part else None
        if match is not None and int(match[1]) != self.start:
            raise WrongResponseError(f"bytes from {self.start} on were requested, but {content_range!r} was returned")
        self.check_length(length or 0)

    def check_length(self, length: int) -> None:
        """Raise an error if a body is too long."""
        if length <= self.most:
            return
        if self.stop is not None:
            raise NoRangesError(f"{self.most} bytes were requested, but more arrived")
        raise TooLargeError(f"it has more than {self.max_bytes:,} bytes, too many for a file of its kind")


WHOLE = Wanted()


class Response(NamedTuple):
    """The bytes of a response, and the tag of the file in its headers.

    Args:
        content: The bytes.
        tag: As in `Version`, the ETag or the date of the last change; empty if the response has neither. If responses
            and listings of a storage have different tags, it begins with another word and is not comparable.
    """

    content: Content
    tag: str = ""


class Reader(Protocol):
    """One file of any storage. Each call is a single attempt: `retried` repeats it, and `naming` names the file."""

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Return bytes of the file, by default all of them; fewer at the end of the file."""

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file for sequential reading from an offset."""


def stat_in(info: Mapping[str, Any]) -> Stat:
    """Convert the entry of a file in a remote file system to a Stat."""
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    version = Version(-1 if info["size"] is None else int(info["size"]), f"tag:{tag}" if tag else "")
    dates = (_seconds(info[name]) for name in _DATES if info.get(name))
    return Stat(version, next((seconds for seconds in dates if seconds is not None), None))


def _seconds(date: Any) -> float | None:
    """Convert a date of a remote file system (a number, a `datetime` or a string) to seconds since 1970."""
    with suppress(ValueError, TypeError):
        if isinstance(date, str):
            is_iso = date[:1].isdigit()
            date = datetime.fromisoformat(date.replace("Z", "+00:00")) if is_iso else parsedate_to_datetime(date)
        return date.timestamp() if isinstance(date, datetime) else float(date)
    return None


def is_other(tag: str, expected: str) -> bool:
    """Return whether a response's tag differs from the expected one; False if they cannot be compared.

    >>> is_other('tag:"a"', 'tag:"b"'), is_other('tag:"a"', "tag:Sat, 25 Nov 2026"), is_other("", 'tag:"b"')
    (True, False, False)
    """
    (kind, _, value), (kind_expected, _, value_expected) = tag.partition(":"), expected.partition(":")
    # An ETag is quoted, a date is not.
    is_comparable = kind == kind_expected and value.endswith('"') == value_expected.endswith('"')
    return is_comparable and value != value_expected and bool(value and value_expected)


@dataclass
class LocalReader:
    """A local file."""

    path: str

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Return bytes of the file. A whole file is read; parts are taken from a cached map."""
        if wanted.stop is not None:
            return Response(read_span(self.path, wanted.start, wanted.most))
        with open(self.path, "rb", buffering=0) as file:  # noqa: PTH123 - a `Path` takes a quarter longer
            return Response(file.readall())

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file."""
        file = open(self.path, "rb")  # noqa: PTH123, SIM115 - as above
        file.seek(start)
        return file


def map_file(descriptor: int) -> mmap.mmap:
    """Map a whole open file for reading, so that processes share its pages.

    Raises:
        ValueError: The file is empty.
        OSError: The file cannot be mapped.
    """
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


class _Map:
    """A file in memory. Views and threads that still read it keep it alive after it was dropped."""

    __slots__ = ("__weakref__", "buffer", "content", "identity", "version")

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            self.identity = _identity(status)
            self.version = Version(status.st_size, f"changed:{status.st_mtime_ns}")
            self.buffer = map_file(file.fileno()) if status.st_size else b""
            self.content = memoryview(self.buffer)

    def release_pages(self) -> None:
        """Remove the pages from this process's memory. Views stay valid, because reading them maps the pages again."""
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # Windows does not have `madvise`
            self.buffer.madvise(mmap.MADV_DONTNEED)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_alive: weakref.WeakValueDictionary[str, _Map] = weakref.WeakValueDictionary()  # copies of a pipe share maps


class MappedFiles:
    """Maps files when they are first read, and keeps the most recently used maps.

    The maps are freed with this object and its views. Forked processes share them; a copy of this object creates new
    maps. A file that has been replaced, truncated or changed is mapped again: each read first checks the size, because
    reading beyond the end of the file kills the process. Pages are removed from the process's memory after 64 MiB of
    views.
    """

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        self._maps: OrderedDict[str, _Map] = OrderedDict()
        self._num_viewed = 0  # bytes viewed since pages were released

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[int | None]]:
        return MappedFiles, (self._number,)

    def view(self, path: str, start: int, size: int, num_bytes: int) -> memoryview:
        """Return a read-only view of a part of a file.

        Raises:
            DataError: The file is missing, or has another length.
        """
        try:
            status = os.stat(path)  # noqa: PTH116 - of each read
            if status.st_size != num_bytes:
                raise DataError(
                    f"{path!r} should have {num_bytes} bytes, but has {status.st_size}. Write or copy it again."
                )
            if start < 0 or start + size > num_bytes:
                raise DataError(f"{path!r} has {num_bytes} bytes, but {size} are due at offset {start}.")
            # The system counts mapped pages as the process's memory until it needs that memory, although the page
            # cache keeps the data: every worker would appear as large as the dataset. Mapping the pages again costs 3
            # us per 110 KB, too much for `read_span`: copying undecoded members would take 30 % longer.
            self._num_viewed += size  # threads may lose updates, which only delays the release
            if self._num_viewed >= _RESIDENT:
                self._num_viewed = 0
                for each in list(self._maps.values()):
                    each.release_pages()
            return self.mapped(path, status).content[start : start + size]
        except OSError as error:
            raise DataError(f"{path!r} cannot be read: {error.strerror}.") from error

    def mapped(self, path: str, status: os.stat_result) -> _Map:
        """Return the map of a file, given its current status."""
        file = self._maps.get(path)
        if file is None or file.identity != _identity(status):
            file = _alive.get(path)
            if file is None or file.identity != _identity(status):
                file = _alive[path] = _Map(path)
            self._maps[path] = file
        try:
            self._maps.move_to_end(path)
            while len(self._maps) > (self._number or _KEPT):
                self._maps.popitem(last=False)
        except KeyError:  # another thread has just dropped it
            pass
        return file


_shards = MappedFiles(_KEPT_SHARDS)


def read_span(path: str, offset: int, size: int, version: Version | None = None) -> bytes:
    """Return `size` bytes of a file from `offset` on, or fewer at its end. The last 64 files stay mapped.

    Raises:
        DataError: The file differs from the `version` that was indexed.
    """
    file = _shards.mapped(path, os.stat(path))  # noqa: PTH116 - of each read
    content = file.buffer[offset : offset + size]
    # The reader reports a truncated file.
    if version is not None and file.version != version and len(content) == size:
        raise DataError(
            f"Shard {path!r} has been replaced, or written to, since it was opened: it had {version.size} bytes, and "
            f"now has {file.version.size} and another date. Open it again, `kdp.open_shards(...)`, to index it again."
        )
    return content
