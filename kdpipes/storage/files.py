"""Access files by local path or URL: read, list, identify by version, write atomically, and lock."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import platformdirs
from filelock import FileLock, Timeout

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.processes import at_fork
from kdpipes.core.secrets import masked
from kdpipes.storage.access import (
    NUM_TRIES,
    SilenceError,
    Threads,
    TooLargeError,
    WrongResponseError,
    hedged,
    in_time,
    is_missing,
    is_rejected,
    retried,
    what_went_wrong,
)
from kdpipes.storage.filesystems import ask, filesystem_of, not_installed, parent_of
from kdpipes.storage.object_store import remote_reader
from kdpipes.storage.readers import MAX_BYTES, Content, LocalReader, Reader, Stat, Version, Wanted, stat_in
from kdpipes.storage.urls import identity_of, is_local, join_url

# Use zlib-ng if it is installed (extra `fast`): it takes 2 instead of 25 us for a JPEG of 107 KB.
try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

Result = TypeVar("Result")

_LISTING = 1 << 27  # maximum size of a response of unknown size
_NUM_LISTED = 16  # number of folders listed at a time
# Names that begin with a dot, and metadata of macOS, Windows, Linux and Synology.
_HIDDEN = re.compile(
    r"(^|/)(\.|(__MACOSX|lost\+found|@eaDir|\$RECYCLE\.BIN|System Volume Information)/|(Thumbs\.db|desktop\.ini)$)"
)
_GLOB = re.compile(r"[*?\[]")
CAN_HOLD = importlib.util.find_spec("fcntl") is not None  # Windows does not have it
_POLL_S = 0.01  # seconds between two attempts to acquire a lock


class ReplacedError(DataError):
    """A shard has changed since its index was read."""


def reader_of(url: str) -> Reader:
    """Return the reader of a file: a local reader, or a remote one through obstore or fsspec."""
    return LocalReader(url) if is_local(url) else remote_reader(url, *filesystem_of(url))


def stat_of(url: str, *, num_tries: int = NUM_TRIES) -> Stat:
    """Return the size, version and date of a file. File systems may take them from a listing.

    Raises:
        FileNotFoundError: The file does not exist.
        DataError: The file system cannot be reached.
    """
    if is_local(url):
        # Caches ask for the version of each sample's file, so this makes as few calls as possible.
        try:
            status = os.stat(url)  # noqa: PTH116
        except OSError as error:
            raise _as_unreadable(url, error) from as_cause(error)
        return Stat(Version(status.st_size, f"changed:{status.st_mtime_ns}"), status.st_mtime)
    with naming(url):
        return retried(remote_reader(url, *filesystem_of(url)).stat, num_tries=num_tries)


def version_of(url: str, *, num_tries: int = NUM_TRIES) -> Version:
    """Return the version of a file, which changes with its content."""
    return stat_of(url, num_tries=num_tries).version


def reject_other(url: str, version: Version) -> None:
    """Raise if the version of a remote shard differs from the one that was indexed."""
    try:
        forget_listings([url])
        now = version_of(url)
    except FileNotFoundError as error:
        raise ReplacedError(f"Shard {url!r} has been removed while it was read.") from error
    if now != version:
        then, new = (f"{each.size} bytes ({each.tag or 'no tag'})" for each in (version, now))
        raise ReplacedError(
            f"Shard {url!r} has been replaced since its index was read: it was {then}, and is {new} now. "
            "Open the shards again."
        )


def file_stamp(url: str) -> str:
    """Return text that identifies a local file and its version. For a remote file, it identifies only the file."""
    if not is_local(url):
        return identity_of(url)
    path = os.path.abspath(url)  # noqa: PTH100 - links stay
    size, tag = version_of(path)
    return f"{path} {size} {tag}"


def read_url(url: str, *, num_tries: int = NUM_TRIES, size: int = -1, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the whole content of a file; temporary errors are retried.

    Args:
        url: A path or URL.
        num_tries: The maximum number of requests.
        size: The size of a remote file according to its listing; -1 if unknown. If fewer bytes arrive, they are
            requested again.
        max_bytes: The maximum size of a remote file, so that an endless response does not fill the memory.
    """
    with naming(url):
        if is_local(url):
            # A `Reader` would cost five more calls per sample.
            with open(url, "rb", buffering=0) as file:  # noqa: PTH123 - a `Path` takes a quarter longer
                return file.readall()
        reader = reader_of(url)

        def read() -> Content:
            content = hedged(partial(reader.read, Wanted(max_bytes=max_bytes))).content
            if size not in (-1, len(content)):
                raise WrongResponseError(
                    f"its listing says {size} bytes, and {len(content)} came, because storage has cut it, or it has "
                    "been replaced. Run this again, which lists the files again"
                )
            return content

        return bytes(retried(read, num_tries=num_tries))


def if_there(read: Callable[[str], Result], url: str) -> Result | None:
    """Return the result of `read` for a file, or None if the file is missing."""
    try:
        return read(url)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError as error:
        if is_local(url) or is_rejected(error):  # some stores respond "forbidden" for missing files
            return None
        raise


def matching_urls(urls: Sequence[str]) -> list[str]:
    """Return the URLs, with each glob ("birds-*.tar") replaced by the matching files in sorted order.

    Raises:
        FileNotFoundError: No file matches.
    """
    return [found for url in urls for found in _matching(url)]


def _matching(pattern: str) -> list[str]:
    # In remote URLs, `?` and `[` may be part of a query. Local files may be named like a pattern.
    if not (_GLOB.search(pattern) and not Path(pattern).exists() if is_local(pattern) else "*" in pattern):
        return [pattern]
    if is_local(pattern):
        files = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - paths stay as they were given
    else:
        with naming(pattern):
            filesystem, path = filesystem_of(pattern)
            rest = "".join(pattern.partition("::")[1:])
            names = in_time(lambda: filesystem.glob(path), pattern, _LISTING)
            files = sorted(filesystem.unstrip_protocol(name) + rest for name in names)
    if not files:
        raise FileNotFoundError(f"No file matches {masked(pattern)!r}.")
    return files


def forget_listings(urls: Sequence[str]) -> None:
    """Drop the listings of remote folders cached by file systems."""
    for url in {url.rpartition("/")[0]: url for url in urls if not is_local(url)}.values():
        with naming(url):
            filesystem, path = filesystem_of(url)
            folder = parent_of(filesystem, path)
            filesystem.invalidate_cache(None if "*" in folder else folder)


def list_files(root: str, suffixes: Sequence[str], found: Iterable[str] = ()) -> list[str]:
    """Return the files below `root` that end with one of `suffixes` (lower case), sorted, without hidden ones.

    `found` are the files in a listing, if there already is one.
    """
    found = found or (_list_local(root) if is_local(root) else list_versions(root))
    return sorted(path for path in found if path.lower().endswith(tuple(suffixes)) and not is_hidden(path))


def is_hidden(path: str) -> bool:
    """Return whether a file is hidden or in a hidden folder, or belongs to an operating system.

    >>> is_hidden("cat/.1.jpg"), is_hidden("__MACOSX/cat/1.jpg"), is_hidden("cat/1.jpg")
    (True, True, False)
    """
    return _HIDDEN.search(path) is not None


def list_versions(root: str) -> dict[str, Version]:
    """Return the version of each file below a remote folder by relative path. Subfolders are listed in parallel."""
    with naming(root):
        filesystem, path = filesystem_of(root)
        filesystem.invalidate_cache(path)
        try:
            entries = retried(lambda: ask(filesystem, "ls", root, path, detail=True, num_bytes=_LISTING))
        except (FileNotFoundError, NotADirectoryError) as error:
            if not is_missing(error) and not isinstance(error, NotADirectoryError):
                raise
            entries = []
        entries = [entry for entry in entries if str(entry["name"]).strip("/") != str(path).strip("/")]
        folders = [str(entry["name"]) for entry in entries if entry["type"] == "directory"]
        find = partial(ask, filesystem, "find", root, detail=True, num_bytes=_LISTING)
        threads = Threads(min(_NUM_LISTED, len(folders)), "kdpipes-listing")
        coming = [threads.submit(partial(retried, partial(find, folder))) for folder in folders]
        files = {str(entry["name"]): entry for entry in entries if entry["type"] != "directory"}
        for future in coming:
            files.update(future.result())
    if not files:
        raise FileNotFoundError(f"There is no folder {masked(root)!r}.")
    return {str(file).removeprefix(path).lstrip("/"): stat_in(info).version for file, info in files.items()}


def list_folder(folder: str) -> dict[str, Version]:
    """Return the version of each file in a remote folder, by its name."""
    with naming(folder):
        filesystem, path = filesystem_of(f"{folder}/")
        filesystem.invalidate_cache(path)
        entries = retried(lambda: ask(filesystem, "ls", folder, path, detail=True, num_bytes=_LISTING))
    files = (entry for entry in entries if entry["type"] != "directory")
    return {str(entry["name"]).rpartition("/")[2]: stat_in(entry).version for entry in files}


def _list_local(root: str) -> Iterator[str]:
    if not Path(root).exists():
        raise FileNotFoundError(f"There is no folder {masked(root)!r}.")
    if not Path(root).is_dir():
        raise NotADirectoryError(f"{root!r} is a file. Pass a folder.")
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not is_hidden(f"{name}/")]  # which may be large, or not readable
        prefix = os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        prefix = "" if prefix == "./" else prefix
        yield from (prefix + file for file in files)


def _raise(error: OSError) -> None:
    raise DataError(f"Folder {error.filename!r} cannot be listed: {error.strerror}.") from error


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Replace errors of any class (botocore's and aiohttp's are not OSErrors) with errors that name `url`."""
    try:
        yield
    except Exception as error:
        raise _as_unreadable(url, error) from as_cause(error)


def _as_unreadable(url: str, error: Exception) -> Exception:
    if is_missing(error):
        hint = " Globs are not expanded here: name each file." if "*" in url else ""
        if "{" in url or "%" in url:
            hint = " A range of numbers is written as {000..015}."
        if "bucket does not exist" in str(error):
            hint += " Its bucket does not exist either: are its name and the endpoint right?"
        return FileNotFoundError(f"There is no file {masked(url)!r}.{hint}")
    if isinstance(error, IsADirectoryError):
        shards = Path(url).glob("*.tar") if is_local(url) else ()
        hint = f"Write {join_url(url, '*.tar')!r} for the shards in it." if any(shards) else "Name a file in it."
        return DataError(f"{url!r} is a folder; a file is needed. {hint}")
    if isinstance(error, ImportError):
        return not_installed(url, error)
    if isinstance(error, SilenceError):
        return DataError(f"{error}.")
    if isinstance(error, TooLargeError):
        return TooLargeError(f"{url!r} cannot be read: {error}.")
    return DataError(f"{url!r} cannot be read: {what_went_wrong(url, error)}")


def write_url(url: str, content: bytes, *, num_tries: int = NUM_TRIES) -> None:
    """Write a whole file atomically, replacing an existing one; temporary errors of remote storage are retried."""
    if is_local(url):
        replace_file(Path(url), content)
    else:
        filesystem, path = filesystem_of(url)
        retried(lambda: filesystem.pipe_file(path, content), num_tries=num_tries)


def create_url(url: str, content: bytes) -> bytes:
    """Write a remote file unless it exists, and return its content afterwards.

    S3, GCS and some others let only one of several writers create a file. If the storage does not support this, all of
    them write, the last write wins, and the other writers see its content.
    """
    filesystem, path = filesystem_of(url)

    def create() -> bytes:
        try:
            filesystem.pipe_file(path, content, mode="create")
        except Exception:  # storage has many errors for a file that exists, and the response to a write may get lost
            with suppress(FileNotFoundError):
                return read_url(url)
            raise
        return content

    unable = (NotImplementedError, TypeError, ValueError)
    try:
        return retried(create, final=unable)
    except unable:
        write_url(url, content)
        return read_url(url)


def cache_folder(name: str) -> Path:
    """Return the local folder for data that later runs can use. It may not exist yet."""
    return Path(os.environ.get("KDPIPES_CACHE_DIR") or _user_cache()).expanduser() / name


def _user_cache() -> Path:
    return Path(platformdirs.user_cache_dir("kdpipes", appauthor=False)).expanduser()


def cached_name(url: str, *details: str) -> str:
    """Return the name in the local cache for data of a URL, without the URL's signature."""
    text = "\n".join([identity_of(url), *details]).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def make_cache_folder(path: Path) -> None:
    """Create a folder for copies of data. Below the user's own cache folder, it is not readable by other users."""
    path.mkdir(mode=0o700 if path.is_relative_to(_user_cache()) else 0o777, parents=True, exist_ok=True)


def pread(descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset`, or fewer at the end. One system call returns at most 2 GiB."""
    content = _pread(descriptor, size, offset)
    while len(content) < size and (more := _pread(descriptor, size - len(content), offset + len(content))):
        content += more
    return content


_seeking = threading.Lock()


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _seeking:  # threads share the descriptor, and with it the position in the file
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all bytes, because one system call may write fewer."""
    view = memoryview(content)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


@contextmanager
def draft_of(path: Path, draft: Path | None = None) -> Iterator[Path]:
    """Yield a path at which to write a draft of a file. If the draft is not moved away, it is removed.

    The draft must be in the same file system as the file. By default, it is a hidden file in the same folder,
    `.NAME.RANDOM.part`. Leftovers of killed processes are recognized by this name.
    """
    draft = draft or path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Write a file atomically, replacing an existing one.

    With `is_synced`, the content is flushed to disk before the name appears, so that a power loss cannot leave an
    incomplete file.
    """
    with draft_of(path) as draft:
        with draft.open("wb") as file:
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)


def create_file(path: Path, content: bytes) -> None:
    """Write a file atomically unless it exists. If several processes write it, the first one wins."""
    with draft_of(path) as draft:
        draft.write_bytes(content)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except FileNotFoundError:
            if not path.exists():  # a faster process may have removed the draft
                raise
        except OSError:  # some file systems have no hard links
            draft.replace(path)


@contextmanager
def locked(path: Path, *, timeout_s: float | None = None) -> Iterator[bool]:
    """Hold an exclusive lock on a file, across processes and threads, and yield whether it was acquired.

    The lock is released when the process ends, even if it is killed. The file remains.

    Args:
        path: The lock file, which is created. It must not hold data.
        timeout_s: The maximum number of seconds to wait for the lock; None means no limit.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if timeout_s is None else timeout_s, poll_interval=_POLL_S)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


_opening = threading.Lock()
_files: weakref.WeakSet[HeldFile] = weakref.WeakSet()


class HeldFile:
    """An open data file with a lock, shared by readers or exclusive to one writer, across processes and threads.

    `locked` does not suffice here: filelock's locks are exclusive, and its lock files must not be moved. A forked
    process does not inherit the lock.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.is_alone = False
        with _opening:  # a fork in between would pass the file, and later its lock, to the child
            self.descriptor = os.open(path, flags, 0o666)
            self._release = weakref.finalize(self, _let_go, self.descriptor)
            _files.add(self)

    def __enter__(self) -> HeldFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, *, is_alone: bool = False, waits: bool = False) -> bool:
        """Acquire a shared or an exclusive lock, and return whether that succeeded; return at once unless `waits`."""
        import fcntl

        kind = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH
        try:
            fcntl.flock(self.descriptor, kind if waits else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.is_alone = is_alone
        return True

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this file."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        """Return the length of the file."""
        return os.fstat(self.descriptor).st_size

    def remove(self) -> None:
        """Delete the file, and free its space even if another process has it open. Requires an exclusive lock."""
        self.path.unlink(missing_ok=True)
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Close the file and release the lock."""
        self._release()

    def disown(self) -> None:
        """Close the file, but leave the lock to the parent process from which this one was forked."""
        if self._release.detach() is not None:
            os.close(self.descriptor)


def _let_go(descriptor: int) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing it does not, while a forked process has it open
    finally:
        os.close(descriptor)


def _disown() -> None:
    """Close the parent's locked files in a forked process; otherwise their locks would outlive the parent."""
    for file in list(_files):
        file.disown()
    _files.clear()
    _opening.release()


at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_disown)
