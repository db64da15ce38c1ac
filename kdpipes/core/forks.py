"""Reset threads and locks in forked processes. The package registers with `os` only here."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

Hook = Callable[[], object]


class Forgetful(Protocol):
    """An object with threads, locks or counts that belong to one process."""

    def forget(self) -> None: ...


_alive: weakref.WeakSet[Forgetful] = weakref.WeakSet()
_before: list[Hook] = []
_after_in_parent: list[Hook] = []
_after_in_child: list[Hook] = []


def forget_after_fork(one: Forgetful) -> None:
    """Call `one.forget()` in each process that is forked while `one` is alive."""
    _alive.add(one)


def at_fork(*, before: Hook, after_in_parent: Hook | None = None, after_in_child: Hook | None = None) -> None:
    """Call functions at each fork.

    Those of `before` run in reverse order of registration, the others in order of registration. In the child, objects
    of `forget_after_fork` come first.
    """
    _before.insert(0, before)
    if after_in_parent is not None:
        _after_in_parent.append(after_in_parent)
    if after_in_child is not None:
        _after_in_child.append(after_in_child)


class ForkLock:
    """A reentrant lock that is free in a forked process, although a thread of the parent may have held it."""

    def __init__(self) -> None:
        self.forget()
        forget_after_fork(self)

    def forget(self) -> None:
        self.lock = threading.RLock()


def _forget() -> None:
    for one in list(_alive):
        one.forget()


def _run(hooks: list[Hook]) -> None:
    for hook in hooks:
        hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _run(_before),
        after_in_parent=lambda: _run(_after_in_parent),
        after_in_child=lambda: _run([_forget, *_after_in_child]),
    )
