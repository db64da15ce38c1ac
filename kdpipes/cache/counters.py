"""What a cache counts in all processes of a chain: the one that has made it, and its workers."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from contextlib import suppress
from pathlib import Path

from kdpipes.cache.shared_folder import SharedFolder
from kdpipes.core.processes import forget_after_fork

__all__ = ["Counters"]

_ROW = struct.Struct("<3Q")


class Counters:
    """Counts of hits, misses and healed entries. A copy in another process adds to the same counts.

    Each process writes a small file of its own in shared memory, so that none waits for another, and the counts of a
    killed process stay. If there is no shared memory left, a process counts for itself.
    """

    def __init__(self, folder: SharedFolder | None = None) -> None:
        self._folder = folder
        self.forget()
        forget_after_fork(self)

    @classmethod
    def shared(cls) -> Counters:
        """Return new counters, in shared memory if there is any left."""
        with suppress(OSError):
            return cls(SharedFolder())
        return cls()

    def __reduce__(self) -> tuple[object, ...]:
        return Counters, (self._folder,)

    def forget(self) -> None:
        """Count from 0, in a file of its own: this is another process."""
        self._counting = threading.Lock()
        self._counts = [0, 0, 0]
        self._row: mmap.mmap | None = None

    def count(self, *, hits: int = 0, misses: int = 0, healed: int = 0) -> None:
        """Add to the counts."""
        with self._counting:
            if self._row is None and not any(self._counts):
                self._row = self._opened()
            counts = self._counts
            counts[0] += hits
            counts[1] += misses
            counts[2] += healed
            if self._row is not None:
                _ROW.pack_into(self._row, 0, *counts)

    def totals(self) -> dict[str, int]:
        """Return hits, misses and healed entries of all processes."""
        rows = [tuple(self._counts)] if self._row is None else []
        for path in Path(self._folder.path).glob("counts-*") if self._folder is not None else []:
            content = path.read_bytes()
            rows += [_ROW.unpack(content)] if len(content) == _ROW.size else []
        return dict(zip(("hits", "misses", "healed"), map(sum, zip((0, 0, 0), *rows, strict=True)), strict=True))

    def _opened(self) -> mmap.mmap | None:
        if self._folder is None:
            return None
        try:
            path = Path(self._folder.path, f"counts-{os.getpid()}-{secrets.token_hex(4)}")
            path.write_bytes(bytes(_ROW.size))
            with path.open("r+b") as file:
                return mmap.mmap(file.fileno(), _ROW.size)
        except OSError:  # the owner of the folder is gone, or shared memory is full
            return None
