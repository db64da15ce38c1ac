"""A cache of one file per entry, in a folder of this machine or in object storage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kdpipes.cache.compressions import check_compression, compressed, decompressed
from kdpipes.cache.file_layout import LEAST_FILES_PER_FOLDER, FileLayout
from kdpipes.cache.folders import LocalFolder, RemoteFolder, folder_of
from kdpipes.cache.metadata import COPY, METADATA, metadata_bytes, metadata_of, said_in
from kdpipes.cache.store import CacheStats, Refusal, check_key, way_out_of
from kdpipes.cache.tally import Tally
from kdpipes.errors import DataError, check_count
from kdpipes.storage.codec import DamagedError
from kdpipes.storage.filesystems import check_filesystem
from kdpipes.storage.urls import is_local, join_url

__all__ = ["FileStore"]

_LAYOUT = "files"


class FileStore:
    """A `CacheStore` of files: a folder that can be moved, packed and opened anywhere (`zip://::cache.zip`).

    Each file is written whole or not at all, by any number of processes at once. What is set up once, the layout and
    the compression, is in the file METADATA, and holds for all who open the cache later, whatever they ask for.

    Args:
        url: A folder, by path or by any URL that fsspec knows. It need not be there.
        num_entries: How many entries are expected at most, for the layout.
        max_files_per_folder: How many files or folders may lie in one folder, at least 32.
        compression: None, "zlib" (quick), "gzip", "bz2", "lzma"; or what takes a package: "zstd" (zstandard), "lz4"
            (lz4), "snappy" (python-snappy).

    Raises:
        ImportError: The package of the file system or of the compression is not installed. For the compression, also
            when an existing compressed cache is opened.
        ValueError: The URL's protocol is unknown.
        DataError: When it is first used: the folder holds something else, or a cache of another version.
    """

    _is_read_only: bool
    refusal: Refusal | None

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        num_entries: int = 1_000_000,
        max_files_per_folder: int = 1000,
        compression: str | None = None,
    ) -> None:
        check_compression(compression)
        max_files = check_count("max_files_per_folder", max_files_per_folder, minimum=LEAST_FILES_PER_FOLDER)
        layout = FileLayout.planned(check_count("num_entries", num_entries), max_files)
        self._url = os.fspath(url).removeprefix("file://")
        if is_local(self._url):
            self._url = os.path.abspath(os.path.expanduser(self._url))  # noqa: PTH100, PTH111 - links stay
        else:
            check_filesystem("url", self._url)
        self._options = {**layout._asdict(), "compression": compression}
        self._tally = Tally()
        self._start()

    def get(self, key: bytes) -> memoryview | None:
        try:
            entry = self._read([check_key(key)])[0]
        except DamagedError:
            self._tally.count(misses=1)
            raise
        self._tally.count(misses=1) if entry is None else self._tally.count(hits=1)
        return entry

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        found = self._read([check_key(key) for key in keys], damaged_too=True)
        num_misses = sum(entry is None for entry in found)
        self._tally.count(hits=len(found) - num_misses, misses=num_misses)
        return found

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        check_key(key)
        if self._is_read_only:
            return False
        self._folder()  # an unknown kind of URL is no fault of storage
        try:
            layout, compression = self._opened(create=True)
            content = compressed(b"".join(buffers), compression)
            path = layout.path_of(key)
            is_healing = replace and self._folder().exists(path)
            self._folder().write(path, content, replace=replace)
        except (DataError, ImportError):
            raise
        except Exception as error:  # of any file system: full, read-only, out of reach
            self._is_read_only = True
            self.refusal = refusal = Refusal(f"cannot be written ({_said(error)})", way_out_of(error))
            self._warn(f"{refusal.reason}. What it has is used, and the rest is loaded each time.")
            return False
        self._tally.count(healed=int(is_healing))
        return True

    def put_many(self, entries: Iterable[tuple[bytes, Iterable[Any]]]) -> bool:
        return all(self.put(key, buffers) for key, buffers in entries)

    def contains(self, key: bytes) -> bool:
        check_key(key)
        set_up = self._opened()
        return set_up is not None and self._folder().exists(set_up[0].path_of(key))

    def place_of(self, key: bytes) -> str:
        """Return where the file of an entry lies, or would."""
        set_up = self._opened()
        return self._url if set_up is None else join_url(self._url, set_up[0].path_of(key))

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """Yield `bound_to(key)` and content of all entries; None in place of a content that cannot be read."""
        set_up = self._opened()
        for name in sorted(self._folder().sizes()) if set_up is not None else []:
            if name not in (METADATA, COPY):
                yield _digest_in(name), _entry(self._folder().read(name), set_up[1], True)

    def stats(self) -> CacheStats:
        """Return what has been counted, and what the folders hold, which are listed for that."""
        sizes = self._folder().sizes() if self._opened() is not None else {}
        for name in (METADATA, COPY):
            sizes.pop(name, None)
        tally = self._tally
        return CacheStats(tally.hits, tally.misses, sum(sizes.values()), len(sizes), tally.healed)

    def close(self) -> None:
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_url", "_options", "_tally")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._files: LocalFolder | RemoteFolder | None = None
        self._set_up: tuple[FileLayout, str | None] | None = None
        self._is_read_only = False
        self.refusal = None

    def _folder(self) -> Any:
        if self._files is None or self._process != os.getpid():
            self._start()
            self._files = folder_of(self._url)
        return self._files

    def _opened(self, *, create: bool = False) -> Any:
        """Return layout and compression; None if there is no cache yet."""
        if self._set_up is None:
            folder = self._folder()
            found = said_in(folder.read, self._url)
            if found is None and create:
                self._check_empty()
                folder.create(METADATA, metadata_bytes(_LAYOUT, self._options))
                folder.create(COPY, folder.read(METADATA))
                found = said_in(folder.read, self._url)
            if found is None:
                return None
            said = metadata_of(found, self._url, _LAYOUT)
            layout = FileLayout(int(said["num_digits"]), int(said["digits_per_folder"]))
            check_compression(said["compression"])
            self._set_up = layout, said["compression"]
        return self._set_up

    def _check_empty(self) -> None:
        names = self._folder().names()
        if names and METADATA not in names and self._folder().read(METADATA) is None:
            raise DataError(f"{self._url!r} is no cache, but holds {names[0]!r}. Give an empty folder, or a new one.")

    def _read(self, keys: list[bytes], *, damaged_too: bool = False) -> list[memoryview | None]:
        self._folder()
        try:
            set_up = self._opened()
            if set_up is None:
                return [None] * len(keys)
            layout, compression = set_up
            paths = [layout.path_of(key) for key in keys]
            contents = self._folder().read_many(paths) if len(paths) != 1 else [self._folder().read(paths[0])]
        except (DataError, ImportError):
            raise
        except Exception as error:  # of any file system
            self._warn(f"cannot be read ({_said(error)}): samples are loaded as if there were no cache.")
            return [None] * len(keys)
        return [_entry(content, compression, damaged_too) for content in contents]

    def _warn(self, text: str) -> None:
        self._tally.warn_once(f"The cache in {self._url!r} {text}")


def _digest_in(name: str) -> bytes:
    try:
        return bytes.fromhex(name.rpartition("/")[2])
    except ValueError:  # a file that kdpipes did not write
        return b""


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _entry(content: bytes | None, compression: str | None, damaged_too: bool) -> memoryview | None:
    if content is None:
        return None
    try:
        return memoryview(decompressed(content, compression))
    except Exception as error:  # of any compression
        if damaged_too:
            return None
        raise DamagedError(f"The entry of {len(content)} bytes cannot be decompressed: {_said(error)}.") from error
