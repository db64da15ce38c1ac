"""What a forked process must not inherit: the threads and locks of its parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
