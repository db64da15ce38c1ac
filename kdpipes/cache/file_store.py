"""A cache of one file per entry, in a local folder or in object storage."""

from __future__ import annotations

import io
import math
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.compression import compr

from kdpipes.cache.metadata import METADATA, metadata_bytes, parse_metadata
from kdpipes.cache.store import (
    CLAIMS,
    CacheStats,
    CacheStore,
    Rejection,
    bound_to,
    check_key,
    claim_by,
    claim_in,
    hint_for,
)
from kdpipes.core.errors import DataError, check_choice, check_count
from kdpipes.storage.access import Access, using
from kdpipes.storage.codec import DamagedError
from kdpipes.storage.files import create_file, create_url, draft_of
from kdpipes.storage.filesystems import check_filesystem, filesystem_of
from kdpipes.storage.retries import retried
from kdpipes.storage.urls import is_local, join_url

__all__ = ["FileLayout", "FileStore"]

Result = TypeVar("Result")

_LEAST_FILES_PER_FOLDER = 32
_BESIDES = 8  # files and folders of the cache itself, in its first folder
_MOST_DIGITS = 16
_DRAFTS = ".partial"
_COUNTS = ".counts"
_TOTAL = f"{_COUNTS}/total"
_ROW = struct.Struct("<2q")
_NUM_TRIES = 3  # of remote storage: the samples can still be loaded
_LONG_AGO_S = 24 * 3600
_PACKAGES = {"lz4": "lz4", "snappy": "python-snappy", "zstd": "zstandard"}


class FileStore(CacheStore):
    """A `CacheStore` of files: a folder that can be moved, packed and opened anywhere (`zip://::cache.zip`).

    Each file is written whole or not at all, by any number of processes at once. The file METADATA records the layout
    of folders and the compression: they hold for everyone who opens the cache later.

    Args:
        url: A folder, by path or by any URL that fsspec knows. It need not exist.
        num_entries: The expected maximum number of entries, for the layout.
        max_files_per_folder: The maximum number of files or folders in one folder, at least 32.
        compression: None, "zlib" (quick), "gzip", "bz2", "lzma"; or one that needs a package: "zstd" (zstandard), "lz4"
            (lz4), "snappy" (python-snappy).
        storage_options: The arguments of fsspec's file system. They may be secrets, and are neither shown nor written.

    Raises:
        ImportError: The package of the file system or of the compression is not installed. For the compression, also
            when an existing compressed cache is opened.
        ValueError: The URL's protocol is unknown.
        DataError: On first use: the folder holds something else, or a cache of another version.
    """

    layout = "files"
    of_process = ("_process", "_files", "_set_up", "_is_read_only", "rejection")

    _is_read_only: bool

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
        layout = FileLayout.planned(check_count("num_entries", num_entries), max_files)
        self._url = os.fspath(url).removeprefix("file://")
        if is_local(self._url):
            self._url = os.path.abspath(os.path.expanduser(self._url))  # noqa: PTH100, PTH111 - links stay
        else:
            check_filesystem("url", self._url)
        self.has_quick_stats = self.completes_itself = is_local(self._url)
        self._options = {**layout._asdict(), "compression": compression}
        self.start()

    def get(self, key: bytes, *, is_known: bool = False) -> memoryview | None:
        check_key(key)
        folder = self._folder()
        try:
            set_up = self._opened()
            content = None if set_up is None else folder.read(set_up[0].path_of(key))
        except (DataError, ImportError):
            raise
        except Exception as error:  # of any file system
            self._warn(f"cannot be read ({_message(error)}): samples are loaded as if there were no cache.")
            return None
        return None if content is None else _entry(content, set_up[1])

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        check_key(key)
        if self._is_read_only:
            return False
        folder = self._folder()  # outside of `try`: an unknown protocol is an error of the caller
        try:
            layout, compression = self._opened(create=True)
            content = _compressed(b"".join(buffers), compression)
            folder.write(layout.path_of(key), content, replace=replace)
        except (DataError, ImportError):
            raise
        except Exception as error:  # of any file system: full, read-only, out of reach
            self._is_read_only = True
            self.rejection = rejection = Rejection(f"cannot be written ({_message(error)})", hint_for(error))
            self._warn(f"{rejection.reason}. What it has is used, and the rest is loaded each time.")
            return False
        return True

    def contains(self, key: bytes) -> bool:
        check_key(key)
        set_up = self._opened()
        return set_up is not None and self._folder().exists(set_up[0].path_of(key))

    def place_of(self, key: bytes) -> str:
        set_up = self._opened()
        return repr(self._url if set_up is None else join_url(self._url, set_up[0].path_of(key)))

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        for name in sorted({} if self._opened() is None else _entries_in(self._folder())):
            entry = None
            with suppress(DamagedError):
                entry = _entry(self._folder().read(name), self._opened()[1])
            yield _digest_in(name), entry

    def stats(self) -> CacheStats:
        """Return the number of entries and bytes; object storage is listed for it, 1,000 files with each request."""
        entries, num_bytes = (0, 0) if self._opened() is None else self._folder().totals()
        return CacheStats(bytes=num_bytes, entries=entries)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        with suppress(OSError):  # who cannot write there gets every claim
            self._opened(create=True)
        claimed: AbstractContextManager[bool] = self._folder().claim(name, waits=waits)
        return claimed

    def start(self) -> None:
        self._process = os.getpid()
        self._files: _LocalFolder | _RemoteFolder | None = None
        self._set_up: tuple[FileLayout, str | None] | None = None
        self._is_read_only = False
        self.rejection = None

    def _folder(self) -> Any:
        if self._files is None or self._process != os.getpid():
            self.start()
            is_near = is_local(self._url)
            self._files = _LocalFolder(self._url) if is_near else _RemoteFolder(self._url, self._access)
        return self._files

    def _opened(self, *, create: bool = False) -> Any:
        """Return layout and compression; None if there is no cache yet."""
        folder = self._folder()
        if self._set_up is None:
            found = parse_metadata(folder.read(METADATA), self._url, self.layout)
            if found is None and create:
                names = folder.names()
                if names and METADATA not in names and folder.read(METADATA) is None:
                    raise DataError(
                        f"{self._url!r} is not a cache, but holds {names[0]!r}. Give an empty folder, or a new one."
                    )
                folder.create(METADATA, metadata_bytes(self.layout, self._options))
                found = parse_metadata(folder.read(METADATA), self._url, self.layout)
            if found is None:
                return None
            _check_compression(found["compression"])
            layout = FileLayout(int(found["num_digits"]), int(found["digits_per_folder"]))
            self._set_up = layout, found["compression"]
        return self._set_up

    def _warn(self, text: str) -> None:
        self.warn_once(f"The cache in {self._url!r} {text}")


class FileLayout(NamedTuple):
    """How entries are spread over folders: by the first digits of a digest of their keys.

    Args:
        num_digits: The number of digits that stand for folders.
        digits_per_folder: How many of them name one folder.
    """

    num_digits: int
    digits_per_folder: int

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

    def path_of(self, key: bytes) -> str:
        """Return the path of an entry in the cache's folder."""
        name = bound_to(key).hex()
        starts = range(0, self.num_digits, self.digits_per_folder)
        folders = [name[start : min(start + self.digits_per_folder, self.num_digits)] for start in starts]
        return "/".join([*folders, name])


def _digest_in(name: str) -> bytes:
    try:
        return bytes.fromhex(name.rpartition("/")[2])
    except ValueError:  # a file that kdpipes did not write
        return b""


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


def _entry(content: bytes, compression: str | None) -> memoryview:
    try:
        return memoryview(_decompressed(content, compression))
    except Exception as error:  # of any compression
        raise DamagedError(f"The entry of {len(content)} bytes cannot be decompressed: {_message(error)}.") from error


class _LocalFolder:
    """A local folder, or a folder of a disk that several machines share.

    Args:
        path: The folder, which need not exist.
    """

    def __init__(self, path: str) -> None:
        self._root = Path(path).expanduser().absolute()
        self._host = socket.gethostname()
        self._row: mmap.mmap | None = None
        self._counted = 0, 0
        self._counting = threading.Lock()

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if there is none."""
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, name: str) -> bool:
        """Return whether there is a file."""
        return (self._root / name).exists()

    def write(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write a file atomically."""
        path = self._root / name
        old = path.stat().st_size if path.exists() else None
        if old is not None and not replace:
            return
        with self._counting:
            if self._row is None:
                self._sweep()
                self._row = self._begin_counting()
        draft = self._root / _DRAFTS / f"{self._host}~{os.getpid()}~{secrets.token_hex(8)}"
        with draft_of(path, draft):
            _in_folder(draft, lambda: draft.write_bytes(content))
            try:  # of two processes at once, the first one writes the file and counts it
                _in_folder(path, lambda: draft.replace(path) if replace else os.link(draft, path))
            except FileExistsError:
                return
            except OSError:  # of file systems without hard links
                draft.replace(path)
        self._count(int(old is None), len(content) - (old or 0))

    def create(self, name: str, content: bytes) -> None:
        """Write a file unless another process has: the first one decides."""
        _in_folder(self._root / name, lambda: create_file(self._root / name, content))

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files and folders directly in a folder that are not hidden."""
        with suppress(FileNotFoundError):
            return [path.name for path in (self._root / folder).iterdir() if not path.name.startswith(".")]
        return []

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below, in bytes."""
        files = (path for path in self._root.rglob("*") if _DRAFTS not in path.parts and path.is_file())
        return {path.relative_to(self._root).as_posix(): path.stat().st_size for path in files}

    def totals(self) -> tuple[int, int]:
        """Return the number and bytes of the entries, without listing them.

        Each process counts what it adds in its own file; the file `total` counts what caches of kdpipes 0.1 had. Files
        that a user deletes stay counted.
        """
        if not self.exists(_TOTAL):
            return self._listed()
        rows = [self.read(f"{_COUNTS}/{name}") or b"" for name in self.names(_COUNTS)]
        counts = [_ROW.unpack(row) for row in rows if len(row) == _ROW.size]
        return sum(each[0] for each in counts), sum(each[1] for each in counts)

    def _listed(self) -> tuple[int, int]:
        sizes = _entries_in(self)
        return len(sizes), sum(sizes.values())

    def _begin_counting(self) -> mmap.mmap:
        """Return the counts of this process, in a file that outlives it however it ends."""
        if not self.exists(_TOTAL):
            self.create(_TOTAL, _ROW.pack(*self._listed()))
        path = self._root / _COUNTS / f"{self._host}-{os.getpid()}-{secrets.token_hex(4)}"
        path.write_bytes(bytes(_ROW.size))
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), _ROW.size)

    def _count(self, entries: int, num_bytes: int) -> None:
        with self._counting:
            assert self._row is not None
            self._counted = self._counted[0] + entries, self._counted[1] + num_bytes
            self._row[:] = _ROW.pack(*self._counted)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim some work by a lock file."""
        return claim_in(self._root, name, waits=waits)

    def _sweep(self) -> None:
        """Remove the drafts of processes that were killed while writing."""
        for draft in (self._root / _DRAFTS).glob("*~*~*"):
            host, pid, _ = draft.name.split("~")
            with suppress(OSError):
                is_old = time.time() - draft.stat().st_mtime > _LONG_AGO_S
                if is_old if host != self._host else not _is_alive(int(pid)):
                    draft.unlink()


def _in_folder(path: Path, action: Callable[[], Any]) -> None:
    """Call `action`, after making the folder of `path` if it is missing."""
    try:
        action()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        action()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class _RemoteFolder:
    """A folder of an fsspec file system that writes files whole, as object storage does.

    Args:
        url: The folder, which need not exist.
        access: How to reach it.
    """

    def __init__(self, url: str, access: Access) -> None:
        self._url, self._access = url, access
        with using(access):
            self._files, root = filesystem_of(url)
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".strip("/") if self._root == "" else f"{self._root}/{name}"

    def _tried(self, call: Callable[[], Result]) -> Result:
        with using(self._access):
            return retried(call, num_tries=_NUM_TRIES)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if there is none."""
        with suppress(FileNotFoundError):
            return bytes(self._tried(lambda: self._files.cat_file(self._path(name))))
        return None

    def exists(self, name: str) -> bool:
        """Return whether there is a file."""
        return bool(self._tried(lambda: self._files.exists(self._path(name))))

    def write(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write a file, even if it exists: asking would take as long as writing."""
        path = self._path(name)
        try:
            self._tried(lambda: self._files.pipe_file(path, content))
        except FileNotFoundError:  # object storage has no folders, but other file systems need them
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._tried(lambda: self._files.pipe_file(path, content))

    def create(self, name: str, content: bytes) -> bytes:
        """Write a file unless it is there, and return what it holds then."""
        with using(self._access):
            return create_url(join_url(self._url, name), content)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files and folders directly in a folder that are not hidden."""
        with suppress(FileNotFoundError):
            paths = self._tried(lambda: self._files.ls(self._path(folder), detail=False))
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
            return [name for name in names if not name.startswith(".")]
        return []

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below, in bytes."""
        found = self._tried(lambda: self._files.find(self._root, detail=True))
        return {path.removeprefix(self._root).lstrip("/"): int(info["size"]) for path, info in found.items()}

    def totals(self) -> tuple[int, int]:
        """Return the number and bytes of the entries."""
        sizes = _entries_in(self)
        return len(sizes), sum(sizes.values())

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim some work by a small file."""
        return claim_by(_Record(self, f"{CLAIMS}/{name.hex()}"), waits=waits)

    def remove(self, name: str) -> None:
        """Delete a file."""
        self._tried(lambda: self._files.rm_file(self._path(name)))


class _Record(NamedTuple):
    """A claim in object storage.

    Args:
        folder: The folder of the cache.
        name: The name of the file.
    """

    folder: _RemoteFolder
    name: str

    def create(self, content: bytes) -> bytes:
        return self.folder.create(self.name, content)

    def replace(self, content: bytes) -> None:
        self.folder.write(self.name, content, replace=True)

    def remove(self) -> None:
        self.folder.remove(self.name)


def _entries_in(folder: Any) -> dict[str, int]:
    """Return the sizes of all entries by the paths of their files."""
    return {name: size for name, size in folder.sizes().items() if not name.startswith((METADATA, "."))}


def _check_compression(compression: str | None) -> None:
    """Raise if a compression is unknown, or its package is not installed.

    Raises:
        ImportError: The package is missing.
        ValueError: There is no such compression.
    """
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


def _decompressed(content: bytes, compression: str | None) -> bytes:
    """Return the entry in the content of a file."""
    if compression is None:
        return content
    if compression == "zlib":
        return zlib.decompress(content)
    with compr[compression](io.BytesIO(content), mode="rb") as file:
        return bytes(file.read())


class _Target(io.BytesIO):
    """Bytes that can be read when they have been closed, as some compressions do."""

    def close(self) -> None:
        """Stay open."""
