"""Read whole files with prefetching: remote files by threads, local files by the operating system."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from kdpipes.core.order import Order
from kdpipes.core.processes import forget_after_fork
from kdpipes.sources._member_reader import Habit
from kdpipes.storage.access import Access, Threads, using
from kdpipes.storage.files import read_url
from kdpipes.storage.readers import Version
from kdpipes.storage.remote import RangeReader, Span
from kdpipes.storage.urls import is_local

_GUESS = 1 << 20  # the size assumed for files of unknown size


class FileReader:
    """Reads the files of field `x`. Until the first file has been read, only the first positions are prefetched.

    Copies start without prefetched files.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self._ahead = RangeReader(lambda span: read_url(span.url, size=span.version.size))
        self._habit = Habit()
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileReader, (self.access,)

    def forget(self) -> None:
        """Reset this object, without a thread."""
        self._thread: Threads | None = None

    def prefetch(self, order: Order, files_at: Callable[[list[int]], list[tuple[str, int]]]) -> None:
        """Start to read the files at the next positions.

        Args:
            order: The positions.
            files_at: A function that maps positions to the URL and the size of each file, -1 if unknown.
        """
        if order.is_epoch:
            return
        for positions in order:
            for due in self._habit.due(positions):
                files = files_at(due.tolist())
                if local := [url for url, _ in files if is_local(url)]:
                    self._thread = self._thread or Threads(1, "kdpipes-files")
                    self._thread.submit(partial(_load, local))
                if len(local) < len(files):
                    with using(self.access):
                        self._ahead.prefetch(_span(url, size) for url, size in files if not is_local(url))

    def read(self, url: str, size: int = -1) -> bytes:
        """Return the content of a file."""
        self._habit.fields.add("x")
        if is_local(url):
            return read_url(url)
        with using(self.access):
            return self._ahead.read(_span(url, size))


def _load(paths: list[str]) -> None:
    """Make the system load files into its cache. A thread does this, because opening a file may wait for the disk."""
    if not hasattr(os, "posix_fadvise"):  # not on macOS and Windows
        return
    for path in paths:
        with suppress(OSError):  # reading the file raises the error
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def _span(url: str, size: int) -> Span:
    return Span(url, 0, _GUESS if size < 0 else max(size, 1), Version(size, ""))
