"""Where shards are written: by their numbers, whole or not at all, each with its index behind it."""

from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import fsspec

from kdpipes.core.errors import DataError, as_cause, must_be
from kdpipes.storage.catalog import index_beside, index_url
from kdpipes.storage.files import forget_listings, version_of, write_url
from kdpipes.storage.held_files import CAN_HOLD
from kdpipes.storage.retries import retried
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.storage.urls import is_local
from kdpipes.write._files import FULL, full_error, in_parallel, write_whole
from kdpipes.write._tar_shard import TarSample, TarShard

__all__ = ["ShardPlaces", "Written"]

_NUMBER = re.compile(r"%(?:0\d+)?d")
_NUM_THREADS = 16


class Written(NamedTuple):
    """A shard that is there.

    Args:
        keys: Of its samples.
        num_bytes: Of the tar.
    """

    keys: Sequence[str]
    num_bytes: int


class ShardPlaces:
    """The URLs of shards 0, 1, ...

    Args:
        pattern: A path or URL with `%06d` in the place of the number.
    """

    def __init__(self, pattern: str | os.PathLike[str]) -> None:
        if not isinstance(pattern, str | os.PathLike):
            raise TypeError(must_be("urls", "a path or URL", pattern))
        text = os.path.expanduser(os.fspath(pattern).removeprefix("file://"))  # noqa: PTH111
        folder, slash, name = text.rpartition("/")
        found = list(_NUMBER.finditer(name))
        if len(found) != 1 or not name.endswith(".tar") or "::" in text or text.startswith("pipe:"):
            rule = 'a path or URL of tars with one number in the file name, like "train-%06d.tar"'
            raise ValueError(
                must_be("urls", rule, pattern, "Shards are plain tars: compressed ones have no positions.")
            )
        self._folder, self._head, self._tail = folder + slash, name[: found[0].start()], name[found[0].end() :]
        self._number = found[0][0]
        self.is_local = is_local(text)

    def url(self, number: int) -> str:
        """Return the URL of a shard."""
        return f"{self._folder}{self._head}{self._number % number}{self._tail}"

    @property
    def notes_url(self) -> str:
        """Where it is written down what the shards are: beside them."""
        return f"{self._folder}{self._head}shards{self._tail.removesuffix('.tar')}.json"

    def make_folder(self) -> None:
        """Make the folder, if it is to be on this machine."""
        if self.is_local:
            Path(self._folder or ".").mkdir(parents=True, exist_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other jobs, if locks are available: jobs would remove each other's drafts.

        Raises:
            RuntimeError: Another job is writing here.
        """
        self.make_folder()
        path = os.path.abspath(f"{self._folder}.{self._head}shards{self._tail}.lock")  # noqa: PTH100
        file = _locked(path) if self.is_local and CAN_HOLD else None
        try:
            yield
        finally:
            if file is not None:
                _held.discard(path)
                Path(path).unlink(missing_ok=True)
                file.close()

    def there(self) -> list[str]:
        """Return the shards that are there, whoever has written them."""
        ours = re.compile(re.escape(self._head) + r"\d+" + re.escape(self._tail))
        return sorted(name for name in self._names() if ours.fullmatch(name))

    def remove_parts(self) -> None:
        """Remove what processes that were killed have left: files on their way."""
        if not self.is_local:
            return
        part = re.compile(r"\." + re.escape(self._head) + r"\d+" + re.escape(self._tail) + r"(\.index)?\.\w+\.part")
        for name in self._names():
            if part.fullmatch(name):
                Path(self._folder, name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        if self.is_local:
            folder = Path(self._folder or ".")
            return [path.name for path in folder.iterdir()] if folder.is_dir() else []
        forget_listings([self.url(0)])
        filesystem, path = fsspec.core.url_to_fs(self.url(0))
        try:
            found = retried(lambda: filesystem.ls(filesystem._parent(path), detail=False))
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]

    def finished(self, numbers: Iterable[int]) -> Iterator[tuple[int, Written]]:
        """Yield which of some shards are there with their indexes, in order, and what is in them."""
        asked = list(numbers)
        found = in_parallel(lambda number: index_beside(self.url(number)), asked, _NUM_THREADS, lambda: None)
        with closing(found):  # type: ignore[type-var]  # a generator
            for number, index in zip(asked, found, strict=True):
                if index is not None:
                    yield number, Written(index.keys, index.version.size)

    def write(self, number: int, samples: Iterable[TarSample]) -> Written:
        """Write a shard, and then its index."""
        url = self.url(number)
        shard = TarShard(url)
        write = _write_here if self.is_local else _upload
        write(url, shard, samples)
        version = version_of(url)
        if version.size not in (-1, shard.num_bytes):
            raise DataError(f"{url!r} is to have {shard.num_bytes} bytes, but has {version.size}: who else writes it?")
        _write_index(url, shard.index(version))
        return Written(list(shard.keys), shard.num_bytes)


_held: set[str] = set()  # lock files of this process, because these locks do not work between its threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_held.clear)


def _locked(path: str) -> BinaryIO | None:
    """Return a locked file that names its holder; None if locking is impossible, as on a read-only disk.

    The lock belongs only to this process; workers that outlive it briefly do not hold it.
    """
    if path in _held:  # opening and closing the file again would release the lock
        raise _busy_error("this process", path)
    import fcntl  # which Windows does not have

    while True:
        try:
            file = open(path, "a+b")  # noqa: PTH123, SIM115 - the caller closes it
        except OSError:
            return None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                holder = file.read().decode(errors="replace") or "another process"
            raise _busy_error(holder, path) from None
        except OSError:  # a file system without locks
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):  # noqa: PTH116
                break
        file.close()  # the previous holder has removed the file
    _held.add(path)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    return file


def _busy_error(holder: str, path: str) -> RuntimeError:
    return RuntimeError(
        f"These shards are already being written by {holder} (lock {path!r}). Call `write_shards` in one process, "
        "with `num_workers=`, not on every rank; or wait for the other call."
    )


def _write_here(url: str, shard: TarShard, samples: Iterable[TarSample]) -> None:
    write_whole(Path(url), None, shard.chunks(samples), -1, lambda num_bytes: None)


def _upload(url: str, shard: TarShard, samples: Iterable[TarSample]) -> None:
    """Write a tar elsewhere from a file of this machine that has no name: requests that fail are made again."""
    filesystem, path = fsspec.core.url_to_fs(url)
    with tempfile.TemporaryFile(prefix="kdpipes-") as file:
        try:
            for chunk in shard.chunks(samples):
                file.write(chunk)
            file.flush()
        except OSError as error:
            if error.errno in FULL:
                raise full_error(Path(tempfile.gettempdir()), shard.num_bytes, f"{url!r}, on its way,") from error
            raise
        _put(filesystem, f"/dev/fd/{file.fileno()}", path, url)


def _put(filesystem: fsspec.AbstractFileSystem, source: str, path: str, url: str) -> None:
    try:
        retried(lambda: filesystem.put_file(source, path))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
            raise
        raise DataError(f"{url!r} cannot be written: {str(error) or type(error).__name__}.") from as_cause(error)
    filesystem.invalidate_cache(filesystem._parent(path))


def _write_index(url: str, index: ShardIndex) -> None:
    content = index.to_bytes()
    if is_local(url):
        write_url(index_url(url), content)
        return
    retried(lambda: write_url(index_url(url), content))
