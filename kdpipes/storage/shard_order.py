"""In which order an epoch needs its shards, how long each, and whether it goes from one to the next."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.storage.download import Shard

__all__ = ["ShardOrder", "Survey", "Visits"]

_AT_ONCE = 16  # how many shards an order may go through side by side


class Visits(NamedTuple):
    """The stretches of an epoch in which shards are needed, by their beginnings.

    Args:
        shards: Which shard it is, `[n]`.
        starts: The place in the epoch from which on it is needed, `[n]`.
        stops: The place up to which, `[n]`.
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

    >>> Survey(np.array([3, 3, 0, 1, 0, 1]), np.ones(4, dtype=bool), [np.arange(6)]).visits().shards
    array([3, 0, 1])
    """

    def __init__(self, shards: NDArray[Any], is_counted: NDArray[np.bool_], *orders: Iterable[NDArray[Any]]) -> None:
        self._shards, self._is_counted, self.orders = shards, is_counted, orders
        self.is_used = np.zeros(len(shards), dtype=bool)  # which samples of the source are needed
        self.counts = np.zeros(len(is_counted), dtype=np.int64)  # how many samples of each shard are needed
        self._num_runs = 0  # how many times the epoch goes on to another shard
        self._visits: Visits | None = None
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

    def visits(self) -> Visits:
        """Return the visits of the epoch; a shard that is needed again soon is still being visited."""
        if self._visits is None:
            self._visits = self._found_visits()
        return self._visits

    def _found_visits(self) -> Visits:
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
        visits = self.visits()
        num_at_once = (visits.stops - visits.starts).sum() / self.num_samples
        return bool(len(visits.shards) <= most and num_at_once <= min(_AT_ONCE, num_shards / 2))


class ShardOrder:
    """The order in which shards are needed, and how far that has come.

    Args:
        shards: In order of need; one that is needed again later stands there again.
        untils: For each, the last one in this order that is begun before it is done with; its own place if not given.
    """

    def __init__(self, shards: Sequence[Shard] = (), untils: Sequence[int] | None = None) -> None:
        self._shards = list(shards)
        self._untils = list(range(len(self._shards))) if untils is None else list(untils)
        self._width = max((until - place for place, until in enumerate(self._untils)), default=0)
        self._places: dict[str, list[int]] = {}
        self._ends: dict[str, list[int]] = {}
        for place, shard in enumerate(self._shards):
            self._places.setdefault(shard.name, []).append(place)
            self._ends.setdefault(shard.name, []).append(self._untils[place])
        self._now = -1

    @property
    def num_at_once(self) -> int:
        """How many shards are read side by side, at most."""
        return self._width + 1

    def reach(self, shard: Shard) -> bool:
        """Take note that a shard is being read, and return whether that is farther than before."""
        place = self._next(shard.name, self._now)
        is_farther = place is not None and place > self._now
        self._now = place if place is not None and is_farther else self._now
        return is_farther

    def ahead(self, number: int) -> list[Shard]:
        """Return the next shards beyond those that are read side by side with the one that was reached last."""
        return self._shards[self._now + 1 : self._now + 1 + number + self._width]

    def need(self, name: str) -> int | None:
        """Return how late a shard is needed next, in this epoch or a next one like it; None if it is not.

        The one before counts as needed, since workers do not go side by side.
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
