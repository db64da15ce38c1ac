"""A cache folder, local or remote: its files, METADATA, and claims of the processes that fill it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from kdpipes.cache.store import claim_by
from kdpipes.core.errors import DataError, must_be
from kdpipes.storage.access import Access, retried, using
from kdpipes.storage.codec import FORMAT
from kdpipes.storage.files import CAN_HOLD, create_file, create_url, locked, read_url, replace_file, write_all
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.object_store import remote_reader
from kdpipes.storage.urls import is_local, join_url

Layout = Literal["lmdb", "files"]
Result = TypeVar("Result")
METADATA = "METADATA"
_HINT = "Give another folder, or delete this one."
_CLAIM_TRIES = 100
_CLAIMS = ".claims"
_DRAFTS = ".partial"
_COUNTS = ".counts/folders"
_NUM_TRIES = 3  # few tries for remote storage, because the samples can also be loaded from the source
_LONG_AGO_S = 24 * 3600
_SETTLED_NS = 2_000_000_000  # coarser than the clock of any file system


def read_metadata(
    folder: LocalFolder | RemoteFolder, place: str, layout: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the setup of the cache in a folder, or None if there is no cache. With `options`, create it first.

    If several processes create a cache, the first one wins.

    Raises:
        DataError: The file METADATA is damaged or has another format or layout, or the folder holds other files.
    """
    found = _parsed(folder.read(METADATA), place, layout)
    if found is not None or options is None:
        return found
    names = folder.names()
    if names and METADATA not in names and folder.read(METADATA) is None:  # another process may just have written it
        raise DataError(f"{place!r} is not a cache, but holds {names[0]!r}. Give an empty folder, or a new one.")
    content = {"format": FORMAT, "layout": layout, **options}
    folder.create(METADATA, json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode())
    return _parsed(folder.read(METADATA), place, layout)


def layout_in(url: str, access: Access | None = None) -> str | None:
    """Return the layout of the cache in a folder or at a URL, or None if there is no cache."""
    try:
        if is_local(url):
            content = Path(url, METADATA).expanduser().read_bytes()
        else:
            with using(access) if access is not None else ExitStack():
                content = read_url(join_url(url, METADATA))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    found = _parsed(content, url)
    return None if found is None else str(found["layout"])


def _parsed(content: bytes | None, place: str, layout: str | None = None) -> dict[str, Any] | None:
    if content is None:
        return None
    try:
        found = dict(json.loads(content))
        is_whole = found.pop("checksum") == _checksum(found) and {"format", "layout"} <= set(found)
    except (ValueError, TypeError, KeyError, RecursionError):  # RecursionError: JSON nested too deeply
        is_whole = False
    if not is_whole:
        raise DataError(f"{place!r} is not a cache, or its {METADATA} file is damaged. {_HINT}")
    written = found["format"], found["layout"]
    if layout is not None and written != (FORMAT, layout):
        ours = f"This version of kdpipes reads format {FORMAT}, here of layout {layout!r}"
        raise DataError(f"{place!r} is a cache of format {written[0]} and layout {written[1]!r}. {ours}. {_HINT}")
    return found


def number_in(metadata: Mapping[str, Any], name: str, place: str, *, least: int, most: int) -> int:
    """Return a number in METADATA. Raise a DataError if it is not a number, or out of range."""
    value = metadata.get(name)
    if type(value) is not int or not least <= value <= most:
        rejection = must_be(name, f"an integer from {least} to {most}", value, _HINT)
        raise DataError(f"{place!r} is not a cache, or its {METADATA} file is damaged: {rejection}")
    return value


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class LocalFolder:
    """A local folder, or a folder on a disk shared by several machines. It need not exist."""

    def __init__(self, path: str) -> None:
        self._root = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - links stay
        self._host = socket.gethostname()
        self.is_marked = False  # whether it is known to be a cache
        self._is_swept = False

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            with open(f"{self._root}/{name}", "rb", buffering=0) as file:  # noqa: PTH123 - a third faster
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return os.path.exists(f"{self._root}/{name}")  # noqa: PTH110 - for each of many files

    def write(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write a file atomically. An existing file is replaced only with `replace`."""
        if not replace and self.exists(name):
            return
        if not self._is_swept:
            self._is_swept = True
            self._sweep()
        path = f"{self._root}/{name}"
        draft = f"{self._root}/{_DRAFTS}/{self._host}~{os.getpid()}~{secrets.token_hex(8)}"

        def write() -> None:
            with open(draft, "xb", buffering=0) as file:  # noqa: PTH123 - of each of many files
                write_all(file.fileno(), content)

        try:
            _in_folder(draft, write)
            _in_folder(path, lambda: os.replace(draft, path))  # noqa: PTH105
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        Path(self._root, name).unlink(missing_ok=True)

    def create(self, name: str, content: bytes) -> None:
        """Write a file unless another process has written it: the first one wins."""
        path = Path(self._root, name)
        _in_folder(str(path), lambda: create_file(path, content))

    def names(self) -> list[str]:
        """Return the names in the folder that are not hidden."""
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self._root) if not name.startswith(".")]  # noqa: PTH208
        return []

    def entries(self) -> list[str]:
        """Return the names of all entries."""
        found: list[str] = []
        for folder, inner, files in os.walk(self._root):
            inner[:] = [name for name in inner if not name.startswith(".")]
            found += [os.path.relpath(f"{folder}/{name}", self._root) for name in files if _is_entry(name)]
        return [name.replace(os.sep, "/") for name in found]

    def totals(self) -> tuple[int, int]:
        """Return the number of entries and their total size in bytes.

        Unchanged folders are not listed again. Their counts are stored in a hidden file, so the cost grows with the
        number of folders, not with the number of entries.
        """
        known: dict[str, Any] = {}
        with suppress(ValueError):
            known = dict(json.loads(self.read(_COUNTS) or b"{}"))
        found: dict[str, Any] = {}
        now = time.time_ns()
        waiting = [""]
        while waiting:
            inner = waiting.pop()
            changed = os.stat(f"{self._root}/{inner}").st_mtime_ns  # noqa: PTH116
            row = known.get(inner)
            if row is None or row[0] != changed:
                with os.scandir(f"{self._root}/{inner}") as listing:
                    listed = [each for each in listing if _is_entry(each.name)]
                folders = [each.name for each in listed if each.is_dir()]
                sizes = [each.stat().st_size for each in listed if not each.is_dir()]
                # A recent modification time proves nothing: a later change may get the same time.
                row = [changed if now - changed > _SETTLED_NS else 0, len(sizes), sum(sizes), folders]
            found[inner] = row
            waiting += [f"{inner}{name}/" for name in row[3]]
        if found != known:
            path = Path(self._root, _COUNTS)  # in a folder of its own, or writing it would change the first folder
            with suppress(OSError):  # without write permission, the folder is listed each time
                _in_folder(str(path), lambda: replace_file(path, json.dumps(found).encode()))
        return sum(row[1] for row in found.values()), sum(row[2] for row in found.values())

    @contextmanager
    def claim(self, name: bytes, *, waits: bool) -> Iterator[bool]:
        """Claim a piece of work by a lock file, which the system releases when the process ends."""
        path = Path(self._root, _CLAIMS, name.hex())
        with ExitStack() as held:
            is_held = self._locked(path, held, waits=waits)
            yield is_held is not False
            if is_held:
                # Removed while locked. Another process may lock the removed file, but finds the work done.
                with suppress(OSError):
                    path.unlink()
                    path.parent.rmdir()  # fails while the folder holds other claims

    def _locked(self, path: Path, held: ExitStack, *, waits: bool) -> bool | None:
        """Lock a file until `held` exits, and return whether that succeeded; None if no lock file can be created."""
        for _ in range(_CLAIM_TRIES):
            try:
                path.parent.mkdir(exist_ok=True)
                return held.enter_context(locked(path, timeout_s=None if waits else 0))
            except (FileExistsError, FileNotFoundError):
                # A process that releases its claim may remove the empty folder at any time, even between two calls.
                if not Path(self._root).is_dir():
                    break
            except OSError:  # no write permission
                break
        return None

    def _sweep(self) -> None:
        """Remove drafts of processes that were killed while writing."""
        for draft in Path(self._root, _DRAFTS).glob("*~*~*"):
            host, pid, _ = draft.name.split("~")
            with suppress(OSError):
                is_old = time.time() - draft.stat().st_mtime > _LONG_AGO_S
                # Windows offers no such check: there, signal 0 is Ctrl-C and interrupts all processes of the console.
                if is_old if host != self._host or not CAN_HOLD else not _is_alive(int(pid)):
                    draft.unlink()


def _is_entry(name: str) -> bool:
    return not name.startswith((".", METADATA))


def _in_folder(path: str, action: Callable[[], Any]) -> None:
    """Call `action`, after creating the folder of `path` if necessary."""
    try:
        action()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        action()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class RemoteFolder:
    """A folder of a file system that writes files as a whole, as object storage does. It need not exist."""

    def __init__(self, url: str, access: Access) -> None:
        self._url = url
        self._access = access
        self.is_marked = False  # whether it is known to be a cache
        with using(access):
            self._files, root = filesystem_of(url)
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _tried(self, call: Callable[[], Result]) -> Result:
        with using(self._access):
            return retried(call, num_tries=_NUM_TRIES)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        with suppress(FileNotFoundError):
            reader = remote_reader(join_url(self._url, name), self._files, self._path(name))
            return bytes(self._tried(reader.read).content)
        return None

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return bool(self._tried(lambda: self._files.exists(self._path(name))))

    def write(self, name: str, content: bytes, *, replace: bool) -> None:
        """Write a file, even if it exists, because checking would take as long as writing."""
        path = self._path(name)
        try:
            self._tried(lambda: self._files.pipe_file(path, content))
        except FileNotFoundError:  # unlike object storage, other file systems need folders
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._tried(lambda: self._files.pipe_file(path, content))

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        with suppress(FileNotFoundError):
            self._tried(lambda: self._files.rm_file(self._path(name)))

    def create(self, name: str, content: bytes) -> bytes:
        """Write a file unless it exists, and return its content afterwards."""
        with using(self._access):
            return create_url(join_url(self._url, name), content)

    def names(self) -> list[str]:
        """Return the names in the folder that are not hidden."""
        with suppress(FileNotFoundError):
            paths = self._tried(lambda: self._files.ls(self._root, detail=False))
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
            return [name for name in names if not name.startswith(".")]
        return []

    def entries(self) -> list[str]:
        """Return the names of all entries."""
        return list(self._sizes())

    def totals(self) -> tuple[int, int]:
        """Return the number and total bytes of the entries. The storage has to list them all."""
        sizes = self._sizes()
        return len(sizes), sum(sizes.values())

    def _sizes(self) -> dict[str, int]:
        found = self._tried(lambda: self._files.find(self._root, detail=True))
        names = {path.removeprefix(self._root).lstrip("/"): int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in names.items() if _is_entry(name)}

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim a piece of work by a small file."""
        file = f"{_CLAIMS}/{name.hex()}"
        return claim_by(
            partial(self.create, file),
            partial(self.write, file, replace=True),
            partial(self.delete, file),
            waits=waits,
        )
