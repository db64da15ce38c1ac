"""What lies below a path or URL: files, folders, and zips that stand for folders."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.masked import masked
from kdpipes.storage.files import version_in
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.refusals import what_went_wrong
from kdpipes.storage.retries import is_missing, retried
from kdpipes.storage.urls import identity_of, join_url
from kdpipes.write._files import RemoteFile
from kdpipes.write._markers import MARKERS

__all__ = ["Entry", "Source", "find_source", "is_inside"]

_ZIP = ".zip"


class Entry(NamedTuple):
    """A file of a source.

    Args:
        name: Its path below the source, with "/".
        file: Where it lies.
        tag: What tells it from the one that it was before.
    """

    name: str
    file: RemoteFile
    tag: str


class Source(NamedTuple):
    """What is to be copied.

    Args:
        url: Where it lies.
        folders: All folders, also empty ones.
        files: Files that are copied as they are.
        zips: Files that are unpacked, each into the folder of its `name`.
    """

    url: str
    folders: list[str]
    files: list[Entry]
    zips: list[Entry]

    def fingerprint(self) -> str:
        """Return what tells it from what it was before, by names, sizes and the storage's tags."""
        entries = (("file", self.files), ("zip", self.zips))
        lines = sorted((kind, each.name, each.file.size, each.tag) for kind, group in entries for each in group)
        return hashlib.blake2b(
            repr((identity_of(self.url), lines)).encode("utf-8", "surrogateescape"), digest_size=16
        ).hexdigest()


def is_inside(name: str) -> bool:
    """Return whether a path, with "/", is a relative one that stays below where it begins."""
    return ".." not in name.split("/") and not name.startswith("/") and "\0" not in name


def find_source(url: str) -> Source:
    """Return what lies at `url`: a folder, a zip, or the folder that `url` with ".zip" stands for.

    Raises:
        FileNotFoundError: There is none of these.
        NotADirectoryError: There is a file that is no zip.
        DataError: It cannot be listed.
    """
    try:
        return _found(url)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or is_missing(error):
            raise
        raise _unlistable(url, error) from as_cause(error)
    except DataError:
        raise
    except Exception as error:
        raise _unlistable(url, error) from as_cause(error)


def _unlistable(url: str, error: Exception) -> DataError:
    return DataError(f"{url!r} cannot be listed: {what_went_wrong(url, error)}.")


def _found(url: str) -> Source:
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()
    info = _info(filesystem, path)
    if info is None:
        return _zip_beside(url)
    if info["type"] == "directory":
        return _tree(url, filesystem, path)
    if info["type"] == "file" and path.lower().endswith(_ZIP):
        return Source(url, [], [], [_entry("", url, filesystem, path, info)])
    if retried(lambda: filesystem.isdir(path)):  # servers of HTTP call everything a file
        return _tree(url, filesystem, path)
    raise NotADirectoryError(
        f"{masked(url)!r} is a file; a folder or a zip is needed. `.localize_files()` copies files."
    )


def _info(filesystem: Any, path: str) -> Any:
    try:
        return _status(path) if isinstance(filesystem, LocalFileSystem) else retried(lambda: filesystem.info(path))
    except FileNotFoundError as error:
        if is_missing(error):
            return None
        raise


def _status(path: str) -> dict[str, Any]:
    """Return what fsspec says of a file of this machine; of a link, what it leads to."""
    status = os.stat(path)  # noqa: PTH116 - of each of many files
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"
    return {"type": kind, "size": status.st_size, "mtime": status.st_mtime_ns, "place": (status.st_dev, status.st_ino)}


def _walk(folder: str, above: tuple[Any, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what lies below a folder of this machine, by path; links are followed, but not back up."""
    above = (*above, _status(folder)["place"])
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries]
    for path in paths:
        info = _status(path)
        if info["type"] == "other":
            raise DataError(f"{path!r} is neither a file nor a folder.")
        if info["place"] not in above:
            yield path, info
            if info["type"] == "directory":
                yield from _walk(path, above)


def _zip_beside(url: str) -> Source:
    first, separator, rest = url.partition("::")
    zip_url = f"{first.rstrip('/')}{_ZIP}{separator}{rest}"
    filesystem, path = filesystem_of(zip_url)
    info = _info(filesystem, path)
    if info is None or info["type"] != "file":
        raise FileNotFoundError(f"There is neither a folder {masked(url)!r} nor a file {masked(zip_url)!r}.")
    return Source(zip_url, [], [], [_entry("", zip_url, filesystem, path, info)])


def _entry(name: str, url: str, filesystem: Any, path: str, info: Any) -> Entry:
    size, tag = version_in({"size": None, **info})
    return Entry(name, RemoteFile(url, filesystem, path, size), tag)


def _tree(url: str, filesystem: Any, root: str) -> Source:
    if isinstance(filesystem, LocalFileSystem):
        found = dict(_walk(root, ()))
    else:
        found = retried(lambda: filesystem.find(root, withdirs=True, detail=True))
    folders: set[str] = set()
    entries: list[Entry] = []
    for path, info in sorted(found.items()):
        name = str(path).removeprefix(root).strip("/")
        if not name or MARKERS & set(name.split("/")):
            continue
        if not is_inside(name):
            raise DataError(f"{path!r} would be copied out of the folder; its name must not have '..'.")
        if info["type"] == "directory" or str(path).endswith("/"):
            folders.add(name)
        else:
            entries.append(_entry(name, join_url(url, name), filesystem, str(path), info))
    folders |= {parent for entry in entries for parent in _parents(entry.name)}
    zips = _standing_for_folders(entries, folders)
    files = [entry for entry in entries if entry.name not in zips]
    return Source(url, sorted(folders), files, [_unpacked(entry) for entry in entries if entry.name in zips])


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _standing_for_folders(entries: list[Entry], folders: set[str]) -> set[str]:
    """Return the zips in folders whose files, hidden ones aside, are all zips; of those that have no folder beside."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        if not posixpath.basename(entry.name).startswith("."):
            by_folder[posixpath.dirname(entry.name)].append(entry.name)
    alone = [names for names in by_folder.values() if all(name.lower().endswith(_ZIP) for name in names)]
    return {name for names in alone for name in names if name[: -len(_ZIP)] not in folders}


def _unpacked(entry: Entry) -> Entry:
    return entry._replace(name=entry.name[: -len(_ZIP)])
