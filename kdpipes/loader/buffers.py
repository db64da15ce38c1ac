"""Memory that a worker process and the main process share, and the batches that travel in it.

A worker has one arena: a file in memory without a name, divided into buffers of equal size. The worker writes a batch
into a free buffer. The main process borrows the buffer for the tensors that the user gets, and releases it when the
last of them is gone. A new arena replaces one whose buffers have become too small. It also replaces an arena that was
detached: a process that the user forks inherits the borrowed tensors, so nobody may write to their memory any more.
"""

from __future__ import annotations

import heapq
import io
import math
import mmap
import os
import pickle
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core import pickling
from kdpipes.delivery.batch_pipe import allocate, is_channels_last
from kdpipes.loader.channel import SharedFile

Place = tuple[int, int]  # where an array begins and ends
_ALIGNMENT = 64


class Array(NamedTuple):
    """The memory of an array of a batch.

    Args:
        content: Its bytes.
        start: Where it already lies in the buffer that is being filled; None if it is not in the buffer.
    """

    content: memoryview
    start: int | None = None


class Given(NamedTuple):
    """A tensor in the buffer that is being filled."""

    tensor: torch.Tensor
    address: int
    start: int


def places_of(arrays: Sequence[Array], end: int = 0) -> tuple[list[Place], int]:
    """Return where arrays belong in a buffer that is filled up to `end`, and where the last of them ends."""
    places = []
    for content, start in arrays:
        if start is None:
            start = _aligned(end)
            end = start + content.nbytes
        places.append((start, start + content.nbytes))
    return places, end


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


class SharedBuffers:
    """The worker's side: fills buffers.

    Args:
        number: How many buffers an arena has.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.file: SharedFile | None = None  # of the arena
        self._memory: mmap.mmap | None = None
        self._size = 0  # of one buffer
        self._reserved: list[int] = []  # how much memory each buffer has
        self._free: list[int] = []
        self._filling: int | None = None  # the buffer of the batch that is being made
        self.given: dict[int, Given] = {}  # tensors in that buffer that `empty` has returned, by their ids
        self._end = 0
        self.arena = 0  # the number of the arena

    @property
    def has_room(self) -> bool:
        """Whether a batch can be written."""
        return self._memory is None or self._filling is not None or bool(self._free)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        """Return a tensor in the buffer of the batch that is being made; of its own memory if there is no room."""
        count = math.prod(shape)
        start = self._end
        size = count * dtype.itemsize
        if self._memory is None or not size or start + size > self._size or not self.has_room:
            return allocate(shape, dtype, memory_format)
        if self._filling is None:
            self._filling = heapq.heappop(self._free)
        try:
            self._reserve(self._filling, start + size)
        except OSError:
            return allocate(shape, dtype, memory_format)
        offset = self._filling * self._size + start
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        if memory_format is torch.channels_last:
            number, channels, height, width = shape
            tensor = tensor.reshape(number, height, width, channels).permute(0, 3, 1, 2)
        else:
            tensor = tensor.reshape(tuple(shape))
        self.given[id(tensor)] = Given(tensor, tensor.data_ptr(), start)
        self._end = _aligned(start + size)
        return tensor

    def put(self, arrays: Sequence[Array]) -> tuple[int, list[Place]]:
        """Write a batch into a buffer; return the number of the buffer, and where in the arena the arrays lie.

        Raises:
            OSError: There is not enough memory.
        """
        places, end = places_of(arrays, self._end)
        if self._memory is None or end > self._size:
            arrays = [Array(content) for content, _ in arrays]  # they are copied from the old arena
            places, end = places_of(arrays)
            self._replace(end)
        if self._filling is None:
            self._filling = heapq.heappop(self._free)
        self._reserve(self._filling, end)
        offset = self._filling * self._size
        number = self._filling
        memory = np.frombuffer(self._memory, dtype=np.uint8)  # type: ignore[arg-type]
        places = [(offset + start, offset + end) for start, end in places]
        for (content, start_now), (start, end) in zip(arrays, places, strict=True):
            if start_now is None:
                memory[start:end] = np.frombuffer(content, dtype=np.uint8)
        self._filling = None
        return number, places

    def begin_batch(self) -> None:
        """Forget the tensors that `empty` has returned: the batch was sent, or given up."""
        self.given.clear()
        self._end = 0
        if self._filling is not None:
            heapq.heappush(self._free, self._filling)
            self._filling = None

    def release(self, arena: int, buffers: Sequence[int], *, is_detached: bool) -> None:
        """Take back buffers that the main process has released, or give up the arena if it was detached."""
        if arena != self.arena:
            return  # it has been replaced meanwhile
        for number in buffers:
            heapq.heappush(self._free, number)
        if is_detached:
            self._close()

    def _replace(self, size: int) -> None:
        # A power of two, so that batches of growing sizes replace few arenas. Only what is reserved takes memory.
        size = 1 << max(size - 1, mmap.PAGESIZE - 1).bit_length()
        file = SharedFile.create()
        os.ftruncate(file.number, size * self._number)
        memory = mmap.mmap(file.number, size * self._number)
        self._close()
        self.file = file
        self._memory = memory
        self._size = size
        self._reserved, self._free = [0] * self._number, list(range(self._number))
        self.arena += 1

    def _close(self) -> None:
        self.file = self._memory = self._filling = None
        self._free = []
        self._size = 0

    def _reserve(self, number: int, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._reserved[number] < size:
            assert self.file is not None
            _allocate(self.file.number, number * self._size, size)
            self._reserved[number] = size


def _allocate(file: int, start: int, size: int) -> None:
    # Reserve the memory now. Otherwise it is allocated on the first write, and a process that writes when none is left
    # is killed.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)


class Arena(NamedTuple):
    """An arena in the main process."""

    number: int
    memory: mmap.mmap


class BorrowedBuffers:
    """The main process's side of one worker's buffers."""

    _all: ClassVar[weakref.WeakSet[BorrowedBuffers]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._all.add(self)
        self.arena: Arena | None = None
        self._is_detached = False
        self._is_reported = False  # the worker knows that the arena is detached
        # Buffers that the user holds views of, by arena and buffer.
        self.borrowed: dict[Place, weakref.ref[NDArray[Any]]] = {}
        self._released: deque[Place] = deque()  # appended to in any thread, wherever the last view is dropped

    def attach(self, number: int, file: SharedFile) -> None:
        """Use a new arena from now on; batches that have arrived before keep theirs."""
        self.arena = Arena(number, mmap.mmap(file.number, os.fstat(file.number).st_size))
        self._is_detached = self._is_reported = False

    def borrow(self, arena: Arena, number: int, places: Sequence[Place]) -> list[memoryview]:
        """Return the arrays in a buffer as views, all of which keep it from being written again."""
        memory = np.frombuffer(arena.memory, dtype=np.uint8)
        key = (arena.number, number)
        borrowed = self.borrowed
        released = self._released

        def release(_: Any) -> None:
            borrowed.pop(key, None)
            released.append(key)

        borrowed[key] = weakref.ref(memory, release)
        whole = memoryview(memory)  # type: ignore[arg-type]  # an array is a buffer from Python 3.12 on, for mypy
        return [whole[start:end] for start, end in places]

    def copy(self, arena: Arena, number: int, places: Sequence[Place]) -> list[memoryview]:
        """Return copies of the arrays in a buffer, and release it."""
        copies = [memoryview(bytearray(memoryview(arena.memory)[start:end])) for start, end in places]
        self.release(arena, number)
        return copies

    def release(self, arena: Arena, number: int) -> None:
        """Release a buffer that is not borrowed."""
        self._released.append((arena.number, number))

    def take_released(self) -> tuple[int, list[int], bool] | None:
        """Return which buffers of which arena the worker may write again, and whether the arena is detached."""
        released = [self._released.popleft() for _ in range(len(self._released))]
        if self.arena is None or self._is_reported:
            return None
        self._is_reported = self._is_detached
        free = [] if self._is_detached else [buffer for arena, buffer in released if arena == self.arena.number]
        return (self.arena.number, free, self._is_detached) if free or self._is_detached else None

    @classmethod
    def detach_borrowed(cls) -> None:
        """Never write again to arenas with borrowed buffers: a process is about to be forked."""
        for buffers in list(cls._all):
            arena = buffers.arena
            if arena is not None and any(number == arena.number for number, _ in list(buffers.borrowed)):
                buffers._is_detached = True


def pack(item: Any, given: Mapping[int, Given]) -> tuple[bytes, list[Array]]:
    """Return a batch as a pickle and the memory of its tensors and arrays, uncopied where it is contiguous.

    Args:
        given: The tensors that lie in a shared buffer already, by their ids.

    Raises:
        TypeError: The batch cannot be pickled, or holds a tensor that is not in the CPU's memory.
    """
    file = io.BytesIO()
    buffers = list[pickle.PickleBuffer]()
    packer = _Packer(file, protocol=5, buffer_callback=buffers.append)
    packer.given = given
    packer.starts = {}
    try:
        packer.dump(item)
    except _DeviceTensorError:
        raise
    except Exception as error:
        why = str(error).rstrip(".")
        raise TypeError(f"A batch cannot be sent from a worker: {why}. Return plain data.") from error
    return file.getvalue(), [Array(buffer.raw(), packer.starts.get(id(buffer))) for buffer in buffers]


def unpack(stream: bytes | memoryview, arrays: Sequence[memoryview]) -> Any:
    """Return what was packed; its tensors and arrays are views of `arrays`."""
    return pickle.loads(stream, buffers=arrays)  # noqa: S301 - sent by a worker of ours, which runs the user's chain


class _DeviceTensorError(TypeError):
    pass


class _Packer(pickling.Pickler):
    """Pickles lambdas and classes of a notebook, too, and keeps the memory of tensors apart."""

    given: Mapping[int, Given]
    starts: dict[int, int]  # where the memory of tensors lies in the shared buffer, by the id of their `PickleBuffer`

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            return super().reducer_override(value)
        if value.device.type != "cpu":
            raise _DeviceTensorError(
                f"A batch with a tensor on {value.device} cannot be sent from a worker. Return CPU tensors, and put "
                "`.to_device(...)` at the end of the chain: it runs in the main process."
            )
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        is_last = is_channels_last(plain)
        plain = plain.permute(0, 2, 3, 1) if is_last else plain.contiguous()
        content: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        buffer = pickle.PickleBuffer(content)
        given = self.given.get(id(value))
        # The second condition is false if an operation in place, like `t_()`, made the tensor use its memory otherwise.
        if given is not None and plain.data_ptr() == given.address and plain.nbytes == given.tensor.nbytes:
            self.starts[id(buffer)] = given.start
        kind = None if type(value) is torch.Tensor else type(value)
        attributes = value.__dict__ if kind is not None else None
        needs_grad = value.requires_grad and value.is_leaf
        return _tensor, (buffer, plain.dtype, tuple(plain.shape), is_last, needs_grad, kind, attributes)


def _tensor(
    content: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    is_channels_last: bool,
    needs_grad: bool,
    kind: Any,
    attributes: Any,
) -> torch.Tensor:
    content = memoryview(content)
    is_empty = not content.nbytes
    tensor = torch.empty(shape, dtype=dtype) if is_empty else torch.frombuffer(content, dtype=dtype).reshape(shape)
    tensor = tensor.permute(0, 3, 1, 2) if is_channels_last else tensor
    if kind is not None:
        tensor = tensor.as_subclass(kind)
        tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if needs_grad else tensor
