"""Files of this machine that stay open between reads."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache

from kdpipes.storage.forward import pread

__all__ = ["read_span"]


class _Open:
    """A file that is open until nobody holds this any more: a thread may still read what another one has let go."""

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        status = os.fstat(descriptor)
        self.descriptor = descriptor
        self.place = status.st_dev, status.st_ino


@lru_cache(maxsize=64)
def _opened(path: str) -> _Open:
    return _Open(os.open(path, os.O_RDONLY))


def read_span(path: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset` on, or those that are there.

    The last 64 files stay open in each process. A forked one may go on with those of its parent, as each read names
    its offset. A file that has been replaced is opened anew; one that has been cut gives fewer bytes, and no signal.
    """
    status = os.stat(path)  # noqa: PTH116 - of each read
    file = _opened(path)
    if file.place != (status.st_dev, status.st_ino):
        _opened.cache_clear()
        file = _opened(path)
    return pread(file.descriptor, size, offset)
