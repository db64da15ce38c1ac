"""One worker process, held by the process that has started it; and how such processes end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

from kdpipes.core.activity import read_record
from kdpipes.core.processes import interrupts_blocked, uninterrupted
from kdpipes.delivery.shared_slots import LentSlots
from kdpipes.delivery.wire import Message, Reader, ReceivedFile, Told, message
from kdpipes.delivery.worker import Options, Parcel, work

__all__ = ["ProcessPool", "WorkerProcess"]

_PATIENCE_S = 1.0
_one_at_a_time = threading.RLock()  # so that a worker does not inherit the other end of another one's link
_starting = threading.Event()
_alive: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(eq=False)
class WorkerProcess:
    """A worker process that is not older than its link.

    Args:
        process: Of multiprocessing.
        link: A socket to it.
        end: A descriptor that can be read once the process has ended.
    """

    process: Any
    link: socket.socket
    end: int
    owner: int = field(default_factory=os.getpid)  # the process that it is a child of
    slots: LentSlots = field(default_factory=LentSlots)
    record: ReceivedFile | None = None
    is_ready: bool = False
    is_over: bool = False  # it has said that it cannot work

    def __post_init__(self) -> None:
        self._reader = Reader(self.link)
        self._outgoing = bytearray()

    @classmethod
    def start(cls, context: Any, parcel: Parcel, options: Options) -> WorkerProcess:
        """Start a process.

        Args:
            context: Of multiprocessing.
            parcel: The chain.
            options: How it works.
        """
        _start_helpers(context)
        with _one_at_a_time:
            ours, theirs = socket.socketpair()
            process = context.Process(target=work, args=(parcel, theirs, options), name="kdpipes worker", daemon=True)
            _starting.set()
            try:
                with interrupts_blocked():
                    process.start()
                end = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else process.sentinel
            except BaseException:
                ours.close()
                if process.pid is not None:
                    process.kill()
                    process.join()
                raise
            finally:
                _starting.clear()
                theirs.close()
        _alive.add(process)
        return cls(process, ours, end)

    @property
    def is_sound(self) -> bool:
        """Whether it is there and works for this process."""
        return not self.is_over and self.owner == os.getpid() and not self.has_ended()

    def send(self, content: bytes) -> None:
        """Send as much as goes without waiting; the rest follows with what is sent, or awaited, next."""
        self._outgoing += content
        with contextlib.suppress(OSError):  # it is busy; or it has died, which reading what it said last comes to
            while self._outgoing:
                del self._outgoing[: self.link.send(self._outgoing, socket.MSG_DONTWAIT)]

    def listen(self, timeout_s: float | None) -> Iterator[Message] | None:
        """Wait for it to say something, and return that; None means that it has died.

        Raises:
            TimeoutError: It has said nothing for `timeout_s`.
        """
        self.send(b"")
        poll = select.poll()
        poll.register(self.link, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(self.end, select.POLLIN)
        events = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
        if not events:
            raise TimeoutError
        return self._reader.read(wait=False) if self.link.fileno() in events else None

    def doing(self) -> tuple[str, str]:
        """Return the key of the sample that it was at last, and what it did with it."""
        return ("", "") if self.record is None else read_record(self.record.number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the process has ended, after waiting for that."""
        return bool(connection.wait([self.end], max(timeout_s, 0.0)))

    def status(self) -> int | None:
        """Return how a process that is ending has ended, as multiprocessing does; None if somebody else was told."""
        self.has_ended(_PATIENCE_S)
        is_told_late = (
            getattr(self.process, "_start_method", "") == "forkserver"
        )  # by the server, a moment after the end
        self.process.join(_PATIENCE_S if is_told_late else 0)
        code: int | None = self.process.exitcode
        return code

    def kill(self, number: int) -> None:
        """Send the process a signal, and never another one that has got its number."""
        with contextlib.suppress(ProcessLookupError):
            if hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(self.end, number)
            else:
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """Close what this process holds of one that has ended."""
        _forget(self.process)
        if self.end != self.process.sentinel:
            os.close(self.end)
        with contextlib.suppress(ValueError):  # somebody else has waited for it: its status is not known
            self.process.close()
        self.link.close()
        self.slots.close()
        self._reader.close()
        self.record = None


def _start_helpers(context: Any) -> None:
    """Start multiprocessing's helpers early, or they would inherit a blocked Ctrl-C, or unblock it (Python 3.11)."""
    if context.get_start_method() in ("spawn", "forkserver"):
        resource_tracker.ensure_running()
    if context.get_start_method() == "forkserver":
        forkserver.ensure_running()


class ProcessPool:
    """The worker processes of one loader, which end together: when it is closed or forgotten, or Python ends."""

    def __init__(self) -> None:
        self._workers: list[WorkerProcess] = []
        weakref.finalize(self, _end_all, self._workers)

    def add(self, worker: WorkerProcess) -> WorkerProcess:
        """Take a worker in, and return it."""
        self._workers.append(worker)
        return worker

    def forget(self, worker: WorkerProcess) -> None:
        """Let go of a worker that has ended."""
        self._workers.remove(worker)

    def end(self, worker: WorkerProcess) -> None:
        """End one worker."""
        with uninterrupted():
            self.forget(worker)
            _end_all([worker])

    def close(self) -> None:
        """End all workers."""
        _end_all(self._workers)


def _end_all(workers: list[WorkerProcess]) -> None:
    """End workers: those that wait at once, others after a moment."""
    if sys.is_finalizing():
        return  # the interpreter has ended them
    with uninterrupted():  # otherwise the remaining workers would not be ended; takes two seconds at most
        _end_each(workers)


def _end_each(workers: list[WorkerProcess]) -> None:
    own = [worker for worker in workers if worker.owner == os.getpid()]  # a forked process has inherited others
    workers.clear()
    for worker in own:
        with contextlib.suppress(OSError):  # it has ended already
            worker.link.send(message(Told.STOP), socket.MSG_DONTWAIT)
            worker.link.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _PATIENCE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in [worker for worker in own if not worker.has_ended(deadline - time.monotonic())]:
            worker.kill(number)
        deadline = time.monotonic() + _PATIENCE_S / 2
    for worker in own:
        worker.status()
        worker.close()


def _forget(process: Any) -> None:
    """Take a process from multiprocessing's list of children, which it ends when the interpreter exits."""
    getattr(multiprocessing.process, "_children", set()).discard(process)
    _alive.discard(process)


def _before_fork() -> None:
    if not _starting.is_set():  # our own workers read nothing that they inherit
        LentSlots.retire_lent()


def _after_fork() -> None:
    """Let a process that the user forks neither wait for the lock of another one nor end the workers of its parent."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()
    for process in list(_alive):
        _forget(process)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
