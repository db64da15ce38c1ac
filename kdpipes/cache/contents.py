"""The entry that makes a cache complete: which samples it holds, in order, so that it opens without its source."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kdpipes.cache.store import CacheStore, bound_to
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode
from kdpipes.storage.shared import PackedStrings

__all__ = ["Contents", "heal_contents", "read_contents", "write_contents"]

_KEYS = b"\0contents", b"\0contents again"  # twice: nothing else knows the samples' keys and labels


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
    return all(_is_written(store, key, {"ends": ends, "letters": letters, "notes": notes}) for key in _KEYS)


def _is_written(store: CacheStore, key: bytes, said: dict[str, Any]) -> bool:
    entry = b"".join(encode(said, key=bound_to(key)))
    with suppress(DamagedError):
        found = store.get(key)
        if found is not None and bytes(found) == entry:
            return True
    return store.put(key, [entry], replace=store.contains(key))


def read_contents(store: CacheStore) -> Contents | None:
    """Return what a complete cache holds, None if it is not complete.

    Raises:
        DamagedError: The entry is damaged, and so is its copy.
    """
    damaged: list[str] = []
    for key in _KEYS:
        try:
            entry = store.get(key)
            said = None if entry is None else decode(entry, key=bound_to(key))
        except (DamagedError, PickledError) as error:
            damaged.append(f"{_place_of(store, key)}: {error}")
            continue
        if said is not None:
            return Contents(PackedStrings.of_arrays(said["ends"], said["letters"]), said["notes"])
    if damaged:
        raise DamagedError(
            f"The list of the cache's samples cannot be read ({' '.join(damaged)}) Its other entries stay, and "
            "`.warm_up()` of the chain that has the source writes the list again."
        )
    return None


def heal_contents(store: CacheStore) -> int:
    """Write the list of samples again from its copy, or the copy from the list; return how many were damaged."""
    found = {key: _sound(store, key) for key in _KEYS}
    whole = next((said for said in found.values() if said is not None), None)
    if whole is None:
        return 0
    damaged = {key: store.contains(key) for key, said in found.items() if said is None}
    healed = {key: store.put(key, encode(whole, key=bound_to(key)), replace=there) for key, there in damaged.items()}
    return sum(is_there and healed[key] for key, is_there in damaged.items())


def _sound(store: CacheStore, key: bytes) -> Any:
    with suppress(DamagedError, PickledError):
        entry = store.get(key)
        return None if entry is None else decode(entry, key=bound_to(key))
    return None


def _place_of(store: CacheStore, key: bytes) -> str:
    place_of = getattr(store, "place_of", None)
    return repr(key) if place_of is None else repr(place_of(key))
