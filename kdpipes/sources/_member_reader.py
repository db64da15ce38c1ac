"""Read the bytes of members from local files, from whole shards in the local cache, or by ranges of remote shards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger
from kdpipes.core.order import WINDOW, Order
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.local import crc32, read_span
from kdpipes.storage.readers import Version
from kdpipes.storage.remote import RangeReader, Span, read_range
from kdpipes.storage.requests import NUM_TRIES, Access, using
from kdpipes.storage.shard_cache import ShardCache, Survey
from kdpipes.storage.shard_folder import Shard
from kdpipes.storage.shard_index import UNCHECKED, Catalog, Places
from kdpipes.storage.urls import is_local

Fetch = Literal["auto", "members", "shards"]
_log = logger(__name__)
_KEPT = 4  # orders that are kept waiting, so that they do not pile up if no field is ever read
_SPARE = 1  # the shard that comes next, in addition to those that are read at the same time
_ON_DISK = ("file://", "local://")
_BLOCK = 512  # bytes of a block of a tar; a header is one block, and contents are padded to whole blocks


class Habit:
    """The fields that this process has read so far, and the positions to prefetch as soon as one is known."""

    def __init__(self) -> None:
        self.fields: set[str] = set()
        self._is_begun = False
        self._waiting: list[NDArray[Any]] = []

    def due(self, positions: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the positions to prefetch: the first ones at once, later ones when a field has been read."""
        # Until then, it is unknown which fields are needed; reading all of them may transfer many times as many bytes.
        if not self.fields and self._is_begun:
            self._waiting = [*self._waiting, positions][-_KEPT:]
            return []
        self._is_begun = True
        due, self._waiting = [*self._waiting, positions], []
        return due


class MemberReader:
    """Reads members of shards. Remote ones are prefetched, as whole shards or by members, to transfer fewer bytes.

    The threads of a loader share one reader. The first thread that begins an epoch chooses how to read it, and the
    others wait for the choice. A copy starts without a choice and without prefetched data.

    Args:
        fetch: How remote shards are read: "shards" (whole), "members", or "auto": whole in an epoch that goes shard by
            shard and needs at least half of their bytes.
        cache: The local cache of whole shards.
        access: The options for remote storage.
    """

    def __init__(self, fetch: Fetch, cache: ShardCache, access: Access) -> None:
        self._fetch = fetch
        self._access = access
        self._cache = cache
        self._ranges = RangeReader()
        self._habit = Habit()
        self._expected: tuple[Order, ...] = ()  # of the epoch that begins
        self._begun: bytes | None = None  # the digest of its positions
        self._is_ordered = False
        self._is_whole = fetch == "shards"
        self._soon: deque[list[int]] = deque(maxlen=_KEPT)  # shards that were prefetched last
        self._due: set[int] = set()  # shards of this epoch that were prefetched, and so may be downloaded
        self.forget()
        forget_after_fork(self)

    def forget(self) -> None:
        """Make a new lock. After a fork, no thread would release the old one if one of the parent held it."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return MemberReader, (self._fetch, self._cache, self._access)

    @property
    def indexes_copies(self) -> bool:
        """Whether a shard without an index is copied whole, and its copy is indexed."""
        return self._fetch == "shards"

    def has_copy(self, url: str, version: Version) -> bool:
        """Return whether a version of a shard can be read from the local cache."""
        return self._is_cached(url) and self._cache.has(Shard(url, version))

    def copy_of(self, url: str, version: Version) -> str | None:
        """Return the path of a shard in the local cache; if all shards are read whole, it is downloaded first."""
        if not self._is_cached(url):
            return None
        return self._cache.path_of(Shard(url, version), fetches=self._fetch == "shards")

    def prefetch(self, catalog: Catalog, order: Order) -> None:
        """Store the order of an epoch that begins, or start to read the samples that are fetched next."""
        if order.is_epoch:
            with self._lock:
                self._expected = (*self._expected, order)
            return
        with using(self._access):
            with self._lock:  # the first thread chooses how to read the epoch, and the others wait for it
                expected, self._expected = self._expected, ()
                if expected and self._fetch != "members":
                    self._begin(catalog, expected)
            for positions in order:
                if self._fetch != "members":
                    positions = positions[~self._in_cache(catalog, positions)]
                for due in self._habit.due(positions) if len(positions) else ():
                    self.prefetch_fields(catalog, due.tolist(), set(self._habit.fields) or set(catalog.fields))

    def prefetch_fields(self, catalog: Catalog, indices: Iterable[int], fields: set[str]) -> None:
        """Start to read some fields by ranges."""
        with using(self._access):
            self._ranges.prefetch(span for index in indices for span in _spans(catalog, index, fields))

    def read(self, catalog: Catalog, index: int, field: str, places: Places) -> bytes:
        """Return the content of a member whose place is in `places`; fewer bytes if a local shard ends early.

        Raises:
            DataError: The member cannot be read, or differs from the index.
        """
        self._habit.fields.add(field)
        number = int(catalog.shards[index])
        url, offset, size = catalog.urls[number], int(places.offsets[index]), int(places.sizes[index])
        if is_local(url):
            return read_span(url, offset, size, catalog.versions[number])
        with using(self._access):
            span = Span(url, offset, offset + size, catalog.versions[number])
            return self._read_remote(catalog, index, span, places)

    def _read_remote(self, catalog: Catalog, index: int, span: Span, places: Places) -> bytes:
        number, checksum, content = int(catalog.shards[index]), UNCHECKED, None
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
            content = bytes(read_range(span))  # it may have been damaged in transit
        raise DataError(
            f"Sample {catalog.key(index)!r} differs from the index: the checksum of the {len(content)} bytes at offset "
            f"{span.start} of {span.url!r} does not match. Index the shard again: `kdpipes index`."
        )

    def _is_cached(self, url: str) -> bool:
        """Return whether a shard may be copied to the local cache: only if it is remote."""
        return self._fetch != "members" and not is_local(url) and not url.startswith(_ON_DISK)

    def _begin(self, catalog: Catalog, orders: Sequence[Order]) -> None:
        """Choose how to read an epoch.

        There is an order for each place of this source in the chain and each thread. It is empty if the epoch does not
        go shard by shard.
        """
        is_cached = np.array([self._is_cached(url) for url in catalog.urls], dtype=bool)
        surveys = {survey.digest: survey for survey in (Survey(catalog.shards, is_cached, order) for order in orders)}
        survey, *others = surveys.values()
        if others:
            survey = Survey(catalog.shards, is_cached, survey.orders[0], *(other.orders[0] for other in others))
        is_known, self._begun = self._begun == survey.digest, survey.digest
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


def _shard(catalog: Catalog, number: int) -> Shard:
    # Checksums of dtype int64 may contain `UNCHECKED`.
    places = (each for each in catalog.fields.values() if isinstance(each, Places))
    is_checked = all(each.checksums is not None and each.checksums.dtype == np.uint32 for each in places)
    return Shard(catalog.urls[number], catalog.versions[number], is_checked)


def _places(catalog: Catalog, fields: set[str]) -> list[Places]:
    """Return the places of the fields that are stored in members; others are in the index."""
    return [places for field in fields if isinstance(places := catalog.fields[field], Places)]


def _bytes_of(
    catalog: Catalog, fields: set[str], is_used: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return for each shard the bytes of `fields` of the used samples, and the bytes of all members."""
    used, whole = (np.zeros(len(catalog.urls)) for _ in range(2))
    for start in range(0, len(catalog), WINDOW):  # in windows, because sizes are large arrays
        window = slice(start, start + WINDOW)
        shards = catalog.shards[window]
        used += np.bincount(shards, _sizes(catalog, fields, window) * is_used[window], len(catalog.urls))
        whole += np.bincount(shards, _sizes(catalog, set(catalog.fields), window), len(catalog.urls))
    return used, whole


def _sizes(catalog: Catalog, fields: set[str], window: slice) -> NDArray[np.int64]:
    """Return the bytes of some fields of each sample of a window, with headers and padding."""
    sizes = np.zeros(len(catalog.shards[window]), dtype=np.int64)
    for places in _places(catalog, fields):
        padded = _BLOCK + -(-places.sizes[window] // _BLOCK) * _BLOCK
        sizes += np.where(places.offsets[window] < 0, 0, padded)
    return sizes


def _spans(catalog: Catalog, index: int, fields: set[str]) -> list[Span]:
    number = int(catalog.shards[index])
    url, version = catalog.urls[number], catalog.versions[number]
    starts = [(int(places.offsets[index]), int(places.sizes[index])) for places in _places(catalog, fields)]
    return [Span(url, start, start + size, version) for start, size in starts if start >= 0 and not is_local(url)]
