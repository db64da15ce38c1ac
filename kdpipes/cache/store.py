"""What every cache does: entries of bytes by key, kept for all processes that open the same place."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kdpipes.errors import must_be

__all__ = ["MORE_ROOM", "MOST_KEY_BYTES", "CacheStats", "CacheStore", "Refusal", "bound_to", "check_key", "way_out_of"]

MORE_ROOM = "Give it more room, or warm up a part of the samples."
MOST_KEY_BYTES = 255
_FOR_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheStats(NamedTuple):
    """What a cache has done in this process, and what it holds.

    Args:
        hits: How often `get` found an entry, in this process.
        misses: How often it did not.
        bytes: What the cache takes, of all processes.
        entries: How many entries it has, of all processes.
        healed: How many entries this process has replaced, because they were damaged.
    """

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    entries: int = 0
    healed: int = 0


class Refusal(NamedTuple):
    """Why a store keeps no more in this process.

    Args:
        reason: What goes behind the name of the cache: "takes no more (...)".
        way_out: A sentence that says what would help.
    """

    reason: str
    way_out: str


def way_out_of(error: Exception) -> str:
    """Return what would help against an error of storage: more room, if it is full, or another place."""
    if isinstance(error, OSError) and error.errno in _FOR_ROOM:
        return MORE_ROOM
    if "already open in this process" in str(error):
        return "A pipe of this process has opened it where it was before it was moved: let go of that pipe first."
    return "Let this user write there, or give a place that can be written: more room would not help."


class CacheStore(Protocol):
    """A place that keeps entries. What cannot be kept is left out, with a warning: a cache is no reason to stop.

    A store opens what it needs when it is first used in a process: it may be pickled and inherited by forked processes
    at any time, and is used by several threads and processes at once. Keys are 1 to 255 bytes.
    """

    refusal: Refusal | None

    def get(self, key: bytes) -> memoryview | None:
        """Return an entry, read-only, or None. The view stays as it is for as long as it is held.

        Raises:
            DamagedError: The entry cannot even be read; `put(..., replace=True)` heals it.
        """

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """Return several entries, of those that are missing or damaged None."""

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        """Keep an entry, given as buffers that follow each other; one that is there already stays as it is.

        Args:
            key: Under which it is found.
            buffers: Of `kdpipes.storage.codec.encode`, for example.
            replace: Whether an entry that is there is damaged, and to be replaced.

        Returns:
            Whether the entry is there now; False where the store is full, cannot be written or is out of reach.
        """

    def put_many(self, entries: Iterable[tuple[bytes, Iterable[Any]]]) -> bool:
        """Keep several entries; return whether all of them are there now."""

    def contains(self, key: bytes) -> bool:
        """Return whether there is an entry, which counts as neither a hit nor a miss."""

    def stats(self) -> CacheStats:
        """Return what has been counted."""

    def close(self) -> None:
        """Let go of what is open in this process. The next use opens it again."""


def bound_to(key: bytes) -> bytes:
    """Return the 20 bytes that the checksum of an entry covers, so that an entry under another key counts as damaged.

    They are a digest of the key, because a cache of files stores only the digest, as the name of the file.
    """
    return hashlib.blake2b(key, digest_size=20).digest()


def check_key(key: bytes) -> bytes:
    """Return a key, or refuse it."""
    if not isinstance(key, bytes):
        raise TypeError(must_be("key", "bytes", key))
    if not 1 <= len(key) <= MOST_KEY_BYTES:
        raise ValueError(must_be("key", f"1 to {MOST_KEY_BYTES} bytes long", key, "Give a digest of it."))
    return key
