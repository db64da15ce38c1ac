"""The interface of all cache stores: entries of bytes by key, shared by all processes that open the same place."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from kdpipes.core.errors import masked, must_be
from kdpipes.storage.files import locked

__all__ = [
    "CLAIMS",
    "MORE_ROOM",
    "MOST_KEY_BYTES",
    "PATIENCE_S",
    "CacheStats",
    "CacheStore",
    "Record",
    "Rejection",
    "bound_to",
    "check_key",
    "claim_by",
    "claim_in",
    "hint_for",
]

MORE_ROOM = "Give it more room, or warm up a part of the samples."
MOST_KEY_BYTES = 255
CLAIMS = ".claims"  # a hidden folder of caches in folders
PATIENCE_S = 60.0  # how long a claim by a record lives without being renewed
_POLL_S = 0.5
_FOR_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheStats(NamedTuple):
    """What a cache holds, and what the processes of its chain have counted.

    Args:
        hits: How often a value was found.
        misses: How often a value had to be loaded.
        bytes: The size of the cache.
        entries: The number of entries in the cache.
        healed: How many damaged entries were replaced.
    """

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    entries: int = 0
    healed: int = 0


class Rejection(NamedTuple):
    """Why a store keeps no more entries in this process.

    Args:
        reason: A predicate whose subject is the cache: "takes no more (...)".
        hint: A sentence that says what would help.
    """

    reason: str
    hint: str


def hint_for(error: Exception) -> str:
    """Return what would help against a storage error: more room if the storage is full, or else another place."""
    if isinstance(error, OSError) and error.errno in _FOR_ROOM:
        return MORE_ROOM
    if "already open in this process" in str(error):
        return "A pipe of this process has opened it where it was before it was moved: let go of that pipe first."
    return "Let this user write there, or give a place that can be written: more room would not help."


class CacheStore(ABC):
    """A place that keeps entries. An entry that cannot be kept is left out, with a warning: the epoch goes on.

    A store opens what it needs when it is first used in a process. It may be pickled, and inherited by forked
    processes, at any time, and is used by several threads and processes at once. Keys are 1 to 255 bytes.
    """

    layout: ClassVar[str]
    of_process: ClassVar[tuple[str, ...]] = ()  # attributes that `start` sets, which are not pickled
    has_quick_stats = False  # whether `stats` needs no search through all entries

    completes_itself = False  # whether the samples are listed after a full epoch: it looks for each entry
    is_shared = True  # whether other chains may find the entries
    rejection: Rejection | None = None
    _warned_in = 0  # the process that has warned

    @abstractmethod
    def get(self, key: bytes, *, is_known: bool = False) -> memoryview | None:
        """Return an entry, read-only, or None. The view stays valid for as long as it is held.

        Args:
            key: The key of the entry.
            is_known: Whether this process has read the entry before, and found it whole. A store may then remember
                where the entry is.

        Raises:
            DamagedError: The entry cannot even be read; `put(..., replace=True)` heals it.
        """

    @abstractmethod
    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        """Keep an entry, given as consecutive buffers. An existing entry stays as it is.

        Args:
            key: The key of the entry.
            buffers: For example those of `kdpipes.storage.codec.encode`.
            replace: Whether an existing entry is damaged, and is to be replaced.

        Returns:
            Whether the entry is there now; False if the store is full, read-only or out of reach.
        """

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Return whether there is an entry."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Return the number of entries and bytes."""

    def takes_more(self) -> bool:
        """Return whether it makes sense to `put` a new entry: not if this process knows that the store is full."""
        return self.rejection is None

    def flush(self) -> None:  # noqa: B027 - most stores write at once
        """Write the entries that a store has gathered to write them together."""

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        """Claim some work among all processes that use the store, and return whether this process may do it.

        Claims only save work. A claim ends with its process, and a store that cannot be written grants every claim.

        Args:
            name: Identifies the work.
            waits: Whether to wait while another process holds the claim.
        """
        return nullcontext(True)

    @abstractmethod
    def start(self) -> None:
        """Set the attributes of `of_process`: nothing is open yet."""

    def close(self) -> None:
        """Release what is open in this process. The next use opens it again."""
        self.start()

    def check(self) -> None:  # noqa: B027 - most stores have nothing to check
        """Check, before an epoch, that the cache can be read safely.

        Raises:
            DataError: The cache has been truncated.
        """

    def each_entry(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """Yield `bound_to(key)` and content of each entry, None for a content that cannot be read."""
        raise NotImplementedError

    def place_of(self, key: bytes) -> str:
        """Return where an entry is, for errors."""
        return repr(key)

    def warn_once(self, text: str) -> None:
        """Warn, unless this process has already been warned of this store."""
        if self._warned_in != os.getpid():
            self._warned_in = os.getpid()
            warnings.warn(masked(text), stacklevel=5)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in (*self.of_process, "_warned_in")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.start()


@contextmanager
def claim_in(folder: Path, name: bytes, *, waits: bool) -> Iterator[bool]:
    """Claim some work by a lock file in a local folder, which the system releases when the process ends."""
    path = folder / CLAIMS / name.hex()
    with ExitStack() as held:
        try:
            path.parent.mkdir(exist_ok=True)
            is_held = held.enter_context(locked(path, timeout_s=None if waits else 0))
        except OSError:  # a folder that cannot be written, or that is gone
            yield True
            return
        yield is_held
        if is_held:
            # Removed while it is locked. Another process may lock the removed file; it finds the work done.
            with suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # unless it holds other claims


class Record(Protocol):
    """A small record in a store without locks."""

    def create(self, content: bytes) -> bytes:
        """Write it unless it exists, and return what it holds then."""

    def replace(self, content: bytes) -> None:
        """Write it."""

    def remove(self) -> None:
        """Delete it, if it exists."""


@contextmanager
def claim_by(record: Record, *, waits: bool) -> Iterator[bool]:
    """Claim some work by a record that its owner renews. One that was not renewed for a minute counts as abandoned.

    Each process measures that time by itself, because clocks of different machines differ.
    """
    token = secrets.token_bytes(8)
    seen, since = b"", time.monotonic()
    try:
        while (content := record.create(token)) != token:
            if not waits:
                break
            if content != seen:
                seen, since = content, time.monotonic()
            elif time.monotonic() - since >= PATIENCE_S:
                record.replace(token)
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
                record.replace(token + number.to_bytes(4, "little"))

    renewing = threading.Thread(target=renew, name="kdpipes-claim", daemon=True)
    renewing.start()
    try:
        yield True
    finally:
        is_over.set()
        renewing.join()
        with suppress(Exception):  # of any storage: it counts as abandoned later
            record.remove()


def bound_to(key: bytes) -> bytes:
    """Return the 20 bytes that the checksum of an entry covers, so that an entry under another key counts as damaged.

    They are a digest of the key, because a cache of files stores only the digest, as the name of the file.
    """
    return hashlib.blake2b(key, digest_size=20).digest()


def check_key(key: bytes) -> bytes:
    """Return `key` if it is valid.

    Raises:
        TypeError: It is not bytes.
        ValueError: It is empty or too long.
    """
    if not isinstance(key, bytes):
        raise TypeError(must_be("key", "bytes", key))
    if not 1 <= len(key) <= MOST_KEY_BYTES:
        raise ValueError(must_be("key", f"1 to {MOST_KEY_BYTES} bytes long", key, "Give a digest of it."))
    return key
