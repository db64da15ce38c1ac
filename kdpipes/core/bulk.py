"""Read the fields of many samples at once, for chains in which reading one field takes a few microseconds.

Making a `Sample` with lazy fields, applying the operations to it and selecting its fields takes about 10 microseconds.
For text, numbers and small arrays, that is longer than all other work. So `deal` first asks the source for columns:
each pipe asks the pipe upstream, `read_fields` returns a list of values for each field, and no samples are made. Pipes
that cannot do this return None, and errors are raised again by reading sample by sample, which names the sample.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from kdpipes.core.randomness import KeyNeededError, SampleKey, without_key
from kdpipes.core.sample import claim_name

__all__ = ["Bulk", "BulkReader", "BulkSource"]

_FIRST = 8  # samples that are read to measure how long one takes
_MAX_SLOW = 3  # slow reads in a row, after which samples are made one by one
_SLOW_S = 100e-6  # a sample; slower ones gain nothing, and many large values would be in memory before they are reduced


class Bulk:
    """What is known about samples that are read together.

    Args:
        seed: The seed of the epochs' order.
        epoch: The epoch number, from 0.
        planned: The epoch for which plan pipes choose samples.
        ordinals: The positions of the samples in the dealt epoch.
        size: The number of samples in the epoch. Larger ordinals are padding.
    """

    def __init__(self, seed: int, epoch: int, planned: int, ordinals: Sequence[int], size: int) -> None:
        self.seed, self.epoch, self.planned, self.ordinals, self.size = seed, epoch, planned, ordinals, size
        self.is_vectorized = False  # set by an operation that is faster for many samples in one call
        self._names: dict[str, int] = {}

    def part(self, start: int, stop: int) -> Bulk:
        """Return the same for some of the samples."""
        return Bulk(self.seed, self.epoch, self.planned, self.ordinals[start:stop], self.size)

    def keys(self) -> list[SampleKey]:
        """Return the random keys of the samples."""
        return [SampleKey(self.seed, self.epoch, ordinal, ordinal >= self.size) for ordinal in self.ordinals]

    def claim_name(self, operation: str) -> str:
        """Return a name that is unique for the samples, like `Sample.claim_name`. Call it upstream first."""
        return claim_name(self._names, operation)


class BulkSource(Protocol):
    """A pipe that may read many samples at once: a `MapPipe`."""

    def field_names(self) -> frozenset[str] | None: ...
    def read_fields(self, names: Sequence[str], positions: NDArray[Any], bulk: Bulk) -> list[Sequence[Any]] | None: ...
    def read_items(self, positions: NDArray[Any], bulk: Bulk) -> list[Any] | None: ...


class BulkReader:
    """Reads batches at once while that works and samples are cheap."""

    def __init__(self) -> None:
        self._size = _FIRST  # how many samples are read at once; 0 if it is not tried any more
        self._num_slow = 0

    def read(self, source: BulkSource, positions: NDArray[Any], bulk: Bulk) -> list[Any] | None:
        """Return the items at some positions; None if they must be made one by one."""
        if len(positions) < _FIRST:
            return None
        items: list[Any] = []
        with without_key():
            while self._size and len(items) < len(positions):
                start, stop = len(items), len(items) + self._size
                begun, part = time.perf_counter(), bulk.part(start, stop)
                try:
                    made = source.read_items(positions[start:stop], part)
                except KeyNeededError:  # users' functions read other pipes of kdpipes
                    made = None
                except Exception:
                    return None
                if made is None:
                    self._size = 0
                    break
                items += made
                if part.is_vectorized or time.perf_counter() - begun <= _SLOW_S * len(made):
                    self._num_slow, self._size = 0, max(self._size, 8 * len(made))
                else:  # the system may have been busy
                    self._num_slow += 1
                    self._size = 0 if self._num_slow >= _MAX_SLOW else _FIRST
        return items if len(items) == len(positions) else None
