"""The interface of file readers, and checks that responses contain the requested bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any, NamedTuple, Protocol

from kdpipes.storage.retries import NoRangesError, TooLargeError, WrongResponseError

Content = bytes | memoryview  # a view of the library's memory if that saves a copy
MAX_BYTES = 1 << 31  # maximum size of a file that is read as a whole
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_MD5 = re.compile(r"tag:\"?([0-9a-f]{32})\"?")
_DATES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")
_TAGS = ("ETag", "etag", "generation", "md5Hash", "crc32c", *_DATES)


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
