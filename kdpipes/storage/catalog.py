"""Find the indexes of many shards, create missing ones, and join them.

The indexes of remote shards are also in one object per folder, so that many shards open with few requests.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeVar

from kdpipes.core.errors import DataError, FieldError
from kdpipes.core.messages import logger, shown_if_slow
from kdpipes.core.secrets import masked
from kdpipes.storage.access import NUM_TRIES, NUM_TRIES_WITH_COPY, is_rejected, retried
from kdpipes.storage.codec import DamagedError
from kdpipes.storage.decoding import Column, ColumnBuilder
from kdpipes.storage.files import crc32, if_there, list_folder, read_url, version_of, write_url
from kdpipes.storage.index_home import (
    IndexState,
    current_index,
    find_index,
    index_homes,
    index_url,
    joined_once,
    keep,
    kept_index,
    put_index,
    read_index,
)
from kdpipes.storage.jobs import in_parallel
from kdpipes.storage.readers import Version, md5_of
from kdpipes.storage.remote import RangeReader, Span
from kdpipes.storage.shard_index import Catalog, IndexBuilder, ShardIndex
from kdpipes.storage.tar import Group, add_sample, ends_early, index_shard, is_compressed, read_members
from kdpipes.storage.urls import is_local

Result = TypeVar("Result")
HasCopy = Callable[[str, Version], bool]
CopyOf = Callable[[str, Version], str | None]

DATA_SET_INDEX = "kdpipes.index"  # a tar of the indexes beside it
_FEW = 2  # the minimum number of shards in a folder to use its joint index
_CHECKED = 4_000  # the maximum number of shards in a folder to check for changes with a listing
_NUM_THREADS = 16
_NUM_THREADS_LOCAL = 4
_SMALL = 1 << 18  # number of bytes that storage reads in the time of one request
_AT_ONCE = 512  # number of samples whose members are requested at a time
_NUM_READINGS = 3  # attempts to read a shard that arrives damaged
_log = logger(__name__)


def open_catalog(
    urls: Sequence[str],
    names: Sequence[str],
    has_copy: HasCopy = lambda url, version: False,
    copy_of: CopyOf = lambda url, version: None,
) -> Catalog:
    """Return the catalog of shards. Shards without a matching index are indexed, and their index is stored.

    Args:
        urls: The URLs of the shards.
        names: The names of the shards in keys.
        has_copy: A function that returns whether a version of a shard is in the local cache. If its index is cached
            too, the shard can be opened even if its storage cannot be reached.
        copy_of: A function that returns the path of a local copy of a remote shard without index, or None; it may
            create the copy. The copy is indexed, so that no byte is read twice.
    """
    is_here = all(map(is_local, urls))
    joined = _joined(urls, {}, {}, has_copy, copy_of) if is_here else _shared(urls, has_copy, copy_of)
    return replace(joined, names=names, urls=urls)


def _shared(urls: Sequence[str], has_copy: HasCopy, copy_of: CopyOf) -> Catalog:
    """Return the joined indexes of remote shards. One local process joins them, and the others map its file."""
    versions = dict[str, Version]()

    @cache
    def known() -> KnownIndexes:
        with suppress(DataError):  # opening the shards one by one reports the error
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

    return Catalog.of(shown_if_slow(in_order(find, urls), len(urls), "indexing", "shard"))


def in_order(read: Callable[[str], Result], urls: Sequence[str]) -> Iterator[Result]:
    """Yield the result of `read` for each shard, in order. Threads read ahead."""
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
    """Records the index of a remote shard while a stream reads it, and stores it in the local cache at the end.

    Member checksums cost 0.45 s of CPU per GB, once on each machine. Without them, damaged members in later range reads
    would go unnoticed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._version: Version | None = None
        self._builder = IndexBuilder()

    def begin(self, version: Version) -> None:
        """Start recording a version of the shard, unless its index is already stored."""
        kept = kept_index(self._url)
        is_kept = kept is not None and kept.version == version
        self._version = version if version.tag and not is_kept else None

    def add(self, group: Group) -> None:
        """Record the members of the next sample."""
        if self._version is not None:
            add_sample(self._builder, group)

    def end(self) -> None:
        """Store the index after the whole shard has been read."""
        if self._version is not None:
            keep(self._url, self._builder.index(self._version))


def make_index(
    url: str, version: Version | None = None, *, with_checksums: bool = False, columns: Sequence[str] = ()
) -> ShardIndex:
    """Index a shard, and write the index beside it, or to the local cache if the storage is read-only.

    `with_checksums` also reads all contents of a local shard and stores their checksums. Indexes of remote shards
    always have checksums.
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

    Columns in an earlier index are preserved. If only columns are missing in the index of a remote shard with large
    members, only the members needed for these columns are read.
    """
    version = version_of(url)
    index = find_index(url, version).index
    if index is None or not (columns or index.columns) or (with_checksums and index.checksums() is None):
        return make_index(url, version, with_checksums=with_checksums, columns=columns)
    every = list(dict.fromkeys((*index.columns, *columns)))
    missing = every[len(index.columns) :]
    if missing and not is_local(url) and len(index.keys) * _SMALL <= version.size:
        with suppress(DataError):  # a member may arrive damaged
            index = replace(index, version=version, columns={**index.columns, **_read_columns(url, index, missing)})
            put_index(url, index)
            return index
    return make_index(url, version, with_checksums=with_checksums, columns=every) if missing or not columns else index


def _read_columns(url: str, index: ShardIndex, names: Sequence[str]) -> dict[str, Column]:
    """Return columns of a remote shard, read from the members that contain them, with many requests at a time."""
    kept = ColumnBuilder(url, names)
    ranges = RangeReader()
    places = {name: known for name, known in index.fields.items() if kept.needs(name)}
    for begin in range(0, len(index.keys), _AT_ONCE):
        window = range(len(index.keys))[begin : begin + _AT_ONCE]
        spans = {
            (sample, name): Span(url, int(known.offsets[sample]), int(known.offsets[sample] + known.sizes[sample]))
            for sample in window
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
        for sample in window:
            kept.add(index.keys[sample], contents[sample])
    return kept.columns()


def _index_remote(url: str, version: Version, columns: Sequence[str]) -> ShardIndex:
    """Index a remote shard. If its structure or MD5 shows that it arrived damaged, read it again."""
    expected = md5_of(version)
    digests = set[str]()

    def read() -> tuple[ShardIndex, str]:
        checksum = hashlib.md5(usedforsecurity=False)
        return index_shard(url, version, columns=columns, checksum=checksum if expected else None), checksum.hexdigest()

    for _ in range(_NUM_READINGS):
        index, digest = retried(read, num_tries=_NUM_READINGS, final=(FieldError,))
        if expected in (None, digest) or digest in digests:  # if the same bytes arrive twice, the tag is not a checksum
            return index
        digests.add(digest)
    raise DataError(
        f"Shard {url!r} came damaged {_NUM_READINGS} times: its MD5 is {digest}, and its tag says {expected}."
    )


def index_beside(url: str) -> ShardIndex | None:
    """Return the index beside a shard, if both exist and it describes the current shard or its original."""
    try:
        version = version_of(url)
        index = read_index(index_url(url))
    except FileNotFoundError:
        return None
    except DamagedError as error:
        _log.warning("%s The shard is taken for unfinished.", error)
        return None
    if index is None or index.version.size != version.size:
        return None
    if version.tag and index.version == version:
        return index
    with suppress(DataError):  # the shard was copied: this reads all of it
        rebuilt = index_shard(url, version, with_checksums=True)
        if replace(rebuilt, version=index.version).to_bytes() == index.to_bytes():
            return index
    return None


@dataclass(frozen=True)
class ShardSeen:
    """The result of `survey_shards` for one shard.

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
    """Yield the contents of each tar, compressed or not, in order, without writing anything.

    With `scan`, shards without a current index are read: the headers of local plain tars, and all of other shards.
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


@dataclass(frozen=True)
class KnownIndexes:
    """The indexes of remote shards that can be read without one request per shard.

    These indexes are stored in one object per folder, or in the local cache. A listing of the folder confirms that they
    describe the current shards. A folder with very many shards is not listed; instead, members are verified when they
    are read.

    Args:
        objects: The shards of each folder that has such an object.
        others: The shards of other folders, whose indexes are all in the local cache.
        listed: The versions of the shards in listings. Some file systems list tags that differ from those of a stat.
        unlisted: The shards that are assumed to match their object, because their folder is not listed.
        sources: The versions of the objects.
    """

    objects: dict[str, list[str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    listed: dict[str, Version] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)
    sources: list[Version] = field(default_factory=list)

    @classmethod
    def of(cls, urls: Sequence[str]) -> KnownIndexes:
        """Look for indexes without reading them."""
        indexes = cls()
        for folder, shards in _by_folder(urls).items():
            source = if_there(version_of, f"{folder}/{DATA_SET_INDEX}")
            is_listed = len(shards) <= _CHECKED
            if source is None and not (is_listed and all(Path(index_homes(url)[0]).exists() for url in shards)):
                continue
            try:
                names = list_folder(folder) if is_listed else {}
            except (DataError, FileNotFoundError, NotImplementedError) as error:
                _log.info("The shards in %s are not listed: %s", masked(folder), error)
                continue
            indexes.listed.update({url: names[name] for url in shards if (name := url.rpartition("/")[2]) in names})
            if source is None:
                indexes.others.extend(shards)
            else:
                indexes.objects[folder] = shards
                indexes.sources.append(source)
                indexes.unlisted.update(() if is_listed else shards)
        return indexes

    def confirms(self, url: str, version: Version) -> bool:
        """Return whether a shard is known to have a version."""
        return url in self.unlisted or (bool(version.tag) and self.listed.get(url) == version)

    def read(self) -> dict[str, ShardIndex]:
        """Return the confirmed indexes."""
        indexes: dict[str, ShardIndex] = {}
        for folder, urls in self.objects.items():
            try:
                indexes.update(_indexes_in(read_url(f"{folder}/{DATA_SET_INDEX}"), urls))
            except (DataError, tarfile.TarError, FileNotFoundError) as error:
                _log.info("The index of the dataset in %s is not used: %s", masked(folder), error)
        indexes.update((url, index) for url in self.others if (index := kept_index(url)) is not None)
        return {url: index for url, index in indexes.items() if self.confirms(url, index.version)}


def _indexes_in(content: bytes, urls: Iterable[str]) -> Iterator[tuple[str, ShardIndex]]:
    by_name = {f"{url.rpartition('/')[2]}.index": url for url in urls}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            url = by_name.get(member.name)
            file = tar.extractfile(member) if member.name in by_name else None
            if url is not None and file is not None:
                yield url, ShardIndex.from_bytes(file.read(), f"{url}.index")


def write_data_set_indexes(indexes: dict[str, ShardIndex]) -> list[str]:
    """Write the indexes of remote shards into one object per folder, and return the URLs of the objects."""
    objects = []
    for folder, urls in _by_folder(indexes).items():
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for url in urls:
                content = indexes[url].to_bytes()
                entry = tarfile.TarInfo(f"{url.rpartition('/')[2]}.index")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        objects.append(f"{folder}/{DATA_SET_INDEX}")
        write_url(objects[-1], file.getvalue())
    return objects


def _by_folder(urls: Iterable[str]) -> dict[str, list[str]]:
    """Group remote shards by folder, omitting folders that have only one or cannot be listed."""
    folders = defaultdict(list)
    for url in urls:
        if "://" in url and "::" not in url and not url.startswith("http") and "?" not in url:
            folders[url.rpartition("/")[0]].append(url)
    return {folder: shards for folder, shards in folders.items() if len(shards) >= _FEW}
