"""Keep fsspec's file systems open while this process forks."""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem

from kdpipes.core.processes import at_fork

_held: list[Any] = []


def _hold(kind: Any = AbstractFileSystem) -> None:
    """Keep references to fsspec's file systems, because a forked process drops them and would thereby close them.

    Closing a file system would remove its sockets from the parent's event loop, which would then wait forever.
    """
    _held.extend(getattr(kind, "_cache", {}).values())
    for special in kind.__subclasses__():
        _hold(special)


at_fork(before=_hold, after_in_parent=_held.clear)
