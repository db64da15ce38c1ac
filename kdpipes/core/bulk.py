"""Read the fields of many samples at once, without making a `Sample` of each.

Making a `Sample` with lazy fields, applying the operations to it and selecting its fields takes 10 microseconds for
text, numbers and small arrays, which is longer than all other work, and more than 100 beside the decoding of images,
which empties the processor's caches. So `deal` first asks the source for columns: each pipe asks the pipe upstream,
`read_fields` returns a list of values for each field, and no samples are made. Pipes that cannot do this return None,
and errors are raised again by reading sample by sample, which names the sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from kdpipes.core import activity
from kdpipes.core.randomness import KeyNeededError, SampleKey, using_key, without_key
from kdpipes.core.sample import Sample, claim_name

_LEAST = 8  # samples in a batch; in smaller ones, little is gained
_FEW = 16  # samples that are read at once, unless they are cheap; all of their undecoded values are in memory
_CHEAP_S = 100e-6  # a sample; of cheaper ones, many are read at once
_SLOW_S = 5e-3  # a sample; slower ones gain nothing, and are large: only one at a time should be in memory


Values = TypeVar("Values", bound=Sequence[Any])


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
        self.measure: Callable[[str, Callable[[], Sequence[Any]]], Any] | None = None  # set by a profiler
        self.names: dict[str, int] = {}  # how many operations have claimed each name
        self._keys: list[SampleKey] | None = None

    def part(self, start: int, stop: int) -> Bulk:
        """Return the same for some of the samples."""
        return Bulk(self.seed, self.epoch, self.planned, self.ordinals[start:stop], self.size)

    def run(self, what: str, make: Callable[[], Values]) -> Values:
        """Return the values that a function makes for the samples, measured if a profiler wants it."""
        return make() if self.measure is None else self.measure(what, make)

    def keys(self) -> list[SampleKey]:
        """Return the random keys of the samples."""
        if self._keys is None:
            self._keys = [SampleKey(self.seed, self.epoch, number, number >= self.size) for number in self.ordinals]
        return self._keys

    def claim_name(self, operation: str) -> str:
        """Return a name that is unique for the samples, like `Sample.claim_name`. Call it upstream first."""
        return claim_name(self.names, operation)


class BulkSource(Protocol):
    """A pipe that may read many samples at once: a `MapPipe`."""

    def field_names(self) -> frozenset[str] | None: ...
    def read_fields(self, names: Sequence[str], positions: NDArray[Any], bulk: Bulk) -> list[Sequence[Any]] | None: ...
    def read_items(self, positions: NDArray[Any], bulk: Bulk) -> list[Any] | None: ...


def read_with_keys(
    source: BulkSource, names: Sequence[str], positions: NDArray[Any], bulk: Bulk
) -> tuple[list[Sequence[Any]], Sequence[str]] | None:
    """Return the values of some fields, and the keys of the samples; None if the source does not support this."""
    if "key" in (source.field_names() or ()):  # a field of that name hides the key
        return None
    read = [*names, *({"key"} - set(names))]
    columns = source.read_fields(read, positions, bulk)
    return None if columns is None else (columns[: len(names)], columns[read.index("key")])


def read_samples(
    fetch: Callable[[int], Sample], names: Sequence[str], positions: NDArray[Any], bulk: Bulk
) -> list[Sequence[Any]] | None:
    """Make samples one by one with `fetch`, and return a column for each name: a field, "key" or "index".

    Pipes downstream can then work on many samples at once. Return None if the samples went through different
    operations.
    """
    rows: list[Sequence[Any]] = []
    claimed: dict[str, int] | None = None
    for position, key in zip(positions.tolist(), bulk.keys(), strict=True):
        with using_key(key):
            sample = fetch(position)
            claimed = sample.claimed_names if claimed is None else claimed
            if sample.claimed_names != claimed:  # samples of a `mix` whose sources have other operations
                return None
            rows.append([sample[name] if name in sample else getattr(sample, name) for name in names])
    bulk.names = dict(claimed or {})
    return list(zip(*rows, strict=True))


def made_of_each(
    bulk: Bulk, make: Callable[..., Any], *columns: Iterable[Any], keys: Callable[[], Iterable[str]], what: str
) -> list[Any]:
    """Return what a function makes of each sample, from one value of each column.

    In a worker process, the sample that it works on is recorded. `keys` is called only there.
    """

    def each() -> list[Any]:
        if activity.current is None:
            return list(map(make, *columns))
        with activity.current.reading(what) as at:
            return [at(key, make)(*values) for key, values in zip(keys(), zip(*columns, strict=True), strict=True)]

    return bulk.run(what, each)


class BulkReader:
    """Makes the items of batches, many at once while that works."""

    def __init__(self) -> None:
        self._size = 1  # how many samples are read at once; 0 if the source cannot do it

    def items(
        self, source: BulkSource, positions: NDArray[Any], bulk: Bulk, make: Callable[[int, int], list[Any]]
    ) -> list[Any]:
        """Return the items at some positions.

        `make(start, stop)` makes the items at `positions[start:stop]` one by one.
        """
        items: list[Any] = []
        while self._size and _LEAST <= len(positions) > len(items):
            start, stop = len(items), min(len(items) + self._size, len(positions))
            found = self.read(source, positions[start:stop], bulk.part(start, stop))
            items += make(start, stop) if found is None else found
            if self._size == 1:  # it was slow; the next batch tries again, because the first epoch fills caches
                break
        return items + make(len(items), len(positions))

    def read(self, source: BulkSource, positions: NDArray[Any], bulk: Bulk) -> list[Any] | None:
        """Return items that are read at once; None if they must be made one by one."""
        begun = time.thread_time()  # what another process does meanwhile does not count
        try:
            with without_key():
                items = source.read_items(positions, bulk)
        except KeyNeededError:  # users' functions read other pipes of kdpipes
            items = None
        except Exception:
            return None
        if items is None:
            self._size = 0
            return None
        lasted_s = (time.thread_time() - begun) / len(items)
        if bulk.is_vectorized or lasted_s <= _CHEAP_S:
            self._size = max(self._size, 8 * len(items))
        else:
            self._size = _FEW if lasted_s <= _SLOW_S else 1
        return items
