"""Remote files: prefetched ranges, and streams that resume after failed requests.

All requests for the contents of remote shards are made here, with the retries and time limits of `retries`.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.access import (
    NUM_SILENT,
    NoRangesError,
    SilenceError,
    Threads,
    current_access,
    hedged,
    in_time,
    retried,
    using,
    what_went_wrong,
)
from kdpipes.storage.files import ReplacedError, naming, reader_of, reject_other, stat_of
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.object_store import remote_reader
from kdpipes.storage.readers import Content, Stat, Version, Wanted, is_other
from kdpipes.storage.urls import is_local

_FIRST_CHUNK = 1 << 20
_LARGEST_CHUNK = 1 << 23
_MOST_CONFIRMED = 100_000
_NUM_AHEAD = 6  # chunks in flight of a file that is read to its end
_NUM_WHOLE = 8  # chunks of a file of which everything will be needed, but not soon
_NUM_BEGUN = 4  # chunks of the next file
_NUM_AT_FIRST = 3  # chunks of a file of which perhaps only the beginning is needed


class BrokenStreamError(Exception):
    """A file whose reading cannot continue. The message follows the file's name."""


class Span(NamedTuple):
    """Bytes of a file from `start` up to `stop`, and the version that the file must have, if known."""

    url: str
    start: int
    stop: int
    version: Version = Version(-1, "")


def read_range(span: Span, *, num_silent: int = NUM_SILENT) -> Content:
    """Return the bytes of a span. Temporary errors are retried.

    Raises:
        ReplacedError: The file has another version.
        NoRangesError: The server does not support ranges.
        DataError: The file cannot be read.
    """
    if span.start >= span.stop:
        return b""
    try:
        return retried(partial(hedged, partial(_read_once, span)), num_silent=num_silent, final=(ReplacedError,))
    except ReplacedError:
        raise
    except NoRangesError as error:
        raise NoRangesError(
            f"Shard {span.url!r} is on a server that does not support range requests: {error}. Use "
            '`kdp.open_shards(fetch="shards")`, `kdp.stream_shards` or `kdpipes.write.copy_to_local`.'
        ) from None
    except Exception as error:
        what = what_went_wrong(span.url, error)
        raise DataError(f"Shard {span.url!r} cannot be read at offset {span.start}: {what}.") from as_cause(error)


def _read_once(span: Span) -> Content:
    size = span.stop - span.start
    content, tag = reader_of(span.url).read(Wanted(span.start, span.stop))
    if is_other(tag, span.version.tag) and (span.url, tag) not in _confirmed:
        reject_other(span.url, span.version)
        if len(_confirmed) >= _MOST_CONFIRMED:
            _confirmed.clear()
        _confirmed.add((span.url, tag))
    if len(content) != size:
        raise DataError(f"{size} bytes were requested, {len(content)} received")
    return content


# Tags in responses that differ from those of the same files in listings, as with some servers.
_confirmed: set[tuple[str, str]] = set()


@dataclass
class _Request:
    """A request in flight or done, and the number of prefetched reads of it still to come."""

    coming: Future[Content]
    num_due: int = 0


@dataclass(eq=False)
class RangeReader:
    """Reads spans. Threads read prefetched spans ahead, merging nearby spans into one request.

    Spans stay in memory until they have been read as often as they were prefetched, and after that until `max_spent`
    bytes of other spans have been read. Safe for threads and forked processes. Copies start empty.

    Args:
        read_file: A function that replaces `read_range` if all spans are whole files.
        max_gap: The maximum number of bytes between two prefetched spans that are merged into one request.
        max_span: The maximum size in bytes of a request for several spans.
        max_bytes: The maximum number of bytes in memory. Beyond that, the spans prefetched first are dropped.
        max_spent: The maximum number of bytes kept in spans that have been read as often as they were prefetched.
        num_threads: The maximum number of requests in flight.
    """

    read_file: Callable[[Span], bytes] | None = None
    max_gap: int = 1 << 16
    max_span: int = 1 << 23
    max_bytes: int = 1 << 28
    max_spent: int = 1 << 25
    num_threads: int = 64

    def __post_init__(self) -> None:
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeReader, tuple(getattr(self, each.name) for each in fields(self))

    def forget(self) -> None:
        """Reset this object, without threads and spans."""
        self._lock = threading.Lock()
        self._threads = Threads(self.num_threads, "kdpipes-ranges")
        self._ahead: OrderedDict[Span, _Request] = OrderedDict()  # in the order of prefetching
        self._spent: OrderedDict[Span, None] = OrderedDict()  # in the order of reading
        self._by_url: dict[str, list[Span]] = {}  # sorted
        self._longest = 0
        self._num_bytes = self._num_spent = 0

    def prefetch(self, spans: Iterable[Span]) -> None:
        """Start to read spans that will be needed, as long as there is room for them."""
        with self._lock:
            due: set[Span] = set()
            missing = []
            for span in spans:
                if span.start >= span.stop:
                    continue
                if (cover := self._covering(span)) is None:
                    missing.append(span)
                else:
                    self._expect(cover)
                    due.add(cover)
            for span in dict.fromkeys(missing) if self.read_file else _merged(missing, self.max_gap, self.max_span):
                if not self._make_room(span.stop - span.start, due):
                    break
                due.add(span)
                self._add(span)
            for span in missing:
                if (cover := self._covering(span)) is not None:
                    self._expect(cover)

    def read(self, span: Span) -> bytes:
        """Return the bytes of a span."""
        if span.start >= span.stop:
            return b""
        with self._lock:
            cover = self._covering(span)
            request = None if cover is None else self._ahead[cover]
        if cover is None or request is None:
            return bytes(self._read_now(span))
        try:
            content = request.coming.result()
        except Exception:
            with self._lock:
                if self._ahead.get(cover) is request:
                    self._remove(cover)
            # A merged request that failed may succeed for a single span. It may time out only once more.
            return bytes(self._read_now(span, num_silent=1))
        with self._lock:
            if self._ahead.get(cover) is request:
                self._note_read(cover, request)
        if self.read_file is not None:
            return bytes(content)
        return bytes(content[span.start - cover.start : span.stop - cover.start])

    def _read_now(self, span: Span, num_silent: int = NUM_SILENT) -> Content:
        return read_range(span, num_silent=num_silent) if self.read_file is None else self.read_file(span)

    def _covering(self, span: Span) -> Span | None:
        if span in self._ahead:
            return span
        spans = self._by_url.get(span.url, [])
        for index in range(bisect_right(spans, Span(span.url, span.start, sys.maxsize)) - 1, -1, -1):
            if spans[index].stop >= span.stop:
                return spans[index]
            if spans[index].start + self._longest < span.stop:
                return None
        return None

    def _expect(self, span: Span) -> None:
        """Keep a span in memory for one more read."""
        self._ahead[span].num_due += 1
        self._ahead.move_to_end(span)
        self._forget_spent(span)

    def _note_read(self, span: Span, request: _Request) -> None:
        request.num_due = max(request.num_due - 1, 0)  # reads without prefetching do not count
        if request.num_due:
            return
        self._forget_spent(span)
        self._spent[span] = None
        self._num_spent += span.stop - span.start
        while self._num_spent > self.max_spent:
            self._remove(next(iter(self._spent)))

    def _forget_spent(self, span: Span) -> None:
        if span in self._spent:
            del self._spent[span]
            self._num_spent -= span.stop - span.start

    def _make_room(self, size: int, due: set[Span]) -> bool:
        """Drop spans that were read, then the oldest ones, except those in `due`; return whether there is room."""
        while self._num_bytes + size > self.max_bytes and self._ahead:
            oldest = next(iter(self._spent or self._ahead))
            if oldest in due:
                break
            self._remove(oldest)
        return self._num_bytes + size <= self.max_bytes or not self._ahead

    def _add(self, span: Span) -> None:
        self._ahead[span] = _Request(self._threads.submit(partial(self._read_now, span, 1)))
        insort(self._by_url.setdefault(span.url, []), span)
        self._longest = max(self._longest, span.stop - span.start)
        self._num_bytes += span.stop - span.start

    def _remove(self, span: Span) -> None:
        self._ahead.pop(span).coming.cancel()
        self._forget_spent(span)
        spans = self._by_url[span.url]
        del spans[bisect_left(spans, span)]
        if not spans:
            del self._by_url[span.url]
        self._num_bytes -= span.stop - span.start


def _merged(spans: Iterable[Span], max_gap: int, max_span: int) -> Iterator[Span]:
    """Yield the spans in sorted order, with nearby spans merged."""
    current: Span | None = None
    for span in sorted(set(spans)):
        if current is not None:
            is_near = span.url == current.url and span.start - current.stop <= max_gap
            stop = max(span.stop, current.stop)
            if is_near and (stop - current.start <= max_span or stop == current.stop):
                current = current._replace(stop=stop)
                continue
            yield current
        current = span
    if current is not None:
        yield current


class _ChangedError(Exception):
    """The file is no longer the one that was opened."""


class _RemoteFile:
    """A remote file as seen by one process, which returns chunks and retries requests.

    Args:
        url: The URL of the file.
        version: The version that the file must have.
        has_ranges: Whether to use range requests. False reads the whole file in one request.
        is_known: Whether `version` is assumed to be current, so that no request is made to check it.
    """

    def __init__(
        self, url: str, version: Version | None = None, *, has_ranges: bool = True, is_known: bool = False
    ) -> None:
        self._url = url
        self._is_known = is_known
        with naming(url):  # errors of any class: creating the file system may fail here
            self._reader = remote_reader(url, *filesystem_of(url))
        if version is not None and is_known:
            stat = Stat(version, has_ranges=self._reader.has_ranges)
        else:
            stat = stat_of(url)
        self.version = stat.version
        self.size = None if stat.version.size < 0 else stat.version.size
        self.has_ranges = has_ranges and stat.has_ranges and self.size is not None
        self._file: Any = None
        self._tags: dict[str, str] = {}  # the tag of the first response
        if version is not None:
            self._reject_change(version)

    def chunk(self, start: int, stop: int) -> Content:
        """Return the bytes from `start` to `stop`, or to the end of a file of unknown size."""
        num_tries = 0

        def attempt() -> Content:
            nonlocal num_tries
            num_tries += 1
            if self.has_ranges:
                return hedged(partial(self._range, start, stop))
            return in_time(partial(self._read_on, start, stop), self._url, stop - start)

        final = (_ChangedError,) if self.has_ranges else (_ChangedError, SilenceError)
        try:
            content = retried(attempt, final=final)
        except (NoRangesError, _ChangedError):
            raise
        except Exception as error:
            try:
                self._check_again()
            except _ChangedError:  # the reason for the error
                raise
            except Exception:
                raise error from None
            raise
        if not self._is_known and (num_tries > 1 or (self.has_ranges and start and stop == self.size)):
            retried(self._check_again, final=(_ChangedError,))  # parts of two versions must not be mixed
        return content

    def close(self) -> None:
        """Close the file. Must be called in the thread that reads chunks."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _check_again(self) -> None:
        """Raise if the file has been replaced."""
        self._reader.filesystem.invalidate_cache(self._reader.path)  # the file system may have cached a listing
        self._reject_change(self._reader.stat().version)

    def _reject_change(self, version: Version) -> None:
        if version != self.version:
            raise _ChangedError("it has changed since it was opened")

    def _range(self, start: int, stop: int) -> Content:
        content, tag = self._reader.read(Wanted(start, stop))
        if tag and self._tags.setdefault("tag", tag) != tag:
            raise _ChangedError("it has changed since it was opened")
        # Some servers send different tags in responses to `HEAD` and `GET`, so a different tag alone proves nothing.
        if is_other(tag, self.version.tag) and not self._is_known:
            self._check_again()
        if len(content) < stop - start:
            raise EOFError(f"{stop - start} bytes are due, {len(content)} came")
        return content

    def _read_on(self, start: int, stop: int) -> bytes:
        """Return a chunk by continuing to read, or by reading from the beginning again."""
        try:
            if self._file is None:
                self._file = self._reader.stream(start)
            parts: list[bytes] = []
            missing = stop - start
            while missing and (part := self._file.read(missing)):
                parts.append(part)
                missing -= len(part)
            if self.size is not None and missing:
                raise EOFError(f"{stop - start} bytes are due, {stop - start - missing} came")
        except BaseException:
            self.close()
            raise
        return b"".join(parts)


class RemoteStream:
    """A remote file that is read sequentially and prefetched by daemon threads.

    A failed request is resumed where it was interrupted. The threads end when the stream is closed or dropped; a forked
    process starts its own.

    Args:
        url: The URL of the file.
        num_ahead: The number of chunks to prefetch until the first one has been read.
        start: The offset of the first byte to read.
        known: The version of the file, so that it need not be looked up. The caller will read the whole file, and must
            check at the end that it still has this version.
    """

    def __init__(
        self, url: str, num_ahead: int = _NUM_AT_FIRST, *, start: int = 0, known: Version | None = None
    ) -> None:
        self._url = url
        self._chunk: Content = b""
        self._at = 0
        self._begin, self._wanted = start, start  # offsets of the current chunk, and of the next one to request
        # The first chunks are small, so that the first samples arrive quickly.
        self._most, self._smallest = (_NUM_AHEAD, _FIRST_CHUNK) if known is None else (_NUM_WHOLE, _LARGEST_CHUNK)
        self._num_ahead = min(num_ahead, _NUM_AHEAD) if known is None else _NUM_WHOLE
        self._source = _RemoteFile(url, known, is_known=known is not None)
        self._access = current_access()
        self.forget()
        self._is_stale = False
        forget_after_fork(self)

    def forget(self) -> None:
        """Drop the chunks and threads of the parent process, whose locks may be held forever."""
        self._coming: deque[Future[Content]] = deque()
        self._threads: Threads | None = None
        self.at_end: Callable[[int], object] | None = None  # called with the number of chunks still in flight
        self._is_stale = True

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> Version:
        """The version of the file, which must not change during reading."""
        return self._source.version

    def read_ahead(self, num_ahead: int = 0) -> RemoteStream:
        """Start reading with at least the given number of chunks prefetched."""
        self._num_ahead = max(num_ahead, self._num_ahead)
        self._request()
        return self

    def num_unused(self, most: int) -> int:
        """Return how many of `most` chunks a file that has been requested as a whole leaves to the next one."""
        return max(most - len(self._coming), 0) if self._wanted == self._source.size else 0

    def close(self) -> None:
        """End the threads. The stream cannot be read afterwards."""
        self._cancel()
        threads = self._threads
        self._threads = None
        if threads is not None:
            threads.submit(self._source.close)

    def readable(self) -> bool:
        """Return True, as for files."""
        return True

    def peek(self, size: int) -> bytes:
        """Return some of the next bytes, at most `size`, without advancing."""
        content = self.read(size)
        self._at -= len(content)
        return content

    def read(self, size: int) -> bytes:
        """Return some bytes, at most `size`; empty at the end.

        Raises:
            BrokenStreamError: Reading cannot continue, or the file has been replaced.
        """
        return bytes(self.view(size))

    def view(self, size: int) -> Content:
        """Return some bytes like `read`, without a copy."""
        if self._at == len(self._chunk):
            self._begin = self._begin + len(self._chunk)
            self._at = 0
            self._chunk = b""
            try:
                with using(self._access):
                    self._chunk = self._next_chunk()
            except Exception as error:
                what = what_went_wrong(self._url, error)
                raise BrokenStreamError(f"cannot be read at offset {self._begin}: {what}") from as_cause(error)
        start = self._at
        self._at = min(self._at + size, len(self._chunk))
        return self._chunk[start : self._at]

    def _next_chunk(self) -> Content:
        if self._is_stale:
            self._renew(has_ranges=self._source.has_ranges)
        try:
            return self._requested()
        except NoRangesError:
            self._renew(has_ranges=False)
            return self._requested()

    def _requested(self) -> Content:
        self._request()
        coming = self._coming.popleft() if self._coming else None
        if self.at_end is not None and self._wanted == self._source.size:
            self.at_end(len(self._coming))
        content = b"" if coming is None else coming.result()
        self._num_ahead = self._most if self._begin else self._num_ahead
        self._request()
        return content

    def _request(self) -> None:
        """Request the next chunks, up to the maximum number in flight."""
        if self._threads is None:
            self._threads = Threads(self._most if self._source.has_ranges else 1, "kdpipes-stream")
        end = self._source.size
        while len(self._coming) < self._num_ahead and (end is None or self._wanted < end):
            start = self._wanted
            stop = start + min(max(start, self._smallest), _LARGEST_CHUNK)
            # For a short remainder, a second request would take longer than reading on.
            self._wanted = stop if end is None else end if end - stop < _FIRST_CHUNK else stop
            self._coming.append(self._threads.submit(partial(self._source.chunk, start, self._wanted)))

    def _renew(self, *, has_ranges: bool) -> None:
        """Open the file again, and continue after the last chunk that was read."""
        self._cancel()
        self._source = _RemoteFile(self._url, self._source.version, has_ranges=has_ranges)
        self._threads = None
        self._wanted = self._begin
        self._is_stale = False

    def _cancel(self) -> None:
        for future in self._coming:
            future.cancel()
        self._coming.clear()


StreamStart = Future[RemoteStream | None]


class StreamsAhead:
    """A sequence of remote files that prefetches the next files while one is being read.

    When a file is opened, the next one is started, and also the one after that if the next file is so small that it
    leaves request slots unused.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._next = dict(pairwise(url for url in urls if not is_local(url)))
        self._access = current_access()
        self.forget()
        forget_after_fork(self)

    def forget(self) -> None:
        """Drop the streams of the parent process."""
        self._threads = Threads(1, "kdpipes-stream")
        # The stream is None if there was no room to start the file.
        self._begun: dict[str, StreamStart] = {}

    def begin(self, url: str) -> None:
        """Start the first of the files, which will be opened later."""
        if not is_local(url):
            with using(self._access):
                self._start(url)

    def open(self, url: str) -> RemoteStream:
        """Return the stream of one of the files, and start the next one."""
        with using(self._access):
            begun = self._begun.pop(url, None)
            stream = None if begun is None else begun.result()
            stream = RemoteStream(url) if stream is None else stream.read_ahead(_NUM_AHEAD)
            if (following := self._next.get(url)) is not None:
                stream.at_end = partial(_use_free_places, self._start(following))
            return stream

    def close(self) -> None:
        """Close the streams that were started and will not be read."""
        begun = self._begun
        self._begun = {}
        for each in begun.values():
            each.add_done_callback(_close_begun)

    def _start(self, url: str) -> StreamStart:
        """Start a file unless it is already started, and the one after it if there is room."""
        before = self._begun.get(url)
        begun = self._begun[url] = self._threads.submit(partial(_begin, url, before))
        if (following := self._next.get(url)) is not None and following not in self._begun:
            self._begun[following] = self._threads.submit(partial(_begin_after, begun, following))
        return begun


def _begin(url: str, before: StreamStart | None) -> RemoteStream | None:
    """Return the stream of a file, which may have been started before."""
    known = None if before is None else before.result()
    return (RemoteStream(url, _NUM_BEGUN) if known is None else known).read_ahead(_NUM_BEGUN)


def _begin_after(former: StreamStart, url: str) -> RemoteStream | None:
    """Start a file if the previous one has been requested completely and leaves request slots unused."""
    stream = _stream_of(former)
    room = 0 if stream is None else stream.num_unused(_NUM_BEGUN)
    return RemoteStream(url, room).read_ahead() if room else None


def _use_free_places(begun: StreamStart, num_under_way: int) -> None:
    """Make the next file use the request slots that the current file no longer needs."""
    if begun.done() and (stream := _stream_of(begun)) is not None:
        stream.read_ahead(_NUM_AHEAD - num_under_way)


def _close_begun(begun: StreamStart) -> None:
    if (stream := _stream_of(begun)) is not None:
        stream.close()


def _stream_of(begun: StreamStart) -> RemoteStream | None:
    """Return the stream of a file once it has been started; None if that has failed or there was no room."""
    return begun.result() if begun.exception() is None else None
