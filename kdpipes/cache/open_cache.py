"""A complete cache as a source of its own, which opens without the source that filled it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.cache.file_store import FileStore
from kdpipes.cache.key import key_of
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.metadata import METADATA, layout_in
from kdpipes.cache.store import CacheStore, bound_to
from kdpipes.core.errors import DataError, check_flag, masked, must_be, reject_field
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Lazy, Sample
from kdpipes.storage.access import Access
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode
from kdpipes.storage.shared import PackedStrings, Shared
from kdpipes.storage.urls import is_local

__all__ = [
    "CacheReaderMapDataPipe",
    "Contents",
    "heal_contents",
    "is_marked",
    "read_contents",
    "store_in",
    "write_contents",
]

_KEYS = b"\0contents", b"\0contents again"  # twice: nothing else knows the samples' keys and labels


@called_as("open_cache")
class CacheReaderMapDataPipe(MapPipe):
    """The samples of a cache on disk that is complete, without their source (`kdp.open_cache(url)`).

    `cache_on_disk(url)` and `warm_up()` have made it complete; it may have been moved or packed since. Keys, fields,
    labels and order are those of the samples that have been cached.

    Args:
        url: The cache's folder, by path, or, of one with the layout "files", by any URL that fsspec knows:
            `zip://::birds.zip`.
        allow_pickle: Whether to read what was pickled, and so to execute what the cache says.
        storage_options: The arguments of fsspec's file system for a URL. They are neither shown nor written.

    Memory: some 30 bytes for each sample, and its key, shared by all workers.

    Raises:
        FileNotFoundError: There is no cache.
        DataError: It is not complete, or an entry is damaged.

    Example:
        >>> photos = kdp.from_dataset([("heron", 0), ("stork", 1)], class_names=["a", "b"])
        >>> _ = photos.transform("x", str.upper).cache_on_disk("cached").warm_up()
        >>> kdp.open_cache("cached").filter_classes(valid=["b"])[0]["x"]
        'STORK'
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(url, str | os.PathLike):
            raise TypeError(must_be("url", "a path or a URL", url))
        check_flag("allow_pickle", allow_pickle)
        self._url = os.fspath(url)
        self._allow_pickle = allow_pickle
        self._store = store_in(self._url, storage_options)
        self._contents: Shared[Contents] | None = None

    def fingerprint(self) -> Any:
        return list(self._opened().keys), self._opened().notes

    def value_fingerprint(self) -> Any:
        """Return what other caches tell it by."""
        return self._opened().notes["bases"]

    def prepare_for_workers(self) -> None:
        """Called before workers start."""
        self._opened()

    def __len__(self) -> int:
        return len(self._opened().keys)

    def fetch(self, index: int) -> Sample:
        keys, notes = self._opened()
        base = notes["bases"][20 * index : 20 * index + 20].tobytes()
        fields: dict[str, Any] = {}
        for name, flags in notes["entries"].items():
            if _flag(notes["in_columns"][name], index):
                value = notes["columns"][name][index]
                fields[name] = value.item() if isinstance(value, np.generic) else value
            elif _flag(flags, index):
                fields[name] = Lazy(partial(self._read, base, name), what=f"reading cached field {name!r}")
        return Sample(fields, key=keys[index], index=index)

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._contents is not None

    def has_column(self, name: str) -> bool:
        return self._contents is not None and self._contents.value.notes["in_columns"].get(name) is True

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
        if self._contents is None:
            return None
        notes = self._opened().notes
        return frozenset(
            name for name in notes["entries"] if True in (notes["entries"][name], notes["in_columns"][name])
        )

    def _read(self, base: bytes, name: str, sample: Sample) -> Any:
        try:
            key = key_of(base, name)
            content = self._store.get(key)
            if content is not None:
                value, ctx = decode(content, allow_pickle=self._allow_pickle, key=bound_to(key))
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

    def _opened(self) -> Contents:
        if self._contents is None:
            contents = read_contents(self._store)
            if contents is None and (rejection := self._store.rejection) is not None:
                raise DataError(f"The cache {self._url!r} {rejection.reason}. {rejection.hint}")
            if contents is None:
                raise DataError(
                    f"The cache {self._url!r} has {self._store.stats().entries:,} entries, but is not complete. An "
                    "epoch that reads all samples completes it, or, where its source is: "
                    "`cached = chain.cache_on_disk(...)`, and then `cached.warm_up()`."
                )
            self._contents = Shared(contents)
        return self._contents.value


def _flag(flags: Any, index: int) -> bool:
    return flags if isinstance(flags, bool) else bool(flags[index])


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
    is_kept = all(_is_written(store, key, {"ends": ends, "letters": letters, "notes": notes}) for key in _KEYS)
    store.flush()
    return is_kept and all(store.contains(key) for key in _KEYS)


def is_marked(store: CacheStore) -> bool:
    """Return whether a cache has a list of its samples."""
    return any(store.contains(key) for key in _KEYS)


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
            # A copy: LMDB reuses the pages of a list that another process replaces, and these arrays stay in use.
            said = None if entry is None else decode(bytes(entry), key=bound_to(key))
        except (DamagedError, PickledError) as error:
            damaged.append(f"{store.place_of(key)}: {error}")
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


def store_in(url: str, storage_options: Mapping[str, Any] | None = None) -> CacheStore:
    """Return the store of a cache that is there.

    Raises:
        FileNotFoundError: There is none.
    """
    url = url.removeprefix("file://")
    layout = layout_in(url, Access(storage_options=storage_options))
    if layout is None:
        hint = "`chain.cache_on_disk(...)` makes one, when a field of it is read."
        if url.endswith(".zip"):
            hint = f"One that is packed, without its folder, opens as 'zip://::{url.rpartition('::')[2]}'."
        raise FileNotFoundError(masked(f"There is no cache in {url!r}: no file {METADATA}. {hint}"))
    if layout == "lmdb" and not is_local(url):
        hint = "Unpack it, or make it by `cache_on_disk(..., layout='files')`."
        raise ValueError(
            f"The cache in {masked(url)!r} is one database (LMDB), which opens in a local folder alone. {hint}"
        )
    return LmdbStore(url) if layout == "lmdb" else FileStore(url, storage_options=storage_options)
