"""What a cache counts in all processes of a chain: the one that has made it, and its workers."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from contextlib import suppress
from pathlib import Path

from kdpipes._forks import forget_after_fork
from kdpipes.cache.shared_folder import SharedFolder

__all__ = ["SharedTally"]

_ROW = struct.Struct("<3Q")


class SharedTally:
    """Counts of hits, misses and healed entries, which a copy in another process adds to.

    Each process writes a small file of its own in shared memory, so that none waits for another, and what a killed
    process has counted stays. Where there is no shared memory left, a process counts for itself.
    """

    def __init__(self) -> None:
        self._folder: SharedFolder | None = None
        with suppress(OSError):
            self._folder = SharedFolder()
        self.forget()
        forget_after_fork(self)

    def __getstate__(self) -> SharedFolder | None:
        return self._folder

    def __setstate__(self, state: SharedFolder | None) -> None:
        self._folder = state
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self._folder,)

    def forget(self) -> None:
        """Count from nothing: this is another process."""
        self._counting = threading.Lock()
        self._counts = [0, 0, 0]
        self._row: mmap.mmap | None = None

    def count(self, *, hits: int = 0, misses: int = 0, healed: int = 0) -> None:
        """Add to what has been counted."""
        with self._counting:
            if self._row is None and not any(self._counts):
                self._row = self._opened()
            counts = self._counts
            counts[0] += hits
            counts[1] += misses
            counts[2] += healed
            if self._row is not None:
                _ROW.pack_into(self._row, 0, *counts)

    def totals(self) -> tuple[int, int, int]:
        """Return hits, misses and healed entries of all processes."""
        rows = [self._counts] if self._folder is None or self._row is None else []
        if self._folder is not None:
            for path in Path(self._folder.path).glob("tally-*"):
                content = path.read_bytes()
                rows += [list(_ROW.unpack(content))] if len(content) == _ROW.size else []
        hits, misses, healed = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0, 0)
        return hits, misses, healed

    def _opened(self) -> mmap.mmap | None:
        if self._folder is None:
            return None
        try:
            path = Path(self._folder.path, f"tally-{os.getpid()}-{secrets.token_hex(4)}")
            path.write_bytes(bytes(_ROW.size))
            with path.open("r+b") as file:
                return mmap.mmap(file.fileno(), _ROW.size)
        except OSError:  # its owner is gone, or shared memory is full
            return None


def _restored(folder: SharedFolder | None) -> SharedTally:
    tally = SharedTally.__new__(SharedTally)
    tally.__setstate__(folder)
    return tally
