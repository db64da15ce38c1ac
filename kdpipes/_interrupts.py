"""Delay or block Ctrl-C in sections of code that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ignore_interrupts", "interrupts_blocked", "uninterrupted"]

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
