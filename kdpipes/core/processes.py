"""What processes must take care of: Ctrl-C at the wrong moment, and the threads and locks of a parent that forks."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fsspec import AbstractFileSystem

__all__ = ["Forgetful", "forget_after_fork", "ignore_interrupts", "interrupts_blocked", "uninterrupted"]

_CAN_BLOCK = hasattr(signal, "pthread_sigmask")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of this block, which must be short.

    Blocking the signal is not enough: another thread of the process may receive it, and Python then still raises
    KeyboardInterrupt in the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    held: list[Any] = []
    signal.signal(signal.SIGINT, lambda *received: held.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Keep Ctrl-C from processes started in this block until they call `ignore_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _CAN_BLOCK else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in this process: it reaches all processes of a terminal, and the main process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _CAN_BLOCK:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Forgetful(Protocol):
    """What holds threads, locks or counts of one process."""

    def forget(self) -> None:
        """Begin anew, with none of them."""


_alive: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forget_after_fork(one: Forgetful) -> None:
    """Let something `forget()` in each process that is forked while it lives."""
    _alive.add(one)


def _forget() -> None:
    for one in list(_alive):
        one.forget()


_held: list[Any] = []


def _instances(kind: Any) -> Iterator[Any]:
    yield from list(getattr(kind, "_cache", {}).values())
    for special in kind.__subclasses__():
        yield from _instances(special)


def _hold() -> None:
    """Keep the file systems that fsspec knows from being closed in a forked process, which fsspec has forget them.

    Closing one there takes the sockets out of the event loop of the parent, which then waits for ever.
    """
    _held.extend(_instances(AbstractFileSystem))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_held.clear, after_in_child=_forget)
