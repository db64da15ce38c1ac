"""A cache in LMDB: in shared memory, one copy for all processes of this machine, or in a folder on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from kdpipes.cache.lmdb_environment import Environment, environment_of
from kdpipes.cache.metadata import create_metadata, read_metadata
from kdpipes.cache.shared_folder import SharedFolder, free_bytes
from kdpipes.cache.store import MORE_ROOM, CacheStats, Refusal, bound_to, check_key, way_out_of
from kdpipes.cache.tally import Tally
from kdpipes.errors import check_count, must_be
from kdpipes.storage.urls import is_local

__all__ = ["LmdbStore"]

Result = TypeVar("Result")
_LAYOUT = "lmdb"
_LEAST_BYTES = 1 << 16
_OF_THIS_PROCESS = ("_opened", "_is_full", "_is_off", "refusal")


class LmdbStore:
    """A `CacheStore` in LMDB. It never evicts: what is there stays, and when it is full, the rest is not kept.

    Entries are read without a copy, if they take a page (4 KiB) or more. A process that is killed, in the middle of a
    `put` even, leaves every entry whole. An entry that is replaced because it is damaged is kept beside the new one,
    since others may look at it. A folder that cannot be written is only read; it must not be written by way of another
    path meanwhile.

    Args:
        folder: A folder of this machine (no network file system), which is made if need be, or a `SharedFolder`.
        max_bytes: How large it may become; by default half of what is free there. Who makes the cache decides, and who
            asks for more later.
        is_durable: Whether each `put` and `put_many` waits for the disk; if not, a cache on disk that was written when
            the machine went down must be deleted. By default so, but for a `SharedFolder`.

    Raises:
        DataError: When it is first used: the folder holds something else, or a cache of another version.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | SharedFolder,
        *,
        max_bytes: int | None = None,
        is_durable: bool | None = None,
    ) -> None:
        self._holder = folder if isinstance(folder, SharedFolder) else None
        path = folder.path if isinstance(folder, SharedFolder) else os.fspath(folder)
        if not is_local(path):
            raise ValueError(must_be("folder", "one of this machine", path, "A `FileStore` takes URLs."))
        self._folder = str(Path(path).expanduser().absolute())
        self._max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes, minimum=_LEAST_BYTES)
        self._is_durable = self._holder is None if is_durable is None else is_durable
        self._tally = Tally()
        self.is_private = False
        self._start()

    @classmethod
    def in_memory(cls, name: str | None = None, *, max_bytes: int | None = None, keep: bool = False) -> LmdbStore:
        """Return a store in shared memory, which is gone with this process.

        Args:
            name: By which other processes of this user share it, for as long as any of them uses it.
            max_bytes: How large it may become; by default half of what is free, and never more than is free.
            keep: Whether a named one stays until it is cleared.
        """
        folder = SharedFolder(name, keep=keep)
        store = cls(folder, max_bytes=max_bytes)
        store.is_private = name is None  # no other chain will ever find what it keeps
        free = free_bytes(folder.path) + _num_bytes(Path(folder.path, "data.mdb"))
        if store._max_bytes is not None and store._max_bytes > free:
            store._max_bytes = max(free, _LEAST_BYTES)
            store._warn(
                f"takes no more than the {free:,} bytes of shared memory that are free, of {max_bytes:,} bytes that "
                "it may. Containers get more by `--shm-size`."
            )
        return store

    @property
    def folder(self) -> str:
        """Where the cache lies."""
        return self._folder

    def get(self, key: bytes) -> memoryview | None:
        found = self._look_up([check_key(key)])[0]
        self._tally.count(misses=1) if found is None else self._tally.count(hits=1)
        return found

    def get_again(self, key: bytes) -> memoryview | None:
        """Return an entry that `get` has given before, and that was whole; a large one without asking LMDB."""
        found = self._asked(lambda environment: environment.find_again(key), None)
        self._tally.count(misses=1) if found is None else self._tally.count(hits=1)
        return found

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        found = self._look_up([check_key(key) for key in keys])
        num_misses = sum(entry is None for entry in found)
        self._tally.count(hits=len(found) - num_misses, misses=num_misses)
        return found

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        return self._write([(check_key(key), b"".join(buffers))], replace)

    def put_many(self, entries: Iterable[tuple[bytes, Iterable[Any]]]) -> bool:
        return self._write([(check_key(key), b"".join(buffers)) for key, buffers in entries], False)

    def contains(self, key: bytes) -> bool:
        check_key(key)
        return self._asked(lambda environment: environment.has(key), False)

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """Yield `bound_to(key)` and content of all entries; None in place of a content that cannot be read."""
        nothing: list[bytes] = []
        for key in self._asked(lambda environment: environment.keys(), nothing):
            yield bound_to(key), self._look_up([key])[0]

    def stats(self) -> CacheStats:
        num_entries, num_bytes = self._asked(lambda environment: environment.size(), (0, 0))
        tally = self._tally
        return CacheStats(tally.hits, tally.misses, num_bytes, num_entries, tally.healed)

    def check_size(self) -> None:
        """Raise if the open file has been truncated; this takes two system calls.

        Raises:
            DataError: The file has been truncated.
        """
        if self._opened is not None:
            self._asked(lambda environment: environment.check_size(), None)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _start(self) -> None:
        self._opened: Environment | None = None
        self._is_full = self._is_off = False
        self.refusal: Refusal | None = None

    def _environment(self) -> Environment | None:
        """Return what is open in this process, None if that cannot be."""
        if self._opened is None and not self._is_off:
            try:
                self._opened = self._open()
            except OSError as error:  # a full or forbidden disk; shared memory whose owner is gone
                self._is_off = True
                self.refusal = Refusal(f"cannot be opened ({error})", way_out_of(error))
                self._warn(f"cannot be opened ({error}): samples are loaded as if there were no cache.")
        return self._opened

    def _open(self) -> Environment:
        if self._holder is not None and not Path(self._folder).is_dir():
            raise FileNotFoundError(f"The process that has made {self._folder!r} has ended.")
        folder = Path(self._folder)
        metadata = read_metadata(folder, _LAYOUT)
        if metadata is None:
            folder.mkdir(parents=True, exist_ok=True)
            limit = self._max_bytes or max(free_bytes(folder) // 2, _LEAST_BYTES)
            metadata = create_metadata(folder, _LAYOUT, {"max_bytes": limit})
        max_bytes = max(int(metadata["max_bytes"]), self._max_bytes or 0)
        environment = environment_of(self._folder, max_bytes, self._is_durable)
        try:
            environment.size()  # opens it, so that what is wrong is known now
        except lmdb.Error as error:
            raise OSError(str(error)) from error
        return environment

    def _look_up(self, keys: list[bytes]) -> list[memoryview | None]:
        return self._asked(lambda environment: environment.find(keys), [None] * len(keys))

    def _asked(self, ask: Callable[[Environment], Result], otherwise: Result) -> Result:
        """Return what the environment answers, or `otherwise` where there is none any more."""
        environment = self._environment()
        try:
            return otherwise if environment is None else ask(environment)
        except (lmdb.Error, OSError) as error:
            self._opened, self._is_off = None, True
            self._warn(f"cannot be read any more ({error}): samples are loaded as if there were no cache.")
            return otherwise

    def _write(self, entries: list[tuple[bytes, bytes]], replace: bool) -> bool:
        environment = None if self._is_full else self._environment()
        if environment is None:
            return False
        try:
            self._tally.count(healed=environment.add(entries, replace=replace))
        except (lmdb.Error, OSError) as error:
            self._is_full = True
            self.refusal = self._refusal(error)
            self._warn(f"{self.refusal.reason}. It keeps what it has, and the rest is loaded each time.")
            return False
        return True

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, lmdb.MapFullError):
            most = "" if self._opened is None else f" of {self._opened.max_bytes:,}"
            return Refusal(f"is full: `max_bytes`{most} are reached", MORE_ROOM)
        if free_bytes(self._folder) < _LEAST_BYTES:  # of which LMDB may say "Input/output error"
            return Refusal(f"takes no more (No space left on device: {error})", MORE_ROOM)
        return Refusal(f"takes no more ({error})", way_out_of(error))

    def _warn(self, text: str) -> None:
        """Warn once; of a cache in shared memory, one process does so for all."""
        if self._holder is not None:
            try:
                Path(self._folder, ".warned").touch(exist_ok=False)
            except FileExistsError:
                return
            except OSError:  # a folder that is gone, or full, has no room for the note either
                pass
        self._tally.warn_once(f"The cache in {self._folder!r} {text}")


def _num_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0
