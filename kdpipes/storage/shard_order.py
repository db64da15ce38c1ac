"""In which order an epoch needs its shards, how long each, and whether it goes from one to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.storage.download import Shard

__all__ = ["ShardOrder", "Visits", "goes_by_shards", "visits_of"]

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
