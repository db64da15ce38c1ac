"""An LMDB environment that is safe to share: with threads, with forked processes, and with views that outlive it."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from kdpipes.errors import DataError

__all__ = ["Environment", "environment_of"]

_NUM_READERS = 1024
_LOCK_BYTES = 17 * 4096  # of `_NUM_READERS`
_MOST_PLACES = 1 << 17  # that a process remembers: some 20 MB
_GENERATIONS = [bytes([number]) for number in range(256)]  # before the key: of an entry, then of those in its place


class Environment:
    """The environment in a folder, opened when it is first used and again after a fork.

    LMDB forbids that a forked process uses what its parent has opened, or opens it anew while it is there; therefore
    every environment is closed before a fork, between two transactions. What has been read of it lives on: views are
    not of LMDB's map, but of one of our own, which goes when no view needs it.

    Args:
        folder: Where it lies, or is made.
        max_bytes: How large it may become.
        is_durable: Whether each commit waits for the disk.
    """

    def __init__(self, folder: str, max_bytes: int, is_durable: bool) -> None:
        self.folder = folder
        self._max_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._is_durable = is_durable
        self._env: Any = None
        self._place: tuple[int, int] | None = None
        self._least_size = 0  # a smaller file has been truncated, as LMDB's file never shrinks
        self._window = _Window()
        self.page_size = mmap.PAGESIZE
        self.reading, self.writing = threading.Lock(), threading.Lock()
        _all.add(self)

    @property
    def is_current(self) -> bool:
        """Whether its files are still those in the folder."""
        return self._place is None or self._place == _place_of(Path(self.folder, "data.mdb"))

    def find(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Return the entries of some keys, None for those that are missing; they may be held for any time."""
        with self.reading, self._begin() as transaction:
            return [self._kept(_newest(transaction, key)) for key in keys]

    def find_again(self, key: bytes) -> memoryview | None:
        """Return an entry that was found before, and was whole; where a large one lies, which never moves, is kept."""
        known = self._window.known(key)
        if known is not None:
            return known
        with self.reading, self._begin() as transaction:
            return self._kept(_newest(transaction, key), key)

    def add(self, entries: Iterable[tuple[bytes, bytes]], *, replace: bool) -> int:
        """Write entries that are not there, or that are to be replaced; return how many have been replaced."""
        if replace:
            self._window.forget()
        with self.writing, self._begin_writing() as transaction:
            return sum(_add(transaction, key, content, replace) for key, content in entries)

    def has(self, key: bytes) -> bool:
        """Return whether there is an entry."""
        with self.reading, self._begin() as transaction:
            return transaction.get(b"\0" + key) is not None

    def keys(self) -> list[bytes]:
        """Return the keys of all entries."""
        with self.reading, self._begin() as transaction:
            found = transaction.cursor()
            return [bytes(key[1:]) for key in found.iternext(values=False) if key[0] == 0]

    def size(self) -> tuple[int, int]:
        """Return how many entries there are, and how many bytes they take."""
        with self.reading, self._begin() as transaction:
            num_pages = self._opened().info()["last_pgno"] + 1
            return transaction.stat()["entries"] - _num_replaced(transaction), num_pages * self.page_size

    def check_size(self) -> None:
        """Raise if the file has been truncated since it was opened; reading the missing part would raise SIGBUS.

        Raises:
            DataError: The file has been truncated. The environment is closed.
        """
        with self.reading:
            if self._env is not None and self._place == _place_of(Path(self.folder, "data.mdb")):
                self._check_size()

    def _check_size(self) -> None:
        data = Path(self.folder, "data.mdb")
        size, least = data.stat().st_size, self._least_size
        if size >= least:  # only then can the first pages, which hold the number of pages, be read
            least = (self._env.info()["last_pgno"] + 1) * self.page_size
        if size < least:
            self._close()
            self._window = _Window()
            raise DataError(f"{str(data)!r} has been truncated: it should have {least} bytes. Delete the cache.")
        self._least_size = size

    def _begin(self) -> Any:
        try:
            return (self._env or self._opened()).begin(buffers=True)
        except (lmdb.MapResizedError, lmdb.ReadersFullError):  # of a process that has more room, or was killed
            self._close()
            return self._opened().begin(buffers=True)

    def _begin_writing(self) -> Any:
        with self.reading:
            env = self._opened()
        try:
            return env.begin(write=True)  # others may read while this waits for other processes
        except lmdb.Error:  # of a process that has more room, or closed by a thread that has noticed that
            with self.reading:
                self._close()
                return self._opened().begin(write=True)

    def _kept(self, found: memoryview | None, key: bytes | None = None) -> memoryview | None:
        """Return what a transaction has found, to be held for any time; and remember where, if it has a key.

        Small values lie in pages that LMDB moves, and are copied. Those of a page and more have pages of their own,
        which stay as they are, for nothing is ever deleted or overwritten here.
        """
        if found is None:
            return None
        view = self._window.view(found, key) if len(found) >= self.page_size else None
        return memoryview(bytes(found)) if view is None else view

    @property
    def max_bytes(self) -> int:
        """How large it may become."""
        return self._max_bytes

    def grow(self, max_bytes: int) -> None:
        """Let it become at least so large."""
        with self.writing, self.reading:
            if max_bytes > self._max_bytes:
                self._max_bytes = max_bytes
                self._close()

    def close(self) -> None:
        """Let go of it until it is used again."""
        with self.writing, self.reading:
            self._close()

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None
        self._window.end()

    def _opened(self) -> Any:
        if self._env is None:
            self._env = self._open()
            self._env.reader_check()  # of processes that were killed
        return self._env

    def _open(self) -> Any:
        is_writable = os.access(self.folder, os.W_OK)
        data = Path(self.folder, "data.mdb")
        if is_writable:
            _reserve(Path(self.folder, "lock.mdb"), _LOCK_BYTES)
        options: dict[str, Any] = {
            "readonly": not is_writable,
            "lock": is_writable,
            "create": is_writable,
            "mode": 0o600,
        }
        options.update(sync=self._is_durable, metasync=self._is_durable, meminit=False, max_readers=_NUM_READERS)
        try:
            env = lmdb.open(self.folder, map_size=self._max_bytes, **options)
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
            raise DataError(f"{self.folder!r} is no cache, or a damaged one ({error}). Delete it.") from error
        self.page_size = env.stat()["psize"]
        place = _place_of(data)
        if place != self._place:
            self._place, self._window, self._least_size = place, _Window(), 0
        self._env = env
        self._check_size()
        self._window.begin(data)
        return env


def _newest(transaction: Any, key: bytes) -> Any:
    """Return the entry of a key: that of the highest generation, should it have been replaced."""
    found, later, number = None, transaction.get(b"\0" + key), 0
    while later is not None:
        found, number = later, number + 1
        later = transaction.get(_GENERATIONS[number] + key)
    return found


def _add(transaction: Any, key: bytes, content: bytes, replace: bool) -> bool:
    """Write an entry if there is none, or if it is to be replaced; return whether it has replaced one."""
    for generation in _GENERATIONS[: -1 if replace else 1]:
        if transaction.put(generation + key, content, overwrite=False):
            return generation != b"\0"
    return False


def _num_replaced(transaction: Any) -> int:
    with transaction.cursor() as cursor:
        return sum(1 for _ in cursor.iternext(values=False)) if cursor.set_range(b"\1") else 0


def _reserve(path: Path, size: int) -> None:
    """Make room for a file that is mapped to be written: without, a full disk would end the process by a signal."""
    if sys.platform != "linux":
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _place_of(path: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


class _Window:
    """A map of our own of the file that LMDB has mapped, too. What is looked at through it keeps it."""

    def __init__(self) -> None:
        self._map = memoryview(b"")
        self._places: dict[bytes, tuple[int, int]] = {}
        self._descriptor: int | None = None
        self._closing: Callable[[], Any] = bool
        self._base: int | None = None

    def begin(self, path: Path) -> None:
        """Look at a file that LMDB has just mapped."""
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self._map = memoryview(b"")

    def end(self) -> None:
        """Forget where LMDB's map was."""
        self._closing()
        self._base = self._descriptor = None

    def known(self, key: bytes) -> memoryview | None:
        """Return the entry of a key whose place is remembered."""
        place, whole = self._places.get(key), self._map
        return whole[place[0] : place[1]] if place is not None and place[1] <= len(whole) else None

    def forget(self) -> None:
        """Remember no place any more: an entry may be elsewhere soon."""
        self._places = {}

    def view(self, found: memoryview, key: bytes | None) -> memoryview | None:
        """Return what lies in LMDB's map, as it lies in this one; None where it is not known how to."""
        if self._descriptor is None:
            return None
        address = int(np.frombuffer(found, np.uint8).__array_interface__["data"][0])
        if self._base is None:
            self._base = _start_of_file(address, os.fstat(self._descriptor).st_ino)
            if self._base is None:
                return None
        start = address - self._base
        end = start + len(found)
        if end > len(self._map):
            self._map = memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))
        if key is not None and len(self._places) < _MOST_PLACES:
            self._places[key] = start, end
        return self._map[start:end]


def _start_of_file(address: int, inode: int) -> int | None:
    """Return the address at which the file begins that is mapped to `address`; None if that is not known."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, _, offset, _, number = line.split(None, 5)[:5]
        start, end = (int(place, 16) for place in span.split("-"))
        if start <= address < end:
            return start - int(offset, 16) if int(number) == inode else None
    return None


_all: weakref.WeakSet[Environment] = weakref.WeakSet()
_by_folder: weakref.WeakValueDictionary[str, Environment] = weakref.WeakValueDictionary()
_registering = threading.Lock()
_stopped: list[Environment] = []  # while this process forks


def environment_of(folder: str, max_bytes: int, is_durable: bool) -> Environment:
    """Return this process's environment in a folder: LMDB allows only one."""
    path = str(Path(folder).resolve())
    with _registering:
        known = _by_folder.get(path)
        if known is None or not known.is_current:
            known = _by_folder[path] = Environment(path, max_bytes, is_durable)
    known.grow(max_bytes)
    return known


def _before_fork() -> None:
    _registering.acquire()
    for environment in list(_all):
        environment.writing.acquire()
        environment.reading.acquire()
        environment._close()
        _stopped.append(environment)


def _after_fork() -> None:
    while _stopped:
        environment = _stopped.pop()
        environment.reading.release()
        environment.writing.release()
    _registering.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
