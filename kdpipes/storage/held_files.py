"""Files that a process holds against others, and lets go when it ends, however it ends."""

from __future__ import annotations

import importlib.util
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType

__all__ = ["CAN_HOLD", "HeldFile"]

CAN_HOLD = importlib.util.find_spec("fcntl") is not None  # Windows has none
_opening = threading.Lock()
_files: weakref.WeakSet[HeldFile] = weakref.WeakSet()


class HeldFile:
    """An open file, which can be locked against other holders of it: other processes, and others in this one.

    A process that is forked does not inherit it.

    Args:
        path: Where it lies.
        flags: As `os.open` takes them.
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
        """Keep others from holding it alone, and return whether that could be had: at once, unless it waits."""
        import fcntl

        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        self.is_alone = False
        return True

    def hold_alone(self, *, waits: bool = False) -> bool:
        """Keep everybody else from holding it, and return whether that could be had: at once, unless it waits."""
        import fcntl

        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        self.is_alone = True
        return True

    def is_in_place(self) -> bool:
        """Return whether it is still what its path leads to."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        """Return its length."""
        return os.fstat(self.descriptor).st_size

    def move(self, path: Path) -> None:
        """Let it lie elsewhere, in the place of what was there."""
        self.path = self.path.replace(path)

    def remove(self) -> None:
        """Delete it, and free its space even if somebody has it open. To be held alone."""
        self.path.unlink(missing_ok=True)
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Let go of it."""
        self._release()


def _let_go(descriptor: int) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # which closing it does not do while a process that was forked has it
    finally:
        os.close(descriptor)


def _disown() -> None:
    """Close in a forked process what its parent holds: its locks would outlive the parent."""
    for file in list(_files):
        if file._release.detach() is not None:
            os.close(file.descriptor)
    _files.clear()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_disown)
