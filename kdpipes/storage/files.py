"""Files by URL, local or remote: read, write, list, and identify by version."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.secrets import masked
from kdpipes.storage.filesystems import filesystem_of, not_installed, parent_of
from kdpipes.storage.local import LocalReader, replace_file
from kdpipes.storage.object_store import remote_reader
from kdpipes.storage.readers import MAX_BYTES, Content, Reader, Stat, Version, Wanted, ask, version_in
from kdpipes.storage.requests import (
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
from kdpipes.storage.urls import identity_of, is_local, join_url

Result = TypeVar("Result")

_LISTING = 1 << 27  # bytes that responses of unknown size may have
_NUM_LISTED = 16  # folders at a time
# Names that begin with a dot, and files of macOS, Windows, Linux and Synology's photo station.
_HIDDEN = re.compile(
    r"(^|/)(\.|(__MACOSX|lost\+found|@eaDir|\$RECYCLE\.BIN|System Volume Information)/|(Thumbs\.db|desktop\.ini)$)"
)
_GLOB = re.compile(r"[*?\[]")


class ReplacedError(DataError):
    """A shard is no longer what it was when its index was read."""


def reader_of(url: str) -> Reader:
    """Return the reader of a file: of a local one, of an object through obstore, or of any other one through fsspec."""
    return LocalReader(url) if is_local(url) else remote_reader(url, *filesystem_of(url))


def stat_of(url: str, *, num_tries: int = NUM_TRIES) -> Stat:
    """Return size, version and date of a file; file systems may take them from a listing.

    Raises:
        FileNotFoundError: The file does not exist.
        DataError: The file system cannot be reached.
    """
    with naming(url):
        return retried(reader_of(url).stat, num_tries=1 if is_local(url) else num_tries)


def version_of(url: str, *, num_tries: int = NUM_TRIES) -> Version:
    """Return the version of a file, which changes with its content."""
    return stat_of(url, num_tries=num_tries).version


def reject_other(url: str, version: Version) -> None:
    """Raise if a remote shard is of another version than when its index was read."""
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
    """Return a text that identifies a local file and its version; for a remote file, only its identity."""
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
        size: The size of a remote file by its listing; -1 if it is unknown. If fewer bytes come, they are requested
            again.
        max_bytes: The maximum size of a remote file, so that a body without an end does not fill the memory.
    """
    with naming(url):
        reader = reader_of(url)
        if is_local(url):
            return bytes(reader.read().content)

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
    """Return what `read` returns of a file, or None if the file is missing."""
    try:
        return read(url)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError as error:
        if is_local(url) or is_rejected(error):  # some stores respond "forbidden" for missing files
            return None
        raise


def matching_urls(urls: Sequence[str]) -> list[str]:
    """Return the URLs with each glob ("birds-*.tar") replaced by the files that match it, sorted.

    Raises:
        FileNotFoundError: No file matches.
    """
    return [found for url in urls for found in _matching(url)]


def _matching(pattern: str) -> list[str]:
    # In remote URLs, `?` and `[` may be part of a query; local files may be named like a pattern.
    if not (_GLOB.search(pattern) and not Path(pattern).exists() if is_local(pattern) else "*" in pattern):
        return [pattern]
    if is_local(pattern):
        found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - paths stay as they were given
    else:
        with naming(pattern):
            filesystem, path = filesystem_of(pattern)
            rest = "".join(pattern.partition("::")[1:])
            names = in_time(lambda: filesystem.glob(path), pattern, _LISTING)
            found = sorted(filesystem.unstrip_protocol(name) + rest for name in names)
    if not found:
        raise FileNotFoundError(f"No file matches {masked(pattern)!r}.")
    return found


def forget_listings(urls: Sequence[str]) -> None:
    """Drop the listings of remote folders that file systems have cached."""
    for url in {url.rpartition("/")[0]: url for url in urls if not is_local(url)}.values():
        with naming(url):
            filesystem, path = filesystem_of(url)
            folder = parent_of(filesystem, path)
            filesystem.invalidate_cache(None if "*" in folder else folder)


def list_files(root: str, suffixes: Sequence[str], found: Iterable[str] = ()) -> list[str]:
    """Return the files below `root` that end with one of `suffixes` (lower case), sorted, without hidden ones.

    `found` are the files of a listing, if one is known.
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
    """Return the version of each file below a remote folder, by its path there; sub-folders are listed in parallel."""
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
        found = {str(entry["name"]): entry for entry in entries if entry["type"] != "directory"}
        for future in coming:
            found.update(future.result())
    if not found:
        raise FileNotFoundError(f"There is no folder {masked(root)!r}.")
    return {str(file).removeprefix(path).lstrip("/"): version_in(info) for file, info in found.items()}


def list_folder(folder: str) -> dict[str, Version]:
    """Return the version of each file in a remote folder, by its name."""
    with naming(folder):
        filesystem, path = filesystem_of(f"{folder}/")
        filesystem.invalidate_cache(path)
        found = retried(lambda: ask(filesystem, "ls", folder, path, detail=True, num_bytes=_LISTING))
    files = (entry for entry in found if entry["type"] != "directory")
    return {str(entry["name"]).rpartition("/")[2]: version_in(entry) for entry in files}


def _list_local(root: str) -> Iterator[str]:
    if not Path(root).exists():
        raise FileNotFoundError(f"There is no folder {masked(root)!r}.")
    if not Path(root).is_dir():
        raise NotADirectoryError(f"{root!r} is a file. Pass a folder.")
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back
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
    """Replace errors by ones that name `url`: of any class, since those of botocore and aiohttp are not OSErrors."""
    try:
        yield
    except Exception as error:
        raise _as_unreadable(url, error) from as_cause(error)


def _as_unreadable(url: str, error: Exception) -> Exception:
    if is_missing(error):
        hint = " Globs are not expanded here: name each file." if "*" in url else ""
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


def write_url(url: str, content: bytes) -> None:
    """Write a whole file atomically; an existing file is replaced."""
    if is_local(url):
        replace_file(Path(url), content)
    else:
        filesystem, place = filesystem_of(url)
        filesystem.pipe_file(place, content)


def create_url(url: str, content: bytes) -> bytes:
    """Write a remote file unless it exists, and return what it holds afterwards.

    S3, GCS and some others let only one of several writers create a file. Where the storage cannot do that, all of them
    write, the last one wins, and the others see its content.
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
        retried(lambda: write_url(url, content))
        return read_url(url)
