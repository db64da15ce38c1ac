"""What a reader of a file returns: its version and date, and bytes that are those that were requested."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any, NamedTuple, Protocol

from kdpipes.storage.retries import NoRangesError, TooLargeError, WrongResponseError

Content = bytes | memoryview  # a view of the memory of the library that has read it, where that saves a copy
MAX_BYTES = 1 << 31  # of a file that is read whole
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_MD5 = re.compile(r"tag:\"?([0-9a-f]{32})\"?")
_DATES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")
_TAGS = ("ETag", "etag", "generation", "md5Hash", "crc32c", *_DATES)


class Version(NamedTuple):
    """What distinguishes the contents of a file from earlier ones.

    Args:
        size: The size in bytes; -1 if it is unknown.
        tag: The kind and value of its ETag or modification time; empty if the storage has neither.
    """

    size: int
    tag: str


def md5_of(version: Version) -> str | None:
    """Return the MD5 of a file, in hexadecimal, if its tag may be that: the ETag of an object uploaded in one piece."""
    return found[1] if (found := _MD5.fullmatch(version.tag)) else None


class Stat(NamedTuple):
    """What storage says of a file.

    Args:
        version: Its version.
        modified: When it was changed last, in seconds since 1970; None if that is unknown.
        has_ranges: Whether a part of it costs one request, and no reading of what comes before.
    """

    version: Version
    modified: float | None = None
    has_ranges: bool = True


class Wanted(NamedTuple):
    """The bytes of a file from `start` up to `stop`; without `stop` a whole file, of at most `max_bytes`."""

    start: int = 0
    stop: int | None = None
    max_bytes: int = MAX_BYTES

    @property
    def most(self) -> int:
        """The maximum number of bytes of the response."""
        return self.max_bytes if self.stop is None else self.stop - self.start

    @property
    def range_header(self) -> dict[str, str]:
        """The header of a request for a range."""
        return {} if self.stop is None else {"Range": f"bytes={self.start}-{self.stop - 1}"}

    def check_head(self, is_part: bool, content_range: str | None, length: int | None) -> None:
        """Raise an error if the headers name other bytes than those requested."""
        if self.stop is not None and not is_part and (self.start or (length or 0) > self.most):
            raise NoRangesError(f"{self.most} bytes were requested, and the response is the whole file")
        found = _CONTENT_RANGE.match(content_range or "") if is_part else None
        if found is not None and int(found[1]) != self.start:
            raise WrongResponseError(f"bytes from {self.start} on were requested, but {content_range!r} was returned")
        self.check_length(length or 0)

    def check_length(self, length: int) -> None:
        """Raise if a body is longer than it may be."""
        if length <= self.most:
            return
        if self.stop is not None:
            raise NoRangesError(f"{self.most} bytes were requested, and more came")
        raise TooLargeError(f"it has more than {self.max_bytes:,} bytes, which is too much for a file of its kind")


WHOLE = Wanted()


class Response(NamedTuple):
    """The bytes of a response, and the version of the file that its headers state.

    Args:
        content: The bytes.
        tag: As in `Version`, its ETag or the date of its last change; empty if it has neither. Of storage whose
            responses and listings have different ones, it begins with another word, and cannot be compared.
    """

    content: Content
    tag: str = ""


class Reader(Protocol):
    """One file of any storage. Each call is a single attempt: `retried` repeats it, and `naming` names the file."""

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Return bytes of the file, all of it by default; fewer at its end."""

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file, to be read front to back from an offset on."""


def stat_in(info: Mapping[str, Any]) -> Stat:
    """Return what the entry of a file in a remote file system says."""
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    version = Version(-1 if info["size"] is None else int(info["size"]), f"tag:{tag}" if tag else "")
    dates = (_seconds(info[name]) for name in _DATES if info.get(name))
    return Stat(version, next((seconds for seconds in dates if seconds is not None), None))


def _seconds(date: Any) -> float | None:
    """Return a date of a remote file system, which may be a number, a `datetime` or a text, in seconds since 1970."""
    with suppress(ValueError, TypeError):
        if isinstance(date, str):
            is_iso = date[:1].isdigit()
            date = datetime.fromisoformat(date.replace("Z", "+00:00")) if is_iso else parsedate_to_datetime(date)
        return date.timestamp() if isinstance(date, datetime) else float(date)
    return None


def is_other(tag: str, expected: str) -> bool:
    """Return whether a response's tag belongs to another version than a tag that is known; False if that is unknown.

    >>> is_other('tag:"a"', 'tag:"b"'), is_other('tag:"a"', "tag:Sat, 25 Nov 2026"), is_other("", 'tag:"b"')
    (True, False, False)
    """
    (kind, _, value), (kind_expected, _, value_expected) = tag.partition(":"), expected.partition(":")
    # An ETag is quoted, a date is not.
    is_comparable = kind == kind_expected and value.endswith('"') == value_expected.endswith('"')
    return is_comparable and value != value_expected and bool(value and value_expected)
