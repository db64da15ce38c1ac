"""Readers: one file of any storage, read by single attempts whose responses are checked.

fsspec returns only the bytes of a response. What HTTP servers and S3 say about them (`Content-Range`, `ETag`) is needed
to notice another version of the file, a wrong range, or a body without an end.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import IO, Any, NamedTuple, Protocol

from fsspec.asyn import sync
from fsspec.spec import AbstractFileSystem

from kdpipes.storage.requests import NoRangesError, TooLargeError, WrongResponseError, in_time, on_loop

Content = bytes | memoryview  # a view of the memory of the library that has read it, where that saves a copy
MAX_BYTES = 1 << 31  # of a file that is read whole
_WHOLE = 1 << 23  # bytes that a whole file is expected to have
_STEP = 1 << 20  # bytes that are skipped at a time
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_MD5 = re.compile(r"tag:\"?([0-9a-f]{32})\"?")
_PART, _MISSING = 206, 404
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


def version_in(info: Mapping[str, Any]) -> Version:
    """Return the version of a file from its entry in a remote file system."""
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    return Version(-1 if info["size"] is None else int(info["size"]), f"tag:{tag}" if tag else "")


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

    def stat(self) -> Stat:
        """Return size, version and date of the file."""

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Return bytes of the file, all of it by default; fewer at its end."""

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file, to be read front to back from an offset on."""


class FsspecReader:
    """A file that a file system of fsspec reads, within the time limit."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        self.url = url
        self.filesystem = filesystem
        self.path = path

    @property
    def _is_http(self) -> bool:
        protocol = self.filesystem.protocol
        return protocol == "http" or "http" in protocol

    @property
    def has_ranges(self) -> bool:
        """Whether its file system reads ranges, as far as is known without a request."""
        kind = type(self.filesystem)
        return getattr(kind, "async_impl", False) or kind.cat_file is not AbstractFileSystem.cat_file

    def stat(self) -> Stat:
        """Ask for the entry of the file, which may come from a listing."""
        info = ask(self.filesystem, "info", self.url, self.path)
        has_ranges = info.get("partial", True) if self._is_http else self.has_ranges
        return stat_in(info)._replace(has_ranges=has_ranges and info["size"] is not None)

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Make one request.

        Raises:
            NoRangesError: The server has returned the whole file in response to a range request.
            TooLargeError: A file that is wanted whole has too many bytes.
            WrongResponseError: Other bytes came.
            SilenceError: It takes longer than the time limit.
        """
        num_bytes = _WHOLE if wanted.stop is None else wanted.most
        kind = type(self.filesystem)
        read = _CHECKED.get(f"{kind.__module__}.{kind.__qualname__}")
        if read is not None:
            call = partial(sync, self.filesystem.loop, read, self.filesystem, self.path, wanted)
            response: Response = on_loop(call, self.url, num_bytes)
            return response
        part = {} if wanted.stop is None else {"start": wanted.start, "end": wanted.stop}
        content = ask(self.filesystem, "cat_file", self.url, self.path, num_bytes=num_bytes, **part)
        wanted.check_length(len(content))
        return Response(content)

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file; where it cannot seek, the bytes before `start` are read, too."""
        options = {"block_size": 0} if self._is_http else {}  # one response, no ranges
        file: IO[bytes] = self.filesystem.open(self.path, "rb", **options)
        if start and not self._is_http and file.seekable():
            file.seek(start)
            return file
        missing = start
        while missing:
            part = file.read(min(missing, _STEP))
            if not part:
                file.close()
                raise EOFError(f"it ends at byte {start - missing}")
            missing -= len(part)
        return file


def ask(filesystem: Any, method: str, url: str, *args: Any, num_bytes: int = 0, **kwargs: Any) -> Any:
    """Call a method of a file system, such as "info", within the time limit; errors name `url`.

    Args:
        filesystem: An fsspec file system.
        method: The name of the method.
        url: The URL of the file.
        args: Positional arguments of the method.
        num_bytes: The size of the response; large responses get more time.
        kwargs: Keyword arguments of the method.

    Raises:
        SilenceError: It takes longer than the time limit.
    """
    call = partial(getattr(filesystem, method), *args, **kwargs)
    # fsspec generates the synchronous methods of asynchronous file systems; only these take a timeout.
    is_generated = getattr(filesystem, "async_impl", False) and method in vars(filesystem)
    return on_loop(call, url, num_bytes) if is_generated else in_time(call, url, num_bytes)


def stat_in(info: Mapping[str, Any]) -> Stat:
    """Return what the entry of a file in a remote file system says."""
    dates = (_seconds(info[name]) for name in _DATES if info.get(name))
    return Stat(version_in(info), next((seconds for seconds in dates if seconds is not None), None))


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
    is_comparable = kind == kind_expected and _is_quoted(value) == _is_quoted(value_expected)
    return is_comparable and value != value_expected and bool(value and value_expected)


def _is_quoted(value: str) -> bool:
    return value.endswith('"')  # an ETag, not a date


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


_CHECKED: dict[str, Callable[[Any, str, Wanted], Awaitable[Response]]] = {
    "fsspec.implementations.http.HTTPFileSystem": _read_http,
    "s3fs.core.S3FileSystem": _read_s3,
}


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
