"""Files of this machine that stay mapped into memory between reads."""

from __future__ import annotations

import mmap
import os
from functools import lru_cache
from pathlib import Path

__all__ = ["read_span"]


class _Mapped:
    """A file in memory until nobody holds this any more: a thread may still read what another one has let go."""

    __slots__ = ("content", "place")

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            self.place = status.st_dev, status.st_ino, status.st_size
            self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""


_mapped = lru_cache(maxsize=64)(_Mapped)


def read_span(path: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset` on, or those that are there.

    The last 64 files stay mapped in each process; forked ones share the maps. A file that has been replaced, cut or
    extended is mapped anew: each read looks at its size first, as what is no longer there cannot be read in a map.
    """
    status = os.stat(path)  # noqa: PTH116 - of each read
    file = _mapped(path)
    if file.place != (status.st_dev, status.st_ino, status.st_size):
        _mapped.cache_clear()
        file = _mapped(path)
    return file.content[offset : offset + size]
