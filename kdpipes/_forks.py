"""What a forked process must not inherit: the threads and locks of its parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from fsspec import AbstractFileSystem

__all__ = ["Forgetful", "forget_after_fork"]


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
