"""Caches that are there: which, what they hold, whether it is sound, and away with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from kdpipes._progress import shown_if_slow
from kdpipes.cache.contents import heal_contents, read_contents
from kdpipes.cache.disk_store import layout_in, store_in
from kdpipes.cache.folders import LocalFolder, folder_of
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.metadata import heal_metadata
from kdpipes.cache.shared_folder import clear_named, named_folders
from kdpipes.core.masked import masked
from kdpipes.errors import DataError
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
        entries: How many.
        bytes: How many they take.
        num_samples: How many samples it says it is complete for; None if it does not.
    """

    place: str
    layout: str
    entries: int
    bytes: int
    num_samples: int | None


class CacheChecked(NamedTuple):
    """How sound a cache is.

    Args:
        entries: How many it has.
        damaged: How many of them, and of the files that say how it was set up, are damaged.
        healed: How many of those have been written again from a copy: how it was set up, and its list of samples.
    """

    entries: int
    damaged: int
    healed: int


def named_caches() -> list[str]:
    """Return the places of the named caches in memory, as `name=...`."""
    return [_NAME + name for name in named_folders()]


def look_at_cache(place: str) -> CacheFound:
    """Return what the cache in a place holds.

    Raises:
        FileNotFoundError: There is none.
    """
    store = _store(place)
    stats, contents = store.stats(), read_contents(store)
    layout = "lmdb" if isinstance(store, LmdbStore) else "files"
    return CacheFound(place, layout, stats.entries, stats.bytes, None if contents is None else len(contents.keys))


def check_cache(place: str) -> CacheChecked:
    """Return how many entries a cache has, how many are damaged, and how many could be healed without the source."""
    store, number = _store(place), 0
    folder = LocalFolder(store.folder) if isinstance(store, LmdbStore) else folder_of(place)
    num_damaged, num_healed = heal_metadata(folder)
    for key, entry in shown_if_slow(store.each_entry(), store.stats().entries, f"verifying {place!r}", "entries"):
        number += 1
        num_damaged += not _is_sound(key, entry)
    return CacheChecked(number, num_damaged, num_healed + heal_contents(store))


def clear_cache(place: str) -> None:
    """Remove a cache, with its folder.

    Raises:
        FileNotFoundError: There is none: other folders are left alone.
    """
    if place.startswith(_NAME):
        clear_named(place.removeprefix(_NAME))
        return
    if layout_in(place) is None:
        raise FileNotFoundError(f"There is no cache in {masked(place)!r}.{_in_memory(place)}")
    if is_local(place):
        shutil.rmtree(Path(place).expanduser())
        return
    filesystem, path = filesystem_of(place)
    filesystem.rm(path, recursive=True)


def _store(place: str) -> Any:
    if not place.startswith(_NAME):
        try:
            return store_in(place)
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
