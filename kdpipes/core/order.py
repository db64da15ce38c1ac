"""The order in which samples will be fetched, computed window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 16  # in positions: an epoch of 10^7 samples takes half a megabyte at a time, and few calls

Positions = NDArray[Any]


class Order:
    """Positions in the order in which they will be fetched, window by window: `for positions in order`.

    The positions of an epoch are computed again in each iteration, and are never all in memory at once.

    Args:
        windows: A function that returns an iterable of windows, each an array of positions.
        is_epoch: True for the positions of a whole epoch, for all workers on this machine; they are known only if the
            epoch is read shard by shard, and otherwise the order is empty. False for the positions to fetch next.
    """

    def __init__(self, windows: Callable[[], Iterable[Positions]], *, is_epoch: bool) -> None:
        self._windows = windows
        self.is_epoch = is_epoch

    @classmethod
    def of_next(cls, positions: Positions) -> Order:
        """Return the order of the positions to fetch next."""
        return cls(lambda: (positions,), is_epoch=False)

    def __iter__(self) -> Iterator[Positions]:
        return (positions for positions in self._windows() if len(positions))

    def through(self, mapping: Callable[[Positions], Positions]) -> Order:
        """Return the corresponding order of the source of a pipe.

        `mapping` maps positions in the pipe to positions in its source. It may drop positions, but not add any.
        """
        return Order(lambda: map(mapping, self), is_epoch=self.is_epoch)

    def positions(self) -> Positions:
        """Return all positions."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self])

    def probe(self, number: int) -> Positions:
        """Return up to `number` positions, spread over the whole order."""
        some = np.concatenate([np.zeros(0, dtype=np.int64), *(_spread(positions, number) for positions in self)])
        return _spread(some, number)


def _spread(positions: Positions, number: int) -> Positions:
    if len(positions) <= number:
        return positions
    return positions[np.linspace(0, len(positions) - 1, number).astype(np.int64)]


def ranges(start: int, stop: int) -> Iterator[Positions]:
    """Yield the integers from `start` to `stop - 1` in windows."""
    return (np.arange(begin, min(begin + WINDOW, stop)) for begin in range(start, stop, WINDOW))


def in_windows(parts: Iterable[Positions]) -> Iterator[Positions]:
    """Join short arrays into windows, because each window costs a few calls regardless of its length."""
    waiting: list[Positions] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= WINDOW:
            yield np.concatenate(waiting)
            waiting = []
            size = 0
    if waiting:
        yield np.concatenate(waiting)
