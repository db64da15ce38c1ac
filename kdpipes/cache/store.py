"""The interface of all cache stores: entries of bytes by key, shared by all processes that open the same place."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple

from kdpipes.core.errors import must_be
from kdpipes.core.messages import warn
from kdpipes.core.secrets import masked

MORE_ROOM = "Give it more room, or warm up a part of the samples."
PATIENCE_S = 60.0  # a claim by a record that is not renewed for this long counts as abandoned
_POLL_S = 0.5
_MOST_KEY_BYTES = 255
_FOR_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheStats(NamedTuple):
    """The size of a cache, and the hits and misses that the processes of its chain have counted.

    Args:
        hits: How often a value was found.
        misses: How often a value had to be loaded.
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
    """Why a store takes no more entries in this process."""

    reason: str  # a predicate whose subject is the cache: "takes no more (...)"
    hint: str  # a sentence: what the user can do

    @classmethod
    def because(cls, what: str, error: Exception) -> Rejection:
        """Return the rejection for a storage error, with a hint that fits it."""
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno in _FOR_ROOM:
            hint = MORE_ROOM
        elif "already open in this process" in message:
            hint = "Another pipe of this process opened the cache before its folder was moved: delete that pipe first."
        else:
            hint = "Check that this user can read it and write to it, or use another place; more room is no help."
        return cls(f"{what} ({message})", hint)


class CacheStore(ABC):
    """A place that keeps entries. If an entry cannot be kept, the store warns once, and the epoch goes on.

    A store opens what it needs on first use in each process. It may be pickled or inherited by forked processes at any
    time, and several threads and processes may use it at once. Keys are 1 to 255 bytes long.
    """

    layout: ClassVar[str]
    of_process: ClassVar[tuple[str, ...]] = ()  # attributes that `start` sets; they are not pickled
    has_quick_stats = False  # whether `stats` is cheap enough for each report of a loader
    completes_itself = False  # whether a full epoch writes the list of samples, which looks up each entry
    is_shared = True  # whether other chains may find the entries
    rejection: Rejection | None = None
    _warned_in = 0  # the process that has warned

    @abstractmethod
    def get(self, key: bytes, *, is_known: bool = False) -> memoryview | None:
        """Return an entry, read-only, or None. The view stays valid for as long as it is held.

        Args:
            key: The key of the entry.
            is_known: Whether this process has verified the entry, so that a store may use the place that it remembers.

        Raises:
            DamagedError: The entry cannot be read; `put(..., replace=True)` heals it.
        """

    @abstractmethod
    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        """Write an entry, given as consecutive buffers, and return whether the store has it now.

        Args:
            key: The key of the entry.
            buffers: For example those of `kdpipes.storage.codec.encode`.
            replace: Whether to replace an existing entry, because it is damaged.
        """

    def limit(self) -> int | None:
        """Return how many bytes it may take; None if it has no limit of its own."""
        return None

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Return whether there is an entry."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Return the number of entries and bytes."""

    @abstractmethod
    def start(self) -> None:
        """Set the attributes of `of_process`: nothing is open yet."""

    def takes_more(self) -> bool:
        """Return False if this process knows that a new entry cannot be kept."""
        return self.rejection is None

    def flush(self) -> None:  # noqa: B027 - most stores write at once
        """Write the entries that have been gathered into a group."""

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim a piece of work among all processes that use the store, and yield whether this process may do it.

        Claims only save work. A claim ends with its process, and a store that cannot be written grants every claim.

        Args:
            name: Identifies the work.
            waits: Whether to wait while another process holds the claim.
        """
        return nullcontext(True)

    def close(self) -> None:
        """Release what is open in this process. The next use opens it again."""
        self.start()

    def check(self) -> None:  # noqa: B027 - only a memory map can be unsafe to read
        """Raise a DataError if the cache has been truncated; called before each epoch."""

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """Yield `bound_to(key)` and the content of each entry; None if the content cannot be read."""
        raise NotImplementedError

    def place_of(self, key: bytes) -> str:
        """Return where an entry is, for errors."""
        return repr(key)

    def warn_once(self, text: str) -> None:
        """Warn, unless this process has already warned about this store."""
        if self._warned_in != os.getpid():
            self._warned_in = os.getpid()
            warn(masked(text))

    def forget(self) -> None:
        """Start anew in a forked process."""
        self.start()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in (*self.of_process, "_warned_in")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.start()


@contextmanager
def claim_by(
    create: Callable[[bytes], bytes], replace: Callable[[bytes], Any], remove: Callable[[], Any], *, waits: bool
) -> Iterator[bool]:
    """Claim a piece of work by a small record in a store without locks. Its owner renews it three times a minute.

    A record that was not renewed for a minute counts as abandoned. Each process measures that time by itself, because
    the clocks of machines differ.

    Args:
        create: A function that writes the record unless it exists, and returns what it holds then.
        replace: A function that writes the record.
        remove: Deletes the record, if it exists.
        waits: Whether to wait while another process holds the claim.
    """
    token = secrets.token_bytes(8)
    seen, since = b"", time.monotonic()
    try:
        while (content := create(token)) != token:
            if not waits:
                break
            if content != seen:
                seen, since = content, time.monotonic()
            elif time.monotonic() - since >= PATIENCE_S:
                replace(token)
                break
            time.sleep(_POLL_S)
    except Exception:  # of any storage: a process that cannot write claims loads the samples
        content = token
    if content != token and not waits:
        yield False
        return
    is_over = threading.Event()

    def renew() -> None:
        number = 0
        while not is_over.wait(PATIENCE_S / 3):
            number += 1
            with suppress(Exception):  # of any storage: then others may load the same samples again
                replace(token + number.to_bytes(4, "little"))

    renewing = threading.Thread(target=renew, name="kdpipes-claim", daemon=True)
    renewing.start()
    try:
        yield True
    finally:
        is_over.set()
        renewing.join()
        with suppress(Exception):  # of any storage: it counts as abandoned later
            remove()


def bound_to(key: bytes) -> bytes:
    """Return the 20 bytes that the checksum of an entry covers, so that an entry under another key counts as damaged.

    They are a digest of the key, because a cache of files stores only the digest, as the name of the file.
    """
    return hashlib.blake2b(key, digest_size=20).digest()


def check_key(key: bytes) -> bytes:
    """Return `key`; raise a TypeError or ValueError if it is not 1 to 255 bytes."""
    if not isinstance(key, bytes):
        raise TypeError(must_be("key", "bytes", key))
    if not 1 <= len(key) <= _MOST_KEY_BYTES:
        raise ValueError(must_be("key", f"1 to {_MOST_KEY_BYTES} bytes long", key, "Give a digest of it."))
    return key
