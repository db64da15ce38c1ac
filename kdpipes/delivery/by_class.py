"""Batches of some samples of some classes each, for metric and contrastive learning. Pure arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import ChainError, DataError, check_count, must_be
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.randomness import generator, hash_key
from kdpipes.delivery.layout import Sharding
from kdpipes.selection import UNLABELLED, number_classes, smallest_int

__all__ = ["ByClass", "ClassEpoch", "ClassOrder", "read_classes"]


@dataclass(frozen=True)
class ByClass:
    """How an epoch is cut into batches of `classes_per_batch` classes with `samples_per_class` samples each.

    Args:
        classes_per_batch: The number of classes in a batch of one rank.
        samples_per_class: The number of samples of each of these classes.
    """

    classes_per_batch: int
    samples_per_class: int
    uneven = "drop"  # every batch is full

    def __post_init__(self) -> None:
        check_count("classes_per_batch", self.classes_per_batch)
        check_count("samples_per_class", self.samples_per_class)

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch of one rank."""
        return self.classes_per_batch * self.samples_per_class

    def fingerprint(self) -> Any:
        """Return what makes the batches what they are, but for the sizes, which a state names."""
        return self.classes_per_batch, self.samples_per_class

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        """Return the numbers on which the batches depend."""
        return {"batch_by": "class", "batch_size": self.batch_size, "num_ranks": num_ranks}


class ClassOrder(Fingerprinted):
    """The positions of the labeled samples, and how many batches they make.

    Args:
        labels: The label of each sample, `[num_samples]`.
        layout: The classes and samples of a batch.

    Raises:
        DataError: Fewer classes have enough samples than a batch needs.
    """

    def __init__(self, labels: NDArray[Any], layout: ByClass) -> None:
        classes, numbers = number_classes(labels)
        num_groups = np.bincount(numbers, minlength=len(classes)) // layout.samples_per_class
        is_unlabelled = (classes == UNLABELLED) | (classes == "-1") if len(classes) else np.zeros(0, dtype=bool)
        is_rare = (num_groups == 0) & ~is_unlabelled
        num_groups[is_unlabelled] = 0
        num_classes = int((num_groups > 0).sum())
        if num_classes < layout.classes_per_batch:
            raise DataError(
                f"`deal(classes_per_batch={layout.classes_per_batch})` needs as many classes with at least "
                f"{layout.samples_per_class} samples each, but there are {num_classes}. Take fewer classes, or fewer "
                'samples per class; `.oversample(mode="exact")` repeats the samples of rare classes.'
            )
        if is_rare.any():
            named = ", ".join(map(str, classes[is_rare][:5].tolist()))
            warnings.warn(
                f'`deal(batch_by="class")` leaves out {int(is_rare.sum())} classes with fewer than '
                f"{layout.samples_per_class} samples: {named}{', ...' if is_rare.sum() > 5 else ''}.",
                stacklevel=2,
            )
        self.numbers: NDArray[Any] = numbers
        self.num_batches = _num_batches(num_groups, layout.classes_per_batch)
        self.num_groups = np.minimum(num_groups, self.num_batches)  # more cannot lie in batches of their own

    def __len__(self) -> int:
        return len(self.numbers)

    def fingerprint(self) -> Any:
        """Return the arrays that identify this order."""
        return self.numbers, self.num_groups


def _num_batches(num_groups: NDArray[Any], classes_per_batch: int) -> int:
    """Return the largest number of batches of distinct classes, if class c has `num_groups[c]` groups of samples."""
    low, high = 1, int(num_groups.sum()) // classes_per_batch
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(np.minimum(num_groups, middle).sum()) >= classes_per_batch * middle
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def read_classes(source: Any, layout: ByClass) -> ClassOrder:
    """Return the samples of an indexed source by their class, field `y`."""
    labels = source.column("y")
    if labels.dtype == object:
        labels = np.asarray([UNLABELLED if label is None else label for label in labels.tolist()])
    if labels.dtype.kind not in "biuU" and len(labels):
        raise ChainError(must_be("y", "a class, as a number or a name", labels[0], '`.add_field("y", ...)` makes it.'))
    return ClassOrder(labels, layout)


class ClassEpoch:
    """An epoch of batches of distinct classes.

    Each class gives its samples in groups. The groups of a class follow each other in a sequence, which is cut into as
    many slots as a batch has classes; each slot gives one group to each batch, in an order of its own. A class that
    lies in two slots gives its groups to different batches.

    Args:
        order: The samples by class.
        layout: The classes and samples of a batch.
        sharding: The number of this rank, and of all ranks: batch b of rank r of R is batch b * R + r of all.
        key: The seed and the epoch.
    """

    def __init__(self, order: ClassOrder, layout: ByClass, sharding: Sharding, key: tuple[int, int]) -> None:
        self._layout, self._sharding = layout, sharding
        self.num_batches = order.num_batches // sharding.num_ranks
        self.full_size = layout.batch_size * sharding.num_ranks
        self.num_samples = order.num_batches * layout.batch_size
        self._order, self._key = order, key
        self._positions: NDArray[Any] | None = None  # of all batches; made when the first is asked for

    def ordinals(self, batch: int) -> range:
        """Return the ordinals of a batch of this rank."""
        start = (batch * self._sharding.num_ranks + self._sharding.rank) * self._layout.batch_size
        return range(start, start + self._layout.batch_size)

    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions of the samples of a batch of this rank, class by class."""
        if self._positions is None:
            self._positions = _arranged(self._order, self._layout, hash_key("classes", *self._key))
        found: NDArray[Any] = self._positions[batch * self._sharding.num_ranks + self._sharding.rank]
        return found

    def windows(self, batch: int) -> Iterator[NDArray[Any]]:
        """Return no positions: the samples of a class come from all shards."""
        return iter(())


def _arranged(order: ClassOrder, layout: ByClass, key: bytes) -> NDArray[Any]:
    """Return the positions of all batches of an epoch, `[num_batches, batch_size]`."""
    rng = generator(key)
    per_class, num_batches = layout.samples_per_class, order.num_batches
    shuffled = rng.permutation(len(order.numbers)).astype(smallest_int(len(order.numbers)))
    turns = rng.permutation(len(order.num_groups))  # the place of each class in the sequence
    kind = np.uint16 if len(turns) <= 1 << 16 else smallest_int(len(turns))  # NumPy sorts 16 bits in linear time
    by_turn = turns.astype(kind)[order.numbers[shuffled]]
    sequence = np.argsort(by_turn, kind="stable").astype(shuffled.dtype)
    sizes = np.bincount(by_turn, minlength=len(turns))
    wanted = np.empty_like(order.num_groups)
    wanted[turns] = order.num_groups
    ends = np.cumsum(sizes) - sizes + np.minimum(wanted * per_class, sizes)
    is_taken = np.arange(len(sequence), dtype=shuffled.dtype) < np.repeat(ends.astype(shuffled.dtype), sizes)
    number = num_batches * layout.classes_per_batch  # of groups
    groups = shuffled[sequence[is_taken]][: number * per_class].reshape(
        layout.classes_per_batch, num_batches, per_class
    )
    owners = np.repeat(np.arange(len(turns)), wanted)[:number].reshape(layout.classes_per_batch, num_batches)
    batches = np.empty((num_batches, layout.classes_per_batch, per_class), dtype=groups.dtype)
    places = rng.permutation(num_batches)
    batches[places, 0] = groups[0]
    for slot in range(1, layout.classes_per_batch):
        taken = places[owners[slot - 1] == owners[slot, 0]]  # the batches that the class has groups in already
        places = _apart(rng.permutation(num_batches), taken, int((owners[slot] == owners[slot, 0]).sum()))
        batches[places, slot] = groups[slot]
    return batches.reshape(num_batches, layout.batch_size)


def _apart(places: NDArray[Any], taken: NDArray[Any], number: int) -> NDArray[Any]:
    """Return a permutation, changed so that its first `number` entries are none of `taken`."""
    if not len(taken):
        return places
    is_taken = np.isin(places, taken)
    wrong = np.flatnonzero(is_taken[:number])
    free = number + np.flatnonzero(~is_taken[number:])[: len(wrong)]
    places[wrong], places[free] = places[free], places[wrong]
    return places
