"""Local files, read or mapped into memory shared by processes."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kdpipes.core.errors import DataError
from kdpipes.storage.readers import WHOLE, Response, Version, Wanted

_KEPT = 256  # maximum number of maps of one `MappedFiles`, each of which holds a descriptor
_KEPT_SHARDS = 64
_RESIDENT = 1 << 26  # number of viewed bytes after which the pages are removed from this process's memory


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

    __slots__ = ("__weakref__", "buffer", "content", "place", "version")

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            self.place = _place(status)
            self.version = Version(status.st_size, f"changed:{status.st_mtime_ns}")
            self.buffer = map_file(file.fileno()) if status.st_size else b""
            self.content = memoryview(self.buffer)

    def release_pages(self) -> None:
        """Remove the pages from this process's memory. Views stay valid, because reading them maps the pages again."""
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # Windows does not have `madvise`
            self.buffer.madvise(mmap.MADV_DONTNEED)


def _place(status: os.stat_result) -> tuple[int, ...]:
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
        found = self._maps.get(path)
        if found is None or found.place != _place(status):
            found = _alive.get(path)
            if found is None or found.place != _place(status):
                found = _alive[path] = _Map(path)
            self._maps[path] = found
        try:
            self._maps.move_to_end(path)
            while len(self._maps) > (self._number or _KEPT):
                self._maps.popitem(last=False)
        except KeyError:  # another thread has just dropped it
            pass
        return found


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
            f"has {file.version.size} of another date. Open it again, `kdp.open_shards(...)`: it is then indexed anew."
        )
    return content
