"""Read the bytes of members from local files, from whole shards in the local cache, or by ranges of remote shards."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger
from kdpipes.core.order import WINDOW, Order
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.access import NUM_TRIES, Access, using
from kdpipes.storage.files import crc32
from kdpipes.storage.readers import Version, read_span
from kdpipes.storage.remote import RangeReader, Span, read_range
from kdpipes.storage.shard_cache import AT_ONCE, Shard, ShardCache
from kdpipes.storage.shard_index import UNCHECKED, Catalog, Places
from kdpipes.storage.urls import is_local

Fetch = Literal["auto", "members", "shards"]
_log = logger(__name__)
_KEPT = 4  # maximum number of waiting orders, so that they do not pile up if no field is ever read
_SPARE = 1  # the next shard, in addition to those that are read at the same time
_ON_DISK = ("file://", "local://")
_BLOCK = 512  # bytes of a tar block: a header is one block, and contents are padded to whole blocks


class Habit:
    """The fields that this process has read so far, and the positions to prefetch once a field is known."""

    def __init__(self) -> None:
        self.fields: set[str] = set()
        self._is_begun = False
        self._waiting: list[NDArray[Any]] = []

    def due(self, positions: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the positions to prefetch: the first positions at once, later ones after a field has been read."""
        # Until then, the needed fields are unknown, and reading all fields may transfer many times as many bytes.
        if not self.fields and self._is_begun:
            self._waiting = [*self._waiting, positions][-_KEPT:]
            return []
        self._is_begun = True
        due = [*self._waiting, positions]
        self._waiting = []
        return due


class MemberReader:
    """Reads members of shards. Remote ones are prefetched as whole shards or by members, whichever is fewer bytes.

    The threads of a loader share one reader. The first thread to begin an epoch chooses how to read it, and the others
    wait for this choice. Copies start without a choice and without prefetched data.

    Args:
        fetch: How to read remote shards: "shards" (whole shards), "members", or "auto": whole shards if the epoch is
            read shard by shard and needs at least half of their bytes.
        cache: The local cache of whole shards.
        access: The access settings for remote storage.
    """

    def __init__(self, fetch: Fetch, cache: ShardCache, access: Access) -> None:
        self._fetch = fetch
        self._access = access
        self._cache = cache
        self._ranges = RangeReader()
        self._habit = Habit()
        self._expected: tuple[Order, ...] = ()  # orders of the epoch that is about to begin
        self._begun: bytes | None = None  # the digest of the current epoch's positions
        self._is_ordered = False
        self._is_whole = fetch == "shards"
        self._soon: deque[list[int]] = deque(maxlen=_KEPT)  # the shards prefetched most recently
        self._due: set[int] = set()  # prefetched shards of this epoch, which may therefore be downloaded
        self.forget()
        forget_after_fork(self)

    def forget(self) -> None:
        """Create a new lock. After a fork, a lock held by a thread of the parent would never be released."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return MemberReader, (self._fetch, self._cache, self._access)

    @property
    def indexes_copies(self) -> bool:
        """Whether shards without an index are copied as a whole, so that the copy is indexed."""
        return self._fetch == "shards"

    def has_copy(self, url: str, version: Version) -> bool:
        """Return whether a version of a shard is in the local cache."""
        return self._is_cached(url) and self._cache.has(Shard(url, version))

    def copy_of(self, url: str, version: Version) -> str | None:
        """Return the path of a shard in the local cache; if all shards are read whole, it is downloaded first."""
        if not self._is_cached(url):
            return None
        return self._cache.path_of(Shard(url, version), fetches=self._fetch == "shards")

    def prefetch(self, catalog: Catalog, order: Order) -> None:
        """Store the order of an epoch that is about to begin, or start to read the next samples."""
        if order.is_epoch:
            with self._lock:
                self._expected = (*self._expected, order)
            return
        with using(self._access):
            with self._lock:  # the first thread chooses how to read the epoch, and the others wait for it
                expected = self._expected
                self._expected = ()
                if expected and self._fetch != "members":
                    self._begin(catalog, expected)
            for positions in order:
                if self._fetch != "members":
                    positions = positions[~self._in_cache(catalog, positions)]
                for due in self._habit.due(positions) if len(positions) else ():
                    self.prefetch_fields(catalog, due.tolist(), set(self._habit.fields) or set(catalog.fields))

    def prefetch_fields(self, catalog: Catalog, indices: Iterable[int], fields: set[str]) -> None:
        """Start to read some fields of samples by ranges."""
        with using(self._access):
            self._ranges.prefetch(span for index in indices for span in _spans(catalog, index, fields))

    def read(self, catalog: Catalog, index: int, field: str, places: Places) -> bytes:
        """Return the content of a member with its location in `places`; fewer bytes if a local shard ends early.

        Raises:
            DataError: The member cannot be read, or differs from the index.
        """
        self._habit.fields.add(field)
        number = int(catalog.shards[index])
        url = catalog.urls[number]
        offset = int(places.offsets[index])
        size = int(places.sizes[index])
        if is_local(url):
            return read_span(url, offset, size, catalog.versions[number])
        with using(self._access):
            span = Span(url, offset, offset + size, catalog.versions[number])
            return self._read_remote(catalog, index, span, places)

    def _read_remote(self, catalog: Catalog, index: int, span: Span, places: Places) -> bytes:
        number = int(catalog.shards[index])
        checksum = UNCHECKED
        content = None
        if places.checksums is not None:
            checksum = int(places.checksums[index])
        if self._is_cached(span.url):
            is_due = self._fetch == "shards" or (self._is_whole and number in self._due)
            content = self._cache.read(_shard(catalog, number), span.start, span.stop - span.start, fetches=is_due)
        is_copy = content is not None
        content = self._ranges.read(span) if content is None else content
        for num_damaged in range(NUM_TRIES):
            if checksum == UNCHECKED or crc32(content) == checksum:
                if is_copy and num_damaged:
                    self._cache.repair(_shard(catalog, number), span.start, content)
                return content
            content = bytes(read_range(span))  # the content may have been damaged in transit
        raise DataError(
            f"Sample {catalog.key(index)!r} differs from the index: the checksum of the {len(content)} bytes at offset "
            f"{span.start} of {span.url!r} does not match. Index the shard again: `kdpipes index`."
        )

    def _is_cached(self, url: str) -> bool:
        """Return whether a shard may be copied to the local cache, which requires that it is remote."""
        return self._fetch != "members" and not is_local(url) and not url.startswith(_ON_DISK)

    def _begin(self, catalog: Catalog, orders: Sequence[Order]) -> None:
        """Choose how to read an epoch.

        There is one order per thread and per occurrence of this source in the chain. It is empty if the epoch is not
        read shard by shard.
        """
        is_cached = np.array([self._is_cached(url) for url in catalog.urls], dtype=bool)
        surveys = {survey.digest: survey for survey in (Survey(catalog.shards, is_cached, order) for order in orders)}
        survey, *others = surveys.values()
        if others:
            survey = Survey(catalog.shards, is_cached, survey.orders[0], *(other.orders[0] for other in others))
        is_known = self._begun == survey.digest
        self._begun = survey.digest
        self._is_ordered = survey.num_samples > 0
        if not is_known:  # a late worker must not choose again, since other fields may have been read by now
            self._due = set()
            reason = "" if self._fetch == "shards" else self._against_whole(catalog, survey)
            self._is_whole = not reason
            if reason and is_cached.any() and self._cache.has_own_folder:
                _log.info(
                    '`cache_dir` is not used for new shards, because %s. `fetch="shards"` always uses it.', reason
                )
        if self._is_whole:
            visits = survey.visits
            shards = [_shard(catalog, number) for number in visits.shards.tolist()]
            self._cache.expect(shards, visits.untils().tolist())
        else:
            self._cache.expect([])

    def _against_whole(self, catalog: Catalog, survey: Survey) -> str:
        """Return the reason why an epoch should read members; an empty string if it should read whole shards."""
        if not self._is_ordered:
            return "the epoch does not go shard by shard"
        touched = np.flatnonzero(survey.counts)
        if not survey.goes_by_shards():
            return "the epoch does not go shard by shard, or its window spans too many of them"
        used, whole = _bytes_of(catalog, set(self._habit.fields) or set(catalog.fields), survey.is_used)
        if 2 * used[touched].sum() < whole[touched].sum():
            return "the epoch needs less than half of the shards' bytes"
        largest = max(touched.tolist(), key=lambda number: catalog.versions[number].size)
        visits = survey.visits
        num_at_once = int((visits.untils() - np.arange(len(visits.shards))).max()) + 1 + _SPARE
        room = min(num_at_once, len(touched)) * catalog.versions[largest].size
        has_room = self._cache.takes(_shard(catalog, largest), room)
        return "" if has_room else f"it has no room for {room:,} bytes of shards that are in use at the same time"

    def _in_cache(self, catalog: Catalog, positions: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which positions will be read from whole shards, and start to download these shards if it is time."""
        numbers = catalog.shards[positions]
        distinct = [number for number in dict.fromkeys(numbers.tolist()) if self._is_cached(catalog.urls[number])]
        if self._is_whole:
            self._due.update(distinct)
            self._soon.append(distinct)
            if not self._is_ordered:
                soon = dict.fromkeys(number for some in list(self._soon) for number in some)
                self._cache.prefetch([_shard(catalog, number) for number in soon])
            here = [number for number in distinct if self._cache.takes(_shard(catalog, number))]
        else:
            here = [number for number in distinct if self._cache.has(_shard(catalog, number))]
        return np.isin(numbers, here)


class Visits(NamedTuple):
    """The intervals of an epoch in which shards are needed, sorted by start. All arrays are `[n]`.

    Args:
        shards: The numbers of the shards.
        starts: The ordinals at which the intervals start.
        stops: The ordinals before which they end.
    """

    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def untils(self) -> NDArray[np.int64]:
        """For each visit, return the last visit that begins before the visit ends."""
        untils: NDArray[np.int64] = np.searchsorted(self.starts, self.stops - 1, side="right") - 1
        return untils


class Survey:
    """The shards that an epoch needs, in order, read from its positions window by window.

    Positions are not stored: an epoch of 10^7 samples takes one byte per sample of the source.

    Args:
        shards: The shard of each sample of the source, `[size]`.
        is_counted: Whether to include each shard, `[num_shards] bool`.
        orders: The positions of the epoch, in windows; each is iterated twice.

    >>> Survey(np.array([3, 3, 0, 1, 0, 1]), np.ones(4, dtype=bool), [np.arange(6)]).visits.shards
    array([3, 0, 1])
    """

    def __init__(self, shards: NDArray[Any], is_counted: NDArray[np.bool_], *orders: Iterable[NDArray[Any]]) -> None:
        self._shards = shards
        self._is_counted = is_counted
        self.orders = orders
        self.is_used = np.zeros(len(shards), dtype=bool)  # samples of the source that are needed
        self.counts = np.zeros(len(is_counted), dtype=np.int64)  # number of needed samples of each shard
        self._num_runs = 0  # number of changes from one shard to another
        digest = hashlib.blake2b(digest_size=16)
        last = -1
        for positions, numbers in self._counted(digest.update):
            self.is_used[positions] = True
            self.counts += np.bincount(numbers, minlength=len(self.counts))
            self._num_runs += int(np.count_nonzero(np.diff(numbers, prepend=last)))
            last = int(numbers[-1])
        self.num_samples = int(self.counts.sum())
        self.digest = digest.digest()  # of all positions

    def _counted(self, note: Callable[[bytes], None] | None = None) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield positions and their shards window by window, omitting shards that are not counted."""
        for positions in chain.from_iterable(self.orders):
            if note is not None:
                note(positions.astype(np.int64, copy=False).tobytes())
            numbers = self._shards[positions]
            is_counted = self._is_counted[numbers]
            if is_counted.any():
                yield positions[is_counted], numbers[is_counted]

    @cached_property
    def visits(self) -> Visits:
        """The visits of the epoch. A shard that is needed again soon is still being visited."""
        far = AT_ONCE * self.num_samples // max(int(np.count_nonzero(self.counts)), 1)
        latest = np.zeros(len(self.counts), dtype=np.int64)  # the last visit of each shard so far
        ends = np.full(len(self.counts), -far - 1)  # the end of that visit; long before the epoch if there is none
        shards, begins, places, stops = ([np.zeros(0, dtype=np.int64)] for _ in range(4))
        size = done = 0
        for _, numbers in self._counted():
            edges = np.flatnonzero(np.diff(numbers)) + 1
            starts = np.concatenate([[0], edges])
            order = np.argsort(numbers[starts], kind="stable")  # runs by shard
            which = numbers[starts][order]
            starts = starts[order] + done
            ends_of_runs = np.append(edges, len(numbers))[order] + done
            is_first = np.diff(which, prepend=-1) != 0  # the first run of its shard in this window
            is_new = starts - np.where(is_first, ends[which], np.roll(ends_of_runs, 1)) > far
            known = np.where(is_new, size + np.cumsum(is_new) - 1, latest[which])
            visits = known[np.maximum.accumulate(np.where(is_new | is_first, np.arange(len(which)), 0))]
            latest[which], ends[which] = visits, ends_of_runs  # for equal indices, NumPy keeps the last value
            shards.append(which[is_new])
            begins.append(starts[is_new])
            is_last = np.append(visits[1:] != visits[:-1], True)
            places.append(visits[is_last])
            stops.append(ends_of_runs[is_last])
            size = size + int(is_new.sum())
            done = done + len(numbers)
        stop_of = np.zeros(size, dtype=np.int64)
        stop_of[np.concatenate(places)] = np.concatenate(stops)
        start_of = np.concatenate(begins)
        by_start = np.argsort(start_of, kind="stable")
        return Visits(np.concatenate(shards)[by_start], start_of[by_start], stop_of[by_start])

    def goes_by_shards(self) -> bool:
        """Return whether the epoch reads the shards in sequence, or a few of them side by side."""
        if not self.num_samples:
            return False
        num_shards = int(np.count_nonzero(self.counts))
        most = 2 * num_shards * self.num_samples / np.count_nonzero(self.is_used)  # two runs for each round
        if self._num_runs <= most:
            return True
        num_at_once = (self.visits.stops - self.visits.starts).sum() / self.num_samples
        return bool(len(self.visits.shards) <= most and num_at_once <= min(AT_ONCE, num_shards / 2))


def _shard(catalog: Catalog, number: int) -> Shard:
    # Checksums of dtype int64 may contain `UNCHECKED`.
    places = (each for each in catalog.fields.values() if isinstance(each, Places))
    is_checked = all(each.checksums is not None and each.checksums.dtype == np.uint32 for each in places)
    return Shard(catalog.urls[number], catalog.versions[number], is_checked)


def _places(catalog: Catalog, fields: set[str]) -> list[Places]:
    """Return the locations of the fields that are stored in members; other fields are in the index."""
    return [places for field in fields if isinstance(places := catalog.fields[field], Places)]


def _bytes_of(
    catalog: Catalog, fields: set[str], is_used: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each shard, return the bytes of `fields` in used samples, and the bytes of all members."""
    used, whole = (np.zeros(len(catalog.urls)) for _ in range(2))
    for start in range(0, len(catalog), WINDOW):  # in windows, because the arrays of sizes are large
        window = slice(start, start + WINDOW)
        shards = catalog.shards[window]
        used += np.bincount(shards, _sizes(catalog, fields, window) * is_used[window], len(catalog.urls))
        whole += np.bincount(shards, _sizes(catalog, set(catalog.fields), window), len(catalog.urls))
    return used, whole


def _sizes(catalog: Catalog, fields: set[str], window: slice) -> NDArray[np.int64]:
    """Return the number of bytes that some fields take in each sample of a window, with headers and padding."""
    sizes = np.zeros(len(catalog.shards[window]), dtype=np.int64)
    for places in _places(catalog, fields):
        padded = _BLOCK + -(-places.sizes[window] // _BLOCK) * _BLOCK
        sizes += np.where(places.offsets[window] < 0, 0, padded)
    return sizes


def _spans(catalog: Catalog, index: int, fields: set[str]) -> list[Span]:
    number = int(catalog.shards[index])
    url = catalog.urls[number]
    version = catalog.versions[number]
    starts = [(int(places.offsets[index]), int(places.sizes[index])) for places in _places(catalog, fields)]
    return [Span(url, start, start + size, version) for start, size in starts if start >= 0 and not is_local(url)]
