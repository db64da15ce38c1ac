"""`Shared`, a small handle for a large value, which is not copied by pickling, copying and graph traversal."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kdpipes.core import pickling

Value = TypeVar("Value")
_names = itertools.count()
_is_sharing: ContextVar[bool] = ContextVar("kdpipes_sharing", default=False)


class Shared(Generic[Value]):
    """A handle to a value that all copies of a pipe share.

    Torch's graph traversal pickles every collection that a pipe holds, and DataLoader2 clones the pipe by pickling it.
    This handle is not a collection, and its copies in the same or a forked process refer to the same value. Inside
    `sharing`, as in `Loader`, pickling does not even serialize the value. A spawned process gets NumPy arrays through
    one shared memory file (Linux), and copies of everything else.

    Args:
        value: An object, ideally an array or an object whose large attributes are arrays. It must not be modified.
        name: Identifies the value in all processes; by default a new name.
    """

    __slots__ = ("__weakref__", "_file", "_name", "value")
    _live: weakref.WeakValueDictionary[str, Shared[Any]] = weakref.WeakValueDictionary()

    def __init__(self, value: Value, name: str | None = None) -> None:
        self.value = value
        self._file: _MemoryFile | None = None
        self._name = name or f"{os.getpid()}-{next(_names)}-{os.urandom(8).hex()}"
        self._live[self._name] = self

    @classmethod
    def of_name(cls, name: str) -> Shared[Any] | None:
        """Return this process's handle with the given name, or None."""
        return cls._live.get(name)

    def __reduce__(self) -> tuple[Any, ...]:
        if _is_sharing.get():
            return _restore, (self._name, None)
        child = get_spawning_popen()
        if child is not None and hasattr(os, "memfd_create"):
            self._file = self._file or _MemoryFile(self.value)
            return _attach, (self._name, *self._file.for_child(child))
        return _restore, (self._name, pickling.dumps(self.value))


@contextmanager
def sharing() -> Iterator[None]:
    """Make pickles of pipes inside this block omit shared values: for copies that stay in this process."""
    token = _is_sharing.set(True)
    try:
        yield
    finally:
        _is_sharing.reset(token)


def is_sharing() -> bool:
    """Return whether copies made now stay in this process."""
    return _is_sharing.get()


def _restore(name: str, payload: bytes | None) -> Shared[Any]:
    live = Shared.of_name(name)
    if live is not None:
        return live
    if payload is None:
        raise RuntimeError("A copy made for use within one process was unpickled in another process.")
    return Shared(name=name, value=pickle.loads(payload))  # noqa: S301 - a chain that the user pickled


class _MemoryFile:
    """The buffers of a value, in an anonymous file that exists until the last process closes it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._file = io.FileIO(os.memfd_create("kdpipes"), "w+")
        weakref.finalize(self, self._file.close)
        self._places: list[tuple[int, int]] | None = None
        self._sent: tuple[weakref.ref[Any], Any] | None = None

    def for_child(self, child: Any) -> tuple[Any, bytes, list[tuple[int, int]]]:
        """Return the data that a process being spawned needs to attach; the buffers are written only once."""
        buffers: list[pickle.PickleBuffer] = []
        payload = pickling.dumps(self._value, buffer_callback=buffers.append)
        if self._places is None:
            self._places = [self._write(buffer) for buffer in buffers]
        if self._sent is None or self._sent[0]() is not child:
            self._sent = weakref.ref(child), DupFd(self._file.fileno())  # a child can detach a descriptor only once
        return self._sent[1], payload, self._places

    def _write(self, buffer: pickle.PickleBuffer) -> tuple[int, int]:
        start = -(-self._file.tell() // 64) * 64
        self._file.seek(start)
        view = buffer.raw()
        while view.nbytes:
            view = view[self._file.write(view) :]
        return start, self._file.tell() - start


_attached: dict[str, memoryview] = {}  # in a child: it gets each file once, but may unpickle a value again later


def _attach(name: str, descriptor: Any, payload: bytes, places: list[tuple[int, int]]) -> Shared[Any]:
    live = Shared.of_name(name)
    if live is not None:
        return live
    if name not in _attached:
        with io.FileIO(descriptor.detach(), "r") as file:
            size = os.fstat(file.fileno()).st_size
            _attached[name] = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"")
    buffers = [_attached[name][start : start + length] for start, length in places]
    return Shared(name=name, value=pickle.loads(payload, buffers=buffers))  # noqa: S301 - sent by the parent process


class PackedStrings(Sequence[str]):
    """A sequence of strings in one array of bytes: 10^6 paths take their length and 8 bytes each, without objects.

    >>> PackedStrings(["heron/1.jpg", "stork/2.jpg"])[1]
    'stork/2.jpg'
    """

    __slots__ = ("_bytes", "_ends")

    def __init__(self, strings: Sequence[str]) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self._ends: NDArray[np.int64] = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
        self._bytes: NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    @classmethod
    def of_arrays(cls, ends: NDArray[np.int64], letters: NDArray[np.uint8]) -> PackedStrings:
        """Return the strings from the arrays that `arrays` returned."""
        self = cls.__new__(cls)
        if len(ends) and (int(ends[-1]) > len(letters) or int(ends[0]) < 0 or (np.diff(ends) < 0).any()):
            raise ValueError("the ends of the strings do not match the bytes")
        self._ends = ends
        self._bytes = letters
        return self

    @classmethod
    def joined(cls, parts: Sequence[PackedStrings]) -> PackedStrings:
        """Return the strings of several sequences, concatenated."""
        all_ends = [np.zeros(0, dtype=np.int64)]
        all_letters = [np.zeros(0, dtype=np.uint8)]
        start = 0
        for ends, letters in (part.arrays() for part in parts):
            all_ends.append(ends + start)
            all_letters.append(letters)
            start += len(letters)
        return cls.of_arrays(np.concatenate(all_ends), np.concatenate(all_letters))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the end offset of each string, and the bytes of all strings."""
        return self._ends, self._bytes

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self._ends))[index]
        start = int(self._ends[position - 1]) if position else 0
        return self._bytes[start : int(self._ends[position])].tobytes().decode("utf-8", "surrogateescape")
