"""Existing caches: open a complete one without the source that filled it, inspect, verify and delete them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.cache.file_store import FileStore
from kdpipes.cache.folder import METADATA, layout_in
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.shared_folder import clear_named, named_folders
from kdpipes.cache.store import CacheStore, Entries, bound_to
from kdpipes.core.column import Column
from kdpipes.core.errors import DataError, check_flag, check_type, reject_field
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import counted, shown_if_slow
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Sample
from kdpipes.core.secrets import masked
from kdpipes.core.shared import PackedStrings, Shared
from kdpipes.storage.access import Access, using
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode
from kdpipes.storage.files import cache_folder
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.index_home import kept_indexes
from kdpipes.storage.urls import is_local

_KEYS = b"\0contents", b"\0contents again"  # two copies, because the samples' keys and labels are stored only there
_NAME = "name="
KEY_SIZE = 20  # bytes of an entry's key


@called_as("open_cache")
class CacheReaderMapDataPipe(MapPipe):
    """Reads the samples of a complete cache on disk, without the source that filled it (`kdp.open_cache(url)`).

    `cache_on_disk(url)` and `warm_up()` complete a cache, which may be moved or packed afterwards. Keys, fields, labels
    and order are those of the cached samples.

    Args:
        url: The folder of the cache, or the store of `cache(store)`. A cache with the layout "files" may also be at any
            URL that fsspec supports, such as `zip://::birds.zip`.
        allow_pickle: Whether to load pickles, which can execute code. Only for caches from people you trust.
        storage_options: The arguments of fsspec's file system for a URL. They are neither shown nor written.

    Memory: the key of each sample, 8 bytes, and 20 for each field, shared by all workers.

    Raises:
        FileNotFoundError: The cache does not exist. DataError: The cache is incomplete, or an entry is damaged.

    Example:
        >>> photos = kdp.from_dataset([("heron", 0), ("stork", 1)], class_names=["a", "b"])
        >>> _ = photos.transform("x", str.upper).cache_on_disk("cached").warm_up()
        >>> kdp.open_cache("cached").filter_classes(valid=["b"])[0]["x"]
        'STORK'
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | CacheStore,
        *,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_type("url", url, str | os.PathLike | CacheStore, "a path, a URL or a `CacheStore`")
        check_flag("allow_pickle", allow_pickle)
        store = url if isinstance(url, CacheStore) else store_in(os.fspath(url), storage_options)
        self._url = str(url)
        self._allow_pickle = allow_pickle
        self._entries = Entries(store)
        self._samples: Shared[SampleList] | None = None

    def fingerprint(self) -> Any:
        return list(self._opened().keys), self._opened().notes

    def value_fingerprint(self) -> Any:
        """Return data that identifies the samples for caches downstream."""
        return self._opened().notes["keys"]

    def prepare_for_workers(self) -> None:
        self._opened()

    def __len__(self) -> int:
        return len(self._opened().keys)

    def fetch(self, index: int) -> Sample:
        keys, notes = self._opened()
        fields: dict[str, Any] = {}
        for name, flags in notes["entries"].items():
            if _flag(notes["in_columns"][name], index):
                value = notes["columns"][name][index]
                fields[name] = value.item() if isinstance(value, np.generic) else value
            elif _flag(flags, index):
                key = notes["keys"][name][index].tobytes()
                fields[name] = Column(partial(self._read, key, name), what=f"reading cached field {name!r}")
        return Sample(fields, key=keys[index], index=index)

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._samples is not None

    def has_column(self, name: str) -> bool:
        return self._samples is not None and self._samples.value.notes["in_columns"].get(name) is True

    def read_column(self, name: str) -> NDArray[Any]:
        notes = self._opened().notes
        if name == "key" and name not in notes["entries"]:
            return np.asarray(list(self._opened().keys))
        if name not in notes["entries"]:
            reject_field(name, f"The cache {self._url!r}", notes["entries"])
        is_column = notes["in_columns"][name] is True and isinstance(notes["columns"][name], np.ndarray)
        return notes["columns"][name] if is_column else super().read_column(name)

    def class_names(self) -> tuple[str, ...] | None:
        names: tuple[str, ...] | None = self._opened().notes["class_names"]
        return names

    def field_names(self) -> frozenset[str] | None:
        if self._samples is None:
            return None
        notes = self._opened().notes
        return frozenset(
            name for name in notes["entries"] if True in (notes["entries"][name], notes["in_columns"][name])
        )

    def _read(self, key: bytes, name: str, sample: Sample) -> Any:
        try:
            content = self._entries.get(key)
            if content is not None:
                value, ctx, *_ = decode(content, allow_pickle=self._allow_pickle, key=bound_to(key))
        except DamagedError as error:
            hint = "An epoch of the chain that fills the cache repairs it."
            raise DataError(f"Field {name!r} of {sample.key!r} in {self._url!r}: {error} {hint}") from error
        if content is None:
            raise DataError(
                f"The cache {self._url!r} no longer has field {name!r} of sample {sample.key!r}. Fill it again."
            )
        for entry, recorded in ctx.items():
            sample.ctx.setdefault(entry, recorded)
        return value

    def _opened(self) -> SampleList:
        if self._samples is None:
            found = read_list(self._entries)
            if found is None and (rejection := self._entries.rejection) is not None:
                raise DataError(
                    f"The list of samples in the cache {self._url!r} could not be read, because the cache "
                    f"{rejection.reason}. {rejection.hint}"
                )
            if found is None:
                raise DataError(
                    f"The cache {self._url!r} has {counted(self._entries.stats().entries, 'entry')}, but is not "
                    "complete. Complete it on a machine that has its source: read a whole epoch, or call "
                    "`chain.cache_on_disk(...).warm_up()`."
                )
            self._samples = Shared(found)
        return self._samples.value


def _flag(flags: Any, index: int) -> bool:
    return flags if isinstance(flags, bool) else bool(flags[index])


class SampleList(NamedTuple):
    """The sample list of a complete cache: keys in order, and plain data such as the names of fields."""

    keys: PackedStrings
    notes: dict[str, Any]


def write_list(entries: Entries, keys: Sequence[str], notes: dict[str, Any]) -> bool:
    """Mark a cache as complete, and return whether it could store the list. All entries of its samples must exist."""
    ends, letters = PackedStrings(keys).arrays()
    is_kept = True
    for key in _KEYS:
        content = b"".join(encode({"ends": ends, "letters": letters, "notes": notes}, key=bound_to(key)))
        found = None
        with suppress(DamagedError):
            found = entries.get(key)
        if found is None or bytes(found) != content:
            is_kept &= entries.put(key, [content], replace=entries.contains(key))
    entries.flush()
    return is_kept and all(map(entries.contains, _KEYS))


def has_list(entries: Entries) -> bool:
    """Return whether a cache has a sample list."""
    return any(map(entries.contains, _KEYS))


def read_list(entries: Entries) -> SampleList | None:
    """Return the sample list of a cache, or None if the cache is incomplete.

    Raises:
        DamagedError: Both copies of the list are damaged.
    """
    damaged: list[str] = []
    for key in _KEYS:
        try:
            found = _list_at(entries, key)
        except (DamagedError, PickledError) as error:
            damaged.append(str(error))
            continue
        if found is not None:
            return SampleList(PackedStrings.of_arrays(found["ends"], found["letters"]), found["notes"])
    if damaged:
        raise DamagedError(
            f"The list of the samples of the cache in {entries.store} and its copy cannot be read "
            f"({' '.join(damaged)}) Its other entries stay, and `.warm_up()` of the chain that has the source writes "
            "the list again."
        )
    return None


def _list_at(entries: Entries, key: bytes) -> Any:
    entry = entries.get(key)
    # Copied, because LMDB reuses the pages of a list that another process replaces, while these arrays stay in use.
    return None if entry is None else decode(bytes(entry), key=bound_to(key))


def store_in(url: str, storage_options: Mapping[str, Any] | None = None) -> LmdbStore | FileStore:
    """Return the store of an existing cache.

    Raises:
        FileNotFoundError: There is no cache.
    """
    url = url.removeprefix("file://")
    layout = layout_in(url, Access(storage_options=storage_options))
    if layout is None:
        hint = "`chain.cache_on_disk(...).warm_up()` makes one."
        if url.endswith(".zip"):
            hint = f"One that is packed, without its folder, opens as 'zip://::{url.rpartition('::')[2]}'."
        raise FileNotFoundError(masked(f"There is no cache in {url!r}: the file {METADATA} is missing. {hint}"))
    if layout == "lmdb" and not is_local(url):
        hint = "Unpack it, or make it by `cache_on_disk(..., layout='files')`."
        raise ValueError(
            f"The cache in {masked(url)!r} is one database (LMDB), which opens in a local folder alone. {hint}"
        )
    return LmdbStore(url) if layout == "lmdb" else FileStore(url, storage_options=storage_options)


class CacheFound(NamedTuple):
    """The contents of a cache."""

    place: str  # `name=...`, a folder or a URL
    layout: str  # "indexes" for the local cache of shard indexes
    entries: int
    bytes: int
    num_samples: int | None  # None if the cache is incomplete


class CacheChecked(NamedTuple):
    """The result of a check of a cache's entries."""

    entries: int
    damaged: int
    healed: int  # damaged entries healed: one of the two copies of the list


def named_caches() -> list[str]:
    """Return the locations of named caches in memory, as `name=...`, and the local cache of indexes if it exists."""
    indexes = cache_folder("indexes")
    return [_NAME + name for name in named_folders()] + [str(indexes)] * indexes.is_dir()


def look_at_cache(place: str, storage_options: Mapping[str, Any] | None = None) -> CacheFound:
    """Return the contents of the cache at a location. Raise a FileNotFoundError if there is no cache."""
    if _has_indexes(place):
        sizes = [size for _, size, _ in kept_indexes(cache_folder("indexes"))]
        return CacheFound(place, "indexes", len(sizes), sum(sizes), None)
    store = _store_at(place, storage_options)
    entries = Entries(store)
    stats = entries.stats()
    found = read_list(entries)
    return CacheFound(place, store.layout, stats.entries, stats.bytes, None if found is None else len(found.keys))


def check_cache(place: str, storage_options: Mapping[str, Any] | None = None) -> CacheChecked:
    """Return the number of entries of a cache, of damaged ones, and of those that were repaired without the source."""
    store = _store_at(place, storage_options)
    entries = Entries(store)
    number = 0
    num_damaged = 0
    num_healed = 0
    for key, entry in shown_if_slow(store.each_entry(), entries.stats().entries, f"verifying {place!r}", "entry"):
        number += 1
        try:
            num_damaged += entry is None
            _ = None if entry is None else decode(entry, key=key)
        except DamagedError:
            num_damaged += 1
        except DataError:  # a type or pickle that must not be opened here
            pass
    lists: dict[bytes, Any] = {}
    for key in _KEYS:
        with suppress(DamagedError, PickledError):
            lists[key] = _list_at(entries, key)
    whole = next((found for found in lists.values() if found is not None), None)
    for key in _KEYS:
        if whole is not None and lists.get(key) is None:
            is_damaged = entries.contains(key)
            is_written = entries.put(key, encode(whole, key=bound_to(key)), replace=is_damaged)
            num_healed += is_damaged and is_written
    return CacheChecked(number, num_damaged, num_healed)


def clear_cache(place: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Delete a cache with its folder. Raise a FileNotFoundError for any other folder, without deleting it."""
    if place.startswith(_NAME):
        clear_named(place.removeprefix(_NAME))
        return
    access = Access(storage_options=storage_options)
    if not _has_indexes(place) and layout_in(place, access) is None:
        raise FileNotFoundError(f"There is no cache in {masked(place)!r}.{_in_memory(place)}")
    if is_local(place):
        shutil.rmtree(Path(place).expanduser())
        return
    with using(access):
        filesystem, path = filesystem_of(place)
        filesystem.rm(path, recursive=True)


def _has_indexes(place: str) -> bool:
    """Return whether a location is the existing local cache of indexes."""
    folder = cache_folder("indexes")
    return place == str(folder) and folder.is_dir()


def _store_at(place: str, storage_options: Mapping[str, Any] | None) -> LmdbStore | FileStore:
    if not place.startswith(_NAME):
        try:
            return store_in(place, storage_options)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}{_in_memory(place)}") from error
    name = place.removeprefix(_NAME)
    if name not in named_folders():
        raise FileNotFoundError(f"There is no cache named {name!r}; there are {named_folders()}.")
    return LmdbStore.in_memory(name)


def _in_memory(name: str) -> str:
    """Return a hint with the location of a cache in memory of this name, or an empty string."""
    return f" The cache of that name in memory is {_NAME + name!r}." if name in named_folders() else ""
