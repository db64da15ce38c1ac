"""Files of this machine that are looked at without a copy, for as long as somebody does."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from kdpipes.core.errors import DataError

__all__ = ["MappedFiles"]

_KEPT = 256  # maps hold a descriptor each


class _Map:
    """A file in memory: views of it keep the memory, not the file's name."""

    __slots__ = ("__weakref__", "content", "place")

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            self.place = status.st_dev, status.st_ino
            self.content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


_alive: weakref.WeakValueDictionary[str, _Map] = weakref.WeakValueDictionary()  # copies of a pipe share them


class MappedFiles:
    """Maps files that are not changed any more when they are first read, and keeps the 256 that were used last.

    They go with this object, and with the views of them. Forked processes share them; a copy maps anew.
    """

    def __init__(self) -> None:
        self._maps: OrderedDict[str, _Map] = OrderedDict()

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        return MappedFiles, ()

    def view(self, path: str, start: int, size: int, num_bytes: int) -> memoryview:
        """Return a read-only view of a part of a file.

        Args:
            path: Of the file.
            start: Where the part begins.
            size: How long it is.
            num_bytes: How long the file is known to be: what is no longer there cannot be read in a map.

        Raises:
            DataError: The file is gone, or has another length.
        """
        try:
            status = os.stat(path)  # noqa: PTH116 - of each read
        except OSError as error:
            raise DataError(f"{path!r} cannot be read: {error.strerror}.") from error
        if status.st_size != num_bytes:
            raise DataError(f"{path!r} should have {num_bytes} bytes, but has {status.st_size}: it has been cut.")
        if start < 0 or start + size > num_bytes:
            raise DataError(f"{path!r} has {num_bytes} bytes, but {size} are due at offset {start}.")
        return self._map(path, (status.st_dev, status.st_ino)).content[start : start + size]

    def _map(self, path: str, place: tuple[int, int]) -> _Map:
        found = self._maps.get(path) or _alive.get(path)
        if found is None or found.place != place:
            try:
                found = _alive[path] = _Map(path)
            except OSError as error:
                raise DataError(f"{path!r} cannot be read: {error.strerror}.") from error
        self._maps[path] = found
        with suppress(KeyError):  # of another thread that lets go at the same moment
            self._maps.move_to_end(path)
            while len(self._maps) > _KEPT:
                self._maps.popitem(last=False)
        return found
