"""The indexes of many shards: found where they lie, made where they are missing, and joined."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, TypeVar

from kdpipes.core.errors import DataError, FieldError
from kdpipes.core.messages import logger
from kdpipes.core.progress import shown_if_slow
from kdpipes.storage.columns import Column, ColumnBuilder
from kdpipes.storage.files import crc32, version_of
from kdpipes.storage.index_home import (
    IndexState,
    KnownIndexes,
    current_index,
    find_index,
    index_url,
    joined_once,
    keep,
    kept_index,
    put_index,
)
from kdpipes.storage.jobs import in_parallel
from kdpipes.storage.readers import Version, md5_of
from kdpipes.storage.remote import RangeReader, Span
from kdpipes.storage.retries import NUM_TRIES, NUM_TRIES_WITH_COPY, is_rejected, retried
from kdpipes.storage.shard_index import Catalog, IndexBuilder, ShardIndex
from kdpipes.storage.tar import Group, add_sample, ends_early, index_shard, is_compressed, read_members
from kdpipes.storage.urls import is_local

Result = TypeVar("Result")
HasCopy = Callable[[str, Version], bool]
CopyOf = Callable[[str, Version], str | None]

_NUM_THREADS = 16
_NUM_THREADS_LOCAL = 4
_SMALL = 1 << 18  # bytes of storage that are read in the time of a request
_AT_ONCE = 512  # samples whose members are requested at a time
_NUM_READINGS = 3  # of a shard that arrives damaged
_log = logger(__name__)


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
        copy_of: A function that returns the path of a copy of a remote shard that has no index, which may be made now,
            or None. The copy is indexed, so that no byte is read twice.
    """
    is_here = all(map(is_local, urls))
    joined = _joined(urls, {}, {}, has_copy, copy_of) if is_here else _shared(urls, has_copy, copy_of)
    return replace(joined, names=names, urls=urls)


def _shared(urls: Sequence[str], has_copy: HasCopy, copy_of: CopyOf) -> Catalog:
    """Return the joined indexes of remote shards, made by one process of the machine and mapped by the others."""
    versions = dict[str, Version]()

    @cache
    def known() -> KnownIndexes:
        with suppress(DataError):  # which opening each shard explains
            return KnownIndexes.of(urls)
        return KnownIndexes()

    def is_current(joined: Catalog) -> bool:
        if joined.sources != known().sources:
            return False
        then = dict(zip(urls, joined.versions, strict=True))
        unsure = [url for url in urls if not known().confirms(url, then[url])]
        try:
            read = partial(version_of, num_tries=NUM_TRIES_WITH_COPY)
            versions.update(zip(unsure, in_order(read, unsure), strict=True))
        except (DataError, FileNotFoundError):
            return False
        return all(version.tag and version == then[url] for url, version in versions.items())

    def join() -> Catalog:
        joined = _joined(urls, known().read(), versions, has_copy, copy_of)
        return replace(joined, sources=known().sources)

    return joined_once(urls, is_current, join)


def _joined(
    urls: Sequence[str],
    known: Mapping[str, ShardIndex],
    versions: Mapping[str, Version],
    has_copy: HasCopy,
    copy_of: CopyOf,
) -> Catalog:
    is_offline = threading.Event()

    def find(url: str) -> ShardIndex:
        index = known.get(url)
        if index is not None and not ends_early(index, url):
            return index
        return _found_or_made(url, versions.get(url), has_copy, copy_of, is_offline)

    return Catalog.of(shown_if_slow(in_order(find, urls), len(urls), "indexing", "shard"), len(urls))


def in_order(read: Callable[[str], Result], urls: Sequence[str]) -> Iterator[Result]:
    """Yield what `read` returns of each shard; threads read ahead."""
    return in_parallel(read, urls, _NUM_THREADS_LOCAL if all(map(is_local, urls)) else _NUM_THREADS, waits=False)


def _found_or_made(
    url: str, seen: Version | None, has_copy: HasCopy, copy_of: CopyOf, is_offline: threading.Event
) -> ShardIndex:
    copy = None if is_local(url) else kept_index(url)
    if copy is not None and not has_copy(url, copy.version):
        copy = None
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
    search = current_index(url, version)
    for damage in search.damage:
        _log.warning("%s It is made anew.", damage)
    if search.index is not None:
        return search.index
    path = None if is_local(url) else copy_of(url, version)
    if path is not None:
        try:
            index = index_shard(path, version, with_checksums=True)
        except (DataError, OSError) as error:  # another process may have removed the copy
            _log.info("%s", error)
        else:
            keep(url, index)
            put_index(url, index)
            return index
    return make_index(url, version)


class IndexRecorder:
    """Records the index of a remote shard while a stream reads it, and keeps it in the local cache at its end.

    A checksum of each member costs 0.45 s of CPU for each GB, once on each machine: without them, damage of members
    that are later read by ranges would not be noticed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._version: Version | None = None
        self._builder = IndexBuilder()

    def begin(self, version: Version) -> None:
        """Record a version of the shard, unless its index is already kept."""
        kept = kept_index(self._url)
        is_kept = kept is not None and kept.version == version
        self._version = version if version.tag and not is_kept else None

    def add(self, group: Group) -> None:
        """Add the members of the next sample."""
        if self._version is not None:
            add_sample(self._builder, group)

    def end(self) -> None:
        """Keep the index; all of the shard has been read."""
        if self._version is not None:
            keep(self._url, self._builder.index(self._version))


def make_index(
    url: str, version: Version | None = None, *, with_checksums: bool = False, columns: Sequence[str] = ()
) -> ShardIndex:
    """Index a shard, and write the index beside it, or to the local cache if the storage is read-only.

    `with_checksums` reads all contents of a local shard, too, and keeps their checksums; remote ones always have them.
    """
    known = version or version_of(url)
    if is_local(url):
        index = index_shard(url, known, with_checksums=with_checksums, columns=columns)
    else:
        index = _index_remote(url, known, columns)
    put_index(url, index)
    return index


def index_again(url: str, *, with_checksums: bool, columns: Sequence[str]) -> ShardIndex:
    """Index a shard for `kdpipes index`, reusing the columns of an index of its current version.

    Columns that an earlier index keeps stay. If an index of a remote shard lacks only columns, and members are large,
    only the members that the columns need are read.
    """
    version = version_of(url)
    index = find_index(url, version).index
    if index is None or not (columns or index.columns) or (with_checksums and index.checksums() is None):
        return make_index(url, version, with_checksums=with_checksums, columns=columns)
    every = list(dict.fromkeys((*index.columns, *columns)))
    missing = every[len(index.columns) :]
    if missing and not is_local(url) and len(index.keys) * _SMALL <= version.size:
        with suppress(DataError):  # a member may have arrived damaged
            index = replace(index, version=version, columns={**index.columns, **_read_columns(url, index, missing)})
            put_index(url, index)
            return index
    return make_index(url, version, with_checksums=with_checksums, columns=every) if missing or not columns else index


def _read_columns(url: str, index: ShardIndex, names: Sequence[str]) -> dict[str, Column]:
    """Return columns of a remote shard from the members that they need, of which many are requested at a time."""
    kept = ColumnBuilder(url, names)
    ranges = RangeReader()
    places = {name: known for name, known in index.fields.items() if kept.needs(name)}
    for begin in range(0, len(index.keys), _AT_ONCE):
        spans = {
            (sample, name): Span(url, int(known.offsets[sample]), int(known.offsets[sample] + known.sizes[sample]))
            for sample in range(begin, min(begin + _AT_ONCE, len(index.keys)))
            for name, known in places.items()
            if known.offsets[sample] >= 0
        }
        ranges.prefetch(spans.values())
        contents: dict[int, dict[str, bytes]] = defaultdict(dict)
        for (sample, name), span in spans.items():
            contents[sample][name] = ranges.read(span)
            checksums = places[name].checksums
            if checksums is not None and crc32(contents[sample][name]) != int(checksums[sample]):
                raise DataError(f"Member {name!r} of sample {index.keys[sample]!r} in {url!r} is damaged.")
        for sample in range(begin, min(begin + _AT_ONCE, len(index.keys))):
            kept.add(index.keys[sample], contents[sample])
    return kept.columns()


def _index_remote(url: str, version: Version, columns: Sequence[str]) -> ShardIndex:
    """Index a remote shard; if it arrives damaged, judging by its structure or its MD5, it is read again."""
    expected = md5_of(version)
    digests = set[str]()

    def read() -> tuple[ShardIndex, str]:
        checksum = hashlib.md5(usedforsecurity=False)
        return index_shard(url, version, columns=columns, checksum=checksum if expected else None), checksum.hexdigest()

    for _ in range(_NUM_READINGS):
        index, digest = retried(read, num_tries=_NUM_READINGS, final=(FieldError,))
        if expected in (None, digest) or digest in digests:  # the same bytes twice: the tag is not a checksum
            return index
        digests.add(digest)
    raise DataError(
        f"Shard {url!r} came damaged {_NUM_READINGS} times: its MD5 is {digest}, and its tag says {expected}."
    )


def index_beside(url: str) -> ShardIndex | None:
    """Return the index beside a shard, if both exist and it describes the shard as it is now, or a copy of it."""
    try:
        version = version_of(url)
    except FileNotFoundError:
        return None
    search = find_index(url, version, [index_url(url)])
    for damage in search.damage:
        _log.warning("%s The shard is taken for unfinished.", damage)
    return search.index or next((index for index in search.others if _is_proven(index, url, version)), None)


def _is_proven(index: ShardIndex, url: str, version: Version) -> bool:
    """Return whether a shard has the contents whose checksums its index holds; all of the shard is read."""
    if index.version.size != version.size:
        return False
    try:
        rebuilt = index_shard(url, version, with_checksums=True)
    except DataError:
        return False
    return replace(rebuilt, version=index.version).to_bytes() == index.to_bytes()


@dataclass(frozen=True)
class ShardSeen:
    """One shard as `survey_shards` found it.

    Args:
        url: The URL of the shard.
        num_bytes: The size of the shard in bytes.
        state: The state of its index: "stale" if it describes another shard, "impossible" for a compressed tar, which
            has no positions.
        index: The contents; None if the shard was not read. For a compressed tar, the offsets are meaningless.
    """

    url: str
    num_bytes: int
    state: IndexState | Literal["impossible"]
    index: ShardIndex | None


def survey_shards(urls: Sequence[str], *, scan: bool = True) -> Iterator[ShardSeen]:
    """Yield the contents of each tar, which may be compressed, in order. Nothing is written anywhere.

    `scan` reads shards without a fresh index: of local plain tars the headers, of others everything.
    """
    return in_order(partial(_seen, scan=scan), urls)


def _seen(url: str, scan: bool) -> ShardSeen:
    version = version_of(url)
    search = find_index(url, version)
    if search.index is not None or not is_compressed(url, version):
        index = index_shard(url, version) if search.index is None and scan else search.index
        return ShardSeen(url, version.size, search.state, index)
    builder = IndexBuilder()
    for group in read_members(url) if scan else ():
        add_sample(builder, group)
    return ShardSeen(url, version.size, "impossible", builder.index(version) if scan else None)
