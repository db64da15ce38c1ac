"""A cache of one file per entry, in a local folder or in object storage."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from fsspec.compression import compr

from kdpipes.cache.folder import LocalFolder, RemoteFolder, entry_error, number_in, read_metadata
from kdpipes.cache.store import CacheStats, CacheStore, Rejection, bound_to, check_key
from kdpipes.core.errors import DataError, check_choice, check_count
from kdpipes.core.forks import forget_after_fork
from kdpipes.storage.access import Access
from kdpipes.storage.codec import DamagedError
from kdpipes.storage.filesystems import check_filesystem
from kdpipes.storage.urls import is_local, join_url

_LEAST_FILES_PER_FOLDER = 32
_BESIDES = 8  # files and folders of the cache itself, in its first folder
_MOST_DIGITS = 16
_MOST_BYTES = 1 << 31  # of an entry that is compressed: a small file can hold more than fits into memory
_PACKAGES = {"lz4": "lz4", "snappy": "python-snappy", "zstd": "zstandard"}


class FileStore(CacheStore):
    """A `CacheStore` of files: a folder that can be moved, packed and opened anywhere (`zip://::cache.zip`).

    Each file is written whole or not at all, by any number of processes at once. The file METADATA records the layout
    of folders and the compression: they hold for everyone who opens the cache later. `cache_on_disk` describes the
    arguments.
    """

    layout = "files"
    of_process = ("_files", "_found", "rejection")

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        num_entries: int = 1_000_000,
        max_files_per_folder: int = 1000,
        compression: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_compression(compression)
        self._access = Access(storage_options=storage_options)
        max_files = check_count("max_files_per_folder", max_files_per_folder, minimum=_LEAST_FILES_PER_FOLDER)
        planned = FileLayout.planned(check_count("num_entries", num_entries), max_files)
        self._url = os.fspath(url).removeprefix("file://")
        self.has_quick_stats = self.completes_itself = is_local(self._url)
        if is_local(self._url):
            self._url = os.path.abspath(os.path.expanduser(self._url))  # noqa: PTH100, PTH111 - links stay
        else:
            check_filesystem("url", self._url)
        self._options = planned._replace(compression=compression)._asdict()
        self.start()

    def get(self, key: bytes, *, is_known: bool = False) -> memoryview | None:
        check_key(key)
        folder = self._folder()
        try:
            layout = self._opened()
            content = None if layout is None else folder.read(layout.path_of(key))
        except (DataError, ImportError):
            raise
        except Exception as error:  # of any file system
            reason = Rejection.because("cannot be read", error).reason
            self.warn_once(f"The cache in {self._url!r} {reason}: samples are loaded as if there were no cache.")
            return None
        return None if content is None else _entry(content, layout.compression)

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        check_key(key)
        if self.rejection is not None:
            return False
        folder = self._folder()  # outside of `try`: an unknown protocol is an error of the caller
        try:
            layout = self._opened(create=True)
            content = _compressed(b"".join(buffers), layout.compression)
            folder.write(layout.path_of(key), content, replace=replace)
        except (DataError, ImportError):
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
        layout = self._opened()
        return layout is not None and self._folder().exists(layout.path_of(key))

    def place_of(self, key: bytes) -> str:
        layout = self._opened()
        return repr(self._url if layout is None else join_url(self._url, layout.path_of(key)))

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        for name in sorted([] if self._opened() is None else self._folder().entries()):
            digest, entry = b"", None
            with suppress(ValueError):  # of a file that kdpipes has not written
                digest = bytes.fromhex(name.rpartition("/")[2])
            with suppress(DamagedError):
                entry = _entry(self._folder().read(name), self._opened().compression)
            yield digest, entry

    def stats(self) -> CacheStats:
        """Return the number of entries and bytes; object storage is listed for it, 1,000 files with each request."""
        entries, num_bytes = (0, 0) if self._opened() is None else self._folder().totals()
        return CacheStats(bytes=num_bytes, entries=entries)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        with suppress(OSError):  # a process that cannot write there gets every claim
            self._opened(create=True)
        claimed: AbstractContextManager[bool] = self._folder().claim(name, waits=waits)
        return claimed

    def start(self) -> None:
        self._files: LocalFolder | RemoteFolder | None = None
        self._found: FileLayout | None = None
        self.rejection = None
        forget_after_fork(self)

    def _folder(self) -> Any:
        if self._files is None:
            self._files = LocalFolder(self._url) if is_local(self._url) else RemoteFolder(self._url, self._access)
        return self._files

    def _opened(self, *, create: bool = False) -> Any:
        """Return the layout, a FileLayout; None if there is no cache yet."""
        if self._found is None:
            found = read_metadata(self._folder(), self._url, self.layout, self._options if create else None)
            if found is None:
                return None
            self._found = FileLayout.of_metadata(found, self._url)
        return self._found


class FileLayout(NamedTuple):
    """How entries are spread over folders, by the first digits of a digest of their keys, and compressed."""

    num_digits: int  # that stand for folders
    digits_per_folder: int
    compression: str | None = None

    @classmethod
    def planned(cls, num_entries: int, max_files: int) -> FileLayout:
        """Return a layout in which no folder gets more than `max_files` of so many entries.

        Folders are a quarter full on average, so that none overflows by chance: at the minimum of 32 files, with 8 of
        24 expected in each folder, the odds are about 1 to a million per folder.

        >>> FileLayout.planned(1_000_000, 1000).path_of(b"heron")
        '4c/3/4c34d2975d0bd9bb626fccc3d2347c9588a67fc2'
        """
        room = max_files - _BESIDES
        digits_per_folder = int(math.log(room, 16))
        if num_entries <= room:
            return cls(0, digits_per_folder)
        fits = (digits for digits in range(1, _MOST_DIGITS) if 4 * num_entries <= max_files * 16**digits)
        return cls(next(fits, _MOST_DIGITS), digits_per_folder)

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any], place: str) -> FileLayout:
        """Return the layout of an existing cache.

        Raises:
            DataError: The entries of its file METADATA are wrong.
            ImportError: The package of its compression is not installed.
        """
        compression = metadata.get("compression")
        try:
            _check_compression(compression)
        except (ValueError, TypeError) as error:
            raise entry_error("compression", "known to kdpipes", compression, place) from error
        num_digits = number_in(metadata, "num_digits", place, least=0, most=_MOST_DIGITS)
        digits_per_folder = number_in(metadata, "digits_per_folder", place, least=1, most=_MOST_DIGITS)
        return cls(num_digits, digits_per_folder, compression)

    def path_of(self, key: bytes) -> str:
        """Return the path of an entry in the cache's folder."""
        name = bound_to(key).hex()
        starts = range(0, self.num_digits, self.digits_per_folder)
        folders = [name[start : min(start + self.digits_per_folder, self.num_digits)] for start in starts]
        return "/".join([*folders, name])


def _check_compression(compression: str | None) -> None:
    """Raise a ValueError if a compression is unknown, an ImportError if its package is not installed."""
    known = [None, "zlib", *sorted({*filter(None, compr), *_PACKAGES} - {"zip"})]
    check_choice("compression", compression, known)
    if compression in _PACKAGES and compression not in compr:
        package = _PACKAGES[compression]
        raise ImportError(f"Compression {compression!r} needs {package}: `pip install {package}`.")


def _compressed(content: bytes, compression: str | None) -> bytes:
    """Return the content of the file of an entry."""
    if compression is None:
        return content
    if compression == "zlib":
        return zlib.compress(content, 1)
    target = _Target()
    with compr[compression](target, mode="wb") as file:
        file.write(content)
    return target.getvalue()


class _Target(io.BytesIO):
    """Bytes that can be read when they have been closed, as some compressions do."""

    def close(self) -> None:
        """Stay open."""


def _entry(content: bytes, compression: str | None) -> memoryview:
    """Return the entry in the content of a file."""
    if compression is None:
        return memoryview(content)
    try:
        if compression == "zlib":
            entry = zlib.decompressobj().decompress(content, _MOST_BYTES + 1)
        else:
            with compr[compression](io.BytesIO(content), mode="rb") as file:
                entry = file.read(_MOST_BYTES + 1)
        if len(entry) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        return memoryview(entry)
    except Exception as error:  # of any compression
        reason = str(error) or type(error).__name__
        raise DamagedError(f"The entry of {len(content)} bytes cannot be decompressed: {reason}.") from error
