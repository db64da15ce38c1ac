"""List, inspect, verify and delete existing caches."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.metadata import layout_in
from kdpipes.cache.open_cache import heal_contents, read_contents, store_in
from kdpipes.cache.shared_folder import clear_named, named_folders
from kdpipes.cache.store import CacheStore
from kdpipes.core.errors import DataError, masked
from kdpipes.core.progress import shown_if_slow
from kdpipes.storage.access import Access, using
from kdpipes.storage.codec import DamagedError, decode
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.urls import is_local

__all__ = ["CacheChecked", "CacheFound", "check_cache", "clear_cache", "look_at_cache", "named_caches"]

_NAME = "name="


class CacheFound(NamedTuple):
    """What a cache holds.

    Args:
        place: `name=...`, a folder or a URL.
        layout: "lmdb" or "files".
        entries: The number of entries.
        bytes: Their size.
        num_samples: For how many samples the cache is complete; None if it is not.
    """

    place: str
    layout: str
    entries: int
    bytes: int
    num_samples: int | None


class CacheChecked(NamedTuple):
    """How many entries of a cache are damaged.

    Args:
        entries: The number of entries.
        damaged: How many of them are damaged.
        healed: How many of those were written again: the list of samples, of which a cache has two copies.
    """

    entries: int
    damaged: int
    healed: int


def named_caches() -> list[str]:
    """Return the places of the named caches in memory, as `name=...`."""
    return [_NAME + name for name in named_folders()]


def look_at_cache(place: str, storage_options: Mapping[str, Any] | None = None) -> CacheFound:
    """Return what the cache in a place holds.

    Raises:
        FileNotFoundError: There is none.
    """
    store = _store(place, storage_options)
    stats, contents = store.stats(), read_contents(store)
    return CacheFound(place, store.layout, stats.entries, stats.bytes, None if contents is None else len(contents.keys))


def check_cache(place: str, storage_options: Mapping[str, Any] | None = None) -> CacheChecked:
    """Return how many entries a cache has, how many are damaged, and how many could be healed without the source."""
    store, number, num_damaged = _store(place, storage_options), 0, 0
    for key, entry in shown_if_slow(store.each_entry(), store.stats().entries, f"verifying {place!r}", "entries"):
        number += 1
        num_damaged += not _is_sound(key, entry)
    return CacheChecked(number, num_damaged, heal_contents(store))


def clear_cache(place: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove a cache, with its folder.

    Raises:
        FileNotFoundError: There is none: other folders are left alone.
    """
    if place.startswith(_NAME):
        clear_named(place.removeprefix(_NAME))
        return
    access = Access(storage_options=storage_options)
    if layout_in(place, access) is None:
        raise FileNotFoundError(f"There is no cache in {masked(place)!r}.{_in_memory(place)}")
    if is_local(place):
        shutil.rmtree(Path(place).expanduser())
        return
    with using(access):
        filesystem, path = filesystem_of(place)
        filesystem.rm(path, recursive=True)


def _store(place: str, storage_options: Mapping[str, Any] | None) -> CacheStore:
    if not place.startswith(_NAME):
        try:
            return store_in(place, storage_options)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}{_in_memory(place)}") from error
    name = place.removeprefix(_NAME)
    if name not in named_folders():
        raise FileNotFoundError(f"There is no cache of the name {name!r}; there are {named_folders()}.")
    return LmdbStore.in_memory(name)


def _in_memory(name: str) -> str:
    """Return where the cache is, if there is one in memory of a name."""
    return f" The one in memory of that name is {_NAME + name!r}." if name in named_folders() else ""


def _is_sound(key: bytes, entry: memoryview | None) -> bool:
    if entry is None:
        return False
    try:
        decode(entry, key=key)
    except DamagedError:
        return False
    except DataError:  # of a type or a pickle that is not to be opened here
        return True
    return True
