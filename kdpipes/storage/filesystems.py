"""The file systems of URLs: each is looked up once in a process, as that takes longer than it seems."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import fsspec

__all__ = ["filesystem_of"]

_MANY = 4_096  # URLs


class _Known(NamedTuple):
    """Where a URL leads, and what that was found out by."""

    filesystem: Any
    path: str
    process: int
    settings: dict[str, Any]

    def holds(self, settings: dict[str, Any]) -> bool:
        """Return whether fsspec would say the same now."""
        kind = type(self.filesystem)
        is_kept = not kind.cachable or kind._cache.get(self.filesystem._fs_token) is self.filesystem
        return is_kept and self.process == os.getpid() and self.settings == settings


_shared: dict[str, _Known] = {}
_own = threading.local()


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path there, as `fsspec.core.url_to_fs` does, but sooner the next time.

    Threads share those that are made for that, which are the asynchronous ones; each has its own of others. What is
    set in `fsspec.config.conf`, and `clear_instance_cache()`, hold from the next call on.
    """
    if "::" in url:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found
    settings = fsspec.config.conf.get(url.partition("://")[0]) or {}
    mine: dict[str, _Known] = _own.__dict__
    known = mine.get(url) or _shared.get(url)
    if known is None or not known.holds(settings):
        filesystem, path = fsspec.core.url_to_fs(url)
        known = _Known(filesystem, path, os.getpid(), dict(settings))
        table = _shared if getattr(known.filesystem, "async_impl", False) else mine
        if len(table) >= _MANY:
            table.clear()
        table[url] = known
    return known.filesystem, known.path
