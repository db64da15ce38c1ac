"""Cut epochs into batches of samples of similar length, or with equal values of a field."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Permutation, smallest_int
from kdpipes.core.callback import Callback
from kdpipes.core.column import as_column
from kdpipes.core.entries import field_of
from kdpipes.core.errors import DataError, check_count, check_type, must_be, reject_field
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.map_pipe import indexed
from kdpipes.core.randomness import hash_key
from kdpipes.delivery.batching import Arguments, Batching, Epoch
from kdpipes.delivery.layout import Layout, Sharding, share_out

_GLOBAL = "global_"
# Samples are shuffled in buckets. In a bucket, the longest sample is at most this many times as long as the shortest,
_SPREAD = 1.1
# unless a bucket would have fewer batches than this: then the same samples would be together in every epoch.
_NUM_BATCHES = 4


class Groups(NamedTuple):
    """Samples in groups, whose batches have a size of their own.

    Args:
        positions: The positions of the samples, group after group.
        starts: The place of the first sample of each group, and the number of all samples.
        sizes: The size of the global batches of each group.
    """

    positions: NDArray[Any]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Grouped(Batching):
    """The base of batchings whose batches have samples of one group each."""

    rejects: ClassVar[tuple[str, ...]] = ("num_batches",)
    substitutes = False

    @abstractmethod
    def groups(self, source: Any, num_ranks: int, number: int) -> Groups:
        """Return the groups of an epoch, and the sizes of their batches."""

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return GroupedEpoch(self.groups(source, num_ranks, 0), self.uneven, Sharding(num_ranks=num_ranks)).num_batches

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        groups = self.groups(source, sharding.num_ranks, number)
        return GroupedEpoch(groups, self.uneven, sharding, self._key(seed, number))


class ByLength(Grouped):
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

    Memory: Four bytes for each sample, shared by the workers, and up to 48 bytes for each batch.

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
    fixed_by = "kdp.by_length(...)"

    def __init__(self, field: str, *, max_tokens: int | None = None, global_max_tokens: int | None = None) -> None:
        check_type("field", field, str, 'the name of a field, like "length"')
        self.field = field
        self.max_tokens = max_tokens
        self.global_max_tokens = global_max_tokens
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

    def groups(self, source: Any, num_ranks: int, number: int) -> Groups:
        order: LengthOrder = self.prepare(source, num_ranks)
        return order.groups(self, num_ranks)

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


def reject_missing(source: Any, field: str) -> None:
    """Raise FieldError if the source is known not to have a field."""
    known = indexed(source, "deal", takes_samples=False).field_names()
    if known is not None and field not in known and field_of(field, known) is None:
        hint = f'`.add_field({field!r}, lambda sample: len(sample["x"]))` adds one, for example.'
        reject_field(field, "The source", known, hint)


class LengthOrder(Fingerprinted):
    """The positions of samples by their length, longest first."""

    def __init__(self, lengths: NDArray[Any]) -> None:
        self._values, places, counts = np.unique(lengths.astype(np.int64), return_inverse=True, return_counts=True)
        order = np.argsort(len(counts) - 1 - places.reshape(-1), kind="stable")
        self.positions = order.astype(smallest_int(len(lengths)))
        self._stops = np.cumsum(counts[::-1])
        self._groups: dict[int, Groups] = {}

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

    def groups(self, batching: ByLength, num_ranks: int) -> Groups:
        """Return the samples in buckets of similar length, computed once for each number of ranks.

        Each bucket has a batch size of its own. Only the last batch of the last bucket may be short.
        """
        if num_ranks not in self._groups:
            starts = [0]
            sizes = list[int]()
            while starts[-1] < len(self):
                size, stop = _next_bucket(self, batching, num_ranks, starts[-1], sizes[-1] if sizes else 1)
                starts.append(stop)
                sizes.append(size)
            self._groups[num_ranks] = Groups(self.positions, np.asarray(starts), np.asarray(sizes, dtype=np.int64))
        return self._groups[num_ranks]


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


def _next_bucket(order: LengthOrder, batching: ByLength, num_ranks: int, start: int, previous: int) -> tuple[int, int]:
    """Return the size of the global batches of the bucket that begins at `start`, and the end of the bucket.

    With a global limit, sizes must not depend on the number of ranks. They are at least `previous`, the size in the
    bucket before, which has a sample for every rank.
    """
    unit = smallest = num_ranks
    if batching.is_global:
        unit = 1
        smallest = previous
    longest = order.length_at(start)
    rest = len(order) - start
    size = batching.num_samples(longest, num_ranks)
    if not start:
        # Fewer samples than ranks are padded, so that every rank gets one.
        size = min(size, max(-(-rest // unit) * unit, num_ranks))
    if not batching.is_shuffled:
        like = order.num_above(longest) - start
        least = 1
    else:
        like = order.num_above(math.ceil(longest / _SPREAD)) - start
        least = _NUM_BATCHES
        if start and rest < least * size:  # the same samples would be together in every epoch
            size = min(size, max(-(-rest // (least * unit)) * unit, smallest))
    stop = start + -(-max(like, least * size) // size) * size
    return size, len(order) if len(order) < stop + (least - 1) * size else stop


class ByValue(Grouped):
    """Batches of samples with equal values of a field: `deal(batch_size=32, batching=kdp.by_value("resolution"))`.

    The field may hold an aspect ratio, a resolution, a modality or a task, for example. In an epoch, the last batch of
    each value may be short; `uneven` of `deal` says what to do with it. Without `shuffle`, the batches of one value
    follow each other. With it, the samples of each value and the batches are shuffled.

    Args:
        field: The name of the field, which holds numbers or text; or the names of several for `of`, such as "w h". They
            are read once for all samples. They need not be selected, and `.add_field` can compute them.
        batch_sizes: The batch sizes of some values, by value, in place of that of `deal`: of a batch of one rank if
            `deal` has a `batch_size`, of the batches of all ranks together if it has a `global_batch_size`.
        of: A function that takes an array `[n]` for each field, and returns the value of each sample, `[n]`.

    Memory: Four bytes for each sample, shared by the workers, and up to 48 bytes for each batch.

    Raises:
        TypeError: `batch_sizes` is not a mapping, or `of` does not return one value for each sample.
        ValueError: A batch size is less than 1, or is given for a value that no sample has. When an epoch begins, also
            if a short batch has fewer samples than there are ranks, with `uneven="keep"`.
        DataError: When the field is read: its values are of different kinds, such as numbers and text.

    Example:
        >>> images = kdp.from_dataset(["wide", "tall", "wide", "tall", "wide"], "shape")
        >>> list(images.select("shape").deal(batch_size=2, batching=kdp.by_value("shape", {"wide": 3})))
        [[('tall',), ('tall',)], [('wide',), ('wide',), ('wide',)]]
        >>> sizes = kdp.from_dataset([(3, 4), (4, 3), (9, 8), (1, 2)], "w h")
        >>> wide = kdp.by_value("w h", {True: 1}, of=lambda w, h: w > h)
        >>> list(sizes.select("w h").deal(batch_size=2, batching=wide))
        [[(3, 4), (1, 2)], [(4, 3)], [(9, 8)]]
    """

    call = "kdp.by_value"
    fixed_by = "kdp.by_value(...)"
    _layout: Layout

    def __init__(
        self, field: str, batch_sizes: Mapping[Any, int] | None = None, *, of: Callable[..., Any] | None = None
    ) -> None:
        check_type("field", field, str, 'the name of a field, like "length"')
        self.field = field
        self._of = None if of is None else Callback("of", of)
        self._fields = [field] if of is None else field.split()
        check_type("batch_sizes", batch_sizes, Mapping | None, "a mapping from values to batch sizes")
        sizes = ((value, check_count("batch_sizes", size)) for value, size in (batch_sizes or {}).items())
        self.batch_sizes = dict(sizes) or None

    def set_up(self, source: Any, arguments: Arguments) -> None:
        self._layout = Layout(arguments.batch_size, arguments.global_batch_size, arguments.uneven)
        for field in self._fields:
            reject_missing(source, field)

    def prepare(self, source: Any, num_ranks: int) -> Any:
        self.fix(source)
        return self._once(
            lambda: ValueOrder(self.field, map(source.column, self._fields), self._of, self.batch_sizes or {})
        )

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        sizes = {str(value): size for value, size in (self.batch_sizes or {}).items()}
        return {"batching": self.call, "field": self.field, "batch_sizes": sizes, **self._layout.sizes(num_ranks)}

    def groups(self, source: Any, num_ranks: int, number: int) -> Groups:
        order: ValueOrder = self.prepare(source, num_ranks)
        name = "batch_size" if self._layout.global_batch_size is None else "global_batch_size"
        given: list[dict[str, Any]] = [
            {name: self.batch_sizes[value]} if self.batch_sizes and value in self.batch_sizes else {}
            for value in order.values
        ]
        sizes = [replace(self._layout, **size).size_of(num_ranks) for size in given]
        return Groups(order.positions, order.starts, np.asarray(sizes, dtype=np.int64))


class ValueOrder(Fingerprinted):
    """The positions of samples by their value."""

    def __init__(
        self, field: str, columns: Iterable[NDArray[Any]], of: Callback | None, batch_sizes: Mapping[Any, int]
    ) -> None:
        column, *others = columns
        if of is not None:
            size = len(column)
            column = as_column(np.atleast_1d(of(column, *others)))
            if column.shape != (size,):
                rule = f"a function that returns one value for each sample, `[{size}]`"
                raise TypeError(must_be("of", rule, column))
        try:
            values, groups, counts = np.unique(column, return_inverse=True, return_counts=True)
        except TypeError as error:
            raise DataError(f"{field!r} must hold numbers or text for `kdp.by_value`, of one kind: {error}.") from error
        self.values: list[Any] = values.tolist()
        self.starts = np.cumsum([0, *counts])
        self.positions = np.argsort(groups.reshape(-1), kind="stable").astype(smallest_int(len(column)))
        unknown = next((value for value in batch_sizes if value not in self.values), None)
        if unknown is not None:
            raise ValueError(must_be("batch_sizes", f"for values that samples have, {self.values[:5]}", unknown))

    def fingerprint(self) -> Any:
        return self.positions, self.values, self.starts


class GroupedEpoch(Epoch):
    """An epoch whose batches have samples of one group each. All epochs have the same number of batches.

    In a shuffled epoch, the batches and the samples within each group are shuffled. A short batch of the last group
    stays last.

    Args:
        groups: The groups of samples.
        uneven: What to do with short batches, each the last one of its group.
        sharding: The rank and the number of ranks.
        key: The seed and the epoch of a shuffled order; None if the epoch is not shuffled, or only counted.
    """

    def __init__(self, groups: Groups, uneven: str, sharding: Sharding, key: tuple[int, int] | None = None) -> None:
        self._groups = groups
        self._sharding = sharding
        self._key = key
        counts = np.diff(groups.starts)
        sizes = groups.sizes
        batches = counts // sizes if uneven == "drop" else -(-counts // sizes)
        self.num_batches = int(batches.sum())
        self.full_size = int(sizes[-1]) if len(sizes) else 0
        numbers = np.arange(self.num_batches)
        if key is not None:
            is_short_kept = len(counts) > 0 and uneven != "drop" and counts[-1] % sizes[-1] > 0
            shuffled = numbers[: self.num_batches - is_short_kept]
            shuffled[:] = Permutation(len(shuffled), key=hash_key("order", *key))[shuffled]
        self._group_of = np.repeat(np.arange(len(batches)), batches)[numbers]
        full = sizes[self._group_of]
        self._firsts = (numbers - (np.cumsum(batches) - batches)[self._group_of]) * full  # places in their groups
        self._own = np.minimum(full, counts[self._group_of] - self._firsts)  # numbers of samples that are no padding
        self._sizes = full if uneven == "pad" else self._own
        self.shortest = int(self._sizes.argmin()) if self.num_batches else 0
        self._starts = np.cumsum(self._own) - self._own
        self.num_samples = int(self._own.sum())
        padding = self._sizes - self._own
        self._padding = self.num_samples + np.cumsum(padding) - padding
        self._within: dict[int, Permutation] = {}

    def ordinals(self, batch: int) -> Sequence[int]:
        start, own, padding = (int(numbers[batch]) for numbers in (self._starts, self._own, self._padding))
        part = share_out(0, int(self._sizes[batch]), self._sharding)
        if part.stop <= own:
            return range(start + part.start, start + part.stop)
        return [start + place if place < own else padding - own + place for place in part]

    def positions(self, batch: int) -> NDArray[Any]:
        part = share_out(0, int(self._sizes[batch]), self._sharding)
        group = int(self._group_of[batch])
        start, stop = (int(place) for place in self._groups.starts[group : group + 2])
        places = (int(self._firsts[batch]) + np.arange(part.start, part.stop)) % (stop - start)
        if self._key is not None:
            if group not in self._within:
                self._within[group] = Permutation(stop - start, key=hash_key("bucket", *self._key, group))
            places = self._within[group][places]
        positions: NDArray[Any] = self._groups.positions[start + places]
        return positions
