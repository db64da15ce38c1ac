"""Batches of samples with equal values of a field, such as a resolution, a modality or a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Permutation, smallest_int
from kdpipes.core.errors import DataError, check_count, must_be
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.messages import counted
from kdpipes.core.randomness import hash_key
from kdpipes.delivery.batching import Arguments, Batching, Epoch
from kdpipes.delivery.by_length import check_field, reject_missing
from kdpipes.delivery.layout import Layout, Sharding, share_out


class ByValue(Batching):
    """Batches of samples with equal values of a field: `deal(batch_size=32, batching=kdp.by_value("resolution"))`.

    The field may hold an aspect ratio, a resolution, a modality or a task, for example. In an epoch, the last batch of
    each value may be short; `uneven` of `deal` says what to do with it. Without `shuffle`, the batches of one value
    follow each other. With it, the samples of each value and the batches are shuffled.

    Args:
        field: The name of the field, which holds numbers or text. It is read once for all samples. It need not be
            selected, and `.add_field` can compute it.
        batch_sizes: The batch sizes of some values, by value, in place of that of `deal`: of a batch of one rank if
            `deal` has a `batch_size`, of the batches of all ranks together if it has a `global_batch_size`.

    Memory: Four bytes for each sample, shared by the workers, and 40 bytes for each batch.

    Raises:
        TypeError: `batch_sizes` is not a mapping.
        ValueError: A batch size is less than 1, or is given for a value that no sample has.
        DataError: When an epoch begins: with `uneven="keep"`, a short batch has fewer samples than there are ranks.

    Example:
        >>> images = kdp.from_dataset(["wide", "tall", "wide", "tall", "wide"], "shape")
        >>> list(images.select("shape").deal(batch_size=2, batching=kdp.by_value("shape", {"wide": 3})))
        [[('tall',), ('tall',)], [('wide',), ('wide',), ('wide',)]]
    """

    call = "kdp.by_value"
    rejects = ("num_batches",)
    fixed_by = "kdp.by_value(...)"
    substitutes = False
    _layout: Layout

    def __init__(self, field: str, batch_sizes: Mapping[Any, int] | None = None) -> None:
        self.field = check_field(field)
        if not isinstance(batch_sizes, Mapping | None):
            raise TypeError(must_be("batch_sizes", "a mapping from values to batch sizes", batch_sizes))
        sizes = ((value, check_count("batch_sizes", size)) for value, size in (batch_sizes or {}).items())
        self.batch_sizes = dict(sizes) or None

    def set_up(self, source: Any, arguments: Arguments) -> None:
        self._layout = Layout(arguments.batch_size, arguments.global_batch_size, arguments.uneven)
        reject_missing(source, self.field)

    def prepare(self, source: Any, num_ranks: int) -> Any:
        self.fix(source)
        return self._once(lambda: ValueOrder(self.field, source.column(self.field), self.batch_sizes or {}))

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        sizes = {str(value): size for value, size in (self.batch_sizes or {}).items()}
        return {"batching": self.call, "field": self.field, "batch_sizes": sizes, **self._layout.sizes(num_ranks)}

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self.epoch(source, Sharding(num_ranks=num_ranks), 0, 0).num_batches

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order: ValueOrder = self.prepare(source, sharding.num_ranks)
        layouts = (self._layout if size is None else self._layout.with_size(size) for size in order.batch_sizes)
        sizes = [layout.size_of(sharding.num_ranks) for layout in layouts]
        epoch = ValueEpoch(order, np.asarray(sizes, dtype=np.int64), self.uneven, sharding, self._key(seed, number))
        if self.uneven == "keep":
            self._reject_short(epoch, order, sharding.num_ranks)
        return epoch

    def _reject_short(self, epoch: ValueEpoch, order: ValueOrder, num_ranks: int) -> None:
        """Raise DataError if a rank would get no sample of a batch."""
        short = np.flatnonzero(epoch.num_real < num_ranks)
        if len(short):
            value, size = order.values[epoch.groups[short[0]]], int(epoch.num_real[short[0]])
            raise DataError(
                f"The last batch of the samples with {self.field} {value!r} has {counted(size, 'sample')} for "
                f'{num_ranks} ranks: some would get nothing, and hang. Use `deal(uneven="pad")` or '
                '`deal(uneven="drop")`.'
            )


class ValueOrder(Fingerprinted):
    """The positions of samples by their value, and the batch size of each value; None for that of `deal`."""

    def __init__(self, field: str, column: NDArray[Any], batch_sizes: Mapping[Any, int]) -> None:
        try:
            values, groups = np.unique(column, return_inverse=True)
        except TypeError as error:
            raise DataError(
                f"{field!r} must hold numbers or text, all of one kind, for `kdp.by_value`: {error}."
            ) from error
        self.values: list[Any] = values.tolist()
        self.counts = np.bincount(groups.reshape(-1), minlength=len(values))
        self.starts = np.cumsum(self.counts) - self.counts
        self.positions = np.argsort(groups.reshape(-1), kind="stable").astype(smallest_int(len(column)))
        self.batch_sizes = [batch_sizes.get(value) for value in self.values]
        unknown = next((value for value in batch_sizes if value not in self.values), None)
        if unknown is not None:
            raise ValueError(must_be("batch_sizes", f"for values that samples have, {self.values[:5]}", unknown))

    def __len__(self) -> int:
        return len(self.positions)

    def fingerprint(self) -> Any:
        return self.positions, self.values, self.counts


class ValueEpoch(Epoch):
    """An epoch in batches of samples with equal values.

    Args:
        order: The samples by value.
        sizes: The sizes of the global batches of each value.
        uneven: What to do with the last batch of a value if it is short.
        sharding: The rank and the number of ranks.
        key: The seed and the epoch of a shuffled order; None if the epoch is not shuffled.
    """

    def __init__(
        self,
        order: ValueOrder,
        sizes: NDArray[np.int64],
        uneven: str,
        sharding: Sharding,
        key: tuple[int, int] | None,
    ) -> None:
        self._order, self._sharding, self._key = order, sharding, key
        batches = order.counts // sizes if uneven == "drop" else -(-order.counts // sizes)
        self.num_batches = int(batches.sum())
        numbers = np.arange(self.num_batches)
        if key is not None:
            numbers = Permutation(len(numbers), key=hash_key("order", *key))[numbers]
        self.groups = np.repeat(np.arange(len(batches)), batches)[numbers]
        self._sizes = sizes[self.groups]
        self._firsts = (numbers - (np.cumsum(batches) - batches)[self.groups]) * self._sizes
        self.num_real = np.minimum(self._sizes, order.counts[self.groups] - self._firsts)  # samples without padding
        self.num_samples = int(self.num_real.sum())
        self.full_size = int(sizes.max(initial=0))
        self._starts = np.cumsum(self.num_real) - self.num_real
        num_padding = (self._sizes - self.num_real) * (uneven == "pad")
        self._padding = self.num_samples + np.cumsum(num_padding) - num_padding
        self._dealt = self.num_real + num_padding
        self._within: dict[int, Permutation] = {}

    def _part(self, batch: int) -> range:
        return share_out(0, int(self._dealt[batch]), self._sharding)

    def ordinals(self, batch: int) -> Sequence[int]:
        part, start, num_real = self._part(batch), int(self._starts[batch]), int(self.num_real[batch])
        if part.stop <= num_real:
            return range(start + part.start, start + part.stop)
        padding = int(self._padding[batch]) - num_real
        return [(start if place < num_real else padding) + place for place in part]

    def positions(self, batch: int) -> NDArray[Any]:
        part, group = self._part(batch), int(self.groups[batch])
        count = int(self._order.counts[group])
        places = (int(self._firsts[batch]) + np.arange(part.start, part.stop)) % count
        if self._key is not None:
            if group not in self._within:
                self._within[group] = Permutation(count, key=hash_key("value", *self._key, group))
            places = self._within[group][places]
        positions: NDArray[Any] = self._order.positions[int(self._order.starts[group]) + places]
        return positions
