"""Orders of an epoch that read shard after shard: the shards shuffled, and the samples within windows. Arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Permutation, smallest_int
from kdpipes.core.errors import ChainError, check_count
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.map_pipe import shard_numbers_of
from kdpipes.core.order import in_windows, ranges
from kdpipes.core.randomness import hash_key

_NUM_SHARDS = 8  # whose samples a window has by default
_KEPT_WINDOWS = 4  # permutations: a batch may lie across windows, and later ones are prefetched


@dataclass(frozen=True)
class ByShard:
    """Read shard after shard in each epoch, and shuffle the samples within windows: `deal(shuffle=kdp.by_shard())`.

    It is for remote shards, and for shards that do not fit in memory. `deal(shuffle="shards")` is short for it.

    Args:
        window: The minimum number of samples that are mixed at a time; by default, those of 8 shards. A cache of whole
            shards (`open_shards(cache_dir=)`) must be large enough for the shards of a window.

    Mixing: Each epoch has a new order of the shards. Their samples are cut into windows, and each window is permuted.
        A batch is drawn evenly from one window, so samples that are farther apart than a window never meet. On average,
        two neighbors in a shard end up a third of a window apart. Shards whose samples are sorted, for example by
        class, need a window of many shards, or `deal(shuffle=True)`.

    Memory: 8 bytes for each shard, and four bytes for each sample if pipes upstream change the order of the shards.

    Raises:
        ValueError: `window` is less than 1.

    Example:
        >>> kdp.by_shard(window=10_000).window
        10000
    """

    call: ClassVar[str] = "kdp.by_shard"
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", check_count("window", self.window))  # converts NumPy integers


Shuffle = bool | Literal["shards"] | ByShard


class ShardOrder(Fingerprinted):
    """The positions of samples by the shard that they lie in, from the number of each sample's shard."""

    def __init__(self, numbers: NDArray[Any]) -> None:
        order = None if bool((np.diff(numbers) >= 0).all()) else np.argsort(numbers, kind="stable")
        self._order = None if order is None else order.astype(smallest_int(len(numbers)))
        _, counts = np.unique(numbers, return_counts=True)
        self.stops: NDArray[np.int64] = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def num_shards(self) -> int:
        """The number of shards that have samples."""
        return len(self.stops)

    def fingerprint(self) -> Any:
        return self._order, self.stops

    def __getitem__(self, places: NDArray[Any]) -> NDArray[Any]:
        """Return the positions of samples by their places in the order of shards."""
        return places if self._order is None else self._order[places]


def read_shards(source: Any) -> ShardOrder:
    """Return the samples of an indexed source by their shard; raise ChainError if it does not know their shards."""
    numbers = shard_numbers_of(source)
    if numbers is None:
        raise ChainError(
            '`deal(shuffle="shards")` needs a source of shards, like `kdp.open_shards`, in every branch of the chain; '
            "`deal(shuffle=True)` shuffles any source."
        )
    return ShardOrder(numbers)


class WindowedOrder:
    """A seeded order of an epoch: shard after shard, in random order, with samples shuffled within windows.

    Args:
        shards: The samples by their shards.
        window: The least number of samples of a window, if the source has as many; None: those of 8 shards.
        key: The seed and the epoch.
    """

    def __init__(self, shards: ShardOrder, window: int | None, key: tuple[int, int]) -> None:
        self._shards = shards
        self._key = key
        size = len(shards)
        self._num_windows = max(size // (window or -(-size * _NUM_SHARDS // max(shards.num_shards, 1)) or 1), 1)
        sequence = Permutation(shards.num_shards, key=hash_key("shards", *key))[np.arange(shards.num_shards)]
        counts = np.diff(shards.stops, prepend=0)[sequence]
        self._stops = np.cumsum(counts)
        # From a place in this epoch's sequence to that of the source.
        self._shifts = shards.stops[sequence] - self._stops
        self._windows: dict[int, Permutation] = {}

    def __getitem__(self, ordinals: NDArray[Any]) -> NDArray[Any]:
        """Return the positions of samples by their ordinals."""
        places = np.array(ordinals, dtype=np.int64)
        windows = self._window_of(places)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            start = self._start(window)
            places[chosen] = start + self._within(window)[places[chosen] - start]
        return self._in_sequence(places)

    def by_shard(self, first: int) -> Iterator[NDArray[Any]]:
        """Yield positions in the order in which shards are needed, from the window of an ordinal on.

        These are all positions, shard after shard. A window of several shards also has a position of each shard at its
        beginning and its end, because it needs them all the time.
        """
        size = len(self._shards)
        start = int(self._window_of(np.asarray(first))) if first < size else self._num_windows
        begin = self._start(start)
        if self._num_windows >= self._shards.num_shards:
            return map(self._in_sequence, ranges(begin, size))
        edges = (self._start(window) for window in range(start, self._num_windows + 1))
        parts = (part for begin, end in pairwise(edges) for part in self._around(begin, end))
        return map(self._in_sequence, in_windows(parts))

    def _around(self, begin: int, end: int) -> Iterator[NDArray[Any]]:
        """Yield the places of a window; before and after them, one place of each of its shards."""
        low, high = np.searchsorted(self._stops, [begin, end - 1], side="right")
        starts = np.concatenate([[begin], self._stops[low:high]])
        yield starts
        yield from ranges(begin, end)
        yield starts

    def _in_sequence(self, places: NDArray[Any]) -> NDArray[Any]:
        return self._shards[places + self._shifts[np.searchsorted(self._stops, places, side="right")]]

    def _window_of(self, places: NDArray[Any]) -> NDArray[Any]:
        windows: NDArray[Any] = ((places + 1) * self._num_windows - 1) // max(len(self._shards), 1)
        return windows

    def _start(self, window: int) -> int:
        return window * len(self._shards) // self._num_windows

    def _within(self, window: int) -> Permutation:
        if window not in self._windows:
            while len(self._windows) >= _KEPT_WINDOWS:
                del self._windows[next(iter(self._windows))]
            size = self._start(window + 1) - self._start(window)
            self._windows[window] = Permutation(size, key=hash_key("window", *self._key, window))
        return self._windows[window]
