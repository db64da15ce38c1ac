"""Remove the shared memory of processes that have ended, even if they were killed.

A signal that kills a process runs none of its code, and a signal handler of kdpipes would replace the user's. So a
small helper process waits for the end, like that of Python's `multiprocessing.resource_tracker`. It runs while there
are folders. The trackers of Python and loky cannot be used: a forked process shares its parent's tracker, and a named
folder must stay while another process holds it.

The helper process runs this file as a script, so it must import only the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# filelock does not suffice: several processes lock the folder itself, in shared mode, and never a file inside it.
with suppress(ImportError):  # Windows does not have it
    import fcntl

CAN_HOLD = importlib.util.find_spec("fcntl") is not None
KEEP = ".keep"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else ()  # often sent to all
_IS_PYTHON = bool(sys.executable) and not getattr(sys, "frozen", False)  # a frozen program would start itself again
_CAN_WATCH = sys.platform == "linux" and _IS_PYTHON
_PATIENCE_S = 5.0
_LETTING_GO_S = 2.0  # time for the forked children of a killed process to release named folders


def root() -> Path:
    """Return the parent folder of shared folders."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def prefix() -> str:
    """Return the prefix of the names of this user's shared folders."""
    return f"kdpipes-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def is_at(path: str, folder: int) -> bool:
    """Return whether a path still refers to an open folder."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(folder))  # noqa: PTH116
    return False


def remove_if_free(path: str, folder: int, *, waits: bool = False) -> bool:
    """Remove an open folder unless it is marked to be kept; return False if another process holds it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    if is_at(path, folder) and not Path(path, KEEP).exists():
        shutil.rmtree(path, ignore_errors=True)
    return True


def sweep(waits_for: str | None = None) -> bool:
    """Remove the folders that no process holds, and return whether any are held.

    Args:
        waits_for: The name prefix of the folders to wait for.
    """
    is_held = False
    for path in root().glob(f"{prefix()}*") if CAN_HOLD else ():
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # the folder is gone, or belongs to another user
            continue
        try:
            if os.fstat(folder).st_uid == os.getuid():
                waits = waits_for is not None and path.name.startswith(waits_for)
                is_held |= not remove_if_free(str(path), folder, waits=waits)
        finally:
            os.close(folder)
    return is_held


class _Watcher:
    """A helper process that waits for the end of this one, even by a kill, while this one has folders."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changing = threading.RLock()  # a folder may be collected while another one is added
        self._process: Any = None
        self._num_folders = 0

    @property
    def pid(self) -> int:
        """The id of the helper process, or -1."""
        return -1 if self._process is None else int(self._process.pid)

    def add(self) -> None:
        """Count a folder. The first folder starts the helper process."""
        with self._changing:
            self._num_folders += 1
            if self._num_folders > 1 or not _CAN_WATCH:
                return
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # permanently inherited by the new process
            try:
                with suppress(OSError):  # without the helper, the next process that creates a folder removes the others
                    self._process = subprocess.Popen(
                        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,  # readers of this process's output must not wait for the helper
                        stderr=subprocess.DEVNULL,
                        cwd="/",
                        bufsize=0,
                    )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def remove(self) -> None:
        """Count a folder less. The process ends with the last one; it is killed, as a stopped one reads nothing."""
        with self._changing:
            self._num_folders -= 1
            process = self._process
            if self._num_folders or process is None:
                return
            self._process = None
            process.stdin.close()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel may delay the end of a killed process
                process.wait(_PATIENCE_S)

    def forget(self) -> None:
        """Close the pipe in a forked process, because otherwise the helper would also wait for that process."""
        process = self._process
        self._reset()
        if process is not None:
            process.stdin.close()
            process.returncode = 0  # it is not a child of this process


watcher = _Watcher()


def _main(pid: str) -> None:
    """Wait for the end of the process at the other end of the pipe, and remove the folders that it left behind."""
    sys.stdin.buffer.read()
    give_up = time.monotonic() + _LETTING_GO_S
    # Unnamed folders can be removed once the last forked process that holds them has ended.
    while sweep(waits_for=f"{prefix()}_{pid}_") and time.monotonic() < give_up:
        time.sleep(0.02)


if __name__ == "__main__":
    _main(sys.argv[1])
