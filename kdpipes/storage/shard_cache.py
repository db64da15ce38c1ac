"""Whole remote shards kept on this machine: downloaded ahead of need, shared by processes, limited in size."""

from __future__ import annotations

import hashlib
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger, warn
from kdpipes.core.processes import forget_after_fork
from kdpipes.core.secrets import masked
from kdpipes.storage.files import ReplacedError
from kdpipes.storage.index_home import keep_index
from kdpipes.storage.local import CAN_HOLD, HeldFile, cache_folder, pread
from kdpipes.storage.requests import Access, Threads, current_access, using
from kdpipes.storage.shard_folder import Shard, ShardFolder, StoredFile, download

_AT_ONCE = 16  # how many shards an order may go through side by side
_NUM_HELD = 2  # shards that stay open in a process between reads, and so cannot be removed by others: at least
_log = logger(__name__)


class ShardCache:
    """Whole shards in a folder, shared with all local processes that use the same one.

    One process downloads a shard, and another one resumes it if that process is killed; others can read it when it is
    complete and verified. Room is made by removing shards that no process is reading: first those that are not in the
    expected order, then those that it needs last. Safe for threads and for forked processes; a copy uses the same
    folder.

    Args:
        folder: The folder; None is `shards` in the local cache (`KDPIPES_CACHE_DIR`, `~/.cache/kdpipes`).
        max_bytes: The maximum size of the cache, with unfinished shards; None is half of what is free there.
        num_ahead: The number of shards to download ahead of the one that is read.
    """

    def __init__(self, folder: str | None = None, max_bytes: int | None = None, num_ahead: int = 2) -> None:
        self._place, self._num_ahead = (folder, max_bytes), num_ahead
        self._end: Any = None
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCache, (*self._place, self._num_ahead)

    def forget(self) -> None:
        """Start over, without threads and open files."""
        self._made: _Fetcher | None = None
        self._lock = threading.Lock()
        self._has_warned = False
        if self._end is not None:
            self._end.detach()

    def takes(self, shard: Shard, num_bytes: int | None = None) -> bool:
        """Return whether a shard, or `num_bytes` that are needed at the same time, can be kept, as far as is known."""
        fetcher = self._fetcher()
        needed = shard.version.size if num_bytes is None else num_bytes
        try:
            if shard.name in fetcher.rejected or needed > fetcher.folder.max_bytes():
                return False
        except OSError as error:
            fetcher.failure = error
        return self._is_able(fetcher)

    @property
    def has_own_folder(self) -> bool:
        """Whether the user has chosen the folder of the cache."""
        return self._place[0] is not None

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is in the cache."""
        return CAN_HOLD and self._fetcher().folder.has(shard)

    def path_of(self, shard: Shard, *, fetches: bool) -> str | None:
        """Return the path of a shard in the cache, or None if it is not there.

        With `fetches`, the shard is downloaded first if it is missing; None then means that it could not be cached, or
        has been replaced in storage.
        """
        try:
            file = self._file(shard, fetches=fetches)
        except ReplacedError:
            return None
        return None if file is None else str(file.path)

    def expect(self, shards: Sequence[Shard], untils: Sequence[int] | None = None) -> None:
        """Set the order in which an epoch that begins needs shards, and start to download the first ones.

        A shard that is needed again later appears again; for `untils` see `NeededShards`.
        """
        fetcher = self._fetcher()
        fetcher.failure = None
        fetcher.rejected.clear()
        self.prefetch(shards, untils)

    def prefetch(self, shards: Sequence[Shard], untils: Sequence[int] | None = None) -> None:
        """Set which shards will be read soon, where the order of the epoch is not known."""
        fetcher = self._fetcher()
        fetcher.order = NeededShards(shards, untils)
        if self._is_able(fetcher):
            fetcher.look_ahead()

    def read(self, shard: Shard, offset: int, size: int, *, fetches: bool = True) -> bytes | None:
        """Return bytes of a shard; None if it is not in the cache and cannot be, or is too short.

        If `fetches`, a missing shard is downloaded. Raises ReplacedError if it has been replaced.
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
                fetcher.rejected.add(shard.name)  # in this epoch: all shards in the cache are needed sooner
            return file
        except ReplacedError:
            raise
        except DataError as error:  # reading single members may still work
            _log.warning("%s Its members are read one by one.", error)
            fetcher.rejected.add(shard.name)
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
            warn(text)
        return fetcher.failure is None

    def _fetcher(self) -> _Fetcher:
        with self._lock:
            if self._made is None:
                folder, max_bytes = self._place
                path = cache_folder("shards") if folder is None else Path(folder).expanduser()
                self._made = _Fetcher(ShardFolder(path, max_bytes), self._num_ahead)
                self._end = weakref.finalize(self, self._made.stop)
            return self._made


class _Fetcher:
    """The state of a cache in one process: open shards, threads, and the order of need.

    The thread that downloads ahead refers to this object and not to the cache, so that the cache can be dropped while
    it works.
    """

    def __init__(self, folder: ShardFolder, num_ahead: int) -> None:
        self.folder = folder
        self.order = NeededShards()
        self.failure: OSError | None = None  # of the local disk: nothing more is downloaded
        self.rejected: set[str] = set()  # shards whose storage fails, or that have no room in this epoch
        self._num_ahead = num_ahead
        self._lock = threading.Lock()
        self._held: OrderedDict[str, HeldFile] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Let the thread end after the bytes that it is reading."""
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
                access = (current_access(),)
                self._thread = threading.Thread(
                    target=self._work_ahead, args=access, name="kdpipes-shards", daemon=True
                )
                self._thread.start()

    def _work_ahead(self, access: Access) -> None:
        tried: set[str] = set()
        with using(access):
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
        due = (shard for shard in self.order.ahead(self._num_ahead) if shard.name not in self.rejected | tried)
        return next((shard for shard in due if not self.folder.has(shard)), None)

    def _fetched(self, shard: Shard, *, waits: bool) -> HeldFile | None:
        def expendable(entries: list[StoredFile]) -> Iterator[StoredFile]:
            """Yield files that may be removed: unneeded ones, then those needed after the shard, last ones first."""
            needs = [(self.order.need(entry.name), entry) for entry in entries]
            latest = self.order.need(shard.name)
            unneeded = sorted((entry for need, entry in needs if need is None), key=lambda entry: entry.used)
            needed = sorted(((need, entry) for need, entry in needs if need is not None), reverse=True)
            for entry in (*unneeded, *(entry for need, entry in needed if latest is None or need > latest)):
                with self._lock:
                    self._held.pop(entry.name, None)
                yield entry

        return self.folder.fetch(shard, self._download, expendable, waits=waits)

    def _download(self, shard: Shard, file: HeldFile) -> bool:
        is_whole = download(shard, file, lambda: not self._is_stopped)
        if is_whole:
            # The shard is usable even if its index cannot be kept. A thread keeps it, because the traceback of an error
            # here would keep the file open.
            Threads(1, "kdpipes-shards").submit(partial(keep_index, shard.url, shard.version)).exception()
        return is_whole


class NeededShards:
    """The order in which an epoch needs shards, and which of them it has reached.

    Args:
        shards: The shards in order of need; one that is needed again later appears again.
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
    """The intervals of an epoch in which shards are needed, sorted by their starts; all arrays are `[n]`.

    Args:
        shards: The numbers of the shards.
        starts: The places in the epoch at which the intervals start.
        stops: The places before which they end.
    """

    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def untils(self) -> NDArray[np.int64]:
        """Return for each visit the last visit that begins before it ends."""
        untils: NDArray[np.int64] = np.searchsorted(self.starts, self.stops - 1, side="right") - 1
        return untils


class Survey:
    """Which shards an epoch needs, and when, read from its positions window by window.

    Positions are not kept: an epoch of 10^7 samples takes one byte for each sample of the source.

    Args:
        shards: The shard of each sample of the source, `[size]`.
        is_counted: For each shard, whether it counts.
        orders: The positions of the epoch, in windows; each is iterated twice.

    >>> Survey(np.array([3, 3, 0, 1, 0, 1]), np.ones(4, dtype=bool), [np.arange(6)]).visits.shards
    array([3, 0, 1])
    """

    def __init__(self, shards: NDArray[Any], is_counted: NDArray[np.bool_], *orders: Iterable[NDArray[Any]]) -> None:
        self._shards, self._is_counted, self.orders = shards, is_counted, orders
        self.is_used = np.zeros(len(shards), dtype=bool)  # which samples of the source are needed
        self.counts = np.zeros(len(is_counted), dtype=np.int64)  # how many samples of each shard are needed
        self._num_runs = 0  # how many times the epoch goes on to another shard
        digest, last = hashlib.blake2b(digest_size=16), -1
        for positions, numbers in self._counted(digest.update):
            self.is_used[positions] = True
            self.counts += np.bincount(numbers, minlength=len(self.counts))
            self._num_runs += int(np.count_nonzero(np.diff(numbers, prepend=last)))
            last = int(numbers[-1])
        self.num_samples = int(self.counts.sum())
        self.digest = digest.digest()  # of all positions

    def _counted(self, note: Callable[[bytes], None] | None = None) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield positions and their shards, window by window, without those whose shards do not count."""
        for positions in chain.from_iterable(self.orders):
            if note is not None:
                note(positions.astype(np.int64, copy=False).tobytes())
            numbers = self._shards[positions]
            is_counted = self._is_counted[numbers]
            if is_counted.any():
                yield positions[is_counted], numbers[is_counted]

    @cached_property
    def visits(self) -> Visits:
        """The visits of the epoch; a shard that is needed again soon is still being visited."""
        far = _AT_ONCE * self.num_samples // max(int(np.count_nonzero(self.counts)), 1)
        latest = np.zeros(len(self.counts), dtype=np.int64)  # the last visit of each shard so far
        ends = np.full(len(self.counts), -far - 1)  # where that ends; long before the epoch where there is none
        shards, begins, places, stops = ([np.zeros(0, dtype=np.int64)] for _ in range(4))
        size = done = 0
        for _, numbers in self._counted():
            edges = np.flatnonzero(np.diff(numbers)) + 1
            starts = np.concatenate([[0], edges])
            order = np.argsort(numbers[starts], kind="stable")  # runs by shard
            which, starts = numbers[starts][order], starts[order] + done
            ends_of_runs = np.append(edges, len(numbers))[order] + done
            is_first = np.diff(which, prepend=-1) != 0  # of its shard, in this window
            is_new = starts - np.where(is_first, ends[which], np.roll(ends_of_runs, 1)) > far
            known = np.where(is_new, size + np.cumsum(is_new) - 1, latest[which])
            visits = known[np.maximum.accumulate(np.where(is_new | is_first, np.arange(len(which)), 0))]
            latest[which], ends[which] = visits, ends_of_runs  # of equal indices, NumPy keeps what comes last
            shards.append(which[is_new])
            begins.append(starts[is_new])
            is_last = np.append(visits[1:] != visits[:-1], True)
            places.append(visits[is_last])
            stops.append(ends_of_runs[is_last])
            size, done = size + int(is_new.sum()), done + len(numbers)
        stop_of = np.zeros(size, dtype=np.int64)
        stop_of[np.concatenate(places)] = np.concatenate(stops)
        start_of = np.concatenate(begins)
        by_start = np.argsort(start_of, kind="stable")
        return Visits(np.concatenate(shards)[by_start], start_of[by_start], stop_of[by_start])

    def goes_by_shards(self) -> bool:
        """Return whether the epoch reads shard after shard, or a few side by side."""
        if not self.num_samples:
            return False
        num_shards = int(np.count_nonzero(self.counts))
        most = 2 * num_shards * self.num_samples / np.count_nonzero(self.is_used)  # twice for each round
        if self._num_runs <= most:
            return True
        num_at_once = (self.visits.stops - self.visits.starts).sum() / self.num_samples
        return bool(len(self.visits.shards) <= most and num_at_once <= min(_AT_ONCE, num_shards / 2))
