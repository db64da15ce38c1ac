"""Requests for bytes whose responses are checked: the range, the version, and the size of a whole file.

fsspec returns only the bytes of a response. What HTTP servers and S3 say about them (`Content-Range`, `ETag`) is needed
to notice another version of the file, a wrong range, or a body without an end.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from kdpipes.core.errors import DataError

Content = bytes | memoryview  # a view of the memory of the library that has read it, where that saves a copy
MAX_BYTES = 1 << 31  # of a file that is read whole
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_PART, _MISSING = 206, 404


class NoRangesError(DataError):
    """A server returned a whole file in response to a range request."""


class TooLargeError(DataError):
    """A file has more bytes than any file of its kind."""


class WrongResponseError(Exception):
    """A response does not contain the requested bytes; another attempt may succeed."""


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


class Response(NamedTuple):
    """The bytes of a response, and the version of the file that its headers state.

    Args:
        content: The bytes.
        tag: As in `Version`, its ETag or the date of its last change; empty if it has neither. Of storage whose
            responses and listings have different ones, it begins with another word, and cannot be compared.
    """

    content: Content
    tag: str = ""


def is_other(tag: str, expected: str) -> bool:
    """Return whether a response's tag belongs to another version than a tag that is known; False if that is unknown.

    >>> is_other('tag:"a"', 'tag:"b"'), is_other('tag:"a"', "tag:Sat, 25 Nov 2026"), is_other("", 'tag:"b"')
    (True, False, False)
    """
    (kind, _, value), (kind_expected, _, value_expected) = tag.partition(":"), expected.partition(":")
    is_comparable = kind == kind_expected and _is_quoted(value) == _is_quoted(value_expected)
    return is_comparable and value != value_expected and bool(value and value_expected)


def _is_quoted(value: str) -> bool:
    return value.endswith('"')  # an ETag, not a date


AsyncRead = Callable[[Any, str, Wanted], Awaitable[Response]]


async def _read_http(filesystem: Any, url: str, wanted: Wanted) -> Response:
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), **wanted.range_header, "Accept-Encoding": "identity"}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(url), headers=headers, **options) as response:
        if response.status == _MISSING:
            raise FileNotFoundError(url)
        response.raise_for_status()
        known: Mapping[str, str] = response.headers
        is_part = response.status == _PART
        wanted.check_head(is_part, known.get("Content-Range"), response.content_length)
        content = await _body(response.content.read, wanted)
        if not is_part and "Content-MD5" in known:
            _check_md5(content, known["Content-MD5"])
    return Response(content, _tag(known.get("ETag") or known.get("Last-Modified")))


async def _read_s3(filesystem: Any, path: str, wanted: Wanted) -> Response:
    bucket, key, version = filesystem.split_path(path)
    options = {**wanted.range_header, **({"VersionId": version} if version else {})}
    response = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **options)
    body = response["Body"]
    try:
        is_part = response["ResponseMetadata"]["HTTPStatusCode"] == _PART
        wanted.check_head(is_part, response.get("ContentRange"), response.get("ContentLength"))
        content = await _body(body.read, wanted)
    finally:
        body.close()
    return Response(content, _tag(response.get("ETag")))


_READERS: dict[str, AsyncRead] = {
    "fsspec.implementations.http.HTTPFileSystem": _read_http,
    "s3fs.core.S3FileSystem": _read_s3,
}


def checked_read(filesystem: Any) -> AsyncRead | None:
    """Return the function that reads from a file system with these checks; None if there is none."""
    kind = type(filesystem)
    return _READERS.get(f"{kind.__module__}.{kind.__qualname__}")


async def _body(read: Callable[[int], Awaitable[bytes]], wanted: Wanted) -> bytes:
    """Return a body, of which no more is read than it may have."""
    parts: list[bytes] = []
    length = 0
    while part := await read(wanted.most + 1 - length):
        parts.append(part)
        length += len(part)
        wanted.check_length(length)
    return b"".join(parts)


def _check_md5(content: bytes, expected: str) -> None:
    found = b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    if found != expected:
        raise WrongResponseError(f"the body has the MD5 {found!r}, but its header says {expected!r}")


def _tag(value: str | None) -> str:
    return f"tag:{value}" if value else ""
