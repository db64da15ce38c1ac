"""A cache in LMDB: in shared memory, one copy for all local processes, or in a folder on disk."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from kdpipes.cache.folder import LocalFolder, number_in, read_metadata
from kdpipes.cache.shared_folder import SharedFolder, free_bytes
from kdpipes.cache.store import CacheStore, bound_to
from kdpipes.core.errors import DataError, check_count, check_flag, must_be
from kdpipes.core.processes import at_fork
from kdpipes.storage.readers import map_file
from kdpipes.storage.urls import is_local

_LEAST_BYTES = 1 << 16
_MOST_BYTES = 1 << 62
_NUM_READERS = 1024
_LOCK_BYTES = 17 * 4096  # size of the lock file for `_NUM_READERS`
# Entries are committed together once there are this many, or this much time after the first of them.
_GROUP_ENTRIES = 64
_GROUP_BYTES = 8 << 20
_GROUP_S = 0.2
_MOST_PLACES = 1 << 17  # about 20 MB in each process
_PREFIX = b"\0"  # prefix of all keys


class LmdbStore(CacheStore):
    """A `CacheStore` in LMDB. It never evicts: a full store keeps its entries.

    Entries of at least a page (4 KiB) are read without a copy. All entries stay intact even if a process is killed in
    the middle of a `put`. A read-only folder is only read, and must not be written through another path at the same
    time. `cache_on_disk` describes the arguments.

    Args:
        folder: A local folder (no network file system), which is created if necessary, or a `SharedFolder`.
        max_bytes: The maximum size; by default, half of the free space. It is set by the process that creates the
            cache; later processes can only raise it.
        is_durable: Whether entries are written in groups and flushed to disk; False by default for a `SharedFolder`.
    """

    layout = "lmdb"
    errors = (OSError, lmdb.Error)
    has_quick_size = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | SharedFolder,
        *,
        max_bytes: int | None = None,
        is_durable: bool | None = None,
    ) -> None:
        self._holder = folder if isinstance(folder, SharedFolder) else None
        path = folder.path if isinstance(folder, SharedFolder) else os.fspath(folder)
        if not is_local(path):
            raise ValueError(must_be("folder", "a local folder", path, "A `FileStore` takes URLs."))
        self.folder = str(Path(path).expanduser().absolute())
        self._max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes, minimum=_LEAST_BYTES)
        self._is_durable = self._holder is None if is_durable is None else check_flag("is_durable", is_durable)
        self._limit_text = ""
        if self._holder is not None:
            self.lifetime = "job"

    @classmethod
    def in_memory(cls, name: str | None = None, *, max_bytes: int | None = None, keep: bool = False) -> LmdbStore:
        """Return a store in shared memory, no larger than the free memory. It is removed as in `cache_in_memory`."""
        folder = SharedFolder(name, keep=keep)
        self = cls(folder, max_bytes=max_bytes)
        if name is None:
            self.lifetime = "chain"
        data = Path(folder.path, "data.mdb")
        free = free_bytes(folder.path) + (data.stat().st_blocks * 512 if data.exists() else 0)
        if self._max_bytes is not None and self._max_bytes > free:
            self._max_bytes = max(free, _LEAST_BYTES)
            self._limit_text = (
                f"the {free:,} bytes of shared memory that were free, of {max_bytes:,} that it may use; `--shm-size` "
                "gives a container more"
            )
        return self

    def get(self, key: bytes) -> memoryview | None:
        return self._environment.find(key)

    def recall(self, key: bytes) -> memoryview | None:
        return self._environment.recall(key)

    def put(self, key: bytes, content: bytes, *, replace: bool) -> None:
        with self._writing() as environment:
            environment.add(key, content, replace)

    def delete(self, key: bytes) -> None:
        with self._writing() as environment:
            environment.delete(key)

    def flush(self) -> None:
        if "_environment" in vars(self):
            with self._writing() as environment:
                environment.flush()

    def contains(self, key: bytes) -> bool:
        return self._environment.has(key)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        with suppress(*self.errors):  # a process that cannot open the folder gets every claim
            _ = self._environment  # creates the folder
        return LocalFolder(self.folder).claim(name, waits=waits)

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """Yield `bound_to(key)` and the content of each entry; None if the content cannot be read."""
        self.flush()
        for key in self._environment.all_keys():
            yield bound_to(key), self.get(key)

    def size(self) -> tuple[int, int]:
        self.flush()
        return self._environment.size()

    def check(self) -> None:
        if "_environment" in vars(self):
            self._environment.check_size()

    def close(self) -> None:
        if "_environment" in vars(self):
            self.flush()
            self._environment.close()
        super().close()

    def __str__(self) -> str:
        return repr(self.folder)

    @contextmanager
    def _writing(self) -> Iterator[_Environment]:
        """Yield the environment for writing, and explain errors caused by a lack of space."""
        environment = self._environment
        try:
            yield environment
        except lmdb.MapFullError as error:
            limit = self._limit_text or f"`max_bytes` of {environment.max_bytes:,}"
            raise OSError(errno.ENOSPC, f"it is full: it has reached {limit}") from error
        except (OSError, lmdb.Error) as error:
            if free_bytes(self.folder) < _LEAST_BYTES:  # LMDB may report "Input/output error"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {error}") from error
            raise

    @cached_property
    def _environment(self) -> _Environment:
        """The environment of this process."""
        if self._holder is not None and not Path(self.folder).is_dir():
            raise FileNotFoundError(f"The process that has made {self.folder!r} has ended.")
        local = LocalFolder(self.folder)
        metadata = read_metadata(local, self.folder, self.layout)
        if metadata is None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            limit = self._max_bytes or max(free_bytes(self.folder) // 2, _LEAST_BYTES)
            metadata = read_metadata(local, self.folder, self.layout, {"max_bytes": limit}) or {}
        noted = number_in(metadata, "max_bytes", self.folder, least=1, most=_MOST_BYTES)
        max_bytes = max(noted, self._max_bytes or 0)
        environment = _environment_of(self.folder, max_bytes, self._is_durable)
        environment.size()  # opened here, to raise errors now
        return environment


class _Environment:
    """The LMDB environment in a folder, one per process, opened on first use and again after a fork.

    A forked process may neither use an environment opened by its parent, nor open it while the parent's is open.
    Therefore, all environments are closed before a fork, between transactions.
    """

    def __init__(self, folder: str, max_bytes: int, is_durable: bool) -> None:
        self.folder = folder
        self.max_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._is_durable = is_durable
        self._env: Any = None
        self._file: tuple[int, int] | None = None
        self._least_size = 0  # LMDB's file never shrinks, so a smaller one was truncated
        self._data = Path(folder, "data.mdb")
        self._views = _Views(self._data, None)
        self._page_size = mmap.PAGESIZE
        self.group: dict[bytes, bytes] = {}  # entries that are not committed yet
        self.group_bytes = 0
        self._since = 0.0  # time at which its first entry was added
        self._is_writable = True
        self.reading = threading.Lock()
        self.writing = threading.Lock()
        _all.add(self)

    @property
    def is_current(self) -> bool:
        """Whether the opened file is still the one in the folder."""
        with suppress(FileNotFoundError):
            return self._file is None or self._file == _file_id(self._data.stat())
        return False

    def recall(self, key: bytes) -> memoryview | None:
        """Return an entry from its remembered location, if there is one."""
        known = self._views.known(key)
        return self.find(key) if known is None else known

    def find(self, key: bytes) -> memoryview | None:
        """Return an entry, or None. The view stays valid indefinitely."""
        if (content := self.group.get(key)) is not None:
            return memoryview(content)
        with self.reading, self._begin() as transaction:
            found = transaction.get(_PREFIX + key)
            # LMDB moves small values, so they are copied. Large values occupy their own pages, which stay in place.
            view = self._views.of(found, key) if found is not None and len(found) >= self._page_size else None
            return view if found is None or view is not None else memoryview(bytes(found))

    def add(self, key: bytes, content: bytes, replace: bool) -> None:
        """Write an entry. An existing one is replaced only with `replace`.

        LMDB reuses the pages of a replaced entry, so views of it may change, but only damaged entries are replaced. An
        entry that another process has healed in the meantime is left alone, because others may already have views of
        it.
        """
        if replace:
            self._views.forget()
        if not self._is_durable or replace:
            with self.writing:
                self._commit({key: content}, replace)
            return
        with self.writing:
            with self.reading:
                self._open()
            if not self._is_writable:
                self._commit({key: content})  # this raises the error
            if not self.group:
                self._since = time.monotonic()
                _flush_at_exit()
            self.group_bytes += 0 if key in self.group else len(content)
            self.group.setdefault(key, content)
            is_due = time.monotonic() - self._since >= _GROUP_S
            if is_due or len(self.group) >= _GROUP_ENTRIES or self.group_bytes >= _GROUP_BYTES:
                self._commit_group()

    def delete(self, key: bytes) -> None:
        """Delete an entry if it exists."""
        self._views.forget()
        with self.writing:
            self._commit_group()
            with self._begin_writing() as transaction:
                transaction.delete(_PREFIX + key)

    def flush(self) -> None:
        """Commit the pending entries."""
        with self.writing:
            self._commit_group()

    def __del__(self) -> None:
        if self.group:  # never at the end of Python, when `suppress` may be gone: `_flush_all` has written it
            with suppress(Exception):  # no caller could handle the error
                self.flush()

    def _commit_group(self) -> None:
        """Commit the pending entries. The caller holds `writing`.

        A transaction waits for the disk twice, regardless of the number of entries: 64 entries take 0.4 ms instead of
        21 ms. If they do not all fit, those that fit are stored.
        """
        group = self.group
        try:
            if group:
                self._commit(group)
        except lmdb.MapFullError:
            for key, content in group.items():
                self._commit({key: content})
        finally:
            self.group, self.group_bytes = {}, 0  # only now, because other threads read it

    def _commit(self, entries: dict[bytes, bytes], replace: bool = False) -> None:
        with self._begin_writing() as transaction:
            for key, content in entries.items():
                is_new = transaction.put(_PREFIX + key, content, overwrite=False)
                if not is_new and replace and transaction.get(_PREFIX + key) != content:
                    transaction.put(_PREFIX + key, content)

    def has(self, key: bytes) -> bool:
        """Return whether an entry exists."""
        if key in self.group:
            return True
        with self.reading, self._begin() as transaction:
            return transaction.get(_PREFIX + key) is not None

    def all_keys(self) -> list[bytes]:
        """Return the keys of all entries."""
        with self.reading, self._begin() as transaction:
            return [bytes(key[1:]) for key in transaction.cursor().iternext(values=False) if key[0] == 0]

    def size(self) -> tuple[int, int]:
        """Return the number of entries and their bytes."""
        with self.reading, self._begin() as transaction:
            return transaction.stat()["entries"], (self._open().info()["last_pgno"] + 1) * self._page_size

    def check_size(self) -> None:
        """Raise a DataError if the file was truncated: reading the missing part would kill the process (SIGBUS)."""
        with self.reading:
            if self._env is not None and self.is_current:
                self._check_size()

    def _check_size(self) -> None:
        size = self._data.stat().st_size
        least = self._least_size
        if size >= least:  # only then can the first pages be read, which hold the number of pages
            least = (self._env.info()["last_pgno"] + 1) * self._page_size
            size = self._data.stat().st_size  # check again: another process may have written in between
        if size < least:
            self.close_now()
            self._views = _Views(self._data, self._file)
            raise DataError(f"{str(self._data)!r} has been truncated: it should have {least} bytes. Delete the cache.")
        self._least_size = size

    def _begin(self) -> Any:
        try:
            return (self._env or self._open()).begin(buffers=True)
        except (lmdb.MapResizedError, lmdb.ReadersFullError):  # another process has raised the size, or was killed
            self.close_now()
            return self._open().begin(buffers=True)

    def _begin_writing(self) -> Any:
        with self.reading:
            env = self._open()
        try:
            return env.begin(write=True)  # other threads may read while this waits for other processes
        except lmdb.Error:  # another process has raised the size, or a thread that noticed this has closed `env`
            with self.reading:
                self.close_now()
                return self._open().begin(write=True)

    def grow(self, max_bytes: int) -> None:
        """Raise the maximum size to `max_bytes` if it is smaller."""
        with self.writing, self.reading:
            if max_bytes > self.max_bytes:
                self.max_bytes = max_bytes
                self.close_now()

    def close(self) -> None:
        """Close the environment until it is used again."""
        with self.writing, self.reading:
            self.close_now()

    def close_now(self) -> None:
        """Close the environment until it is used again. The caller holds `reading`."""
        if self._env is not None:
            self._env.close()
        self._env = self._views.base = None

    def _open(self) -> Any:
        if self._env is not None:
            return self._env
        is_writable = self._is_writable = os.access(self.folder, os.W_OK)
        if is_writable:
            _reserve(Path(self.folder, "lock.mdb"), _LOCK_BYTES)
        try:
            env = lmdb.open(
                self.folder,
                map_size=self.max_bytes,
                readonly=not is_writable,
                lock=is_writable,
                create=is_writable,
                mode=0o600,
                sync=self._is_durable,
                metasync=self._is_durable,
                meminit=False,
                max_readers=_NUM_READERS,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
            raise DataError(f"{self.folder!r} is not a cache, or is damaged ({error}). Delete it.") from error
        self._env = env
        self._page_size = env.stat()["psize"]
        file = _file_id(self._data.stat())
        if file != self._file:
            self._file, self._views, self._least_size = file, _Views(self._data, file), 0
        self._check_size()
        env.reader_check()  # free the slots of killed processes
        return env


def _reserve(path: Path, size: int) -> None:
    """Allocate a file that LMDB maps for writing: on a full disk, writing to the map would end the process (SIGBUS)."""
    if sys.platform != "linux":
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _file_id(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class _Views:
    """Zero-copy views of large entries, through a separate read-only map of LMDB's file.

    py-lmdb's buffers are valid only within a transaction, and LMDB's map only until the next fork, while samples may
    keep views indefinitely. A view of the separate map keeps that map alive. With plain copies, a cached epoch runs at
    0.71 (encoded, 107 KB) and 0.81 (decoded, 224 x 224) of its speed, and a look-up of 107 KB at 0.53. If LMDB is asked
    again for the location of each entry, they run at 0.83, 0.89 and 0.72 (benchmarks/bench_cache.py, two workers).
    """

    def __init__(self, path: Path, file: tuple[int, int] | None) -> None:
        self._path = path
        self._file = file
        self._map = memoryview(b"")
        self._places: dict[bytes, tuple[int, int]] = {}
        self.base: int | None = None  # start of LMDB's map while it is open

    def known(self, key: bytes) -> memoryview | None:
        """Return an entry from its remembered location."""
        place = self._places.get(key)
        whole = self._map
        return whole[place[0] : place[1]] if place is not None and place[1] <= len(whole) else None

    def forget(self) -> None:
        """Forget all locations, because entries may move."""
        self._places = {}

    def of(self, found: memoryview, key: bytes) -> memoryview | None:
        """Return a view of a value found by LMDB; None if its location in the file is unknown (Linux reports it)."""
        address = int(np.frombuffer(found, np.uint8).__array_interface__["data"][0])
        self.base = self.base or _start_of_map(address, self._file)
        if self.base is None:
            return None
        start = address - self.base
        end = start + len(found)
        if end > len(self._map):
            with suppress(FileNotFoundError), self._path.open("rb") as file:
                if _file_id(os.fstat(file.fileno())) == self._file:
                    self._map = memoryview(map_file(file.fileno()))
            if end > len(self._map):  # the folder was moved
                return None
        if len(self._places) < _MOST_PLACES:
            self._places[key] = start, end
        return self._map[start:end]


def _start_of_map(address: int, file: tuple[int, int] | None) -> int | None:
    """Return the start address of the map of a file that contains `address`; None if unknown."""
    maps = Path("/proc/self/maps")
    if file is None or not maps.exists():
        return None
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, _, offset, _, inode = line.split(None, 5)[:5]
        start, end = (int(place, 16) for place in span.split("-"))
        if start <= address < end:
            return start - int(offset, 16) if int(inode) == file[1] else None
    return None


_all: weakref.WeakSet[_Environment] = weakref.WeakSet()
_registering = threading.Lock()
_stopped: list[_Environment] = []  # environments closed while this process forks
_flushes_in = 0  # the process that will commit its groups when it ends


def _environment_of(folder: str, max_bytes: int, is_durable: bool) -> _Environment:
    """Return this process's environment in a folder, because LMDB allows only one."""
    path = str(Path(folder).resolve())
    with _registering:
        known = next((each for each in list(_all) if each.folder == path and each.is_current), None)
        environment = known or _Environment(path, max_bytes, is_durable)
    environment.grow(max_bytes)
    return environment


def _before_fork() -> None:
    _registering.acquire()
    for environment in list(_all):
        environment.writing.acquire()
        environment.reading.acquire()
        environment.close_now()
        _stopped.append(environment)


def _forget_groups() -> None:
    for environment in _stopped:
        environment.group, environment.group_bytes = {}, 0  # the parent writes these entries
    _after_fork()


def _flush_at_exit() -> None:
    """Commit pending entries at the regular end of this process, even if it is a child of `multiprocessing`."""
    global _flushes_in
    if _flushes_in != os.getpid():
        _flushes_in = os.getpid()
        Finalize(None, _flush_all, exitpriority=10)


def _flush_all() -> None:
    for environment in list(_all):
        with suppress(lmdb.Error, OSError, DataError):  # no caller could handle the error
            environment.flush()


def _after_fork() -> None:
    while _stopped:
        environment = _stopped.pop()
        environment.reading.release()
        environment.writing.release()
    _registering.release()


at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_groups)
