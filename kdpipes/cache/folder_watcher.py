"""A small process that removes shared memory when the process that holds it has been killed.

A signal that ends a process runs none of its code, and a handler of ours would take the place of a user's. So another
process waits for its end, as Python's own `multiprocessing.resource_tracker` does. It runs while there are folders.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.util import spawnv_passfds  # which Python's own tracker is started by

__all__ = ["unwatch", "watch"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.platform != "win32" else ()  # often sent to all

_PROGRAM = """
import fcntl, os, sys, time
source = os.fdopen(int(sys.argv[1]), "rb")
nowhere = os.open(os.devnull, os.O_RDWR)
for number in range(3):  # whoever reads what the watched process prints is not to wait for this one
    os.dup2(nowhere, number)
os.chdir("/")
left = {}
for line in source:
    sign, path = line[:1], line[1:].rstrip(bytes([10])).decode("utf-8", "surrogateescape")
    left.pop(path, None)
    if sign != b"-":
        left[path] = sign == b"n"
def hold(folder, is_named):
    if not is_named:  # processes that it was forked to may still end
        fcntl.flock(folder, fcntl.LOCK_EX)
        return True
    for _ in range(100):  # while its own process lets go; others have watchers of their own
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False
for path, is_named in left.items():
    import shutil
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if hold(folder, is_named) and not os.path.exists(os.path.join(path, ".keep")):
            if os.path.samestat(os.stat(path), os.fstat(folder)):
                shutil.rmtree(path)
    except OSError:
        pass
"""
_IS_PYTHON = bool(sys.executable) and not getattr(sys, "frozen", False)  # and no program that would start once more
_CAN_WATCH = sys.platform == "linux" and _IS_PYTHON
_PATIENCE_S = 5.0


class _Watcher:
    """The process that watches this one, while there is something to watch."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have none."""
        self._changing = threading.RLock()  # a folder may be collected while another one is added
        self.pid = self._pipe = -1
        self._paths: Counter[str] = Counter()

    def add(self, path: str, *, is_named: bool) -> None:
        """Watch a folder, once more."""
        with self._changing:
            if not self._paths:
                self._start()
            self._paths[path] += 1
            self._tell(f"{'n' if is_named else '+'}{path}")

    def remove(self, path: str) -> None:
        """Watch a folder once less; the process goes with the last one."""
        with self._changing:
            if path not in self._paths:
                return
            self._paths[path] -= 1
            if not self._paths[path]:
                del self._paths[path]
                self._tell(f"-{path}")
            if not self._paths:
                self._stop()

    def _start(self) -> None:
        with suppress(OSError):  # without it, the next process that makes a folder removes what was left
            source, self._pipe = os.pipe()
            # A stopped watcher reads nothing, and a full pipe must not block this process.
            os.set_blocking(self._pipe, False)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # for good, in the process that is started
            try:
                arguments = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(source)]
                self.pid = spawnv_passfds(os.fsencode(sys.executable), arguments, [source])
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.close(source)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # the watcher was killed, or does not read
            os.write(self._pipe, f"{line}\n".encode("utf-8", "surrogateescape"))

    def _stop(self) -> None:
        pipe, pid, self._pipe, self.pid = self._pipe, self.pid, -1, -1
        if pipe >= 0:
            os.close(pipe)
        if pid > 0:
            _end(pid)

    def disown(self) -> None:
        """Let go of the pipe in a process that was forked, for which it would not end."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self.forget()


def _end(pid: int) -> None:
    """Kill a watcher that has nothing left to watch, and reap it.

    A stopped watcher would never notice that the pipe was closed. The wait is bounded, because the kernel may delay the
    end of a killed process.
    """
    give_up = time.monotonic() + _PATIENCE_S
    with suppress(ChildProcessError):  # already reaped; its pid may belong to another process by now
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < give_up:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


_watcher = _Watcher()


def watch(path: str, *, is_named: bool) -> None:
    """Have a folder of this process removed when the process ends, however that happens."""
    if _CAN_WATCH:
        _watcher.add(path, is_named=is_named)


def unwatch(path: str) -> None:
    """Watch a folder no more: it is gone, or others have it."""
    if _CAN_WATCH:
        _watcher.remove(path)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watcher.disown)
