"""Keep fsspec's file systems open while this process forks."""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem

from kdpipes.core.processes import at_fork

_held: list[Any] = []


def _hold(kind: Any = AbstractFileSystem) -> None:
    """Keep references to fsspec's file systems, so that a forked process, which drops them, does not close them.

    Closing one would remove its sockets from the event loop of the parent, which would then wait forever.
    """
    _held.extend(getattr(kind, "_cache", {}).values())
    for special in kind.__subclasses__():
        _hold(special)


at_fork(before=_hold, after_in_parent=_held.clear)
