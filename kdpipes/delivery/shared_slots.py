"""Memory that a worker and the main process share: written by the one, lent to the user by the other, used again."""

from __future__ import annotations

import heapq
import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.delivery.wire import ReceivedFile

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
        start = _aligned(end)
        end = start + size
        places.append((start, end))
    return places, end


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


class Slots:
    """A worker's slots. Each is a file in memory that grows to the largest batch that it has held.

    A batch may be put together in the slot in which it will travel: its arrays in the order in which they are sent.

    Args:
        number: How many there are.
    """

    def __init__(self, number: int) -> None:
        self._free = list(range(number))
        self._files: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._told: set[int] = set()  # slots whose descriptors the main process has
        self._making: int | None = None  # the slot of the batch that is being put together
        self._placed: dict[int, tuple[int, int]] = {}  # where its arrays lie in there, by their addresses
        self._end = 0

    @property
    def num_free(self) -> int:
        """How many slots can be written."""
        return len(self._free) + (self._making is not None)

    def begin(self) -> None:
        """Begin to put a batch together; what the last one has taken, unless it has been sent, is free again."""
        self._placed.clear()
        self._end = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for an array of the batch, in its slot; None where there is none."""
        size = math.prod(shape) * dtype.itemsize
        if not size or (self._making is None and not self._free):
            return None
        if self._making is None:
            self._making = heapq.heappop(self._free)
        start = _aligned(self._end)
        try:
            self._reserve(self._making, start + size)
        except OSError:
            return None
        memory = np.frombuffer(self._maps[self._making], dtype=np.uint8, count=size, offset=start)
        self._end = start + size
        self._placed[memory.ctypes.data] = start, self._end
        return torch.from_numpy(memory).view(dtype).reshape(tuple(shape))

    def put(self, buffers: Sequence[memoryview]) -> tuple[int, int | None]:
        """Write buffers into a free slot; return its number, and its descriptor if it has never been used before.

        Raises:
            OSError: There is not enough memory.
        """
        places, size = places_of([buffer.nbytes for buffer in buffers])
        slot = self._free[0] if self._making is None else self._making
        self._reserve(slot, size)
        if self._making is None:
            heapq.heappop(self._free)
        self._making = None
        memory = np.frombuffer(self._maps[slot], dtype=np.uint8)
        for (start, end), content in zip(places, self._to_write(buffers, places), strict=True):
            if content is not None:
                memory[start:end] = content
        is_new = slot not in self._told
        self._told.add(slot)
        return slot, self._files[slot] if is_new else None

    def _to_write(self, buffers: Sequence[memoryview], places: Sequence[tuple[int, int]]) -> list[Any]:
        """Return what is to be written at each place: None where it lies there already."""
        contents: list[Any] = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
        known = [self._placed.get(content.ctypes.data) if len(content) else None for content in contents]
        if any(found not in (None, place) for found, place in zip(known, places, strict=True)):
            return [content.copy() for content in contents]  # they would overwrite each other
        return [content if found is None else None for found, content in zip(known, contents, strict=True)]

    def give_back(self, slot: int) -> None:
        """Take a slot back that the main process is done with; a retired one gets new memory."""
        if slot & RETIRED:
            slot ^= RETIRED
            os.close(self._files.pop(slot))
            del self._maps[slot]
            self._told.discard(slot)
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
        self._files: dict[int, ReceivedFile] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[NDArray[Any]]] = {}

    @property
    def num_lent(self) -> int:
        """How many slots the user holds views of."""
        return len(self._lent)

    def attach(self, slot: int, file: ReceivedFile) -> None:
        """Take the descriptor of a slot's memory, which is closed with the others."""
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
            file = self._files[slot].number
            length = os.fstat(file).st_size
            self._maps[slot] = mmap.mmap(file, length, flags=mmap.MAP_SHARED | _POPULATE)
        return np.frombuffer(self._maps[slot], dtype=np.uint8), places
