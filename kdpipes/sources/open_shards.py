"""Read tar shards by position. Indexes are read or created once; contents are read when their fields are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.column import Column, as_column
from kdpipes.core.entries import value_of
from kdpipes.core.errors import (
    REPLACE_FILE,
    DataError,
    check_choice,
    check_class_names,
    check_count,
    check_flag,
    must_be,
    reject_field,
)
from kdpipes.core.labels import number_column, number_fields
from kdpipes.core.map_pipe import MapPipe, is_key
from kdpipes.core.messages import shown_if_slow
from kdpipes.core.order import Order
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Block, Rows
from kdpipes.core.shared import Shared
from kdpipes.core.traits import Traits
from kdpipes.sources._member_reader import Fetch, MemberReader
from kdpipes.storage.access import DEFAULT_S, Access, using
from kdpipes.storage.catalog import open_catalog
from kdpipes.storage.decoding import decode_member, missing_in, values_of
from kdpipes.storage.files import forget_listings, matching_urls, version_of
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.index_home import Seen, find_index, names_beside
from kdpipes.storage.shard_cache import ShardCache
from kdpipes.storage.shard_index import Catalog, Places, by_gaps
from kdpipes.storage.tar import DottedKeys
from kdpipes.storage.urls import expand_urls, identity_of, is_local, relative_names

_NUM_PROBED = 1000
_PROBED = 4  # number of shards whose indexes `read_twice` looks for
_AT_ONCE = 512  # number of members of a column requested at a time


def _stamp_of(catalog: Catalog, index: int) -> str:
    """Return text that identifies the shard of a sample and its version."""
    number = int(catalog.shards[index])
    url, (size, tag) = catalog.urls[number], catalog.versions[number]
    where = os.path.abspath(url) if is_local(url) else identity_of(url)  # noqa: PTH100 - links stay
    return f"{where} {size} {tag}"


def _warn_of_dots(catalog: Catalog) -> None:
    """Warn if the first samples seem to be merged from several samples, because their keys contain dots."""
    number = min(len(catalog), _NUM_PROBED)
    fields: list[list[str]] = [[] for _ in range(number)]
    for name, known in catalog.fields.items() if any("." in name for name in catalog.fields) else ():
        for index in np.flatnonzero(known.offsets[:number] >= 0) if isinstance(known, Places) else range(number):
            fields[index].append(name)
    dotted = DottedKeys()
    for index, found in enumerate(fields):
        if found:
            dotted.see(catalog.key(index), found)
    dotted.end()


@called_as("open_shards")
class ShardReaderMapDataPipe(MapPipe):
    """Reads the samples of plain webdataset tars by position (`kdp.open_shards(urls)`).

    Each member is a field with the name of its extension: `0001.jpg` and `0001.cls` are fields `jpg` and `cls` of
    sample `0001`; `.rename_fields(x="jpg;png", y="cls")` gives them the usual names. The extension determines how a
    field is decoded: the number or name of a class (`.cls`), text (`.txt`, `.html`), JSON (`.json`), an array (`.npy`),
    or tensors (`.pth` and `.pt`, loaded with `weights_only`); other members are bytes. The key is the shard's name, a
    slash and the sample's key. The members of a sample may be anywhere in its shard; samples are in the order of their
    first members. Members without an extension, hidden ones and those in `__meta__/` are ignored. If a sample lacks a
    member that others have, reading it is an error, and `.on_error("skip")` skips the sample.

    Each shard has an index, `NAME.tar.index`, which contains the offsets of its members and the classes. It is stored
    in the same folder. If it is missing, or belongs to another version of the shard, the shard is indexed once, and the
    index is stored there, or in the local cache (`KDPIPES_CACHE_DIR`, `~/.cache/kdpipes`) if the folder is read-only.

    Remote shards are prefetched, with retries. Members are verified if the index has checksums, like the indexes of
    remote shards and those written by `kdpipes index`. Either only the members needed for the next batches of `deal`
    are read, with neighboring members in one request, or whole shards, which stay in the local cache for later epochs
    and runs and for all local processes. Complete shards are read from the cache even if their storage cannot be
    reached. Whole shards are downloaded in ranges, resumed after an interruption, and verified by size and ETag. To
    make room, the shards that are needed last are removed first.

    Args:
        urls: Paths or fsspec URLs of uncompressed tars, with brace ranges, `"s3://bucket/birds-{000..127}.tar"`, or
            globs, `"birds-*.tar"`. `pipe:` is rejected.
        class_names: The names of the classes 0, 1, ...; by default, those that `kdp.write_shards` has stored in
            `NAME-shards.json`, if all shards are finished and have not changed since.
        fetch: How remote shards are read: "members", "shards" (whole shards), or "auto": whole shards if the epoch is
            read shard by shard, needs at least half of their bytes, and the cache can hold all shards of a window and
            one more; otherwise members of shards that are not cached.
        cache_dir: The folder for whole shards; None is `shards` in the local cache.
        max_cache_bytes: The maximum size of this folder, including downloads in progress; None is half of the free
            space on its disk. If there is no room for a shard, its members are read instead.
        timeout_s: How long remote storage may take to respond to a request, in seconds, plus 1 s for each 256 KiB of a
            large one; a second timeout is an error. None waits without limit.
        decode: Whether to decode texts, JSON, arrays and tensors; False returns their bytes. Numbers are always
            decoded.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}` or
            `{"anon": True}` for S3, for all URLs. Workers get them; no `repr`, state, fingerprint or error contains
            them.
        hedge_s: The seconds after which a read without a response is requested a second time; the first one counts.

    Memory: the length of the keys, 12 bytes per sample, 12 to 16 bytes per member and 8 per class, shared by all
        workers; for remote shards, also up to 256 MB of prefetched data in each worker.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard is truncated, compressed, not a tar, or cannot be reached; or a member has changed since it
            was indexed. The error names the shard, the member and the offset.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        class_names: Sequence[str] | None = None,
        fetch: Fetch = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        max_cache_bytes: int | None = None,
        timeout_s: float | None = DEFAULT_S,
        decode: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        self._urls = Shared(expand_urls(urls))
        self._class_names = self._given_names = check_class_names(class_names)
        check_choice("fetch", fetch, get_args(Fetch))
        if not isinstance(cache_dir, str | os.PathLike | None) or (cache_dir and not is_local(os.fspath(cache_dir))):
            raise ValueError(must_be("cache_dir", "a local folder", cache_dir))
        max_bytes = None if max_cache_bytes is None else check_count("max_cache_bytes", max_cache_bytes)
        self._catalog: Shared[Catalog] | None = None
        self._found: Shared[list[str]] | None = None
        self._has_names = self._class_names is not None  # whether `_class_names` is final, even if it is None
        check_filesystems("urls", self._urls.value)
        self._access = Access(timeout_s, storage_options, hedge_s)
        self._decode = check_flag("decode", decode)
        cache = ShardCache(None if cache_dir is None else os.fspath(cache_dir), max_bytes)
        self._members = MemberReader(fetch, cache, self._access)
        self._is_remote = not all(map(is_local, self._urls.value))

    def __len__(self) -> int:
        return len(self._indexed())

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        catalog = self._indexed()
        blocks = []
        for numbers, lacking in by_gaps({field: catalog.fields[field] for field in catalog.gaps}, rows.positions):
            fields = {name: self._column(catalog, name) for name in catalog.fields if name not in lacking}
            number_fields(fields, self._given_names)
            version = partial(_stamp_of, catalog)
            blocks.append(block := Block(fields, rows.part(numbers), key=catalog.key, version=version))
            if lacking:
                block.lacking = lacking, self._place_of(block.positions[0], fields)
        return blocks

    def _place_of(self, index: int, present: Iterable[str]) -> str:
        """Return the shard of a sample, with the offset if it is known."""
        catalog = self._indexed()
        url = catalog.urls[int(catalog.shards[index])]
        known = (catalog.fields[field] for field in present)
        begins = [int(places.offsets[index]) for places in known if isinstance(places, Places)]
        return f"{url!r} at offset {min(begins)}" if begins else repr(url)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(role="source", is_remote=self._is_remote)

    def fingerprint(self) -> Any:
        catalog = self._indexed()
        contents = {
            field: known.sizes if isinstance(known, Places) else known for field, known in catalog.fields.items()
        }
        return catalog.names, catalog.shards, catalog.short_keys, contents, self.class_names(), self._decode

    def value_fingerprint(self) -> Any:
        """Return the data that identifies values in caches, in addition to the versions of the shards."""
        return () if self._decode else "bytes"

    def prefetch(self, order: Order) -> None:
        if self._is_remote:
            self._members.prefetch(self._indexed(), order)

    def shard_numbers(self) -> NDArray[Any]:
        return self._indexed().shards

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._catalog is not None

    def has_column(self, name: str) -> bool:
        if self._catalog is None:
            return False
        catalog = self._catalog.value
        return name in catalog.columns or isinstance(catalog.fields.get(name), np.ndarray)

    def read_column(self, name: str) -> NDArray[Any]:
        return number_column(self._read_column(name), name, self._given_names)

    def _read_column(self, name: str) -> NDArray[Any]:
        catalog = self._indexed()
        if name in catalog.columns and not isinstance(catalog.fields.get(name), np.ndarray):
            column = catalog.columns[name]
            for index in missing_in(column)[:1].tolist():
                value_of(self.fetch(index), name)  # raises an error that names the sample
            return values_of(column)
        if is_key(name, catalog.fields):
            return np.asarray([catalog.key(index) for index in range(len(self))])
        if name not in catalog.fields:
            reject_field(name, "`open_shards`", catalog.fields)
        known = catalog.fields[name]
        if not isinstance(known, Places):
            return known
        lacking = np.flatnonzero(known.offsets < 0)
        if len(lacking):
            raise DataError(
                f"Sample {catalog.key(int(lacking[0]))!r} has no member {name!r}; {len(lacking)} have none. Drop them."
            )
        return as_column(list(shown_if_slow(self._all_of(name), len(self), f"reading {name!r}")))

    def class_names(self) -> tuple[str, ...] | None:
        if not self._has_names:
            with using(self._access):
                self._class_names = names_beside(self._matching(), self._seen)
                self._has_names = True
        return self._class_names

    def field_names(self) -> frozenset[str] | None:
        return None if self._catalog is None else frozenset(self._catalog.value.fields)

    def read_twice(self) -> list[str]:
        """Return those of the first remote shards that have no index, because opening them reads them an extra time."""
        if not self._is_remote or self._catalog is not None or self._members.indexes_copies:
            return []
        with using(self._access):
            return [url for url in self._matching()[:_PROBED] if find_index(url, version_of(url)).index is None]

    def _indexed(self) -> Catalog:
        if self._catalog is None:
            urls, self._found = self._matching(), None  # if opening fails, the globs are matched again
            with using(self._access):
                members = self._members
                self._catalog = Shared(open_catalog(urls, relative_names(urls), members.has_copy, members.copy_of))
            _warn_of_dots(self._catalog.value)
        return self._catalog.value

    def _matching(self) -> list[str]:
        """Return the URLs of the shards with globs expanded."""
        if self._catalog is not None:
            return list(self._catalog.value.urls)
        if self._found is None:
            with using(self._access):
                forget_listings(self._urls.value)
                self._found = Shared(matching_urls(self._urls.value))
        return self._found.value

    def _seen(self) -> dict[str, Seen]:
        catalog = self._indexed()
        numbers = np.bincount(catalog.shards, minlength=len(catalog.urls)).tolist()
        known = zip(catalog.urls, catalog.versions, numbers, strict=True)
        return {url: Seen(version.size, number) for url, version, number in known}

    def _all_of(self, field: str) -> Iterator[Any]:
        catalog = self._indexed()
        for index in range(len(catalog)):
            if self._is_remote and index % _AT_ONCE == 0:
                window = range(index, min(index + _AT_ONCE, len(catalog)))
                self._members.prefetch_fields(catalog, window, {field})
            yield self._read(catalog, index, field)

    def _column(self, catalog: Catalog, field: str) -> Column:
        places = catalog.fields[field]
        what = f"reading member {field!r}"
        if isinstance(places, Places):
            return Column(lambda sample: self._read(catalog, sample.position, field), what=what)
        return Column(
            lambda sample: int(places[sample.position]),
            what=what,
            is_cheap=True,
            many=lambda block: places[block.positions].tolist(),
        )

    def _read(self, catalog: Catalog, index: int, field: str) -> Any:
        places = catalog.fields[field]
        if not isinstance(places, Places):
            return int(places[index])
        content = self._members.read(catalog, index, field, places)
        if len(content) < places.sizes[index]:
            raise DataError(
                f"Shard {catalog.urls[catalog.shards[index]]!r} is truncated: expected {places.sizes[index]} bytes at "
                f"offset {places.offsets[index]}, but found {len(content)}. Replace it, or `kdpipes index` it again."
            )
        try:
            return decode_member(field, content, decode=self._decode)
        except ValueError as error:
            what = f"member {field!r} of sample {catalog.key(index)!r} in {self._place_of(index, [field])}"
            raise DataError(f"{what} cannot be decoded: {error}. {REPLACE_FILE}") from error
