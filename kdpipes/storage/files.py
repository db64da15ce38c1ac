"""Files by path or URL, through fsspec. Nothing is opened before it is read, and no handle is kept."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import fsspec

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.masked import masked
from kdpipes.storage.drafts import replace_file
from kdpipes.storage.filesystems import filesystem_of, not_installed
from kdpipes.storage.refusals import what_went_wrong
from kdpipes.storage.retries import NUM_TRIES, is_missing, retried
from kdpipes.storage.time_limit import SilenceError, ask, in_time
from kdpipes.storage.urls import identity_of, is_local, join_url

__all__ = [
    "Version",
    "cache_folder",
    "file_stamp",
    "forget_listings",
    "list_files",
    "list_stamps",
    "list_versions",
    "make_cache_folder",
    "matching_urls",
    "md5_of",
    "open_url",
    "read_url",
    "remote_info",
    "version_in",
    "version_of",
    "write_url",
]


_INDEX, _LISTING = 1 << 23, 1 << 27  # how large answers may be of which that is not known
_GLOB = re.compile(r"[*?\[]")
_MD5 = re.compile(r"tag:\"?([0-9a-f]{32})\"?")
_TAGS = (
    *("ETag", "etag", "generation", "md5Hash", "crc32c"),
    *("LastModified", "last_modified", "Last-Modified", "mtime", "created"),
)


class Version(NamedTuple):
    """What tells a file from the one that it was before.

    Args:
        size: In bytes.
        tag: Its ETag or the like, or when it was changed last, with a word before that says which; empty where the
            storage has nothing.
    """

    size: int
    tag: str


def md5_of(version: Version) -> str | None:
    """Return the MD5 of a file, in hexadecimal, if its tag may be that: the ETag of an object uploaded in one piece."""
    found = _MD5.fullmatch(version.tag)
    return None if found is None else found[1]


def cache_folder(name: str) -> Path:
    """Return the folder of this machine where kdpipes keeps what later runs can use; it need not be there.

    Args:
        name: What for: "indexes", "shards".
    """
    return Path(os.environ.get("KDPIPES_CACHE_DIR") or _home()).expanduser() / name


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kdpipes").expanduser()


def make_cache_folder(path: Path) -> None:
    """Make a folder for copies of data; below the user's own cache folder, other users cannot read it."""
    path.mkdir(mode=0o700 if path.is_relative_to(_home()) else 0o777, parents=True, exist_ok=True)


def matching_urls(urls: Sequence[str]) -> list[str]:
    """Return the URLs with each glob ("birds-*.tar") replaced by the files that match it, sorted.

    Raises:
        FileNotFoundError: No file matches.
    """
    return [found for url in urls for found in (_matching(url) if _is_glob(url) else [url])]


def _is_glob(url: str) -> bool:
    """Return whether `url` is no file's name; elsewhere, `?` and `[` may be part of a query."""
    return bool(_GLOB.search(url)) and not Path(url).exists() if is_local(url) else "*" in url


def _matching(pattern: str) -> list[str]:
    if is_local(pattern):
        found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - paths stay as they were given
    else:
        with _naming(pattern):
            filesystem, path = filesystem_of(pattern)
            rest = "".join(pattern.partition("::")[1:])
            names = in_time(lambda: filesystem.glob(path), pattern, _LISTING)
            found = sorted(filesystem.unstrip_protocol(name) + rest for name in names)
    if not found:
        raise FileNotFoundError(f"No file matches {masked(pattern)!r}.")
    return found


class Bounded:
    """A file elsewhere whose storage must answer in time.

    Args:
        file: That is open for reading.
        url: Of it.
    """

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """Return some bytes, as files do.

        Raises:
            SilenceError: They do not come in time.
        """
        content: bytes = in_time(lambda: self._file.read(size), self._url, max(size, _INDEX if size < 0 else 0))
        return content


@contextmanager
def open_url(url: str, *, compression: str | None = None) -> Iterator[IO[bytes]]:
    """Open `url` for reading; an error names the URL."""
    with _naming(url):
        if is_local(url):
            file = fsspec.open(url, "rb", compression=compression).open()
        else:
            filesystem, path = filesystem_of(url)
            file = in_time(lambda: filesystem.open(path, "rb", compression=compression), url)
    with file:
        yield file if is_local(url) else cast("IO[bytes]", Bounded(file, url))


def read_url(url: str, *, num_tries: int = NUM_TRIES) -> bytes:
    """Return the whole content of a file; temporary errors are retried."""
    with _naming(url):
        if is_local(url):
            return Path(url).read_bytes()
        filesystem, path = filesystem_of(url)
        content: bytes = retried(lambda: ask(filesystem, "cat_file", url, path, num_bytes=_INDEX), num_tries=num_tries)
    return content


def write_url(url: str, content: bytes) -> None:
    """Write a whole file so that nobody sees half of it; what was there before is replaced."""
    if not is_local(url):
        filesystem, place = filesystem_of(url)
        filesystem.pipe_file(place, content)
        return
    replace_file(Path(url), content)


def forget_listings(urls: Sequence[str]) -> None:
    """Let nothing be taken from listings of folders elsewhere that file systems have kept."""
    for url in {url.rpartition("/")[0]: url for url in urls if not is_local(url)}.values():
        with _naming(url):
            filesystem, path = filesystem_of(url)
            folder = filesystem._parent(path)
            filesystem.invalidate_cache(None if "*" in folder else folder)


def version_of(url: str, *, num_tries: int = NUM_TRIES) -> Version:
    """Return the version of a file, which changes with its content; file systems may take it from a listing."""
    if is_local(url):
        try:
            status = os.stat(url)  # noqa: PTH116 - of each of many files
        except OSError as error:
            raise _as_unreadable(url, error) from as_cause(error)
        return Version(status.st_size, f"changed:{status.st_mtime_ns}")
    return version_in(remote_info(url, num_tries=num_tries)[2])


def remote_info(url: str, *, num_tries: int = NUM_TRIES) -> tuple[Any, str, dict[str, Any]]:
    """Return the file system of a remote file, its path there, and its entry there.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file system cannot be reached.
    """
    with _naming(url):
        filesystem, path = filesystem_of(url)
        return filesystem, path, retried(lambda: ask(filesystem, "info", url, path), num_tries=num_tries)


def version_in(info: Mapping[str, Any]) -> Version:
    """Return what tells a file from the one that it was before, of what a file system knows of it.

    A size that it does not know is -1.
    """
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    return Version(-1 if info["size"] is None else int(info["size"]), f"tag:{tag}" if tag else "")


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Let errors name `url`: of any class, since those of botocore and aiohttp are no OSErrors."""
    try:
        yield
    except Exception as error:
        raise _as_unreadable(url, error) from as_cause(error)


def _as_unreadable(url: str, error: Exception) -> Exception:
    if is_missing(error):
        hint = " Globs are not expanded: give a list, or a brace range." if "*" in url else ""
        if "bucket does not exist" in str(error):
            hint += " Its bucket does not exist either: are its name and the endpoint right?"
        return FileNotFoundError(f"There is no file {masked(url)!r}.{hint}")
    if isinstance(error, IsADirectoryError):
        pattern = f"{url.rstrip('/')}/*.tar"
        return DataError(f"{url!r} is a folder; a file is needed. Write {pattern!r} for the shards in it.")
    if isinstance(error, ImportError):
        return not_installed(url, error)
    if isinstance(error, SilenceError):
        return DataError(f"{error}.")
    return DataError(f"{url!r} cannot be read: {what_went_wrong(url, error)}")


def list_files(root: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files below `root` that end with one of `suffixes` (lower case), sorted; hidden ones are left out."""
    found = _list_local(root) if is_local(root) else _list_remote(root)
    return sorted(path for path in found if path.lower().endswith(tuple(suffixes)) and "/." not in f"/{path}")


def file_stamp(url: str) -> str:
    """Return a text that identifies a local file and its version; for a remote file, only its identity."""
    if not is_local(url):
        return identity_of(url)
    path = os.path.abspath(url)  # noqa: PTH100 - links stay
    size, tag = version_of(path)
    return f"{path} {size} {tag}"


def list_versions(root: str) -> dict[str, Version]:
    """Return the version of each file below a folder elsewhere, by its path there."""
    with _naming(root):
        filesystem, path = filesystem_of(root)
        found: dict[str, Any] = retried(lambda: ask(filesystem, "find", root, path, detail=True, num_bytes=_LISTING))
    return {str(file).removeprefix(path).lstrip("/"): version_in(info) for file, info in found.items()}


def list_stamps(root: str) -> dict[str, str]:
    """Return a stamp for each file below a remote folder, by path, like `file_stamp` for local files."""
    return {
        name: f"{join_url(identity_of(root), name)} {size} {tag}" for name, (size, tag) in list_versions(root).items()
    }


def _list_local(root: str) -> Iterator[str]:
    if not Path(root).exists():
        raise FileNotFoundError(f"There is no folder {masked(root)!r}.")
    if not Path(root).is_dir():
        raise NotADirectoryError(f"{root!r} is a file; a folder is needed.")
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_raise):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        prefix = os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        prefix = "" if prefix == "./" else prefix
        yield from (prefix + file for file in files)


def _raise(error: OSError) -> None:
    raise DataError(f"Folder {error.filename!r} cannot be listed: {error.strerror}.") from error


def _list_remote(root: str) -> Iterator[str]:
    with _naming(root):
        filesystem, path = filesystem_of(root)
        is_folder = ask(filesystem, "isdir", root, path)
        found: list[Any] = ask(filesystem, "find", root, path, num_bytes=_LISTING) if is_folder else []
    if not is_folder:
        raise FileNotFoundError(f"There is no folder {masked(root)!r}.")
    yield from (str(file).removeprefix(path).lstrip("/") for file in found)
