"""Folders in shared memory that are deleted when the last process using them ends."""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import shutil
import struct
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdpipes.cache.folder_watcher import CAN_HOLD, KEEP, is_at, prefix, remove_if_free, root, sweep, watcher
from kdpipes.core.errors import must_be
from kdpipes.core.processes import forget_after_fork, uninterrupted

with suppress(ImportError):  # Windows does not have it
    import fcntl

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROW = struct.Struct("<3Q")


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the number of bytes that can still be written to the file system of `folder`."""
    return shutil.disk_usage(folder).free


forget_after_fork(watcher)  # registered here, because its module also runs as a script and does not import kdpipes


class SharedFolder:
    """A folder in shared memory (`/dev/shm`; on systems other than Linux, a temporary folder).

    The process that creates it holds a lock on it, which the system releases even if the process is killed. Without a
    name, the folder is removed with that process or this object; with a name, with the last process that opened it by
    this name. The folders of a killed process are removed by a small helper process (Linux), or by the next process
    that creates a folder. A copy in another process, pickled or forked, refers to the same folder, but does not hold
    it.

    Args:
        name: The name by which other processes of this user find the folder.
        keep: Whether the folder stays until `clear_named` after no process holds it anymore.
    """

    def __init__(self, name: str | None = None, *, keep: bool = False) -> None:
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            rule = "letters, digits, '.', '_' and '-', beginning with a letter or digit"
            raise ValueError(must_be("name", rule, name))
        if keep and name is None:
            raise ValueError(
                must_be("keep", "False without a name", keep, "Pass `name=`: later processes find the cache by it.")
            )
        sweep()
        self.path = str(root() / f"{prefix()}{name or f'_{os.getpid()}_{secrets.token_hex(8)}'}")
        watcher.add()
        try:
            lock = _made_and_held(self.path)
        except BaseException:
            watcher.remove()
            raise
        _live[self.path] = self
        weakref.finalize(self, _let_go, self.path, lock, os.getpid(), name is not None)
        if keep:
            Path(self.path, KEEP).touch()

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self.path,)


_live: weakref.WeakValueDictionary[str, SharedFolder] = weakref.WeakValueDictionary()


def _found(path: str) -> SharedFolder:
    """Return a copy: the same object in the process that holds the folder, so that it outlives the first of two."""
    known = _live.get(path)
    if known is None:
        known = SharedFolder.__new__(SharedFolder)
        known.path = path
    return known


def _made_and_held(path: str) -> int | None:
    while True:
        with suppress(FileExistsError):
            Path(path).mkdir(mode=0o700)
        if not CAN_HOLD:
            return None
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # it was swept in the meantime
            continue
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
                raise
            raise PermissionError(
                f"{path!r} exists, but is not a folder of this user: it is a file, a link, or another user's folder. "
                "Pass another `name=`, or remove it."
            ) from error
        status = os.fstat(lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            os.close(lock)
            raise PermissionError(
                f"{path!r} belongs to another user, or other users can access it. Pass another `name=`, or run "
                f"`chmod 700` on it if it is yours."
            )
        fcntl.flock(lock, fcntl.LOCK_SH)
        if is_at(path, lock):
            return lock
        os.close(lock)


def _let_go(path: str, lock: int | None, owner: int, is_named: bool) -> None:
    if os.getpid() != owner:
        return
    with uninterrupted():  # a finalizer that is interrupted by Ctrl-C is not called again
        if not is_named:
            shutil.rmtree(path, ignore_errors=True)
        elif lock is not None:
            remove_if_free(path, lock)
        if lock is not None:
            os.close(lock)
        watcher.remove()


def named_folders() -> list[str]:
    """Return the names of this user's existing folders."""
    paths = (path for path in root().glob(f"{prefix()}*") if path.is_dir() and not path.is_symlink())
    return sorted(stem for path in paths if _NAME.fullmatch(stem := path.name.removeprefix(prefix())))


def clear_named(name: str) -> None:
    """Remove a named folder. Processes that use it keep what they have opened.

    Raises:
        FileNotFoundError: There is no folder with this name.
    """
    if name not in named_folders():
        raise FileNotFoundError(f"There is no folder {name!r} in shared memory; there are {named_folders()}.")
    shutil.rmtree(root() / f"{prefix()}{name}")


class CacheCounters:
    """Counters of hits, misses and healed entries. A copy in another process adds to the same counters.

    Each process writes to its own small file in shared memory, so that no process waits for another, and the counts of
    a killed process are preserved. Without free shared memory, each process counts on its own.
    """

    def __init__(self, folder: SharedFolder | None = None) -> None:
        self.folder = folder
        self.forget()
        forget_after_fork(self)

    @classmethod
    def shared(cls) -> CacheCounters:
        """Return new counters, in shared memory if possible."""
        with suppress(OSError):
            return cls(SharedFolder())
        return cls()

    def __reduce__(self) -> tuple[object, ...]:
        return CacheCounters, (self.folder,)

    def forget(self) -> None:
        """Count from 0 in a separate file, because this is another process."""
        self._counting = threading.Lock()
        self._counts = [0, 0, 0]
        self._row: mmap.mmap | None = None

    def count(self, *, hits: int = 0, misses: int = 0, healed: int = 0) -> None:
        """Add to the counts."""
        with self._counting:
            if self._row is None and not any(self._counts) and self.folder is not None:
                with suppress(OSError):  # the folder's owner has ended, or shared memory is full
                    path = Path(self.folder.path, f"counts-{os.getpid()}-{secrets.token_hex(4)}")
                    path.write_bytes(bytes(_ROW.size))
                    with path.open("r+b") as file:
                        self._row = mmap.mmap(file.fileno(), _ROW.size)
            counts = self._counts
            counts[0] += hits
            counts[1] += misses
            counts[2] += healed
            if self._row is not None:
                _ROW.pack_into(self._row, 0, *counts)

    def totals(self) -> dict[str, int]:
        """Return the number of hits, misses and healed entries in all processes."""
        rows = [tuple(self._counts)] if self._row is None else []
        for path in Path(self.folder.path).glob("counts-*") if self.folder is not None else []:
            content = path.read_bytes()
            rows += [_ROW.unpack(content)] if len(content) == _ROW.size else []
        return dict(zip(("hits", "misses", "healed"), map(sum, zip((0, 0, 0), *rows, strict=True)), strict=True))
