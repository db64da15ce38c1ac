"""Handle Ctrl-C in the main process and in workers, and reset threads and locks after a fork."""

from __future__ import annotations

import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

import torch


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
    """Block Ctrl-C in processes started in this block until they call `ignore_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in this process. The terminal sends it to all processes, and the main process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_one_torch_thread(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run the torch operations of a function in one thread if it is called in the main thread.

    On a single image, torch's threads wait for each other longer than they compute: without worker processes, an epoch
    of crops took 1.6 times as long with two threads as with one, and 8 times as long if other processes were running.
    In other threads the setting is left alone, because they share MKL's number of threads.
    """

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        number = torch.get_num_threads()
        if number == 1 or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(number)

    return called


Hook = Callable[[], object]


class Forgetful(Protocol):
    """An object with threads, locks or counts that belong to one process."""

    def forget(self) -> None: ...


_alive: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forget_after_fork(one: Forgetful) -> None:
    """Call `one.forget()` in each process that is forked while `one` is alive."""
    _alive.add(one)


def at_fork(**hooks: Hook) -> None:
    """Register hooks like `os.register_at_fork`, on systems that can fork.

    Each hook is registered separately, so that an interrupt in one of them does not prevent the others from running.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


class ForkLock:
    """A reentrant lock that is free in a forked process, even if a thread of the parent held it."""

    def __init__(self) -> None:
        self.forget()
        forget_after_fork(self)

    def forget(self) -> None:
        self.lock = threading.RLock()


def _forget() -> None:
    for one in list(_alive):
        one.forget()


at_fork(after_in_child=_forget)  # this runs before the hooks of all other modules, because they import this one
