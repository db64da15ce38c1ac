"""The interface of cache stores, and the counters, claims and warnings that kdpipes adds to every store."""

from __future__ import annotations

import errno
import hashlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from kdpipes.cache.shared_folder import CacheCounters
from kdpipes.core.errors import DataError
from kdpipes.core.messages import warn
from kdpipes.core.processes import forget_after_fork
from kdpipes.core.secrets import masked

Result = TypeVar("Result")
MORE_ROOM = "Give it more room, or warm up a part of the samples."
PATIENCE_S = 60.0  # a claim whose record is not renewed for this long counts as abandoned
_POLL_S = 0.5
_PAUSE_S = 5.0  # before failed storage is tried again
_CLAIM = b"claim "
_FOR_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheStats(NamedTuple):
    """The size of a cache, and the hits and misses counted by all processes of its chain.

    Args:
        hits: The number of values read from the cache.
        misses: The number of values loaded from the source.
        bytes: The size of the cache.
        entries: The number of entries in the cache.
        healed: The number of damaged entries that were replaced.
    """

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    entries: int = 0
    healed: int = 0


class Rejection(NamedTuple):
    """The reason why a store accepts no more entries in this process."""

    reason: str  # a predicate whose subject is the cache: "takes no more (...)"
    hint: str  # a sentence that says what the user can do

    @classmethod
    def because(cls, what: str, error: Exception) -> Rejection:
        """Return the rejection for a storage error, with a matching hint."""
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename is None:
            message = error.strerror or message
        if isinstance(error, OSError) and error.errno in _FOR_ROOM:
            hint = MORE_ROOM
        elif isinstance(error, ConnectionError):
            hint = "When it can be reached, warm up again: that continues where it stopped."
        elif "already open in this process" in message:
            hint = "Another pipe of this process opened the cache before its folder was moved: delete that pipe first."
        else:
            hint = "Check that this user can read it and write to it, or use another place; more room is no help."
        return cls(f"{what} ({message})", hint)


class CacheStore(ABC):
    """Storage for the entries of a cache: bytes by key. Subclass it, and pass an instance to `cache`.

    A store only stores bytes. kdpipes adds checksums to the entries, counts hits, divides the work of filling the cache
    among processes, and reads from the source if the storage fails.

    Several threads and processes use a store at the same time. It is pickled for workers, so open connections in a
    `functools.cached_property`: its value is not pickled, and copies and forked processes open their own.
    `kdpipes.testing.check_store` checks a store.

    Attributes:
        errors: The exceptions raised if the storage fails or is full. After such an error, a warning is issued, and
            samples are loaded from the source. Other exceptions end the epoch.
        has_quick_size: Whether `size` is fast. If so, loaders report the size.
        lifetime: The lifetime of entries: "chain" if no other chain can find them, "job" if they are deleted with the
            last process that uses them, or "lasting". A lasting cache with a quick size is completed by a full epoch,
            other caches only by `warm_up()`.
    """

    errors: tuple[type[Exception], ...] = (OSError,)
    has_quick_size = False
    lifetime: Literal["chain", "job", "lasting"] = "lasting"

    @abstractmethod
    def get(self, key: bytes) -> bytes | memoryview | None:
        """Return the content of an entry, or None if it does not exist. A view must stay valid as long as it is held.

        Args:
            key: The key of the entry, 1 to 255 bytes.
        """

    @abstractmethod
    def put(self, key: bytes, content: bytes, *, replace: bool) -> None:
        """Write an entry completely or not at all, even if the process is killed.

        Args:
            key: The key of the entry.
            content: Its content.
            replace: Whether to replace an existing entry. If False, it may still be replaced if checking takes long.
        """

    @abstractmethod
    def delete(self, key: bytes) -> None:
        """Delete an entry if it exists."""

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Return the number of entries and their bytes."""

    def contains(self, key: bytes) -> bool:
        """Return whether an entry exists."""
        return self.get(key) is not None

    def recall(self, key: bytes) -> bytes | memoryview | None:
        """Return an entry that this process has already verified. A store may remember its location."""
        return self.get(key)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim a piece of work among all processes that use the store, and yield whether this process may do it.

        Claims only save work. By default, a claim is a temporary entry.

        Args:
            name: The identifier of the work.
            waits: Whether to wait while another process holds the claim.
        """
        key = _CLAIM + name

        def create(content: bytes) -> bytes:
            self.put(key, content, replace=False)
            return bytes(self.get(key) or content)

        return claim_by(create, partial(self.put, key, replace=True), partial(self.delete, key), waits=waits)

    def flush(self) -> None:  # noqa: B027 - most stores write at once
        """Write entries that have been collected into a group."""

    def check(self) -> None:  # noqa: B027 - only a memory map can be unsafe to read
        """Raise a DataError if the cache is unsafe to read. Called before each epoch."""

    def close(self) -> None:
        """Release all resources of this process. The next use opens them again."""
        drop_opened(self)

    def __str__(self) -> str:
        return type(self).__name__

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not _is_opened(self, name)}


def _is_opened(store: CacheStore, name: str) -> bool:
    return isinstance(getattr(type(store), name, None), cached_property)


def drop_opened(store: CacheStore) -> None:
    """Forget the values of a store's cached properties, so that the next use computes them again."""
    for name in [name for name in vars(store) if _is_opened(store, name)]:
        del vars(store)[name]


class Entries:
    """The entries of a cache in a store. If the storage fails, a warning is issued, and the epoch continues without it.

    Args:
        store: The store.
        counters: Counters of hits and misses in all processes; None disables counting.
    """

    def __init__(self, store: CacheStore, counters: CacheCounters | None = None) -> None:
        self.store = store
        self.counters = counters
        self._reset()
        forget_after_fork(self)

    def _reset(self) -> None:
        self.rejection: Rejection | None = None
        self._away_until = self._full_until = 0.0
        self._has_warned = False

    def forget(self) -> None:
        """Make a forked process open the store again."""
        for member in [member for kind in type(self.store).__mro__ for member in vars(kind).values()]:
            if isinstance(member, cached_property) and hasattr(member, "lock"):
                # Up to Python 3.11, cached properties have a lock, which a thread of the parent may have been holding.
                member.lock = threading.RLock()
        drop_opened(self.store)
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return Entries, (self.store, self.counters)

    def get(self, key: bytes, *, is_verified: bool = False) -> memoryview | None:
        """Return a read-only view of an entry, or None. The view stays valid as long as it is held.

        Args:
            key: The key of the entry.
            is_verified: Whether this process has verified the entry.

        Raises:
            DamagedError: The entry cannot be read; `put(..., replace=True)` heals it.
        """
        look_up = self.store.recall if is_verified else self.store.get
        content = self._read(look_up, key, otherwise=None)
        return content if content is None or type(content) is memoryview else memoryview(content).toreadonly()

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        """Write an entry from consecutive buffers, and return whether the store accepted it."""
        content = b"".join(buffers)
        return self._written(lambda: self.store.put(key, content, replace=replace))

    def flush(self) -> None:
        """Write entries that have been collected into a group."""
        self._written(self.store.flush)

    def contains(self, key: bytes) -> bool:
        """Return whether an entry exists."""
        return self._read(self.store.contains, key, otherwise=False)

    def stats(self) -> CacheStats:
        """Return the size of the cache, and the counts of all processes."""
        entries, num_bytes = self._read(self.store.size, otherwise=(0, 0))
        counts = {} if self.counters is None else self.counters.totals()
        return CacheStats(bytes=num_bytes, entries=entries, **counts)

    def check(self) -> None:
        """Raise a DataError if the cache is unsafe to read."""
        self._read(self.store.check, otherwise=None)

    def takes_more(self) -> bool:
        """Return False if this process knows that no new entry can be stored."""
        until = max(self._full_until, self._away_until)
        return not until or time.monotonic() >= until

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim a piece of work: see `CacheStore.claim`."""
        return self.store.claim(name, waits=waits)

    def close(self) -> None:
        """Close the store. The next use opens it again."""
        self.store.close()
        self._reset()

    def _read(self, ask: Callable[..., Result], *arguments: Any, otherwise: Result) -> Result:
        if self._away_until and time.monotonic() < self._away_until:
            return otherwise
        try:
            return ask(*arguments)
        except DataError:
            raise
        except self.store.errors as error:
            self._go_without(error)
            return otherwise

    def _written(self, write: Callable[[], None]) -> bool:
        if not self.takes_more():
            return False
        try:
            write()
        except DataError:
            raise
        except self.store.errors as error:
            self._full_until = time.monotonic() + _PAUSE_S
            self.rejection = Rejection.because("takes no more", error)
            self._warn(f"{self.rejection.reason}. It keeps what it has, and the rest is loaded each time.")
            return False
        return True

    def _go_without(self, error: Exception) -> None:
        self._away_until = time.monotonic() + _PAUSE_S
        self.rejection = Rejection.because("cannot be read", error)
        self._warn(f"{self.rejection.reason}: samples are loaded as if there were no cache, until it is back.")

    def _warn(self, text: str) -> None:
        """Warn once, in one of the processes that share the counters."""
        if self._has_warned:
            return
        self._has_warned = True
        if self.counters is not None and self.counters.folder is not None:
            with suppress(FileNotFoundError):  # the process that created the folder has ended
                try:
                    Path(self.counters.folder.path, ".warned").touch(exist_ok=False)
                except FileExistsError:
                    return
        warn(masked(f"The cache in {self.store} {text}"))


@contextmanager
def claim_by(
    create: Callable[[bytes], bytes], replace: Callable[[bytes], Any], remove: Callable[[], Any], *, waits: bool
) -> Iterator[bool]:
    """Claim a piece of work by a small record in a store without locks. Its owner renews it three times per minute.

    A record that was not renewed for a minute counts as abandoned. Each process measures this time on its own, because
    the clocks of machines differ.

    Args:
        create: A function that writes the record unless it exists, and returns its content.
        replace: A function that writes the record.
        remove: A function that deletes the record if it exists.
        waits: Whether to wait while another process holds the claim.
    """
    token = secrets.token_bytes(8)
    seen = b""
    since = time.monotonic()
    try:
        while (content := create(token)) != token:
            if not waits:
                break
            if content != seen:
                seen = content
                since = time.monotonic()
            elif time.monotonic() - since >= PATIENCE_S:
                replace(token)
                break
            time.sleep(_POLL_S)
    except Exception:  # errors of any storage: a process that cannot write claims loads the samples
        content = token
    if content != token and not waits:
        yield False
        return
    is_over = threading.Event()

    def renew() -> None:
        number = 0
        while not is_over.wait(PATIENCE_S / 3):
            number += 1
            with suppress(Exception):  # errors of any storage: other processes may then load the same samples again
                replace(token + number.to_bytes(4, "little"))

    renewing = threading.Thread(target=renew, name="kdpipes-claim", daemon=True)
    renewing.start()
    try:
        yield True
    finally:
        is_over.set()
        renewing.join()
        with suppress(Exception):  # errors of any storage: the record will count as abandoned
            remove()


def bound_to(key: bytes) -> bytes:
    """Return 20 bytes covered by the checksum of an entry, so that an entry stored under another key counts as damaged.

    They are a digest of the key, because a cache of files stores only the digest, as the name of the file.
    """
    return hashlib.blake2b(key, digest_size=20).digest()
