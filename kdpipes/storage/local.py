"""Local files: read and mapped into memory, written atomically, locked, and kept in the local cache."""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import platformdirs
from filelock import FileLock, Timeout

from kdpipes.core.errors import DataError
from kdpipes.core.processes import at_fork
from kdpipes.storage.readers import WHOLE, Response, Stat, Version, Wanted
from kdpipes.storage.urls import identity_of

# By zlib-ng where it is installed (extra `fast`), which takes 2 in place of 25 us for a JPEG of 107 KB.
try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

CAN_HOLD = importlib.util.find_spec("fcntl") is not None  # Windows has none
_KEPT = 256  # maps of one `MappedFiles`; each holds a descriptor
_KEPT_SHARDS = 64
_RESIDENT = 1 << 26  # bytes that are viewed until the pages of the maps leave this process's memory
_POLL_S = 0.01  # between two attempts to get a lock


class LocalReader:
    """A local file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def stat(self) -> Stat:
        """Return size, version and date of the file."""
        status = os.stat(self.path)  # noqa: PTH116 - of each of many files
        return Stat(Version(status.st_size, f"changed:{status.st_mtime_ns}"), status.st_mtime)

    def read(self, wanted: Wanted = WHOLE) -> Response:
        """Return bytes of the file. All of it is read; parts are taken from a map that is kept."""
        if wanted.stop is not None:
            return Response(read_span(self.path, wanted.start, wanted.most))
        with open(self.path, "rb", buffering=0) as file:  # noqa: PTH123 - a `Path` takes a quarter longer
            return Response(file.readall())

    def stream(self, start: int = 0) -> IO[bytes]:
        """Open the file."""
        file = open(self.path, "rb")  # noqa: PTH123, SIM115 - as above
        file.seek(start)
        return file


def pread(descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset`, or fewer at the end: the system returns at most 2 GiB per call."""
    content = _pread(descriptor, size, offset)
    while len(content) < size and (more := _pread(descriptor, size - len(content), offset + len(content))):
        content += more
    return content


_seeking = threading.Lock()


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _seeking:  # threads share the descriptor, and with it the place in the file
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes: one call of the system may write fewer."""
    view = memoryview(content)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def cache_folder(name: str) -> Path:
    """Return the local folder for data that later runs can use; it may not exist yet."""
    return Path(os.environ.get("KDPIPES_CACHE_DIR") or _user_cache()).expanduser() / name


def _user_cache() -> Path:
    return Path(platformdirs.user_cache_dir("kdpipes", appauthor=False)).expanduser()


def cached_name(url: str, *details: str) -> str:
    """Return the name under which the local cache keeps something of a URL, without its signature."""
    text = "\n".join([identity_of(url), *details]).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def make_cache_folder(path: Path) -> None:
    """Make a folder for copies of data; below the user's own cache folder, other users cannot read it."""
    path.mkdir(mode=0o700 if path.is_relative_to(_user_cache()) else 0o777, parents=True, exist_ok=True)


def map_file(descriptor: int) -> mmap.mmap:
    """Map a whole open file for reading, so that processes share its pages.

    Raises:
        ValueError: The file is empty.
        OSError: The file cannot be mapped.
    """
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


class _Map:
    """A file in memory. Views and threads that still read it keep it alive after others have dropped it."""

    __slots__ = ("__weakref__", "buffer", "content", "place", "version")

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            self.place = _place(status)
            self.version = Version(status.st_size, f"changed:{status.st_mtime_ns}")
            self.buffer = map_file(file.fileno()) if status.st_size else b""
            self.content = memoryview(self.buffer)

    def release_pages(self) -> None:
        """Remove the pages from this process's memory; views stay valid, because reading them maps the pages again."""
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # Windows has no `madvise`
            self.buffer.madvise(mmap.MADV_DONTNEED)


def _place(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_alive: weakref.WeakValueDictionary[str, _Map] = weakref.WeakValueDictionary()  # copies of a pipe share maps


class MappedFiles:
    """Maps files when they are first read, and keeps those that were used last.

    The maps are freed with this object and the views of them. Forked processes share them; a copy of this object maps
    anew. A file that has been replaced, cut or changed is mapped anew: each read looks at its size first, because
    reading what is no longer there kills the process. Pages that were viewed leave the process's memory after 64 MiB.
    """

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        self._maps: OrderedDict[str, _Map] = OrderedDict()
        self._num_viewed = 0  # bytes since pages were released

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[int | None]]:
        return MappedFiles, (self._number,)

    def view(self, path: str, start: int, size: int, num_bytes: int) -> memoryview:
        """Return a read-only view of a part of a file.

        Raises:
            DataError: The file is missing, or has another length.
        """
        try:
            status = os.stat(path)  # noqa: PTH116 - of each read
            if status.st_size != num_bytes:
                raise DataError(
                    f"{path!r} should have {num_bytes} bytes, but has {status.st_size}. Write or copy it again."
                )
            if start < 0 or start + size > num_bytes:
                raise DataError(f"{path!r} has {num_bytes} bytes, but {size} are due at offset {start}.")
            self._count(size)
            return self.mapped(path, status).content[start : start + size]
        except OSError as error:
            raise DataError(f"{path!r} cannot be read: {error.strerror}.") from error

    def _count(self, num_bytes: int) -> None:
        """Release the pages of the maps after each 64 MiB that were viewed.

        The system counts mapped pages as the memory of the process until it needs them: data that are read once would
        make every worker as large as the dataset. The page cache keeps the data. Mapping the pages again costs 3 us
        per 110 KB, which is too much for `read_span`: copies of undecoded members of shards would take 30 % longer.
        """
        self._num_viewed += num_bytes  # a count that threads lose only delays the release
        if self._num_viewed >= _RESIDENT:
            self._num_viewed = 0
            for each in list(self._maps.values()):
                each.release_pages()

    def mapped(self, path: str, status: os.stat_result) -> _Map:
        """Return the map of a file whose status is known."""
        found = self._maps.get(path)
        if found is None or found.place != _place(status):
            found = _alive.get(path)
            if found is None or found.place != _place(status):
                found = _alive[path] = _Map(path)
            self._maps[path] = found
        try:
            self._maps.move_to_end(path)
            while len(self._maps) > (self._number or _KEPT):
                self._maps.popitem(last=False)
        except KeyError:  # another thread has dropped it at the same moment
            pass
        return found


_shards = MappedFiles(_KEPT_SHARDS)


def read_span(path: str, offset: int, size: int, version: Version | None = None) -> bytes:
    """Return `size` bytes of a file from `offset` on, or fewer at its end. The last 64 files stay mapped.

    Raises:
        DataError: The file is no longer of the `version` that it had when it was indexed.
    """
    file = _shards.mapped(path, os.stat(path))  # noqa: PTH116 - of each read
    content = file.buffer[offset : offset + size]
    if version is not None and file.version != version and len(content) == size:  # the reader reports a cut file
        raise DataError(
            f"Shard {path!r} has been replaced, or written to, since it was opened: it had {version.size} bytes, and "
            f"has {file.version.size} of another date. Open it again, `kdp.open_shards(...)`: it is then indexed anew."
        )
    return content


@contextmanager
def draft_of(path: Path, draft: Path | None = None) -> Iterator[Path]:
    """Yield the path at which to write a draft of a file; a draft that has not been moved is removed.

    The draft must be in the same file system as the file. By default, it is hidden beside it as `.NAME.RANDOM.part`, a
    name by which leftovers of killed processes are recognized.
    """
    draft = draft or path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Write a file atomically; an existing file is replaced.

    If `is_synced`, the content is on the disk before the name is, so that a loss of power cannot part them.
    """
    with draft_of(path) as draft:
        with draft.open("wb") as file:
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)


def create_file(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it exists: of several processes, the first one decides."""
    with draft_of(path) as draft:
        draft.write_bytes(content)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except FileNotFoundError:
            if not path.exists():  # a faster process may have removed the draft
                raise
        except OSError:  # of file systems without hard links
            draft.replace(path)


@contextmanager
def locked(path: Path, *, timeout_s: float | None = None) -> Iterator[bool]:
    """Hold an exclusive lock on a file between processes and threads, and yield whether it is held.

    The lock ends with the process, however that ends; the file stays.

    Args:
        path: The lock file, which is created; never a file with data.
        timeout_s: How long to wait for the lock; None is without a limit.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if timeout_s is None else timeout_s, poll_interval=_POLL_S)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


_opening = threading.Lock()
_files: weakref.WeakSet[HeldFile] = weakref.WeakSet()


class HeldFile:
    """An open data file that readers share and one writer holds alone, between processes and threads.

    `locked` cannot do this: filelock's locks are exclusive, and its lock files must not be moved. A forked process does
    not inherit the hold.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.is_alone = False
        with _opening:  # a fork in between would leave the file, and later its lock, to the child
            self.descriptor = os.open(path, flags, 0o666)
            self._release = weakref.finalize(self, _let_go, self.descriptor)
            _files.add(self)

    def __enter__(self) -> HeldFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def hold_together(self, *, waits: bool = True) -> bool:
        """Share the file with other readers; return whether that worked, at once unless `waits`."""
        return self._hold(is_alone=False, waits=waits)

    def hold_alone(self, *, waits: bool = False) -> bool:
        """Hold the file against all others; return whether that worked, at once unless `waits`."""
        return self._hold(is_alone=True, waits=waits)

    def _hold(self, *, is_alone: bool, waits: bool) -> bool:
        import fcntl

        kind = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH
        try:
            fcntl.flock(self.descriptor, kind if waits else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.is_alone = is_alone
        return True

    def is_in_place(self) -> bool:
        """Return whether its path still leads to this file."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        """Return its length."""
        return os.fstat(self.descriptor).st_size

    def remove(self) -> None:
        """Delete the file, and free its space even if another process has it open. Only for files held alone."""
        self.path.unlink(missing_ok=True)
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Close the file, which ends the hold."""
        self._release()

    def disown(self) -> None:
        """Close the file, but leave the hold to the process that this one was forked from."""
        if self._release.detach() is not None:
            os.close(self.descriptor)


def _let_go(descriptor: int) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing it does not, while a forked process has it open
    finally:
        os.close(descriptor)


def _disown() -> None:
    """Close the parent's held files in a forked process: their locks would outlive the parent."""
    for file in list(_files):
        file.disown()
    _files.clear()
    _opening.release()


at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_disown)
