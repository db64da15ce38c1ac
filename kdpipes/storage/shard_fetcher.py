"""Shards that come to this machine: those that are asked for at once, and by a thread those that are needed next."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from kdpipes.core.errors import DataError
from kdpipes.storage.catalog import keep_index
from kdpipes.storage.download import Shard, download
from kdpipes.storage.held_files import HeldFile
from kdpipes.storage.ranges import Threads, read_range
from kdpipes.storage.shard_folder import Entry, ShardFolder
from kdpipes.storage.shard_order import ShardOrder
from kdpipes.storage.time_limit import limited, time_limit

__all__ = ["ShardFetcher"]

_NUM_HELD = 2  # shards that stay open in a process between reads, and so cannot be removed by others: at least
_MOST_HELD = 16
_log = logging.getLogger(__name__)


class ShardFetcher:
    """What a cache has in one process: open shards, threads, and the order of need.

    The thread that looks ahead knows this and not the cache, which may go while it works.

    Args:
        folder: Where shards are kept.
        num_ahead: See `ShardCache`.
        num_ranges: See `ShardCache`.
        range_size: See `ShardCache`.
    """

    def __init__(self, folder: ShardFolder, num_ahead: int, num_ranges: int, range_size: int) -> None:
        self.folder = folder
        self.order = ShardOrder()
        self.failure: OSError | None = None  # of this machine: nothing more is downloaded
        self.refused: set[str] = set()  # shards whose storage fails, or that have no room in this epoch
        self._num_ahead, self._num_ranges, self._range_size = num_ahead, num_ranges, range_size
        self._lock = threading.Lock()
        self._held: OrderedDict[str, HeldFile] = OrderedDict()
        self._range_threads: Threads | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Let threads end after the range that they are at."""
        self._is_stopped = True

    def file_of(self, shard: Shard, *, fetches: bool) -> HeldFile | None:
        """Return the file of a shard, held; if need be after its download."""
        with self._lock:
            file = self._held.get(shard.name)
            if file is not None:
                self._held.move_to_end(shard.name)
                return file
        file = self._fetched(shard, waits=True) if fetches else self.folder.find(shard)
        if file is not None:
            with self._lock:
                self._held[shard.name] = file
                while len(self._held) > self._most_held(shard):
                    self._held.popitem(last=False)
        return file

    def _most_held(self, shard: Shard) -> int:
        """Return how many may stay open: those that are read side by side, if others have room for as many."""
        number = min(self.order.num_at_once, _MOST_HELD)
        is_roomy = 2 * number * shard.version.size <= self.folder.max_bytes()
        return max(_NUM_HELD, number) if is_roomy else _NUM_HELD

    def let_go(self, name: str) -> None:
        """Hold a shard no longer, once those threads are done that are reading it."""
        with self._lock:
            self._held.pop(name, None)

    def look_ahead(self) -> None:
        """Let a thread download the shards that are needed next, unless one is at it."""
        with self._lock:
            is_idle = self._thread is None or not self._thread.is_alive()
            if is_idle and self._due() is not None:
                limit = (time_limit(),)
                self._thread = threading.Thread(target=self._work_ahead, args=limit, name="kdpipes-shards", daemon=True)
                self._thread.start()

    def _work_ahead(self, seconds: float | None) -> None:
        with limited(seconds):
            self._fetch_due()

    def _fetch_due(self) -> None:
        tried: set[str] = set()
        while True:
            with self._lock:
                shard = self._due(tried)
                if shard is None:
                    self._thread = None
                    return
            tried.add(shard.name)
            try:
                self._fetched(shard, waits=False)
            except DataError as error:  # who needs it will see
                _log.info("%s", error)
            except OSError as error:
                self.failure = error

    def _due(self, tried: set[str] | None = None) -> Shard | None:
        if self._is_stopped or self.failure is not None:
            return None
        tried = self.refused | (tried or set())
        due = (shard for shard in self.order.ahead(self._num_ahead) if shard.name not in tried)
        return next((shard for shard in due if not self.folder.has(shard)), None)

    def _fetched(self, shard: Shard, *, waits: bool) -> HeldFile | None:
        def expendable(entries: list[Entry]) -> Iterator[Entry]:
            for entry in self._by_need(entries, self.order.need(shard.name)):
                self.let_go(entry.name)
                yield entry

        return self.folder.fetch(shard, self._download, expendable, waits=waits)

    def _by_need(self, entries: list[Entry], latest: int | None) -> list[Entry]:
        """Return what may go for a shard, first what is not needed, then what is needed last, but later than it."""
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
