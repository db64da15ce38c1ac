"""Batches of samples of like length: how an epoch is cut so that none has more than so many tokens. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.delivery.layout import Sharding, Uneven, share_out
from kdpipes.draw import hash_key
from kdpipes.errors import check_choice, check_count, must_be
from kdpipes.selection import Permutation, smallest_int

__all__ = ["ByLength", "LengthEpoch", "LengthOrder"]

_GLOBAL = "global_"
_SPREAD = 1.1  # how much longer the longest of the samples that are shuffled among each other may be than the shortest,
_NUM_BATCHES = 4  # unless that would make fewer batches of them, where samples would meet the same ones in every epoch


@dataclass(frozen=True)
class ByLength:
    """How an epoch is cut into batches by the lengths of its samples; a length counts for 1 at least.

    A batch counts as many tokens as it has when all of its samples are padded to the longest.

    Args:
        column: The name of the field of lengths.
        is_shuffled: Whether samples of like length are shuffled among each other, at the cost of some padding.
        limits: `max_tokens` and `batch_size`, of one rank's batch, or `global_max_tokens` and `global_batch_size`, of
            all ranks' together; None where there is none.
        uneven: What becomes of a short last batch.
    """

    column: str
    is_shuffled: bool
    limits: Mapping[str, int | None]
    uneven: Uneven

    def __post_init__(self) -> None:
        if not isinstance(self.column, str):
            raise TypeError(must_be("batch_by", 'the name of a field, like "length"', self.column))
        given = {name: check_count(name, limit) for name, limit in self.limits.items() if limit is not None}
        if len({name.startswith(_GLOBAL) for name in given}) != 1:
            raise ValueError(
                "`deal(batch_by=...)` takes `max_tokens` or `batch_size` or both; or `global_max_tokens` or "
                f"`global_batch_size` or both; but got {' and '.join(f'`{name}`' for name in given) or 'none of them'}."
            )
        object.__setattr__(self, "limits", given)
        check_choice("uneven", self.uneven, ("keep", "pad", "drop"))

    def identity(self) -> Any:
        """Return what makes the batches what they are, as plain data."""
        return self.uneven, self.column, sorted(self.limits.items()), _SPREAD, _NUM_BATCHES

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the numbers, besides the identity, on which the batches depend."""
        return {} if self._is_global else {"num_ranks": num_ranks}

    def num_samples(self, length: int, num_ranks: int) -> int:
        """Return how many samples of a length fit into a global batch; 0 if not one for each rank."""
        number = min(
            limit // max(length, 1) if name.endswith("max_tokens") else limit
            for name, limit in self.limits.items()
            if limit is not None
        )
        if self._is_global:
            return number if number >= num_ranks else 0
        return number * num_ranks

    @property
    def _is_global(self) -> bool:
        return any(name.startswith(_GLOBAL) for name in self.limits)


class LengthOrder:
    """The positions of samples by their length, longest first.

    Args:
        lengths: Of all samples, `[num_samples]`, integers from 0.
    """

    def __init__(self, lengths: NDArray[Any]) -> None:
        values, places, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        order = np.argsort(len(values) - 1 - places.reshape(-1), kind="stable")
        self.positions = order.astype(smallest_int(len(lengths)))
        self._values, self._stops = values[::-1].astype(np.int64), np.cumsum(counts[::-1])

    def __len__(self) -> int:
        return len(self.positions)

    def length_at(self, place: int) -> int:
        """Return the length of the sample at a place of this order."""
        return int(self._values[np.searchsorted(self._stops, place, side="right")])

    def num_above(self, length: float) -> int:
        """Return how many samples are as long as this, or longer."""
        number = int(np.count_nonzero(self._values >= length))
        return int(self._stops[number - 1]) if number else 0


class _Bucket(NamedTuple):
    """Samples of like length: those from `start` to `stop` of the order, in global batches from `first_batch` on."""

    start: int
    stop: int
    batch_size: int
    first_batch: int


def _buckets(order: LengthOrder, layout: ByLength, num_ranks: int) -> tuple[_Bucket, ...]:
    """Return the buckets of an epoch, longest samples first; only the last batch of the last one may be short."""
    buckets: list[_Bucket] = []
    start = first_batch = 0
    spread, least = (_SPREAD, _NUM_BATCHES) if layout.is_shuffled else (1.0, 1)
    while start < len(order):
        longest = order.length_at(start)
        size = layout.num_samples(longest, num_ranks)
        like = max(order.num_above(longest / spread) - start, least * size)
        stop = start + -(-like // size) * size
        if len(order) < stop + least * size - size:
            stop = len(order)
        buckets.append(_Bucket(start, stop, size, first_batch))
        first_batch += -(-(stop - start) // size)
        start = stop
    return tuple(buckets)


class LengthEpoch:
    """An epoch, cut into batches of samples of like length.

    Where it is shuffled, both the batches and the samples within a bucket have an order of their own; a short last
    batch stays last. As many batches in every epoch.

    Args:
        order: The samples by their length, of which none is longer than the layout allows.
        layout: The limits.
        sharding: Which rank this is, of how many.
        key: Of the order: seed and epoch; None if it is not shuffled, or only counted.
    """

    def __init__(
        self, order: LengthOrder, layout: ByLength, sharding: Sharding, key: tuple[int, int] | None = None
    ) -> None:
        self._order, self._layout, self._sharding, self._key = order, layout, sharding, key
        self._buckets = _buckets(order, layout, sharding.num_ranks)
        sizes = [_sizes_of(bucket) for bucket in self._buckets]
        self._sizes = np.concatenate([np.zeros(0, dtype=np.int64), *sizes])
        is_short = bool(self._buckets) and bool(self._sizes[-1] < self._buckets[-1].batch_size)
        if is_short and layout.uneven == "drop":
            self._sizes = self._sizes[:-1]
        num_shuffled = len(self._sizes) - (is_short and layout.uneven != "drop")
        self._numbers = np.arange(len(self._sizes))
        if key is not None:
            order_of = Permutation(num_shuffled, key=hash_key("order", *key))
            self._numbers[:num_shuffled] = order_of[self._numbers[:num_shuffled]]
        self._starts = np.cumsum(self._sizes[self._numbers]) - self._sizes[self._numbers]
        self.full_size = self._buckets[-1].batch_size if self._buckets else 0
        self._first_batches = [bucket.first_batch for bucket in self._buckets]
        self._in_bucket: dict[int, Permutation] = {}

    @property
    def num_batches(self) -> int:
        """How many batches each rank gets."""
        return len(self._sizes)

    def ordinals(self, batch: int) -> range:
        """Return the ordinals of this rank's part of a batch; those from the number of samples on are padding."""
        return share_out(int(self._starts[batch]), self._filled(batch), self._sharding)

    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions of the samples of this rank's part of a batch."""
        ordinals, number, bucket = self.ordinals(batch), int(self._numbers[batch]), self._bucket(batch)
        first = (number - bucket.first_batch) * bucket.batch_size - int(self._starts[batch])
        places = np.arange(first + ordinals.start, first + ordinals.stop) % (bucket.stop - bucket.start)
        if self._key is not None:
            places = self._permutation(bucket, self._key)[places]
        positions: NDArray[Any] = self._order.positions[bucket.start + places]
        return positions

    def _permutation(self, bucket: _Bucket, key: tuple[int, int]) -> Permutation:
        if bucket.start not in self._in_bucket:
            size = bucket.stop - bucket.start
            self._in_bucket[bucket.start] = Permutation(size, key=hash_key("bucket", *key, bucket.start))
        return self._in_bucket[bucket.start]

    def _bucket(self, batch: int) -> _Bucket:
        place = np.searchsorted(self._first_batches, self._numbers[batch], side="right") - 1
        return self._buckets[int(place)]

    def _filled(self, batch: int) -> int:
        return (
            self._bucket(batch).batch_size if self._layout.uneven == "pad" else int(self._sizes[self._numbers[batch]])
        )


def _sizes_of(bucket: _Bucket) -> NDArray[np.int64]:
    number = bucket.stop - bucket.start
    sizes = np.full(-(-number // bucket.batch_size), bucket.batch_size, dtype=np.int64)
    sizes[-1] = number - (len(sizes) - 1) * bucket.batch_size
    return sizes
