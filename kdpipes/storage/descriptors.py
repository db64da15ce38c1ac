"""Files of this machine that stay mapped into memory between reads."""

from __future__ import annotations

import mmap
import os
from functools import lru_cache
from pathlib import Path

from kdpipes.core.errors import DataError
from kdpipes.storage.files import Version

__all__ = ["read_span"]


class _Mapped:
    """A file in memory until nobody holds this any more: a thread may still read what another one has let go."""

    __slots__ = ("content", "place", "version")

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            self.place = _place(status)
            self.version = Version(status.st_size, f"changed:{status.st_mtime_ns}")
            self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""


def _place(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_mapped = lru_cache(maxsize=64)(_Mapped)


def read_span(path: str, offset: int, size: int, version: Version | None = None) -> bytes:
    """Return `size` bytes of a file from `offset` on, or those that are there.

    The last 64 files stay mapped in each process; forked ones share the maps. A file that has been replaced, cut or
    changed is mapped anew: each read looks at its size first, as what is no longer there cannot be read in a map.

    Args:
        path: Of the file.
        offset: Of the first byte.
        size: How many.
        version: What `version_of` said of the file when offset and size were found out, if others are refused.

    Raises:
        DataError: The file is another one now.
    """
    status = os.stat(path)  # noqa: PTH116 - of each read
    file = _mapped(path)
    if file.place != _place(status):
        _mapped.cache_clear()
        file = _mapped(path)
    content = file.content[offset : offset + size]
    if version is not None and file.version != version and len(content) == size:  # one that was cut is told by that
        raise DataError(
            f"Shard {path!r} has been replaced, or written to, since it was opened: it had {version.size} bytes, and "
            f"has {file.version.size} of another date. Open it again, `kdp.open_shards(...)`: it is then indexed anew."
        )
    return content
