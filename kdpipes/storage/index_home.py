"""The locations of what belongs to shards: their indexes, and the notes of the job that wrote them.

An index is beside its shard or in the local cache, where joined indexes are as well. Notes are beside the shards: the
job, the sizes of the shards and the class names.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger
from kdpipes.core.secrets import masked
from kdpipes.storage.access import NUM_TRIES, NUM_TRIES_WITH_COPY, TooLargeError
from kdpipes.storage.codec import DamagedError
from kdpipes.storage.files import (
    cache_folder,
    cached_name,
    if_there,
    locked,
    make_cache_folder,
    read_url,
    replace_file,
    stat_of,
    write_url,
)
from kdpipes.storage.readers import MAX_BYTES, Version
from kdpipes.storage.shard_index import Catalog, ShardIndex
from kdpipes.storage.tar import ends_early, is_index_of
from kdpipes.storage.urls import identity_of, is_local, split_chain

_MAX_BYTES = 1 << 32  # maximum size of the local cache; the joined indexes of 10^7 samples have several hundred MB
_LARGEST_HEADER = 1 << 24  # maximum bytes of an index besides its arrays
_BETWEEN_SWEEPS = 64  # writes between two cleanups of the local cache
_LONG_AGO_S = 24 * 3600.0
IndexState = Literal["fresh", "stale", "damaged", "missing"]
_FORMAT = 1  # of notes
_DIGITS = re.compile(r"\d+")
_num_kept = count()
_log = logger(__name__)


def index_homes(url: str) -> list[str]:
    """Return the possible locations of a shard's index in search order: beside the shard, and in the local cache.

    For a remote shard, the local cache comes first, because that may save a request.

    >>> index_homes("birds-000.tar")[0]
    'birds-000.tar.index'
    """
    homes = [index_url(url), _cached_index(url)]
    return homes if is_local(url) else homes[::-1]


def index_url(url: str) -> str:
    """Return the URL of the index beside a shard.

    >>> index_url("s3://bucket/birds-000.tar")
    's3://bucket/birds-000.tar.index'
    """
    path, separator, rest = split_chain(url)
    path, mark, query = path.partition("?") if path.startswith("http") else (path, "", "")
    return f"{path}.index{mark}{query}{separator}{rest}"


def _cached_index(url: str) -> str:
    """Return the path of a shard's index in the local cache."""
    absolute = os.path.abspath(url) if is_local(url) else url  # noqa: PTH100 - links are not resolved
    return str(cache_folder("indexes") / f"{cached_name(absolute)}.index")


@dataclass(frozen=True)
class IndexFound:
    """The index of a shard, beside it or in the local cache.

    Args:
        state: "fresh" if it describes the current shard; "stale" if it describes another version or shard; "damaged" or
            "missing".
        index: The index, if it is fresh. If shard and index were copied, its version is that of the original shard.
        damage: The errors of indexes that cannot be read.
    """

    state: IndexState
    index: ShardIndex | None
    damage: Sequence[DataError] = ()


def current_index(url: str, version: Version) -> IndexFound:
    """Look for a shard's index as `find_index` does. That of a copied shard is cached to avoid comparing it again."""
    search = find_index(url, version)
    if search.index is None or (version.tag and search.index.version == version):
        return search
    index = replace(search.index, version=version)
    keep(url, index)
    return replace(search, index=index)


def read_index(home: str, max_bytes: int = MAX_BYTES) -> ShardIndex | None:
    """Return the index at a URL; None if it is missing.

    Raises:
        DamagedError: It is damaged, or has another format.
        TooLargeError: It has more than `max_bytes` bytes.
    """
    content = if_there(partial(read_url, max_bytes=max_bytes), home)
    return None if content is None else ShardIndex.from_bytes(content, home)


def find_index(url: str, version: Version) -> IndexFound:
    """Look for a shard's index beside it and in the local cache, without writing anything."""
    indexes: list[tuple[str, ShardIndex]] = []
    damage: list[DataError] = []
    # Bound the size: everything in an index is also in its shard, except for a header.
    max_bytes = _LARGEST_HEADER + 2 * version.size if version.size >= 0 else MAX_BYTES
    for home in index_homes(url):
        try:
            index = read_index(home, max_bytes)
        except (DamagedError, TooLargeError) as error:
            damage.append(error)
            continue
        if index is None:
            continue
        if version.tag and index.version == version and not ends_early(index, url):
            return IndexFound("fresh", index, damage)
        indexes.append((home, index))
    fitting = (index for home, index in indexes if _may_fit(index.version, version, home, url))
    fit = next((index for index in fitting if is_index_of(index, url) and not ends_early(index, url)), None)
    otherwise: IndexState = "stale" if indexes else "damaged" if damage else "missing"
    return IndexFound("fresh" if fit is not None else otherwise, fit, damage)


def _may_fit(then: Version, now: Version, place: str, url: str) -> bool:
    """Return whether an index may describe a shard with a different tag, because both were copied.

    An index older than its shard cannot. Remote files cannot be compared further without reading the whole shard, so
    their dates must be known. Local shards are compared by `is_index_of`.
    """
    if then.size != now.size:
        return False
    if then.tag == now.tag:  # the storage has no tags
        return True
    kind, kind_now = (version.tag.partition(":")[0] for version in (then, now))
    if is_local(url):
        return kind != kind_now or _is_newer(place, url)
    return kind != kind_now and not is_local(place) and _is_newer(place, url)


def _is_newer(place: str, url: str) -> bool:
    """Return whether an index is known to be at least as new as its shard."""
    index = stat_of(place).modified
    shard = stat_of(url).modified
    return index is not None and shard is not None and index >= shard


def kept_index(url: str) -> ShardIndex | None:
    """Return the index of a shard, of any version, from the local cache, or None."""
    with suppress(DamagedError):
        return read_index(_cached_index(url))
    return None


def keep(url: str, index: ShardIndex) -> None:
    """Write an index to the local cache."""
    path = Path(_cached_index(url))
    try:
        make_cache_folder(path.parent)
        replace_file(path, index.to_bytes())
        if next(_num_kept) % _BETWEEN_SWEEPS == 0:
            remove_oldest(path.parent)
    except OSError as error:  # the cache may be read-only
        _log.info("%s", masked(f"The index of {url} cannot be cached as {str(path)!r}: {error}"))


def keep_index(url: str, version: Version) -> None:
    """Write the index of a shard to the local cache, so that a cached shard opens without its storage."""
    index = find_index(url, version).index
    if index is not None:
        keep(url, replace(index, version=version))


def put_index(url: str, index: ShardIndex) -> None:
    """Write an index beside its shard, or to the local cache if the storage is read-only."""
    is_kept = Path(_cached_index(url)).exists()  # the cached index is preferred when reading
    try:
        write_url(index_url(url), index.to_bytes(), num_tries=1)
    except Exception as error:  # any file system, which may be read-only
        _log.info("%s", masked(f"The index of {url} cannot be written beside it: {error}"))
        is_kept = True
    if is_kept:
        keep(url, index)


def joined_once(urls: Sequence[str], is_current: Callable[[Catalog], bool], join: Callable[[], Catalog]) -> Catalog:
    """Return the joined indexes of shards. One process writes them to the local cache, and others memory-map the file.

    Args:
        urls: The URLs of the shards.
        is_current: A function that returns whether a catalog describes the current shards. Processes that ask at the
            same time, such as the ranks of a job, wait for the first one and use its catalog.
        join: A function that joins the indexes again.
    """
    path = cache_folder("indexes") / f"{cached_name(urls[0], *map(identity_of, urls))}.joined"
    before = _time_of(path)
    with ExitStack() as stack:
        # Other processes that open the same shards wait here, and then map this process's file. If the cache is
        # read-only, there is no lock, and each process joins the indexes itself.
        with suppress(OSError):
            make_cache_folder(path.parent)
            stack.enter_context(locked(path.with_suffix(".lock")))
            # Remove drafts of processes that were killed while they held the lock.
            for draft in path.parent.glob(f".{path.name}.*.part"):
                draft.unlink()
        joined: Catalog | None = None
        try:
            joined = Catalog.from_file(path) if path.exists() else None
        except (OSError, ValueError) as error:
            _log.info("%s", error)
        if joined is not None and _time_of(path) != before:  # another process has confirmed it meanwhile
            return joined
        if joined is None or not is_current(joined):
            joined = join()
            try:
                replace_file(path, joined.to_bytes())
                joined = Catalog.from_file(path)
            except OSError:  # other processes do not trust the older file, because its time stays the same
                return joined
            with suppress(OSError):
                remove_oldest(path.parent)
        with suppress(OSError):
            os.utime(path)  # protect it from `remove_oldest`, and confirm it to processes that wait
        return joined


def _time_of(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def kept_indexes(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the time of last use, the size in bytes and the path of each file in the local cache of indexes.

    Old drafts of killed processes are removed.
    """
    files: list[tuple[float, int, Path]] = []
    for file in folder.iterdir():
        with suppress(OSError):
            status = file.stat()
            if file.suffix == ".part" and time.time() - status.st_mtime > _LONG_AGO_S:
                file.unlink()
            else:
                files.append((status.st_mtime, status.st_size, file))
    return sorted(files)


def remove_oldest(folder: Path) -> None:
    """Remove the least recently used files from the local cache of indexes until it is below its size limit."""
    files = kept_indexes(folder)
    excess = sum(size for _, size, _ in files) - _MAX_BYTES
    for _, size, file in files[:-1]:
        if excess > 0:
            file.unlink(missing_ok=True)
            excess -= size


def forget_joined() -> None:
    """Remove all joined indexes from the local cache. Needed if indexes beside unchanged shards have changed."""
    for path in cache_folder("indexes").glob("*.joined"):
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True)
class SavedNotes:
    """The notes of one job.

    Args:
        job: Plain data that determines the bytes of the shards: the chain's fingerprints and the arguments.
        class_names: The names of the classes 0, 1, ...
        stops: The position in the chain at which each shard ends, as far as known.
        shards: The number of samples and of bytes of each shard, once all shards are complete.
        format: The format of the notes.
    """

    job: dict[str, Any]
    class_names: Sequence[str] | None = None
    stops: Sequence[int] | None = None
    shards: Sequence[tuple[int, int]] | None = None
    format: int = _FORMAT

    @classmethod
    def from_bytes(cls, content: bytes, url: str) -> SavedNotes:
        """Return the notes in a file.

        Raises:
            DataError: The file has another format, or does not contain notes.
        """
        try:
            notes = json.loads(content.decode("utf-8", "surrogateescape"))
            if notes["format"] != _FORMAT:
                raise DataError(f"{url!r} is of format {notes['format']}, but this kdpipes reads format {_FORMAT}.")
            return msgspec.convert(notes, cls)
        except (KeyError, TypeError, msgspec.ValidationError, json.JSONDecodeError, RecursionError) as error:
            hint = "To start over, remove it and the shards beside it."
            raise DataError(f"{url!r} cannot be read as notes of shards: {error}. {hint}") from error

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(vars(self), ensure_ascii=False, indent=1).encode("utf-8", "surrogateescape")


class Seen(NamedTuple):
    """Known facts about an existing shard. A size of -1 or a number of None means unknown."""

    num_bytes: int
    num_samples: int | None = None


class NotesPlace(NamedTuple):
    """The URL at which notes of some shards would be, and the number in the name of each shard, by its URL."""

    url: str
    numbers: dict[str, int]


def notes_places(urls: Sequence[str]) -> list[NotesPlace]:
    """Return the possible locations of notes of shards, by the naming scheme of `write_shards`, without reading.

    >>> notes_places(["a/p-000.tar", "a/p-001.tar"])
    [NotesPlace(url='a/p-shards.json', numbers={'a/p-000.tar': 0, 'a/p-001.tar': 1})]
    """
    known: dict[str, dict[str, int]] = defaultdict(dict)
    for url in urls:
        folder, slash, name = url.rpartition("/")
        stem = name.removesuffix(".tar")
        for found in reversed(list(_DIGITS.finditer(stem)) if name.endswith(".tar") else []):
            place = f"{folder}{slash}{stem[: found.start()]}shards{stem[found.end() :]}.json"
            known[url][place] = int(found[0])
    counts = Counter(place for candidates in known.values() for place in candidates)
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for url, candidates in known.items():
        place = max(candidates, key=lambda each: counts[each])
        places[place][url] = candidates[place]
    return [NotesPlace(place, numbers) for place, numbers in places.items()]


def notes_beside(place: NotesPlace) -> SavedNotes | None:
    """Return the notes of shards; None if they are missing or invalid. Remote notes are stored in the local cache."""
    content = _content_of(place.url)
    try:
        return SavedNotes.from_bytes(content, place.url) if content else None
    except DataError as error:
        _log.warning("%s The notes are ignored.", error)
        return None


def _content_of(url: str) -> bytes:
    copy = None if is_local(url) else cache_folder("indexes") / f"{cached_name(url)}.json"
    known = copy.read_bytes() if copy is not None and copy.exists() else None
    try:
        num_tries = NUM_TRIES if known is None else NUM_TRIES_WITH_COPY
        content = if_there(partial(read_url, num_tries=num_tries), url) or b""
    except DataError:
        if known is None:
            raise
        return known
    if copy is not None and content != known:
        with suppress(OSError):  # the cache may be read-only
            make_cache_folder(copy.parent)
            replace_file(copy, content)
    return content


def names_beside(urls: Sequence[str], look: Callable[[], Mapping[str, Seen]]) -> tuple[str, ...] | None:
    """Return the class names in the notes beside shards of a single job; None if the notes have none.

    Only one file is read. `look` returns known facts about each shard by URL. It is called only if the notes have
    names.
    """
    places = notes_places(urls)
    if len(places) != 1 or len(places[0].numbers) != len(urls):
        return None
    notes = notes_beside(places[0])
    return None if notes is None or notes.class_names is None else class_names_of(notes, places[0], look())


def class_names_of(notes: SavedNotes, place: NotesPlace, seen: Mapping[str, Seen]) -> tuple[str, ...] | None:
    """Return the names of the classes 0, 1, ...; None if the notes have none, or describe other shards."""
    shards = notes.shards or ()
    if notes.class_names is None or max(place.numbers.values()) >= len(shards):
        return None
    for url, number in place.numbers.items():
        num_samples, num_bytes = shards[number]
        if seen[url].num_bytes not in (num_bytes, -1) or seen[url].num_samples not in (num_samples, None):
            return None
    return tuple(notes.class_names)
