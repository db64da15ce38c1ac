"""Memory that a worker and the main process share: written by the one, lent to the user by the other, used again."""

from __future__ import annotations

import heapq
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["RETIRED", "LentSlots", "Slots", "anonymous_file", "places_of"]

RETIRED = 0x8000  # in the number of a slot whose memory another process may still read
_ALIGNMENT = 64
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux: the pages are there at once, not one fault after the other


def anonymous_file() -> int:
    """Return the descriptor of memory without a name, which ends with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kdpipes")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def places_of(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return where buffers of these sizes begin and end in a slot, and the size of the slot."""
    places, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + size
        places.append((start, end))
    return places, end


class Slots:
    """A worker's slots. Each is a file in memory that grows to the largest batch that it has held.

    Args:
        number: How many there are.
    """

    def __init__(self, number: int) -> None:
        self._free = list(range(number))
        self._files: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def num_free(self) -> int:
        """How many slots can be written."""
        return len(self._free)

    def put(self, buffers: Sequence[memoryview]) -> tuple[int, int | None]:
        """Write buffers into a free slot; return its number, and its descriptor if it has never been used before.

        Raises:
            OSError: There is not enough memory.
        """
        places, size = places_of([buffer.nbytes for buffer in buffers])
        slot = self._free[0]
        is_new = slot not in self._files
        self._reserve(slot, size)
        heapq.heappop(self._free)
        memory = np.frombuffer(self._maps[slot], dtype=np.uint8)
        for (start, end), buffer in zip(places, buffers, strict=True):
            memory[start:end] = np.frombuffer(buffer, dtype=np.uint8)
        return slot, self._files[slot] if is_new else None

    def give_back(self, slot: int) -> None:
        """Take a slot back that the main process is done with; a retired one gets new memory."""
        if slot & RETIRED:
            slot ^= RETIRED
            os.close(self._files.pop(slot))
            del self._maps[slot]
        heapq.heappush(self._free, slot)

    def _reserve(self, slot: int, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if slot in self._maps and len(self._maps[slot]) >= size:
            return
        file = self._files[slot] if slot in self._files else anonymous_file()
        try:
            _allocate(file, size)
            self._maps[slot] = mmap.mmap(file, size, flags=mmap.MAP_SHARED | _POPULATE)
        except BaseException:
            if slot not in self._files:
                os.close(file)
            raise
        self._files[slot] = file


def _allocate(file: int, size: int) -> None:
    """Make a file in memory larger, with an error where there is no memory: a process that wrote would be killed."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


class LentSlots:
    """The slots of one worker, in the main process.

    Views of a slot may be handed to the user; when the last of them is gone, the slot's number is in `returned`. A
    process that the user forks meanwhile has the views as well: the memory is not written again then.
    """

    _all: ClassVar[weakref.WeakSet[LentSlots]] = weakref.WeakSet()

    def __init__(self) -> None:
        LentSlots._all.add(self)
        self._retired: set[int] = set()
        self.returned: deque[int] = deque()  # appended to wherever the last view is dropped
        self._files: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[NDArray[Any]]] = {}

    @property
    def num_lent(self) -> int:
        """How many slots the user holds views of."""
        return len(self._lent)

    def attach(self, slot: int, file: int) -> None:
        """Take the descriptor of a slot's memory, which is closed with the others."""
        if slot in self._files:
            os.close(self._files[slot])
            self._maps.pop(slot, None)
        self._files[slot] = file

    def lend(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return the buffers in a slot as views, all of which keep it from being written again."""
        memory, places = self._memory(slot, sizes)
        returned, lent, retired = self.returned, self._lent, self._retired

        def give_back(_: Any) -> None:
            lent.pop(slot, None)
            returned.append(slot | RETIRED if slot in retired else slot)
            retired.discard(slot)

        lent[slot] = weakref.ref(memory, give_back)
        whole = memoryview(memory)  # type: ignore[arg-type]  # an array is a buffer from Python 3.12 on, for mypy
        return [whole[start:end] for start, end in places]

    def copy(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return copies of the buffers in a slot, which is free again then."""
        memory, places = self._memory(slot, sizes)
        copies = [memoryview(memory[start:end].copy()) for start, end in places]
        self.returned.append(slot)
        return copies

    def close(self) -> None:
        """Let go of the memory; views that are still held keep theirs."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._maps.clear()

    @classmethod
    def retire_lent(cls) -> None:
        """Let no memory that is lent now be written again: a process is about to be forked."""
        for slots in list(cls._all):
            slots._retired.update(slots._lent)

    def _memory(self, slot: int, sizes: Sequence[int]) -> tuple[NDArray[Any], list[tuple[int, int]]]:
        places, size = places_of(sizes)
        if slot not in self._maps or len(self._maps[slot]) < size:
            length = os.fstat(self._files[slot]).st_size
            self._maps[slot] = mmap.mmap(self._files[slot], length, flags=mmap.MAP_SHARED | _POPULATE)
        return np.frombuffer(self._maps[slot], dtype=np.uint8), places
