"""A cache of one file per entry, in a local folder or in object storage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from kdpipes.cache.folder import LocalFolder, RemoteFolder, read_metadata
from kdpipes.cache.store import CacheStats, CacheStore, Rejection, bound_to, check_key
from kdpipes.core.errors import DataError
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.access import Access
from kdpipes.storage.filesystems import check_filesystem
from kdpipes.storage.urls import is_local, join_url


class FileStore(CacheStore):
    """A `CacheStore` of files: a folder that can be moved, packed and opened anywhere (`zip://::cache.zip`).

    Each file is written whole or not at all, by any number of processes at once. The file METADATA marks the folder as
    a cache. `cache_on_disk` describes the arguments.
    """

    layout = "files"
    of_process = ("_files", "_is_found", "rejection")

    def __init__(self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        self._access = Access(storage_options=storage_options)
        self._url = os.fspath(url).removeprefix("file://")
        self.has_quick_stats = self.completes_itself = is_local(self._url)
        if is_local(self._url):
            self._url = os.path.abspath(os.path.expanduser(self._url))  # noqa: PTH100, PTH111 - links stay
        else:
            check_filesystem("url", self._url)
        self.start()

    def get(self, key: bytes, *, is_known: bool = False) -> memoryview | None:
        check_key(key)
        folder = self._folder()
        try:
            if not self._exists():
                return None
            content = folder.read(path_of(key))
        except DataError:
            raise
        except Exception as error:  # of any file system
            reason = Rejection.because("cannot be read", error).reason
            self.warn_once(f"The cache in {self._url!r} {reason}: samples are loaded as if there were no cache.")
            return None
        if content is None:
            return None
        return memoryview(content)

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        check_key(key)
        if self.rejection is not None:
            return False
        folder = self._folder()  # outside of `try`: an unknown protocol is an error of the caller
        try:
            self._exists(create=True)
            folder.write(path_of(key), b"".join(buffers), replace=replace)
        except DataError:
            raise
        except Exception as error:  # of any file system: full, read-only, out of reach
            self.rejection = Rejection.because("cannot be written", error)
            self.warn_once(
                f"The cache in {self._url!r} {self.rejection.reason}. What it has is used, and the rest is loaded each "
                "time."
            )
            return False
        return True

    def contains(self, key: bytes) -> bool:
        check_key(key)
        return self._exists() and bool(self._folder().exists(path_of(key)))

    def place_of(self, key: bytes) -> str:
        return repr(join_url(self._url, path_of(key)))

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        if not self._exists():
            return
        for name in sorted(self._folder().entries()):
            digest = b""
            with suppress(ValueError):  # of a file that kdpipes has not written
                digest = bytes.fromhex(name.rpartition("/")[2])
            content = self._folder().read(name)
            if content is not None:  # it may have been deleted since
                yield digest, memoryview(content)

    def stats(self) -> CacheStats:
        """Return the number of entries and bytes; object storage is listed for it, 1,000 files with each request."""
        if not self._exists():
            return CacheStats(bytes=0, entries=0)
        entries, num_bytes = self._folder().totals()
        return CacheStats(bytes=num_bytes, entries=entries)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        with suppress(OSError):  # a process that cannot write there gets every claim
            self._exists(create=True)
        claimed: AbstractContextManager[bool] = self._folder().claim(name, waits=waits)
        return claimed

    def start(self) -> None:
        self._files: LocalFolder | RemoteFolder | None = None
        self._is_found = False
        self.rejection = None
        forget_after_fork(self)

    def _folder(self) -> Any:
        if self._files is None:
            self._files = LocalFolder(self._url) if is_local(self._url) else RemoteFolder(self._url, self._access)
        return self._files

    def _exists(self, *, create: bool = False) -> bool:
        """Return whether there is a cache."""
        if not self._is_found:
            options: dict[str, Any] | None = {} if create else None
            self._is_found = read_metadata(self._folder(), self._url, self.layout, options) is not None
        return self._is_found


def path_of(key: bytes) -> str:
    """Return the path of an entry in the cache's folder, below one of 4,096 folders.

    A million entries are 244 in each folder.

    >>> path_of(b"heron")
    '4c/3/4c34d2975d0bd9bb626fccc3d2347c9588a67fc2'
    """
    name = bound_to(key).hex()
    return f"{name[:2]}/{name[2]}/{name}"
