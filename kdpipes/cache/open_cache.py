"""A complete cache as a source of its own, where that which has filled it need not be."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.cache.contents import Contents, read_contents
from kdpipes.cache.disk_store import store_in
from kdpipes.cache.identity import key_of
from kdpipes.cache.store import bound_to
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.registry import called_as
from kdpipes.errors import DataError, check_flag, must_be, refuse_field
from kdpipes.sample import Lazy, Sample
from kdpipes.storage.codec import DamagedError, decode
from kdpipes.storage.shared import Shared

__all__ = ["CacheReaderMapDataPipe"]


@called_as("open_cache")
class CacheReaderMapDataPipe(MapPipe):
    """The samples of a cache on disk that is complete, without their source (`kdp.open_cache(url)`).

    `cache_on_disk(url)` and `warm_up()` have made it complete; it may have been moved or packed since. Keys, fields,
    labels and order are those of the samples that have been cached.

    Args:
        url: The cache's folder, by path, or, of one with the layout "files", by any URL that fsspec knows:
            `zip://::birds.zip`.
        allow_pickle: Whether to read what was pickled, and so to execute what the cache says.

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

    def __init__(self, url: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        if not isinstance(url, str | os.PathLike):
            raise TypeError(must_be("url", "a path or a URL", url))
        check_flag("allow_pickle", allow_pickle)
        self._url = os.fspath(url)
        self._allow_pickle = allow_pickle
        self._store = store_in(self._url)
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

    def read_column(self, name: str) -> NDArray[Any]:
        notes = self._opened().notes
        if name == "key" and name not in notes["entries"]:
            return np.asarray(list(self._opened().keys))
        if name not in notes["entries"]:
            refuse_field(name, f"The cache {self._url!r}", notes["entries"])
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
            way_out = "An epoch of the chain that fills the cache repairs it."
            raise DataError(f"Field {name!r} of {sample.key!r} in {self._url!r}: {error} {way_out}") from error
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
            if contents is None and (refusal := self._store.refusal) is not None:
                raise DataError(f"The cache {self._url!r} {refusal.reason}. {refusal.way_out}")
            if contents is None:
                raise DataError(
                    f"The cache {self._url!r} has {self._store.stats().entries:,} entries, but is not complete: epochs "
                    "fill it, `warm_up()` loads what is missing and makes the list of its samples. Where its source "
                    "is: `cached = chain.cache_on_disk(...)`, and then `cached.warm_up()`."
                )
            self._contents = Shared(contents)
        return self._contents.value


def _flag(flags: Any, index: int) -> bool:
    return flags if isinstance(flags, bool) else bool(flags[index])
