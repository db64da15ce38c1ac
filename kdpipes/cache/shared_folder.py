"""Folders in shared memory, which are removed with the last process that has made or opened them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdpipes.cache.folder_watcher import unwatch, watch
from kdpipes.core.errors import must_be
from kdpipes.core.processes import uninterrupted
from kdpipes.storage.files import CAN_HOLD

# filelock cannot do this: the folder itself is locked, shared by several processes, and never a file inside it.
with suppress(ImportError):  # Windows does not have it
    import fcntl

__all__ = ["SharedFolder", "clear_named", "free_bytes", "named_folders"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEEP = ".keep"


def _root() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"kdpipes-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes can still be written where `folder` lies."""
    return shutil.disk_usage(folder).free


class SharedFolder:
    """A folder in shared memory (`/dev/shm`; on other systems than Linux, a temporary folder).

    The process that makes it holds it by a lock, which the system releases however the process ends. Without a name,
    the folder is removed with that process or this object; with a name, with the last process that opened it by its
    name. The folders of a killed process are removed by a small helper process (Linux), or by the next process that
    makes a folder. A copy in another process, pickled or forked, is the same folder, but does not hold it.

    Args:
        name: The name by which other processes of this user find it.
        keep: Whether it stays when no process holds it any more, until `clear_named`.
    """

    def __init__(self, name: str | None = None, *, keep: bool = False) -> None:
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(must_be("name", "letters, digits, '.', '_' and '-', the first no sign", name))
        if keep and name is None:
            raise ValueError(must_be("keep", "False without a name", keep, "Pass `name=`: nobody else could find it."))
        _sweep()
        stem = name or f"_{os.getpid()}_{secrets.token_hex(8)}"
        self.path = str(_root() / f"{_prefix()}{stem}")
        watch(self.path, is_named=name is not None)
        try:
            lock = _made_and_held(self.path)
        except BaseException:
            unwatch(self.path)
            raise
        _live[self.path] = self
        weakref.finalize(self, _let_go, self.path, lock, os.getpid(), name is not None)
        if keep:
            Path(self.path, _KEEP).touch()

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
        except FileNotFoundError:  # swept in between
            continue
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
                raise
            raise PermissionError(
                f"{path!r} exists, but is not a folder of this user: it is a file, a link, or another user's folder. "
                "Use another name, or remove it."
            ) from error
        status = os.fstat(lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            os.close(lock)
            raise PermissionError(f"{path!r} belongs to somebody else, or is open to others: use another name.")
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is(path, lock):
            return lock
        os.close(lock)


def _is(path: str, lock: int) -> bool:
    """Return whether a path still leads to the folder that was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(lock))  # noqa: PTH116
    return False


def _let_go(path: str, lock: int | None, owner: int, is_named: bool) -> None:
    if os.getpid() != owner:
        return
    with uninterrupted():  # a finalizer that Ctrl-C cuts short is not called again
        if not is_named:
            shutil.rmtree(path, ignore_errors=True)
        elif lock is not None:
            _remove_if_free(path, lock)
        if lock is not None:
            os.close(lock)
        unwatch(path)


def _remove_if_free(path: str, lock: int) -> None:
    """Remove a folder, unless it is held or to be kept."""
    if not CAN_HOLD:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if _is(path, lock) and not Path(path, _KEEP).exists():
        shutil.rmtree(path, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    if not CAN_HOLD:
        return
    for path in _root().glob(f"{_prefix()}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or of another user
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                _remove_if_free(str(path), lock)
        finally:
            os.close(lock)


def named_folders() -> list[str]:
    """Return the names of the existing folders of this user."""
    paths = (path for path in _root().glob(f"{_prefix()}*") if path.is_dir() and not path.is_symlink())
    stems = (path.name.removeprefix(_prefix()) for path in paths)
    return sorted(stem for stem in stems if _NAME.fullmatch(stem))


def clear_named(name: str) -> None:
    """Remove a folder by its name. Processes that use it go on with what they have open.

    Raises:
        FileNotFoundError: There is no folder of that name.
    """
    if name not in named_folders():
        raise FileNotFoundError(f"There is no folder {name!r} in shared memory; there are {named_folders()}.")
    shutil.rmtree(_root() / f"{_prefix()}{name}")
