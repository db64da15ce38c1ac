"""Parts of files that lie elsewhere: read with retries, and ahead of need, neighbours in one request."""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.refusals import what_went_wrong
from kdpipes.storage.retries import NUM_SILENT, retried
from kdpipes.storage.time_limit import SilenceError, answer_of, ask, limited, time_limit, waiting

__all__ = ["NoRangesError", "RangeReader", "Span", "Threads", "read_range"]


class NoRangesError(DataError):
    """A server returned a whole file in response to a range request."""

    def __init__(self, message: str, content: bytes = b"") -> None:
        super().__init__(message)
        self.content = content  # the whole file


class Span(NamedTuple):
    """Bytes of a file, from `start` up to `stop`."""

    url: str
    start: int
    stop: int


def read_range(span: Span, *, num_silent: int = NUM_SILENT) -> bytes:
    """Return the bytes of a span; what may pass is tried again.

    Args:
        span: Which.
        num_silent: How many tries may get no answer in time.

    Raises:
        DataError: They cannot be had, or the file ends before.
    """
    try:
        if span.start >= span.stop:
            return b""
        return retried(lambda: _once(span), num_silent=num_silent, final=(NoRangesError,))
    except NoRangesError:
        raise
    except Exception as error:
        what = what_went_wrong(span.url, error)
        raise DataError(f"Shard {span.url!r} cannot be read at offset {span.start}: {what}.") from as_cause(error)


def _read_ahead(span: Span) -> bytes:
    with waiting():  # whoever reads the span looks at the time
        return read_range(span)


def _once(span: Span) -> bytes:
    filesystem, path = filesystem_of(span.url)
    size = span.stop - span.start
    content: bytes = ask(filesystem, "cat_file", span.url, path, start=span.start, end=span.stop, num_bytes=size)
    if len(content) > size:
        raise NoRangesError(
            f"Shard {span.url!r} is on a server that does not support range requests: {size} bytes were requested, "
            f'{len(content)} received. Use `kdp.open_shards(fetch="shards")`, `kdp.stream_shards` or '
            "`kdp.copy_to_local`.",
            content,
        )
    if len(content) != size:
        raise DataError(f"{size} bytes were requested, {len(content)} received")
    return content


class Threads:
    """Daemon threads that read: they hold up no process that ends, whatever they wait for, and end when dropped.

    Args:
        number: How many there may be; one is begun when something waits.
        name: What they are called.
    """

    def __init__(self, number: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], float | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_missing, self._name = number, name
        weakref.finalize(self, _end, self._jobs, number)

    def submit(self, action: Callable[[], Any]) -> Future[Any]:
        """Let one of them do something."""
        future: Future[Any] = Future()
        with self._lock:
            self._jobs.put((action, future, time_limit()))
            if self._num_missing and self._jobs.qsize():
                self._num_missing -= 1
                threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
        return future


def _work(jobs: Any) -> None:
    while (job := jobs.get()) is not None:
        action, future, seconds = job
        if future.set_running_or_notify_cancel():
            try:
                with limited(seconds):
                    future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
        del job, action, future  # what was read is not to be kept until something else is


def _end(jobs: Any, number: int) -> None:
    for _ in range(number):
        jobs.put(None)


@dataclass
class _Request:
    """What one request brings, and how often it will be read, of what has been announced."""

    coming: Future[bytes]
    num_due: int = 0


class RangeReader:
    """Reads spans; those that were announced are read ahead by threads, and kept until they are read, or pushed out.

    Once read, they stay until `max_spent` bytes of others have been read. Safe for threads and for forked processes. A
    copy of it knows nothing.

    Args:
        max_gap: How many bytes between two announced spans are read along, to make one request of both.
        max_span: How many bytes one request may have, if it is made of several spans.
        max_bytes: How many bytes are kept in all: where more are announced, those that were announced first go.
        max_spent: How many bytes are kept that have been read as often as they were announced.
        num_threads: How many requests are under way at a time.
    """

    def __init__(
        self,
        *,
        max_gap: int = 1 << 16,
        max_span: int = 1 << 23,
        max_bytes: int = 1 << 28,
        max_spent: int = 1 << 25,
        num_threads: int = 64,
    ) -> None:
        self._arguments = {"max_gap": max_gap, "max_span": max_span, "max_bytes": max_bytes}
        self._arguments |= {"max_spent": max_spent, "num_threads": num_threads}
        self._max_gap, self._max_span, self._num_threads = max_gap, max_span, num_threads
        self._max_bytes, self._max_spent = max_bytes, max_spent
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_anew, (self._arguments,)

    def forget(self) -> None:
        """Begin anew, with no threads and nothing read."""
        self._lock = threading.Lock()
        self._threads: Threads | None = None
        self._ahead: OrderedDict[Span, _Request] = OrderedDict()  # as they were announced
        self._spent: OrderedDict[Span, None] = OrderedDict()  # as they were read
        self._by_url: dict[str, list[Span]] = {}  # sorted
        self._longest = 0
        self._num_bytes = self._num_spent = 0

    def announce(self, spans: Iterable[Span]) -> None:
        """Begin to read what will be asked for, as much as is kept."""
        with self._lock:
            due: set[Span] = set()
            missing = []
            for span in spans:
                if span.start >= span.stop:
                    continue
                if (known := self._covering(span)) is None:
                    missing.append(span)
                else:
                    self._expect(known)
                    due.add(known)
            if missing and self._threads is None:
                self._threads = Threads(self._num_threads, "kdpipes-ranges")
            for span in _merged(missing, self._max_gap, self._max_span):
                if not self._make_room(span.stop - span.start, due):
                    break
                due.add(span)
                self._add(span)
            for span in missing:
                if (known := self._covering(span)) is not None:
                    self._expect(known)

    def read(self, span: Span) -> bytes:
        """Return the bytes of a span.

        Raises:
            DataError: They cannot be had.
        """
        if span.start >= span.stop:
            return b""
        with self._lock:
            known = self._covering(span)
            request = None if known is None else self._ahead[known]
        if known is None or request is None:
            return read_range(span)
        try:
            content = answer_of(request.coming, span.url, known.stop - known.start)
        except Exception as error:  # what failed for many is tried for one
            with self._lock:
                if self._ahead.get(known) is request:
                    self._remove(known)
            is_silent = isinstance(error, SilenceError)
        else:
            with self._lock:
                if self._ahead.get(known) is request:
                    self._note_read(known, request)
            return content[span.start - known.start : span.stop - known.start]
        return read_range(span, **({"num_silent": 1} if is_silent else {}))

    def _covering(self, span: Span) -> Span | None:
        if span in self._ahead:
            return span
        known = self._by_url.get(span.url, [])
        for place in range(bisect_right(known, Span(span.url, span.start, sys.maxsize)) - 1, -1, -1):
            if known[place].stop >= span.stop:
                return known[place]
            if known[place].start + self._longest < span.stop:
                return None
        return None

    def _expect(self, known: Span) -> None:
        """Keep a span until it has been read once more."""
        self._ahead[known].num_due += 1
        self._ahead.move_to_end(known)
        self._forget_spent(known)

    def _note_read(self, known: Span, request: _Request) -> None:
        request.num_due = max(request.num_due - 1, 0)  # who comes back has not been announced
        if request.num_due:
            return
        self._forget_spent(known)
        self._spent[known] = None
        self._num_spent += known.stop - known.start
        while self._num_spent > self._max_spent:
            self._remove(next(iter(self._spent)))

    def _forget_spent(self, known: Span) -> None:
        if known in self._spent:
            del self._spent[known]
            self._num_spent -= known.stop - known.start

    def _make_room(self, size: int, due: set[Span]) -> bool:
        """Let go of what was read, then of the oldest spans, but of none in `due`, and return whether that did."""
        while self._num_bytes + size > self._max_bytes and self._ahead:
            oldest = next(iter(self._spent or self._ahead))
            if oldest in due:
                break
            self._remove(oldest)
        return self._num_bytes + size <= self._max_bytes or not self._ahead

    def _add(self, span: Span) -> None:
        assert self._threads is not None
        self._ahead[span] = _Request(self._threads.submit(lambda: _read_ahead(span)))
        insort(self._by_url.setdefault(span.url, []), span)
        self._longest = max(self._longest, span.stop - span.start)
        self._num_bytes += span.stop - span.start

    def _remove(self, span: Span) -> None:
        self._ahead.pop(span).coming.cancel()
        self._forget_spent(span)
        known = self._by_url[span.url]
        del known[bisect_left(known, span)]
        if not known:
            del self._by_url[span.url]
        self._num_bytes -= span.stop - span.start


def _made_anew(arguments: dict[str, int]) -> RangeReader:
    return RangeReader(**arguments)


def _merged(spans: Iterable[Span], max_gap: int, max_span: int) -> Iterator[Span]:
    """Yield spans of which neighbours have become one."""
    current: Span | None = None
    for span in sorted(set(spans)):
        if current is None:
            current = span
            continue
        is_near = span.url == current.url and span.start - current.stop <= max_gap
        stop = max(span.stop, current.stop)
        if is_near and (stop - current.start <= max_span or stop == current.stop):
            current = Span(current.url, current.start, stop)
        else:
            yield current
            current = span
    if current is not None:
        yield current
