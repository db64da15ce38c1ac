"""A small process that removes shared memory when the process that holds it has been killed.

A signal that ends a process runs none of its code, and a handler of ours would take the place of a user's. So another
process waits for its end, as Python's own `multiprocessing.resource_tracker` does. It runs while there are folders. The
trackers of Python and loky cannot take its place: a forked process shares its parent's, and a named folder must stay
while another process holds it.

The helper process runs this file as a script, so it must import nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

__all__ = ["unwatch", "watch"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else ()  # often sent to all
_IS_PYTHON = bool(sys.executable) and not getattr(sys, "frozen", False)  # a frozen program would start itself again
_CAN_WATCH = sys.platform == "linux" and _IS_PYTHON
_PATIENCE_S = 5.0


class _Watcher:
    """The process that watches this one, while there is something to watch."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._changing = threading.RLock()  # a folder may be collected while another one is added
        self._process: Any = None
        self._paths: Counter[str] = Counter()

    @property
    def pid(self) -> int:
        """The process that watches, -1 if there is none."""
        return -1 if self._process is None else int(self._process.pid)

    def add(self, path: str, *, is_named: bool) -> None:
        """Watch a folder, once more."""
        with self._changing:
            if not self._paths:
                self._start()
            self._paths[path] += 1
            self._send(b"n" if is_named else b"+", path)

    def remove(self, path: str) -> None:
        """Watch a folder once less; the process ends with the last one."""
        with self._changing:
            if path not in self._paths:
                return
            self._paths[path] -= 1
            if not self._paths[path]:
                del self._paths[path]
                self._send(b"-", path)
            if not self._paths:
                self._stop()

    def _start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited by the new process, for good
        try:
            with suppress(OSError):  # without it, the next process that makes a folder removes the others
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # readers of this process's output must not wait for the helper
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    bufsize=0,
                )
                # A stopped watcher reads nothing, and a full pipe must not block this process.
                os.set_blocking(self._process.stdin.fileno(), False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _send(self, sign: bytes, path: str) -> None:
        with suppress(OSError):  # the watcher was killed, or does not read
            if self._process is not None:
                self._process.stdin.write(sign + os.fsencode(path) + b"\n")

    def _stop(self) -> None:
        """Kill the watcher and reap it: a stopped one would never notice that the pipe was closed."""
        process, self._process = self._process, None
        if process is not None:
            process.stdin.close()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel may delay the end of a killed process
                process.wait(_PATIENCE_S)

    def disown(self) -> None:
        """Close the pipe in a forked process: otherwise the watcher would wait for that process, too."""
        process = self._process
        self._forget()
        if process is not None:
            process.stdin.close()
            process.returncode = 0  # not a child of this process


_watcher = _Watcher()


def watch(path: str, *, is_named: bool) -> None:
    """Have a folder of this process removed when the process ends, even if it is killed."""
    if _CAN_WATCH:
        _watcher.add(path, is_named=is_named)


def unwatch(path: str) -> None:
    """Stop watching a folder: it is gone, or others have it."""
    if _CAN_WATCH:
        _watcher.remove(path)


def _main() -> None:
    """Wait for the end of the process at the other end of the pipe, and remove the folders that it has left."""
    left: dict[bytes, bool] = {}
    for line in sys.stdin.buffer:
        sign, path = line[:1], line[1:].rstrip(b"\n")
        left.pop(path, None)
        if sign != b"-":
            left[path] = sign == b"n"
    for path, is_named in left.items():
        with suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            is_free = _hold(folder, is_named) and not os.path.exists(path + b"/.keep")  # noqa: PTH110
            if is_free and os.path.samestat(os.stat(path), os.fstat(folder)):  # noqa: PTH116
                shutil.rmtree(path)


def _hold(folder: int, is_named: bool) -> bool:
    """Lock a folder, and return whether nobody else holds it."""
    import fcntl

    if not is_named:  # held by forked processes, which may still end
        fcntl.flock(folder, fcntl.LOCK_EX)
        return True
    give_up = time.monotonic() + 2.0  # while the watched process lets go; other processes have watchers of their own
    while time.monotonic() < give_up:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


if __name__ == "__main__":
    _main()
elif hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watcher.disown)
