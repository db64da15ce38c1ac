"""Files elsewhere, front to back: read ahead, and read on from where a request broke off."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

from fsspec.spec import AbstractFileSystem

from kdpipes.core.errors import as_cause
from kdpipes.storage.files import Version, remote_info, version_in
from kdpipes.storage.ranges import Threads
from kdpipes.storage.refusals import what_went_wrong
from kdpipes.storage.retries import retried
from kdpipes.storage.time_limit import SilenceError, ask, in_time, limited, time_limit
from kdpipes.storage.urls import is_local

__all__ = ["BrokenStreamError", "RemoteStream", "StreamsAhead"]

_FIRST_CHUNK, _LARGEST_CHUNK = 1 << 20, 1 << 22
_NUM_AHEAD = 6  # chunks under way, of a file that is being read on
_NUM_BEGUN = 4  # of the file that comes next
_NUM_AT_FIRST = 3  # of one of which nobody may want more than the beginning


class BrokenStreamError(Exception):
    """A file that cannot be read on: says so in words that follow its name."""


class _ChangedError(Exception):
    """A file that is not the one that was opened."""


class _NoRangesError(Exception):
    """A server that gives more than the part that it is asked for."""


class _Source:
    """A file elsewhere, as one process sees it: gives chunks, tried again where that may help.

    Args:
        url: Of the file.
        version: That of the file when it was opened, if it has been; it must not have changed since.
    """

    def __init__(self, url: str, version: Version | None = None, *, has_ranges: bool = True) -> None:
        self._url = url
        self._filesystem, self._path, info = remote_info(url)
        self.version = version_in(info)
        self.size = info["size"]
        self.has_ranges = has_ranges and self.size is not None and _has_ranges(self._filesystem, info)
        self._file: Any = None
        self._offset = 0
        if version is not None:
            self._refuse_change(version)

    def chunk(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`, or up to the end, where only reading tells where that is."""
        num_tries = 0

        def attempt() -> bytes:
            nonlocal num_tries
            num_tries += 1
            read = self._range if self.has_ranges else self._read_on
            return in_time(partial(read, start, stop), self._url, stop - start)

        try:
            content = retried(attempt, final=(_NoRangesError,) if self.has_ranges else (_NoRangesError, SilenceError))
        except _NoRangesError:
            raise
        except Exception as error:
            self._refuse_as_changed(error)
            raise
        if num_tries > 1 or (self.has_ranges and start and stop == self.size):
            retried(self._check_again, final=(_ChangedError,))  # parts of two files make none
        return content

    def close(self) -> None:
        """Let go of the file; to be called where chunks are read."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _check_again(self) -> None:
        """Refuse a file that has been replaced."""
        self._filesystem.invalidate_cache(self._path)  # it may remember a listing
        self._refuse_change(version_in(ask(self._filesystem, "info", self._url, self._path)))

    def _refuse_as_changed(self, error: Exception) -> None:
        """Refuse a file that has been replaced, if that is to be learned: it would be the reason for an error."""
        try:
            self._check_again()
        except _ChangedError:
            raise
        except Exception:
            raise error from None

    def _refuse_change(self, version: Version) -> None:
        if version != self.version:
            raise _ChangedError("it has changed since it was opened")

    def _range(self, start: int, stop: int) -> bytes:
        if _is_http(self._filesystem):
            content = self._http_range(start, stop)
        else:
            content = self._filesystem.cat_file(self._path, start=start, end=stop)
        if len(content) > stop - start:
            raise _NoRangesError
        if len(content) < stop - start:
            raise EOFError(f"{stop - start} bytes are due, {len(content)} came")
        return content

    def _http_range(self, start: int, stop: int) -> bytes:
        """Return a part of a file of a server that may give all of it, of which no more is taken than is wanted."""
        with self._filesystem.open(self._path, "rb", size=self.size, cache_type="none") as file:
            file.seek(start)
            try:
                content: bytes = file.read(stop - start)
            except ValueError as error:  # so fsspec says that all of it came
                raise _NoRangesError from error
        return content

    def _read_on(self, start: int, stop: int) -> bytes:
        try:
            file = self._opened_at(start)
            parts: list[bytes] = []
            while self._offset < stop and (part := file.read(stop - self._offset)):
                parts.append(part)
                self._offset += len(part)
            if self.size is not None and self._offset < stop:
                raise EOFError(f"{stop - start} bytes are due, {self._offset - start} came")
        except BaseException:
            self.close()
            raise
        return b"".join(parts)

    def _opened_at(self, start: int) -> Any:
        is_http = _is_http(self._filesystem)
        if self._file is None:
            options = {"block_size": 0} if is_http else {}  # one answer, no ranges: it cannot seek
            self._file, self._offset = self._filesystem.open(self._path, "rb", **options), 0
        if self._offset != start and not is_http and self._file.seekable():
            self._offset = self._file.seek(start)
        while self._offset < start:
            part = self._file.read(min(start - self._offset, _FIRST_CHUNK))
            if not part:
                raise EOFError(f"it ends at byte {self._offset}")
            self._offset += len(part)
        return self._file


def _is_http(filesystem: Any) -> bool:
    return "http" in filesystem.protocol or filesystem.protocol == "http"


def _has_ranges(filesystem: Any, info: dict[str, Any]) -> bool:
    """Return whether a part of a file costs one request, and no reading of what comes before."""
    if _is_http(filesystem):
        return bool(info.get("partial", True))
    kind = type(filesystem)
    return bool(getattr(kind, "async_impl", False)) or kind.cat_file is not AbstractFileSystem.cat_file


class RemoteStream:
    """A file elsewhere that is read front to back, ahead of need, by daemon threads.

    A request that fails is made again, from where it broke off. The threads end when the stream is closed or dropped;
    a process that was forked has its own.

    Args:
        url: Of the file.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The storage cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._chunk, self._at = b"", 0
        self._begin, self._wanted = 0, 0  # of the chunk; of the next one that is to be asked for
        self._coming: deque[Future[bytes]] = deque()
        self._num_ahead = min(_NUM_AT_FIRST, _NUM_AHEAD)
        self.at_end: Callable[[int], object] | None = None  # told how many chunks are under way when they are the last
        self._source = _Source(url)
        self._threads: Threads | None = None
        self._process, self._seconds = os.getpid(), time_limit()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> RemoteStream:
        """Let the threads read what comes first."""
        self._num_ahead = min(_NUM_BEGUN, _NUM_AHEAD)
        self._ask()
        return self

    def go_on(self, num_ahead: int) -> RemoteStream:
        """Let the threads read so many chunks ahead, or more: all of the file will be read."""
        self._num_ahead = max(num_ahead, self._num_ahead)
        self._ask()
        return self

    def close(self) -> None:
        """End the threads; nothing can be read any more."""
        self._forget()
        threads, self._threads = self._threads, None
        if threads is not None and self._process == os.getpid():
            threads.submit(self._source.close)

    def readable(self) -> bool:
        """Return True, as files do."""
        return True

    def read(self, size: int) -> bytes:
        """Return some bytes, `size` at most; none at the end.

        Raises:
            BrokenStreamError: The file cannot be read on, or is no longer the one that was opened.
        """
        if self._at == len(self._chunk):
            self._begin, self._at = self._begin + len(self._chunk), 0
            self._chunk = b""
            self._chunk = self._next_chunk()
        start, self._at = self._at, min(self._at + size, len(self._chunk))
        return self._chunk[start : self._at]

    def _next_chunk(self) -> bytes:
        try:
            with limited(self._seconds):
                return self._asked_anew()
        except Exception as error:
            what = what_went_wrong(self._url, error)
            raise BrokenStreamError(f"cannot be read at offset {self._begin}: {what}") from as_cause(error)

    def _asked_anew(self) -> bytes:
        """Return the next chunk, with another view of the file if need be."""
        if self._process != os.getpid():
            self._renew(has_ranges=self._source.has_ranges)
        try:
            return self._asked()
        except _NoRangesError:
            self._renew(has_ranges=False)
            return self._asked()

    def _asked(self) -> bytes:
        self._ask()
        coming = self._coming.popleft() if self._coming else None
        if self.at_end is not None and self._wanted == self._source.size:
            self.at_end(len(self._coming))
        content = b"" if coming is None else coming.result()
        self._num_ahead = _NUM_AHEAD if self._begin else self._num_ahead
        self._ask()
        return content

    def _ask(self) -> None:
        """Let the threads read the chunks that come next."""
        if self._threads is None:
            self._threads = Threads(_NUM_AHEAD if self._source.has_ranges else 1, "kdpipes-stream")
        end = self._source.size
        while len(self._coming) < self._num_ahead and (end is None or self._wanted < end):
            start = self._wanted
            stop = start + min(max(start, _FIRST_CHUNK), _LARGEST_CHUNK)
            self._wanted = stop if end is None else min(stop, end)
            self._coming.append(self._threads.submit(partial(self._source.chunk, start, self._wanted)))

    def _renew(self, *, has_ranges: bool) -> None:
        """Go on with another view of the file, where the chunk ends that was read last."""
        self._forget()
        self._source, self._threads = _Source(self._url, self._source.version, has_ranges=has_ranges), None
        self._wanted, self._process = self._begin, os.getpid()

    def _forget(self) -> None:
        coming, self._coming = self._coming, deque()
        if self._process == os.getpid():  # a thread of a parent may hold the lock of a future for ever
            for future in coming:
                future.cancel()


class StreamsAhead:
    """Files elsewhere that are read one after the other: while one is read, the next one is begun.

    Args:
        urls: Of the files, in order; those of this machine are passed over.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._next = dict(pairwise(url for url in urls if not is_local(url)))
        self._threads: Threads | None = None
        self._seconds = time_limit()
        self._begun: tuple[str, int, Future[RemoteStream]] | None = None

    def open(self, url: str) -> RemoteStream:
        """Return the stream of one of the files, and begin the next one.

        Raises:
            FileNotFoundError: There is no such file.
            DataError: The storage cannot be reached.
        """
        with limited(self._seconds):
            return self._open(url)

    def _open(self, url: str) -> RemoteStream:
        (known, process, begun), self._begun = self._begun or ("", 0, Future()), None
        is_begun = known == url and process == os.getpid()  # threads of a parent do nothing in a forked process
        stream = begun.result().go_on(_NUM_AHEAD) if is_begun else RemoteStream(url)
        if (following := self._next.get(url)) is not None:
            self._threads = self._threads or Threads(1, "kdpipes-stream")
            begun = self._threads.submit(lambda: RemoteStream(following).begin())
            self._begun = following, os.getpid(), begun
            stream.at_end = partial(_go_on, begun, os.getpid())
        return stream

    def close(self) -> None:
        """Let go of what has been begun and will not be read."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[1] == os.getpid():
            begun[2].add_done_callback(_close_begun)


def _go_on(begun: Future[RemoteStream], process: int, num_under_way: int) -> None:
    """Let the next file have the threads' places that are free, of as many as one file may have."""
    if process == os.getpid() and begun.done() and not begun.cancelled() and begun.exception() is None:
        begun.result().go_on(_NUM_AHEAD - num_under_way)


def _close_begun(begun: Future[RemoteStream]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result().close()
