"""The indexes of many shards: found beside them or in the local cache, made where they are missing, and joined."""

from __future__ import annotations

import hashlib
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError, FieldError, masked
from kdpipes.core.progress import shown_if_slow
from kdpipes.storage.catalog_file import CatalogFile, Joined, KnownIndexes, cached_index
from kdpipes.storage.columns import Column, ColumnBuilder
from kdpipes.storage.files import (
    Version,
    make_cache_folder,
    md5_of,
    read_url,
    version_of,
    write_url,
)
from kdpipes.storage.memory import read_span
from kdpipes.storage.remote import RangeReader, Span
from kdpipes.storage.retries import NUM_TRIES, NUM_TRIES_WITH_COPY, is_rejected, retried
from kdpipes.storage.shard_index import IndexBuilder, JoinedIndexes, Places, ShardIndex
from kdpipes.storage.shared import PackedStrings
from kdpipes.storage.tar import Member, add_sample, compression_of, ends_early, index_shard, is_index_of, read_members
from kdpipes.storage.threads import Threads
from kdpipes.storage.urls import is_local

__all__ = [
    "Catalog",
    "IndexFound",
    "IndexRecorder",
    "IndexState",
    "ShardSeen",
    "find_index",
    "index_again",
    "index_beside",
    "index_url",
    "keep_index",
    "make_index",
    "open_catalog",
    "survey_shards",
]

IndexState = Literal["fresh", "stale", "damaged", "missing"]
Result = TypeVar("Result")
HasCopy = Callable[[str, Version], bool]
CopyOf = Callable[[str, Version], str | None]

_NUM_THREADS, _NUM_THREADS_LOCAL = 16, 4
_SMALL = 1 << 18  # bytes of storage that are read in the time of a request
_AT_ONCE = 512  # samples whose members are requested at a time
_NUM_READINGS = 3  # of a shard that arrives damaged
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Catalog:
    """Where each field of each sample of some shards lies.

    Args:
        names: The names of the shards in keys.
        versions: Of the shards, when they were opened.
        shards: The number of the shard of each sample, `[n]`.
        short_keys: The samples' keys in their shards, `[n]`.
        fields: The places of each field, `[n]`; or its values, `[n] int64`, where the indexes hold all of them: labels.
        urls: Of the shards.
        columns: Values of fields or of their entries that the indexes of all shards keep.
    """

    names: Sequence[str]
    versions: Sequence[Version]
    shards: NDArray[np.int32]
    short_keys: PackedStrings
    fields: dict[str, Places | NDArray[np.int64]]
    urls: Sequence[str] = ()
    columns: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def gaps(self) -> frozenset[str]:
        """The fields that some samples lack."""
        places = {name: known for name, known in self.fields.items() if isinstance(known, Places)}
        return frozenset(name for name, known in places.items() if len(known.offsets) and known.offsets.min() < 0)

    def key(self, index: int) -> str:
        """Return the key of a sample: the shard's name, a slash and its key there."""
        return f"{self.names[int(self.shards[index])]}/{self.short_keys[index]}"


def open_catalog(
    urls: Sequence[str],
    names: Sequence[str],
    has_copy: HasCopy = lambda url, version: False,
    copy_of: CopyOf = lambda url, version: None,
) -> Catalog:
    """Return the catalog of shards; shards without a matching index are indexed, and the index is kept.

    Args:
        urls: The URLs of the shards.
        names: The names of the shards in keys.
        has_copy: Whether a version of a shard is in the local cache. If its index is there as well, the shard opens
            even if its storage cannot be reached.
        copy_of: Returns the path of a copy of a remote shard that has no index, which may be made now, or None. The
            copy is indexed, so that no byte is read twice.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard cannot be read.
    """
    joined = _joined(urls, {}, {}, has_copy, copy_of) if all(map(is_local, urls)) else _shared(urls, has_copy, copy_of)
    return Catalog(names, joined.versions, joined.shards, joined.keys, joined.fields, urls, joined.columns)


def _shared(urls: Sequence[str], has_copy: HasCopy, copy_of: CopyOf) -> Joined:
    """Return the joined indexes of remote shards, made by one process of the machine and mapped by the others."""
    file, versions = CatalogFile(urls), dict[str, Version]()

    @cache
    def known() -> KnownIndexes:
        with suppress(DataError):  # which opening each shard explains
            return KnownIndexes.of(urls)
        return KnownIndexes()

    def is_current(joined: Joined) -> bool:
        if joined.sources != known().sources:
            return False
        then = dict(zip(urls, joined.versions, strict=True))
        unsure = [url for url in urls if not known().confirms(url, then[url])]
        try:
            read = partial(version_of, num_tries=NUM_TRIES_WITH_COPY)
            versions.update(zip(unsure, _in_order(read, unsure) if unsure else (), strict=True))
        except (DataError, FileNotFoundError):
            return False
        return all(version.tag and version == then[url] for url, version in versions.items())

    with file.held():
        joined = file.find(is_current)
        if joined is None:
            joined = _joined(urls, known().read(), versions, has_copy, copy_of)
            joined = file.keep(joined._replace(sources=known().sources))
        return joined


def _joined(
    urls: Sequence[str],
    known: Mapping[str, ShardIndex],
    versions: Mapping[str, Version],
    has_copy: HasCopy,
    copy_of: CopyOf,
) -> Joined:
    joined = JoinedIndexes(len(urls))
    is_offline = threading.Event()

    def find(url: str) -> ShardIndex:
        index = known.get(url)
        if index is not None and not ends_early(index, url):
            return index
        return _found_or_made(url, versions.get(url), has_copy, copy_of, is_offline)

    for index in shown_if_slow(_in_order(find, urls), len(urls), "indexing", "shards"):
        joined.add(index)
    return Joined(joined.versions, joined.shards(), joined.keys(), joined.fields(), joined.columns())


def _in_order(read: Callable[[str], Result], urls: Sequence[str]) -> Iterator[Result]:
    """Yield what `read` returns of each shard; threads, which do not delay the end of the process, read ahead."""
    num_threads = _NUM_THREADS_LOCAL if all(map(is_local, urls)) else _NUM_THREADS
    threads, num_ahead = Threads(min(num_threads, len(urls)), "kdpipes-indexes"), 4 * num_threads
    rest, coming = iter(urls), deque[Future[Result]]()
    try:
        while True:
            coming.extend(threads.submit(partial(read, url)) for url in islice(rest, num_ahead - len(coming)))
            if not coming:
                return
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()


def _found_or_made(
    url: str, seen: Version | None, has_copy: HasCopy, copy_of: CopyOf, is_offline: threading.Event
) -> ShardIndex:
    copy = None if is_local(url) else _copied(url, has_copy)
    if copy is not None and is_offline.is_set():
        return copy
    try:
        version = seen or version_of(url, num_tries=NUM_TRIES if copy is None else NUM_TRIES_WITH_COPY)
    except DataError as error:
        if copy is None or is_rejected(error):
            raise
        if not is_offline.is_set():
            is_offline.set()
            _log.warning("%s. The local copies are used.", str(error).rstrip("."))
        return copy
    found = find_index(url, version)
    for damage in found.damage:
        _log.warning("%s It is made anew.", damage)
    if found.index is None:
        return _index_of_copy(url, version, None if is_local(url) else copy_of(url, version)) or make_index(
            url, version
        )
    if not _is_of(found.index, version):
        _keep(found.index, url, version)
    return replace(found.index, version=version)


def _copied(url: str, has_copy: Callable[[str, Version], bool]) -> ShardIndex | None:
    """Return the index of the local copy of a shard; None unless both are in the local cache."""
    content = _content_of(cached_index(url))
    try:
        index = None if content is None else ShardIndex.from_bytes(content, url)
    except DataError:
        return None
    return index if index is not None and has_copy(url, index.version) else None


def _index_of_copy(url: str, version: Version, path: str | None) -> ShardIndex | None:
    """Index the copy of a remote shard, and keep the index beside the shard and in the local cache."""
    if path is None:
        return None
    try:
        index = index_shard(path, version, with_checksums=True)
    except (DataError, OSError) as error:  # another process may have removed the copy; the error must name the shard
        _log.info("%s", error)
        return None
    _keep(index, url, version)
    _put(url, index)
    return index


class IndexRecorder:
    """Records the index of a remote shard while a stream reads it, and keeps it in the local cache at its end.

    A checksum of each member costs 0.45 s of CPU for each GB, once on each machine: without them, damage of members
    that are later read by ranges would not be noticed.

    Args:
        url: Of the shard.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._version: Version | None = None
        self._builder = IndexBuilder()

    def begin(self, version: Version) -> None:
        """Record a version of the shard, unless its index is already kept."""
        is_known = not version.tag or _copied(self._url, lambda _, known: known == version) is not None
        self._version = None if is_known else version

    def add(self, group: Sequence[tuple[Member, bytes]]) -> None:
        """Add the members of the next sample."""
        if self._version is not None:
            add_sample(self._builder, group)

    def end(self) -> None:
        """Keep the index; all of the shard has been read."""
        if self._version is not None:
            _keep(self._builder.index(self._version), self._url, self._version)


def keep_index(url: str, version: Version) -> None:
    """Keep the index of a shard in the local cache, so that a copy of the shard opens without its storage."""
    if _copied(url, lambda _, known: known == version) is None:
        index = find_index(url, version).index
        if index is not None:
            _keep(index, url, version)


def _keep(index: ShardIndex, url: str, version: Version) -> None:
    """Write an index that fits a version of a shard to the local cache, so that it need not be compared again."""
    with suppress(Exception):  # the cache may be read-only
        _write(cached_index(url), replace(index, version=version).to_bytes())


def make_index(
    url: str, version: Version | None = None, *, with_checksums: bool = False, columns: Sequence[str] = ()
) -> ShardIndex:
    """Index a shard, and write the index beside it, or to the local cache if the storage is read-only.

    Args:
        url: Of the tar.
        version: Of the tar, if it is known.
        with_checksums: Whether to read all contents, too, and keep their checksums.
        columns: The names of the columns to keep.
    """
    known = version or version_of(url)
    if is_local(url):
        index = index_shard(url, known, with_checksums=with_checksums, columns=columns)
    else:
        index = _index_remote(url, known, columns)
    _put(url, index)
    return index


def _put(url: str, index: ShardIndex) -> None:
    """Write an index beside its shard, or to the local cache if the storage is read-only."""
    content = index.to_bytes()
    for place in (index_url(url), cached_index(url)):
        try:
            _write(place, content)
            break
        except Exception as error:  # of any file system, which may be read-only
            _log.info("%s", masked(f"The index of {url} cannot be kept as {place}: {error}"))
    if place != cached_index(url) and Path(cached_index(url)).exists():  # which is looked at first
        _keep(index, url, index.version)


def index_again(url: str, *, with_checksums: bool, columns: Sequence[str]) -> ShardIndex:
    """Index a shard for `kdpipes index`: anew, except that an index of the shard as it is now is kept for its columns.

    Columns that an earlier index keeps stay. If an index lacks only columns, and members are large, only the members
    that the columns need are read.

    Args:
        url: Of the tar.
        with_checksums: Whether to read all contents of a local shard, too, and keep their checksums.
        columns: The names of the columns to keep.
    """
    version = version_of(url)
    index = find_index(url, version).index
    if index is None or not (columns or index.columns) or (with_checksums and index.checksums() is None):
        return make_index(url, version, with_checksums=with_checksums, columns=columns)
    missing = [name for name in columns if name not in index.columns]
    every = [*index.columns, *missing]
    # Requests for small members between small members take longer than the whole shard.
    if not columns or (missing and not is_local(url) and len(index.keys) * _SMALL > version.size):
        return make_index(url, version, with_checksums=with_checksums, columns=every)
    if missing:
        try:
            found = _read_columns(url, index, missing)
        except DataError as error:  # a member may have arrived damaged
            _log.info("%s", error)
            return make_index(url, version, with_checksums=with_checksums, columns=every)
        index = replace(index, version=version, columns={**index.columns, **found})
        _put(url, index)
    return index


def _read_columns(url: str, index: ShardIndex, names: Sequence[str]) -> dict[str, Column]:
    """Return columns of an indexed shard from the members that they need, of which many are requested at a time."""
    kept, ranges = ColumnBuilder(url, names), RangeReader()
    places = {name: known for name, known in index.fields.items() if kept.needs(name)}

    def spans(sample: int) -> Iterator[tuple[str, Span]]:
        for name, known in places.items():
            start, size = int(known.offsets[sample]), int(known.sizes[sample])
            if start >= 0:
                yield name, Span(url, start, start + size)

    num_samples = len(index.keys)
    for sample in range(num_samples):
        if sample % _AT_ONCE == 0 and not is_local(url):
            coming = range(sample + _AT_ONCE if sample else 0, min(sample + 2 * _AT_ONCE, num_samples))
            ranges.prefetch(span for later in coming for _, span in spans(later))
        contents = {}
        for name, span in spans(sample):
            is_here = is_local(url)
            content = read_span(url, span.start, span.stop - span.start) if is_here else ranges.read(span)
            checksums = places[name].checksums
            if checksums is not None and zlib.crc32(content) != int(checksums[sample]):
                raise DataError(f"Member {name!r} of sample {index.keys[sample]!r} in {url!r} is damaged.")
            contents[name] = content
        kept.add(index.keys[sample], contents)
    return kept.columns()


def _index_remote(url: str, version: Version, columns: Sequence[str]) -> ShardIndex:
    """Index a remote shard; if it arrives damaged, judging by its structure or its MD5, it is read again."""
    due, seen = md5_of(version), set[str]()

    def read() -> tuple[ShardIndex, str]:
        checksum = hashlib.md5(usedforsecurity=False)
        return index_shard(url, version, columns=columns, checksum=checksum if due else None), checksum.hexdigest()

    for _ in range(_NUM_READINGS):
        index, found = retried(read, num_tries=_NUM_READINGS, final=(FieldError,))
        if due in (None, found) or found in seen:  # the same bytes twice: the tag is not a checksum
            return index
        seen.add(found)
    raise DataError(f"Shard {url!r} came damaged {_NUM_READINGS} times: its MD5 is {found}, and its tag says {due}.")


def index_url(url: str) -> str:
    """Return the URL of the index of a shard, which lies beside it.

    >>> index_url("s3://bucket/birds-000.tar")
    's3://bucket/birds-000.tar.index'
    """
    path, separator, rest = url.partition("::")
    path, mark, query = path.partition("?") if path.startswith("http") else (path, "", "")
    return f"{path}.index{mark}{query}{separator}{rest}"


def index_beside(url: str) -> ShardIndex | None:
    """Return the index beside a shard, if both exist and it describes the shard as it is now, or a copy of it."""
    try:
        content, version = read_url(index_url(url)), version_of(url)
    except FileNotFoundError:
        return None
    try:
        index = ShardIndex.from_bytes(content, index_url(url))
    except DataError as error:
        _log.warning("%s The shard is taken for unfinished.", error)
        return None
    fits = _is_of(index, version) or (_may_fit(index.version, version, index_url(url)) and is_index_of(index, url))
    return index if fits or _is_proven(index, url, version) else None


def _is_proven(index: ShardIndex, url: str, version: Version) -> bool:
    """Return whether a shard has the contents whose checksums its index holds; all of the shard is read."""
    if index.version.size != version.size:
        return False
    try:
        found = index_shard(url, version, with_checksums=True)
    except DataError:
        return False
    return replace(found, version=index.version).to_bytes() == index.to_bytes()


def _is_of(index: ShardIndex, version: Version) -> bool:
    return bool(version.tag) and index.version == version


def _write(place: str, content: bytes) -> None:
    path = Path(place)
    if is_local(place) and path.suffix == ".index" and path.parent.name == "indexes":
        make_cache_folder(path.parent)
    write_url(place, content)


@dataclass(frozen=True)
class IndexFound:
    """The index of a shard, beside it or in the local cache.

    Args:
        state: "fresh": it describes the shard as it is now; "stale": another one; "damaged"; "missing".
        index: If it is fresh. Its version may be that of the shard's original, of which shard and index are copies.
        damage: Why existing indexes cannot be read.
    """

    state: IndexState
    index: ShardIndex | None
    damage: Sequence[DataError] = ()


def find_index(url: str, version: Version) -> IndexFound:
    """Look for a shard's index; nothing is written.

    Args:
        url: Of the tar.
        version: Of the tar.

    Raises:
        DataError: The storage cannot be reached.
    """
    indexes: list[tuple[str, ShardIndex]] = []
    damage: list[DataError] = []
    places = index_url(url), cached_index(url)
    for place in places if is_local(url) else reversed(places):  # a request less
        content = _content_of(place)
        if content is None:
            continue
        try:
            index = ShardIndex.from_bytes(content, place)
        except DataError as error:
            damage.append(error)
            continue
        if _is_of(index, version) and not ends_early(index, url):
            return IndexFound("fresh", index, damage)
        indexes.append((place, index))
    fitting = [index for place, index in indexes if _may_fit(index.version, version, place)]
    fit = next((index for index in fitting if is_index_of(index, url) and not ends_early(index, url)), None)
    otherwise: IndexState = "stale" if indexes else "damaged" if damage else "missing"
    return IndexFound("fresh" if fit is not None else otherwise, fit, damage)


def _content_of(place: str) -> bytes | None:
    try:
        return read_url(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError as error:
        if is_local(place) or is_rejected(error):
            return None  # some stores answer "forbidden" for missing files
        raise


def _may_fit(then: Version, now: Version, sidecar: str) -> bool:
    """Return whether an index may describe a shard: if both files were copied, the shard has another tag."""
    kinds = [version.tag.partition(":")[0] for version in (then, now)]
    if then.size != now.size or then.tag == now.tag or kinds[0] != kinds[1]:
        return then.size == now.size
    return kinds == ["changed", "changed"] and _changed(version_of(sidecar)) >= _changed(now)


def _changed(version: Version) -> int:
    return int(version.tag.partition(":")[2])


@dataclass(frozen=True)
class ShardSeen:
    """The contents of a shard.

    Args:
        url: Of the shard.
        num_bytes: Its size.
        state: Of its index: "fresh", "stale" (of another shard), "damaged", "missing"; "impossible" for a compressed
            tar, which has no positions.
        index: The contents; None if the shard was not read. Of a compressed tar, the sizes are right and the offsets
            mean nothing.
    """

    url: str
    num_bytes: int
    state: Literal["fresh", "stale", "damaged", "missing", "impossible"]
    index: ShardIndex | None


def survey_shards(urls: Sequence[str], *, scan: bool = True) -> Iterator[ShardSeen]:
    """Yield the contents of each shard, in order. Nothing is written, beside the shards or to the local cache.

    Args:
        urls: Of tars, which may be compressed.
        scan: Whether to read shards without a fresh index: of local plain tars the headers, of others everything.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard cannot be read.
    """
    return _in_order(partial(_seen, scan=scan), urls)


def _seen(url: str, scan: bool) -> ShardSeen:
    version = version_of(url)
    if compression_of(url) is not None:
        return ShardSeen(url, version.size, "impossible", _read_through(url) if scan else None)
    found = find_index(url, version)
    if found.index is not None or not scan:
        return ShardSeen(url, version.size, found.state, found.index)
    index = index_shard(url, version) if is_local(url) else _read_through(url)
    return ShardSeen(url, version.size, found.state, index)


def _read_through(url: str) -> ShardIndex:
    """Return the contents of a tar that may be compressed; offsets are those in the unpacked tar."""
    builder = IndexBuilder()
    for group in read_members(url):
        add_sample(builder, group)
    return builder.index(Version(-1, ""))
