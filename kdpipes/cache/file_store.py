"""A cache of one file per entry, in a local folder or in object storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any

from kdpipes.cache.folder import LocalFolder, RemoteFolder, read_metadata
from kdpipes.cache.store import CacheStore, bound_to
from kdpipes.storage.access import Access
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.urls import is_local


class FileStore(CacheStore):
    """A `CacheStore` of files: a folder that can be moved, packed and opened anywhere (`zip://::cache.zip`).

    Each file is written completely or not at all, by any number of processes at the same time. The file METADATA marks
    the folder as a cache. `cache_on_disk` describes the arguments.
    """

    layout = "files"
    errors = (Exception,)  # errors of any file system

    def __init__(self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        self._access = Access(storage_options=storage_options)
        self._url = os.fspath(url).removeprefix("file://")
        self.has_quick_size = is_local(self._url)
        if is_local(self._url):
            self._url = os.path.abspath(os.path.expanduser(self._url))  # noqa: PTH100, PTH111 - links stay
        else:
            check_filesystems("url", [self._url])

    def get(self, key: bytes) -> bytes | None:
        content: bytes | None = self._folder.read(path_of(key)) if self._exists() else None
        return content

    def put(self, key: bytes, content: bytes, *, replace: bool) -> None:
        self._exists(create=True)
        self._folder.write(path_of(key), content, replace=replace)

    def delete(self, key: bytes) -> None:
        self._folder.delete(path_of(key))

    def contains(self, key: bytes) -> bool:
        return self._exists() and bool(self._folder.exists(path_of(key)))

    def size(self) -> tuple[int, int]:
        """Return the number of entries and bytes. Object storage is listed for this, 1,000 files per request."""
        totals: tuple[int, int] = self._folder.totals() if self._exists() else (0, 0)
        return totals

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        with suppress(OSError):  # a process without write permission gets every claim
            self._exists(create=True)
        claimed: AbstractContextManager[bool] = self._folder.claim(name, waits=waits)
        return claimed

    def each_entry(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield `bound_to(key)` and the content of each entry."""
        if not self._exists():
            return
        for name in sorted(self._folder.entries()):
            digest = b""
            with suppress(ValueError):  # a file not written by kdpipes
                digest = bytes.fromhex(name.rpartition("/")[2])
            content = self._folder.read(name)
            if content is not None:  # it may have been deleted in the meantime
                yield digest, content

    def __str__(self) -> str:
        return repr(self._url)

    @cached_property
    def _folder(self) -> Any:
        return LocalFolder(self._url) if is_local(self._url) else RemoteFolder(self._url, self._access)

    def _exists(self, *, create: bool = False) -> bool:
        """Return whether the cache exists, or create it first with `create`."""
        folder = self._folder
        if not folder.is_marked:
            options: dict[str, Any] | None = {} if create else None
            folder.is_marked = read_metadata(folder, self._url, self.layout, options) is not None
        return bool(folder.is_marked)


def path_of(key: bytes) -> str:
    """Return the path of an entry in the cache's folder, below one of 4,096 subfolders.

    With a million entries, each subfolder holds 244.

    >>> path_of(b"heron")
    '4c/3/4c34d2975d0bd9bb626fccc3d2347c9588a67fc2'
    """
    name = bound_to(key).hex()
    return f"{name[:2]}/{name[2]}/{name}"
