"""Parts of files that lie elsewhere: read with retries, and ahead of need, neighbours in one request."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import fsspec

from kdpipes.errors import DataError

__all__ = ["RangeReader", "Span", "read_range"]

_NUM_TRIES = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_NOT_TO_BE_HELPED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_jitter = random.Random()


class Span(NamedTuple):
    """Bytes of a file, from `start` up to `stop`."""

    url: str
    start: int
    stop: int


def read_range(span: Span) -> bytes:
    """Return the bytes of a span; what may pass is tried again, at growing intervals that are drawn at random.

    Raises:
        DataError: They cannot be had, or the file ends before.
    """
    error: Exception = DataError("nothing was read")
    for attempt in range(_NUM_TRIES):
        if attempt:
            time.sleep(min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S) * _jitter.uniform(0.5, 1.5))
        try:
            filesystem, path = fsspec.core.url_to_fs(span.url)
            content: bytes = filesystem.cat_file(path, start=span.start, end=span.stop)
        except _NOT_TO_BE_HELPED as failure:
            error = failure
            break
        except Exception as failure:  # those of botocore and aiohttp are no OSErrors
            error = failure
            continue
        if len(content) == span.stop - span.start:
            return content
        error = DataError(f"{span.stop - span.start} bytes are due, {len(content)} came")
    what = str(error) or type(error).__name__
    raise DataError(f"Shard {span.url!r} cannot be read at offset {span.start}: {what}.") from error


class RangeReader:
    """Reads spans; those that were announced are read ahead by threads, and kept until `max_bytes` newer ones came.

    Safe for threads and for forked processes. A copy of it knows nothing.

    Args:
        max_gap: How many bytes between two announced spans are read along, to make one request of both.
        max_span: How many bytes one request may have, if it is made of several spans.
        max_bytes: How many bytes are kept.
        num_threads: How many requests are under way at a time.
    """

    def __init__(
        self, *, max_gap: int = 1 << 16, max_span: int = 1 << 23, max_bytes: int = 1 << 28, num_threads: int = 16
    ) -> None:
        self._arguments = {"max_gap": max_gap, "max_span": max_span, "max_bytes": max_bytes, "num_threads": num_threads}
        self._max_gap, self._max_span = max_gap, max_span
        self._max_bytes, self._num_threads = max_bytes, num_threads
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_anew, (self._arguments,)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: OrderedDict[Span, Future[bytes]] = OrderedDict()
        self._by_url: dict[str, list[Span]] = {}
        self._num_bytes = 0

    def announce(self, spans: Iterable[Span]) -> None:
        """Begin to read what will be asked for."""
        if self._process != os.getpid():  # the threads of a parent are not there
            self._begin()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kdpipes-ranges")
            for span in _merged(spans, self._max_gap, self._max_span):
                if self._covering(span) is None:
                    self._ahead[span] = self._threads.submit(read_range, span)
                    self._by_url.setdefault(span.url, []).append(span)
                    self._num_bytes += span.stop - span.start
            self._forget()

    def read(self, span: Span) -> bytes:
        """Return the bytes of a span.

        Raises:
            DataError: They cannot be had.
        """
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            known = self._covering(span)
            coming = None if known is None else self._ahead[known]
        if known is None or coming is None:
            return read_range(span)
        return coming.result()[span.start - known.start : span.stop - known.start]

    def drop(self, span: Span) -> None:
        """Forget what has been read of a span."""
        with self._lock:
            known = self._covering(span)
            if known is not None:
                self._remove(known)

    def _covering(self, span: Span) -> Span | None:
        known = self._by_url.get(span.url, ())
        return next((one for one in known if one.start <= span.start and span.stop <= one.stop), None)

    def _forget(self) -> None:
        while self._num_bytes > self._max_bytes and len(self._ahead) > 1:
            self._remove(next(iter(self._ahead)))

    def _remove(self, span: Span) -> None:
        self._ahead.pop(span).cancel()
        self._by_url[span.url].remove(span)
        if not self._by_url[span.url]:
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
