"""Whole remote shards kept on this machine: downloaded ahead of need, shared by processes, limited in size."""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes._forks import forget_after_fork
from kdpipes.core.masked import masked
from kdpipes.errors import DataError
from kdpipes.storage.catalog import keep_index
from kdpipes.storage.files import CAN_HOLD, HeldFile, Version, cache_folder, pread
from kdpipes.storage.remote import Threads, read_range
from kdpipes.storage.retries import limited, time_limit
from kdpipes.storage.shard_folder import Entry, ReplacedError, Shard, ShardFolder, download

__all__ = ["Shard", "ShardCache", "ShardOrder", "Visits", "goes_by_shards", "visits_of"]

_AT_ONCE = 16  # how many shards an order may go through side by side
_NUM_HELD = 2  # shards that stay open in a process between reads, and so cannot be removed by others: at least
_log = logging.getLogger(__name__)


class ShardCache:
    """Whole shards in a folder, shared with all local processes that use the same one.

    One process downloads a shard, and another one resumes it if that process is killed; others can read it when it is
    complete and verified. Room is made by removing shards that no process is reading: first those that are not in the
    expected order, then those that it needs last. Safe for threads and for forked processes; a copy uses the same
    folder.

    Args:
        folder: The folder; None is `shards` in the local cache (`KDPIPES_CACHE_DIR`, `~/.cache/kdpipes`).
        max_bytes: Its maximum size, with unfinished shards; None is half of what is free there.
        num_ahead: How many shards beyond the one that is read are downloaded ahead of need.
        num_ranges: How many requests are under way at a time.
        range_size: The size of a request in bytes.
    """

    def __init__(
        self,
        folder: str | None = None,
        max_bytes: int | None = None,
        *,
        num_ahead: int = 2,
        num_ranges: int = 8,
        range_size: int = 1 << 23,
    ) -> None:
        self._place = folder, max_bytes
        self._sizes: dict[str, Any] = {"num_ahead": num_ahead, "num_ranges": num_ranges, "range_size": range_size}
        self._end: Any = None
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardCache, **self._sizes), self._place

    def forget(self) -> None:
        """Start over, without threads and open files."""
        self._made: _Fetcher | None = None
        self._lock = threading.Lock()
        self._has_warned = False
        if self._end is not None:
            self._end.detach()

    def takes(self, shard: Shard, num_bytes: int | None = None) -> bool:
        """Return whether a shard can be kept, as far as is known.

        Args:
            shard: Which one.
            num_bytes: The size of it and of all that must be kept at the same time; None means the shard alone.
        """
        fetcher = self._fetcher()
        needed = shard.version.size if num_bytes is None else num_bytes
        try:
            if shard.name in fetcher.refused or needed > fetcher.folder.max_bytes():
                return False
        except OSError as error:
            fetcher.failure = error
        return self._is_able(fetcher)

    @property
    def has_own_folder(self) -> bool:
        """Whether the user has chosen the folder of the cache."""
        return self._place[0] is not None

    def has_version(self, url: str, version: Version) -> bool:
        """Return whether a version of a shard is in the cache."""
        return CAN_HOLD and self.has(Shard(url, version))

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is in the cache."""
        return self._fetcher().folder.has(shard)

    def expect(self, shards: Sequence[Shard], untils: Sequence[int] | None = None) -> None:
        """Set the order in which an epoch that begins needs shards, and start to download the first ones.

        Args:
            shards: In order of need; one that is needed again later appears again.
            untils: See `ShardOrder`.
        """
        fetcher = self._fetcher()
        fetcher.failure = None
        fetcher.refused.clear()
        self._set_order(shards, untils)

    def announce(self, shards: Sequence[Shard]) -> None:
        """Set which shards will be read soon, where the order of the epoch is not known."""
        self._set_order(shards, None)

    def _set_order(self, shards: Sequence[Shard], untils: Sequence[int] | None) -> None:
        fetcher = self._fetcher()
        fetcher.order = ShardOrder(shards, untils)
        if self._is_able(fetcher):
            fetcher.look_ahead()

    def read(self, shard: Shard, offset: int, size: int, *, fetches: bool = True) -> bytes | None:
        """Return bytes of a shard; None if it is not in the cache and cannot be, or is too short.

        Args:
            shard: Which one.
            offset: Of the first byte.
            size: The number of bytes.
            fetches: Whether to download a shard that is not in the cache.

        Raises:
            ReplacedError: The shard has been replaced.
        """
        file = self._file(shard, fetches=fetches)
        content = None if file is None else pread(file.descriptor, size, offset)
        return content if content is None or len(content) == size else None

    def repair(self, shard: Shard, offset: int, content: bytes) -> None:
        """Write some bytes of a shard again that have been damaged."""
        try:
            self._fetcher().folder.repair(shard, offset, content)
        except OSError as error:  # the folder may be read-only
            _log.warning("The damaged copy of %s cannot be repaired: %s", masked(shard.url), error)

    def _file(self, shard: Shard, *, fetches: bool) -> HeldFile | None:
        fetcher = self._fetcher()
        if not CAN_HOLD:
            return None
        if fetcher.order.reach(shard):
            fetcher.look_ahead()
        try:
            is_wanted = fetches and self.takes(shard)
            file = fetcher.file_of(shard, fetches=is_wanted)
            if file is None and is_wanted and fetcher.order.need(shard.name) is not None:
                fetcher.refused.add(shard.name)  # in this epoch: all shards in the cache are needed sooner
            return file
        except ReplacedError:
            raise
        except DataError as error:  # reading single members may still work
            _log.warning("%s Its members are read one by one.", error)
            fetcher.refused.add(shard.name)
        except OSError as error:
            fetcher.failure = error
            self._is_able(fetcher)
        return None

    def _is_able(self, fetcher: _Fetcher) -> bool:
        if not CAN_HOLD:
            fetcher.failure = OSError("files cannot be locked on this system")
        if fetcher.failure is not None and not self._has_warned:
            self._has_warned = True
            text = f"Shards cannot be kept in {str(fetcher.folder.path)!r}: {fetcher.failure}. Members are read alone."
            warnings.warn(text, stacklevel=2)
        return fetcher.failure is None

    def _fetcher(self) -> _Fetcher:
        with self._lock:
            if self._made is None:
                folder, max_bytes = self._place
                path = cache_folder("shards") if folder is None else Path(folder).expanduser()
                self._made = _Fetcher(ShardFolder(path, max_bytes), **self._sizes)
                self._end = weakref.finalize(self, self._made.stop)
            return self._made


class _Fetcher:
    """The state of a cache in one process: open shards, threads, and the order of need.

    The thread that downloads ahead refers to this object and not to the cache, so that the cache can be dropped while
    it works.
    """

    def __init__(self, folder: ShardFolder, num_ahead: int, num_ranges: int, range_size: int) -> None:
        self.folder = folder
        self.order = ShardOrder()
        self.failure: OSError | None = None  # of the local disk: nothing more is downloaded
        self.refused: set[str] = set()  # shards whose storage fails, or that have no room in this epoch
        self._num_ahead, self._num_ranges, self._range_size = num_ahead, num_ranges, range_size
        self._lock = threading.Lock()
        self._held: OrderedDict[str, HeldFile] = OrderedDict()
        self._range_threads: Threads | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Let threads end after the range that they are reading."""
        self._is_stopped = True

    def file_of(self, shard: Shard, *, fetches: bool) -> HeldFile | None:
        """Return the file of a shard, held; if `fetches`, it is downloaded first where needed."""
        with self._lock:
            file = self._held.get(shard.name)
            if file is not None:
                self._held.move_to_end(shard.name)
                return file
        file = self._fetched(shard, waits=True) if fetches else self.folder.find(shard)
        if file is not None:
            # Shards that are read side by side stay open, if there is room for twice as many.
            number = min(self.order.num_at_once, _AT_ONCE)
            is_roomy = 2 * number * shard.version.size <= self.folder.max_bytes()
            with self._lock:
                self._held[shard.name] = file
                while len(self._held) > (max(_NUM_HELD, number) if is_roomy else _NUM_HELD):
                    self._held.popitem(last=False)
        return file

    def look_ahead(self) -> None:
        """Start a thread that downloads the shards that are needed next, unless one is running."""
        with self._lock:
            is_idle = self._thread is None or not self._thread.is_alive()
            if is_idle and self._due(set()) is not None:
                limit = (time_limit(),)
                self._thread = threading.Thread(target=self._work_ahead, args=limit, name="kdpipes-shards", daemon=True)
                self._thread.start()

    def _work_ahead(self, seconds: float | None) -> None:
        tried: set[str] = set()
        with limited(seconds):
            while True:
                with self._lock:
                    shard = self._due(tried)
                    if shard is None:
                        self._thread = None
                        return
                tried.add(shard.name)
                try:
                    self._fetched(shard, waits=False)
                except DataError as error:  # the thread that needs it will raise it
                    _log.info("%s", error)
                except OSError as error:
                    self.failure = error

    def _due(self, tried: set[str]) -> Shard | None:
        if self._is_stopped or self.failure is not None:
            return None
        due = (shard for shard in self.order.ahead(self._num_ahead) if shard.name not in self.refused | tried)
        return next((shard for shard in due if not self.folder.has(shard)), None)

    def _fetched(self, shard: Shard, *, waits: bool) -> HeldFile | None:
        def expendable(entries: list[Entry]) -> Iterator[Entry]:
            for entry in self._by_need(entries, self.order.need(shard.name)):
                with self._lock:
                    self._held.pop(entry.name, None)
                yield entry

        return self.folder.fetch(shard, self._download, expendable, waits=waits)

    def _by_need(self, entries: list[Entry], latest: int | None) -> list[Entry]:
        """Return the files that may be removed: unneeded ones, then those needed after `latest`, last ones first."""
        needs = {entry: self.order.need(entry.name) for entry in entries}
        unneeded = sorted((entry for entry, need in needs.items() if need is None), key=lambda entry: entry.used)
        needed = sorted(((need, entry) for entry, need in needs.items() if need is not None), reverse=True)
        return [*unneeded, *(entry for need, entry in needed if latest is None or need > latest)]

    def _download(self, shard: Shard, file: HeldFile) -> bool:
        with self._lock:
            threads = self._range_threads = self._range_threads or Threads(self._num_ranges, "kdpipes-ranges")
        is_whole = download(
            shard,
            file,
            lambda span: threads.submit(partial(read_range, span)),
            range_size=self._range_size,
            num_ranges=self._num_ranges,
            is_wanted=lambda: not self._is_stopped,
        )
        if is_whole:
            # The shard is usable even if its index cannot be kept. A thread keeps it, because the traceback of an error
            # here would keep the file open.
            threads.submit(partial(keep_index, shard.url, shard.version)).exception()
        return is_whole


class ShardOrder:
    """The order in which an epoch needs shards, and which of them it has reached.

    Args:
        shards: In order of need; one that is needed again later appears again.
        untils: For each shard, the last place in this order that is begun before the epoch is done with it; by default
            its own place.
    """

    def __init__(self, shards: Sequence[Shard] = (), untils: Sequence[int] | None = None) -> None:
        self._shards = list(shards)
        known = range(len(self._shards)) if untils is None else untils
        self._width = max((until - place for place, until in enumerate(known)), default=0)
        self._places: dict[str, list[int]] = {}
        self._ends: dict[str, list[int]] = {}
        for place, (shard, until) in enumerate(zip(self._shards, known, strict=True)):
            self._places.setdefault(shard.name, []).append(place)
            self._ends.setdefault(shard.name, []).append(until)
        self._now = -1

    @property
    def num_at_once(self) -> int:
        """The maximum number of shards that are read side by side."""
        return self._width + 1

    def reach(self, shard: Shard) -> bool:
        """Note that a shard is being read, and return whether the epoch has moved on to it."""
        place = self._next(shard.name, self._now)
        if place is None or place <= self._now:
            return False
        self._now = place
        return True

    def ahead(self, number: int) -> list[Shard]:
        """Return the next shards beyond those that are read side by side with the one that was reached last."""
        return self._shards[self._now + 1 : self._now + 1 + number + self._width]

    def need(self, name: str) -> int | None:
        """Return how late a shard is needed next, in this epoch or a next one like it; None if it is not.

        The shard before the current one counts as needed, because workers are not at the same place.
        """
        if name not in self._places:
            return None
        place = self._next(name, self._now - 1)
        return len(self._shards) + self._places[name][0] if place is None else place

    def _next(self, name: str, now: int) -> int | None:
        """Return the place at which a shard is needed next, or is being used now."""
        ends = self._ends.get(name, [])
        number = bisect_left(ends, now)
        return self._places[name][number] if number < len(ends) else None


class Visits(NamedTuple):
    """The intervals of an epoch in which shards are needed, sorted by their starts.

    Args:
        shards: The number of the shard, `[n]`.
        starts: The place in the epoch at which the interval starts, `[n]`.
        stops: The place before which it ends, `[n]`.
    """

    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def untils(self) -> NDArray[np.int64]:
        """Return for each visit the last visit that begins before it ends."""
        untils: NDArray[np.int64] = np.searchsorted(self.starts, self.stops - 1, side="right") - 1
        return untils


def visits_of(shards: NDArray[np.int64]) -> Visits:
    """Return the visits of an epoch; a shard that is needed again soon is still being visited.

    Args:
        shards: Of each sample of the epoch, `[n]`.

    >>> visits_of(np.array([3, 3, 0, 1, 0, 1])).shards
    array([3, 0, 1])
    """
    runs = _runs(shards)
    order = np.argsort(runs.shards, kind="stable")
    which, starts, stops = (column[order] for column in runs)
    far = _AT_ONCE * len(shards) // max(len(np.unique(which)), 1)
    is_new = np.ones(len(which), dtype=bool)
    is_new[1:] = (which[1:] != which[:-1]) | (starts[1:] - stops[:-1] > far)
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(which)) - 1 if len(first) else first
    by_start = np.argsort(starts[first], kind="stable")
    return Visits(which[first][by_start], starts[first][by_start], stops[last][by_start])


def _runs(shards: NDArray[np.int64]) -> Visits:
    edges = np.flatnonzero(np.diff(shards)) + 1
    starts = np.concatenate([np.zeros(min(len(shards), 1), dtype=np.int64), edges])
    stops = np.append(edges, len(shards)) if len(shards) else edges
    return Visits(shards[starts], starts, stops)


def goes_by_shards(shards: NDArray[np.int64], num_rounds: float = 1.0) -> bool:
    """Return whether an epoch reads shard after shard, or a few side by side.

    Args:
        shards: Of each sample of the epoch, `[n]`.
        num_rounds: How often it needs each sample.
    """
    if not len(shards):
        return False
    num_shards = len(np.unique(shards))
    if len(_runs(shards).shards) <= 2 * num_rounds * num_shards:
        return True
    visits = visits_of(shards)
    num_at_once = (visits.stops - visits.starts).sum() / len(shards)
    is_short = len(visits.shards) <= 2 * num_rounds * num_shards
    return bool(is_short and num_at_once <= min(_AT_ONCE, num_shards / 2))
