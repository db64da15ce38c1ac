"""The entry that makes a cache complete: which samples it holds, in order, so that it opens without its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kdpipes.cache.store import CacheStore
from kdpipes.storage.codec import decode, encode
from kdpipes.storage.shared import PackedStrings

__all__ = ["Contents", "read_contents", "write_contents"]

_KEY = b"\0contents"


class Contents(NamedTuple):
    """What a complete cache holds.

    Args:
        keys: The samples' keys, in the order of their source.
        notes: Plain data that were written with them.
    """

    keys: PackedStrings
    notes: dict[str, Any]


def write_contents(store: CacheStore, keys: Sequence[str], notes: dict[str, Any]) -> bool:
    """Mark a cache as complete, when all entries of its samples are there; return whether that could be kept.

    Args:
        store: The cache.
        keys: The samples' keys, in the order of their source.
        notes: Plain data that a reader needs besides, such as the names of fields.
    """
    ends, letters = PackedStrings(keys).arrays()
    entry = encode({"ends": ends, "letters": letters, "notes": notes})
    return store.put(_KEY, entry, replace=store.contains(_KEY))


def read_contents(store: CacheStore) -> Contents | None:
    """Return what a complete cache holds, None if it is not complete.

    Raises:
        DamagedError: The entry is damaged.
    """
    entry = store.get(_KEY)
    if entry is None:
        return None
    said = decode(entry)
    return Contents(PackedStrings.of_arrays(said["ends"], said["letters"]), said["notes"])
