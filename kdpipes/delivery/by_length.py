"""Cut epochs into batches of samples of similar length, with limited numbers of tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Permutation, smallest_int
from kdpipes.core.errors import DataError, check_count, must_be, reject_field
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.map_pipe import indexed
from kdpipes.core.randomness import hash_key
from kdpipes.delivery.batching import Arguments, Batching, Epoch
from kdpipes.delivery.layout import Sharding, share_out

_GLOBAL = "global_"
# Samples are shuffled in buckets. In a bucket, the longest sample is at most this many times as long as the shortest,
_SPREAD = 1.1
# unless a bucket would have fewer batches than this: then the same samples would be together in every epoch.
_NUM_BATCHES = 4


class ByLength(Batching):
    """Batches of samples of similar length: `deal(batching=kdp.by_length("length", max_tokens=4096))`.

    A batch has as many samples as fit. Its tokens are counted with all samples padded to the longest. A length counts
    as at least 1. Without `shuffle`, the longest samples come first. With it, the samples of a batch are drawn from
    those of similar length (longer by up to a tenth, or more if there are few), and the batches are shuffled.

    Args:
        field: The name of the field that holds the length of each sample, an integer. It is read once for all samples.
            It need not be selected, and `.add_field` can compute it. Lengths must not be random.
        max_tokens: The maximum size of a batch of one rank, including padding: the number of its samples times the
            largest length. `batch_size` of `deal` may be given as well, or instead, and limits the number of samples.
        global_max_tokens: The maximum size of the batches of all ranks together, in place of `max_tokens`. It works for
            any number of ranks. The samples are shared out evenly, so that the part of a rank may exceed its share by
            less than one sample. `global_batch_size` may be given as well, or instead.

    Memory: Four bytes for each sample, shared by the workers, and 16 bytes for each batch.

    Raises:
        ValueError: When `deal` is called: no limit is given, or limits of one rank and of all ranks together.
        DataError: When the lengths are read: a sample is longer than `max_tokens`, or its length is no integer.

    Source: `max_tokens` is fairseq's.

    Example:
        >>> texts = kdp.from_dataset(["to be or not", "to be", "that is", "the question"], "x")
        >>> texts = texts.add_field("length", lambda sample: len(sample["x"].split()))
        >>> list(texts.select("x").deal(batching=kdp.by_length("length", max_tokens=6)))
        [[('to be or not',)], [('to be',), ('that is',), ('the question',)]]
    """

    call = "kdp.by_length"
    rejects = ("num_batches",)
    fixed_by = "kdp.by_length(...)"
    substitutes = False

    def __init__(self, field: str, *, max_tokens: int | None = None, global_max_tokens: int | None = None) -> None:
        self.field = check_field(field)
        self.max_tokens, self.global_max_tokens = max_tokens, global_max_tokens
        self._limits = _given(max_tokens=max_tokens, global_max_tokens=global_max_tokens)

    def set_up(self, source: Any, arguments: Arguments) -> None:
        sizes = _given(batch_size=arguments.batch_size, global_batch_size=arguments.global_batch_size)
        self._limits = sizes | self._limits
        if len({name.startswith(_GLOBAL) for name in self._limits}) != 1:
            given = " and ".join(f"`{name}`" for name in self._limits) or "none of them"
            raise ValueError(
                "`kdp.by_length(...)` needs `max_tokens`, `batch_size` of `deal` or both; or `global_max_tokens`, "
                f"`global_batch_size` or both; but got {given}."
            )
        self.is_global = any(name.startswith(_GLOBAL) for name in self._limits)
        reject_missing(source, self.field)

    def prepare(self, source: Any, num_ranks: int) -> Any:
        self.fix(source)
        order = self._once(lambda: read_lengths(source, self.field))
        self._reject_long(source, order, num_ranks)
        return order

    def fingerprint(self) -> Any:
        return self.uneven, _SPREAD, _NUM_BATCHES

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        limits = {"batching": self.call, "field": self.field, **self._limits}
        return limits if self.is_global else {**limits, "num_ranks": num_ranks}

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return int(self.prepare(source, num_ranks).buckets(self, num_ranks).num_kept(self.uneven))

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        return LengthEpoch(self, self.prepare(source, sharding.num_ranks), sharding, self._key(seed, number))

    def num_samples(self, length: int, num_ranks: int) -> int:
        """Return the number of samples of a length in a global batch; 0 if there is not one for each rank."""
        number = min(
            limit // max(length, 1) if name.endswith("max_tokens") else limit for name, limit in self._limits.items()
        )
        if self.is_global:
            return number if number >= num_ranks else 0
        return number * num_ranks

    def _reject_long(self, source: Any, order: LengthOrder, num_ranks: int) -> None:
        """Raise an error if a batch cannot hold a sample of the largest length for each rank."""
        if not len(order) or self.num_samples(order.length_at(0), num_ranks):
            return
        limits = ", ".join(f"{name}={limit}" for name, limit in self._limits.items())
        if not self.num_samples(1, num_ranks):
            raise ValueError(
                f"`{self.call}({limits})` leaves some of {num_ranks} ranks without samples. Raise the limit."
            )
        raise DataError(
            f"Sample {source.fetch(int(order.positions[0])).key!r} has {self.field} {order.length_at(0)}: with "
            f"`{self.call}({limits})`, a batch cannot hold one such sample for every rank. Leave such samples out, "
            f"`pipe[pipe.column({self.field!r}) <= limit]`, or raise the limit."
        )


def _given(**limits: int | None) -> dict[str, int]:
    return {name: check_count(name, limit) for name, limit in limits.items() if limit is not None}


def check_field(field: Any) -> str:
    """Return the name of a field; raise TypeError if it is none."""
    if not isinstance(field, str):
        raise TypeError(must_be("field", 'the name of a field, like "length"', field))
    return field


def reject_missing(source: Any, field: str) -> None:
    """Raise FieldError if the source is known not to have a field."""
    known = indexed(source, "deal", takes_samples=False).field_names()
    if known is not None and field not in known:
        hint = f'`.add_field({field!r}, lambda sample: len(sample["x"]))` adds one, for example.'
        reject_field(field, "The source", known, hint)


class LengthOrder(Fingerprinted):
    """The positions of samples by their length, longest first."""

    def __init__(self, lengths: NDArray[Any]) -> None:
        self._values, places, counts = np.unique(lengths.astype(np.int64), return_inverse=True, return_counts=True)
        order = np.argsort(len(counts) - 1 - places.reshape(-1), kind="stable")
        self.positions = order.astype(smallest_int(len(lengths)))
        self._stops = np.cumsum(counts[::-1])
        self._buckets: dict[int, _Buckets] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def fingerprint(self) -> Any:
        return self.positions, self._values, self._stops

    def length_at(self, place: int) -> int:
        """Return the length of the sample at a place of this order."""
        return int(self._values[-1 - int(np.searchsorted(self._stops, place, side="right"))])

    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the distinct lengths, longest first, and the number of samples of each."""
        return self._values[::-1], np.diff(self._stops, prepend=0)

    def num_above(self, length: int) -> int:
        """Return the number of samples of at least this length."""
        number = len(self._values) - int(np.searchsorted(self._values, length))
        return int(self._stops[number - 1]) if number else 0

    def buckets(self, batching: ByLength, num_ranks: int) -> _Buckets:
        """Return how to divide an epoch, computed once for each number of ranks."""
        if num_ranks not in self._buckets:
            self._buckets[num_ranks] = _Buckets(self, batching, num_ranks)
        return self._buckets[num_ranks]


def read_lengths(source: Any, field: str) -> LengthOrder:
    """Return the samples of an indexed source by length; raise DataError if one is not an integer of at least 0."""
    lengths = source.column(field)
    if lengths.dtype.kind in "iu":
        wrong = lengths < 0
    elif lengths.dtype.kind == "f":
        wrong = ~((lengths >= 0) & (lengths == np.floor(lengths)) & np.isfinite(lengths))
    else:
        wrong = np.asarray([not (isinstance(value, int) and value >= 0) for value in lengths], dtype=bool)
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{field!r} must hold integers of at least 0, but sample {source.fetch(place).key!r} has "
            f"{field} {lengths[place]!r}. Add a field for the length: "
            '`.add_field("length", lambda sample: len(sample["x"]))`.'
        )
    return LengthOrder(lengths)


class _Buckets:
    """The division of the order into buckets of samples of similar length, longest first, each with its own batch size.

    Bucket n contains the samples from `starts[n]` to `starts[n + 1]` in global batches of `sizes[n]`, with the numbers
    from `first_batches[n]` to `first_batches[n + 1]`. Only the last batch of the last bucket may be short.
    """

    def __init__(self, order: LengthOrder, batching: ByLength, num_ranks: int) -> None:
        starts, sizes = [0], list[int]()
        while starts[-1] < len(order):
            size, stop = _next_bucket(order, batching, num_ranks, starts[-1], sizes[-1] if sizes else 1)
            starts.append(stop)
            sizes.append(size)
        self.starts, self.sizes = np.asarray(starts), np.asarray(sizes, dtype=np.int64)
        batches = -(-np.diff(self.starts) // self.sizes)
        self.first_batches = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(batches)])
        self.num_batches = int(self.first_batches[-1])
        rest = int(self.starts[-1] - self.starts[-2]) % sizes[-1] if sizes else 0
        self.short = rest  # the number of samples in the short last batch; 0 if there is none

    def num_kept(self, uneven: str) -> int:
        """Return the number of batches of an epoch."""
        return self.num_batches - (uneven == "drop" and self.short > 0)


def _next_bucket(order: LengthOrder, batching: ByLength, num_ranks: int, start: int, previous: int) -> tuple[int, int]:
    """Return the size of the global batches of the bucket that begins at `start`, and the end of the bucket.

    With a global limit, sizes must not depend on the number of ranks. They are at least `previous`, the size in the
    bucket before, which has a sample for every rank.
    """
    unit = smallest = num_ranks
    if batching.is_global:
        unit, smallest = 1, previous
    longest, rest = order.length_at(start), len(order) - start
    size = batching.num_samples(longest, num_ranks)
    if not start:
        # Fewer samples than ranks are padded, so that every rank gets one.
        size = min(size, max(-(-rest // unit) * unit, num_ranks))
    if not batching.is_shuffled:
        like, least = order.num_above(longest) - start, 1
    else:
        like, least = order.num_above(math.ceil(longest / _SPREAD)) - start, _NUM_BATCHES
        if start and rest < least * size:  # the same samples would be together in every epoch
            size = min(size, max(-(-rest // (least * unit)) * unit, smallest))
    stop = start + -(-max(like, least * size) // size) * size
    return size, len(order) if len(order) < stop + (least - 1) * size else stop


class LengthEpoch(Epoch):
    """An epoch in batches of samples of similar length. All epochs have the same number of batches.

    In a shuffled epoch, the batches and the samples within each bucket are shuffled. A short last batch stays last.

    Args:
        batching: How to divide the epoch into batches.
        order: The samples in the order of their lengths, none longer than it allows.
        sharding: The rank and the number of ranks.
        key: The seed and the epoch of a shuffled order; None if the epoch is not shuffled, or only counted.
    """

    def __init__(
        self, batching: ByLength, order: LengthOrder, sharding: Sharding, key: tuple[int, int] | None = None
    ) -> None:
        self._order, self._is_padded, self._sharding, self._key = order, batching.uneven == "pad", sharding, key
        self._buckets = buckets = order.buckets(batching, sharding.num_ranks)
        self.num_samples = len(order)
        self.num_batches = buckets.num_kept(batching.uneven)
        self.full_size = int(buckets.sizes[-1]) if len(buckets.sizes) else 0
        self._numbers = np.arange(self.num_batches)
        if key is not None:
            is_short_kept = buckets.short > 0 and batching.uneven != "drop"
            shuffled = self._numbers[: self.num_batches - is_short_kept]
            shuffled[:] = Permutation(len(shuffled), key=hash_key("order", *key))[shuffled]
        sizes = self._sizes(self._numbers)
        self._starts = np.cumsum(sizes) - sizes
        self._in_bucket: dict[int, Permutation] = {}

    def ordinals(self, batch: int) -> range:
        numbers = self._numbers[batch : batch + 1]
        size = self._buckets.sizes[self._bucket_of(numbers)] if self._is_padded else self._sizes(numbers)
        return share_out(int(self._starts[batch]), int(size[0]), self._sharding)

    def positions(self, batch: int) -> NDArray[Any]:
        ordinals, number = self.ordinals(batch), int(self._numbers[batch])
        bucket = int(self._bucket_of(number))
        start, stop = (int(place) for place in self._buckets.starts[bucket : bucket + 2])
        first = (number - int(self._buckets.first_batches[bucket])) * int(self._buckets.sizes[bucket])
        offset = first - int(self._starts[batch])
        places = np.arange(offset + ordinals.start, offset + ordinals.stop) % (stop - start)
        if self._key is not None:
            if bucket not in self._in_bucket:
                self._in_bucket[bucket] = Permutation(stop - start, key=hash_key("bucket", *self._key, bucket))
            places = self._in_bucket[bucket][places]
        positions: NDArray[Any] = self._order.positions[start + places]
        return positions

    def _bucket_of(self, numbers: Any) -> NDArray[np.int64]:
        buckets: NDArray[np.int64] = np.searchsorted(self._buckets.first_batches, numbers, side="right") - 1
        return buckets

    def _sizes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of samples in the batches with these numbers, which count batches by length."""
        sizes = self._buckets.sizes[self._bucket_of(numbers)]
        if self._buckets.short:
            sizes[numbers == self._buckets.num_batches - 1] = self._buckets.short
        return sizes
