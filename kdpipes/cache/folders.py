"""Folders of files, on this machine or elsewhere, in which a file is there whole or not at all."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdpipes.storage.files import draft_of
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.retries import retried
from kdpipes.storage.urls import is_local

__all__ = ["LocalFolder", "RemoteFolder", "folder_of"]

_DRAFTS = ".partial"
_NUM_TRIES = 3  # of a storage elsewhere: the samples can still be loaded
_LONG_AGO_S = 24 * 3600


class LocalFolder:
    """A folder of this machine, or of a disk that several machines share.

    Args:
        path: Which need not be there.
    """

    def __init__(self, path: str) -> None:
        self._root = Path(path).expanduser().absolute()
        self._host = socket.gethostname()
        self._is_swept = False

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if there is none."""
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the contents of several files."""
        return [self.read(name) for name in names]

    def exists(self, name: str) -> bool:
        """Return whether there is a file."""
        return (self._root / name).exists()

    def write(self, name: str, content: bytes, *, replace: bool = True) -> None:
        """Write a file so that nobody sees half of it, whatever happens."""
        path = self._root / name
        if not replace and path.exists():
            return
        self._sweep()
        draft = self._root / _DRAFTS / f"{self._host}~{os.getpid()}~{secrets.token_hex(8)}"
        with draft_of(path, draft):
            _in_folder(draft, lambda: draft.write_bytes(content))
            _in_folder(path, lambda: draft.replace(path))

    def create(self, name: str, content: bytes) -> None:
        """Write a file unless another process has: the first one decides."""
        draft = f"{_DRAFTS}/{self._host}~{os.getpid()}~{secrets.token_hex(8)}"
        self.write(draft, content)
        try:
            os.link(self._root / draft, self._root / name)
        except FileExistsError:
            pass
        except OSError:  # of file systems that know no hard links
            self.write(name, content, replace=False)
        finally:
            (self._root / draft).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return what lies directly in the folder and is not hidden."""
        with suppress(FileNotFoundError):
            return [path.name for path in self._root.iterdir() if not path.name.startswith(".")]
        return []

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below, in bytes."""
        files = (path for path in self._root.rglob("*") if _DRAFTS not in path.parts and path.is_file())
        return {path.relative_to(self._root).as_posix(): path.stat().st_size for path in files}

    def _sweep(self) -> None:
        """Remove what processes were writing when they were killed."""
        if self._is_swept:
            return
        self._is_swept = True
        for draft in (self._root / _DRAFTS).glob("*~*~*"):
            host, pid, _ = draft.name.split("~")
            with suppress(OSError):
                is_old = time.time() - draft.stat().st_mtime > _LONG_AGO_S
                if is_old if host != self._host else not _is_alive(int(pid)):
                    draft.unlink()


def _in_folder(path: Path, action: Callable[[], Any]) -> None:
    """Do something with a path whose folder need not be there yet."""
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


class RemoteFolder:
    """A folder of a file system that fsspec knows, which writes files whole, as object storage does.

    Args:
        url: Which need not be there.
    """

    def __init__(self, url: str) -> None:
        self._files, root = filesystem_of(url)
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if there is none."""
        try:
            content: bytes = retried(lambda: self._files.cat_file(self._path(name)), num_tries=_NUM_TRIES)
        except FileNotFoundError:
            return None
        return content

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the contents of several files, which are read at once; of those that cannot be read, None."""
        if not names:
            return []
        found = self._files.cat([self._path(name) for name in names], on_error="omit")
        by_name = {path.rsplit("/", 1)[-1]: content for path, content in found.items()}
        return [by_name.get(name.rsplit("/", 1)[-1]) for name in names]

    def exists(self, name: str) -> bool:
        """Return whether there is a file."""
        return bool(retried(lambda: self._files.exists(self._path(name)), num_tries=_NUM_TRIES))

    def write(self, name: str, content: bytes, *, replace: bool = True) -> None:
        """Write a file. One that is there is written again: to ask for it would take as long."""
        path = self._path(name)
        try:
            retried(lambda: self._files.pipe_file(path, content), num_tries=_NUM_TRIES)
        except FileNotFoundError:  # object storage has no folders; others want them to be made
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            retried(lambda: self._files.pipe_file(path, content), num_tries=_NUM_TRIES)

    def create(self, name: str, content: bytes) -> None:
        """Write a file unless it is there; of two processes at once, the last one decides."""
        if not self.exists(name):
            self.write(name, content)

    def names(self) -> list[str]:
        """Return what lies directly in the folder."""
        with suppress(FileNotFoundError):
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False)]
        return []

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below, in bytes."""
        found = self._files.find(self._root, detail=True)
        return {path.removeprefix(self._root).lstrip("/"): int(info["size"]) for path, info in found.items()}


def folder_of(url: str) -> LocalFolder | RemoteFolder:
    """Return the folder of a path or a URL."""
    place = url.removeprefix("file://")
    return LocalFolder(place) if is_local(place) else RemoteFolder(place)
