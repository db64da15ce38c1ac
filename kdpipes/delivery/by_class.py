"""Batches of some samples of some classes each, for metric and contrastive learning."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import missing_of, number_classes, smallest_int
from kdpipes.core.errors import DataError, check_count
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.labels import labels_of
from kdpipes.core.messages import counted, warn
from kdpipes.core.randomness import generator, hash_key
from kdpipes.delivery.batching import Arguments, Batching, Epoch
from kdpipes.delivery.layout import Sharding


class ByClass(Batching):
    """Batches of some samples of some classes: `deal(batching=kdp.by_class(classes=8, samples_per_class=4))`.

    They are for metric and contrastive learning. One class follows the other, and no batch has a class twice. An epoch
    has as many such batches as the data allows, all of them full; the samples that remain of a class are left out, and
    are different ones in each shuffled epoch. Classes with fewer than `samples_per_class` samples are left out with a
    warning.

    Args:
        classes: The number of classes in a batch of one rank.
        samples_per_class: The number of samples of each of these classes.

    Raises:
        ValueError: An argument is less than 1; or, when `deal` is called, it has a batch size, too.
        DataError: When the labels are read: too few classes have enough samples.

    Example:
        >>> numbers = kdp.from_dataset([(n, n % 3) for n in range(9)])
        >>> list(numbers.select("y").deal(batching=kdp.by_class(classes=2, samples_per_class=2), seed=1))[0]
        [(0,), (0,), (1,), (1,)]
    """

    call = "kdp.by_class"
    rejects = ("batch_size", "global_batch_size", "num_batches", "uneven")
    fixed_by = "kdp.by_class(...)"

    def __init__(self, classes: int, samples_per_class: int) -> None:
        self.classes = check_count("classes", classes)
        self.samples_per_class = check_count("samples_per_class", samples_per_class)
        self.batch_size = self.classes * self.samples_per_class

    def set_up(self, source: Any, arguments: Arguments) -> None:
        self.uneven = "drop"

    def prepare(self, source: Any, num_ranks: int) -> Any:
        self.fix(source)
        return self._once(lambda: ClassOrder(labels_of(source, "kdp.by_class"), self))

    def fingerprint(self) -> Any:
        return self.classes, self.samples_per_class

    def batch_size_of(self, num_ranks: int) -> int:
        return self.batch_size

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        return {"batching": self.call, "batch_size": self.batch_size, "num_ranks": num_ranks}

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return int(self.prepare(source, num_ranks).num_batches // num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order = self.prepare(source, sharding.num_ranks)
        return ClassEpoch(self, order, sharding, self._key(seed, number) or (seed, 0))

    def why_empty(self, epoch: Epoch, num_ranks: int) -> str:
        made = epoch.num_samples // self.batch_size
        return (
            f"`kdp.by_class(...)` can make {counted(made, 'batch')}, but there are {num_ranks} ranks, so no rank gets "
            f"a batch. Use at most {counted(made, 'rank')}, or smaller batches."
        )


class ClassOrder(Fingerprinted):
    """The classes of the samples, from the label of each, and how many batches they make."""

    def __init__(self, labels: NDArray[Any], batching: ByClass) -> None:
        classes, numbers = number_classes(labels)
        num_groups = np.bincount(numbers, minlength=len(classes)) // batching.samples_per_class
        is_unlabelled = classes == missing_of(classes)
        is_rare = (num_groups == 0) & ~is_unlabelled
        num_groups[is_unlabelled] = 0
        num_classes = int((num_groups > 0).sum())
        if num_classes < batching.classes:
            raise DataError(
                f"`kdp.by_class(classes={batching.classes})` needs as many classes with at least "
                f"{counted(batching.samples_per_class, 'sample')} each, but there are {num_classes}. Take fewer "
                'classes, or fewer samples per class; `.oversample(mode="exact")` repeats the samples of rare classes.'
            )
        if is_rare.any():
            named = ", ".join(map(str, classes[is_rare][:5].tolist()))
            warn(
                f"`kdp.by_class(...)` leaves out {counted(int(is_rare.sum()), 'class')} with fewer than "
                f"{counted(batching.samples_per_class, 'sample')}: {named}{', ...' if is_rare.sum() > 5 else ''}.",
            )
        self.numbers: NDArray[Any] = numbers
        self.num_batches = _num_batches(num_groups, batching.classes)
        self.num_groups = np.minimum(num_groups, self.num_batches)  # more cannot lie in batches of their own

    def __len__(self) -> int:
        return len(self.numbers)

    def fingerprint(self) -> Any:
        return self.numbers, self.num_groups


def _num_batches(num_groups: NDArray[Any], classes: int) -> int:
    """Return the largest number of batches of distinct classes, if class c has `num_groups[c]` groups of samples."""
    low = 1
    high = int(num_groups.sum()) // classes
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(np.minimum(num_groups, middle).sum()) >= classes * middle
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


class ClassEpoch(Epoch):
    """An epoch of batches of distinct classes.

    Each class gives its samples in groups. The groups of a class follow each other in a sequence, which is cut into as
    many slots as a batch has classes; each slot gives one group to each batch, in an order of its own. A class that
    lies in two slots gives its groups to different batches.

    Args:
        batching: The classes and samples of a batch.
        order: The samples by class.
        sharding: The rank and the number of ranks: batch b of rank r of R is batch b * R + r of all.
        key: The seed and the epoch.
    """

    def __init__(self, batching: ByClass, order: ClassOrder, sharding: Sharding, key: tuple[int, int]) -> None:
        self._batching = batching
        self._order = order
        self._sharding = sharding
        self._key = key
        self.num_batches = order.num_batches // sharding.num_ranks
        self.shortest = 0
        self.full_size = batching.batch_size * sharding.num_ranks
        self.num_samples = order.num_batches * batching.batch_size
        self._positions: NDArray[Any] | None = None  # of all batches; made when the first is asked for

    def ordinals(self, batch: int) -> range:
        start = (batch * self._sharding.num_ranks + self._sharding.rank) * self._batching.batch_size
        return range(start, start + self._batching.batch_size)

    def positions(self, batch: int) -> NDArray[Any]:
        if self._positions is None:
            self._positions = _arranged(self._order, self._batching, hash_key("classes", *self._key))
        found: NDArray[Any] = self._positions[batch * self._sharding.num_ranks + self._sharding.rank]
        return found


def _arranged(order: ClassOrder, batching: ByClass, key: bytes) -> NDArray[Any]:
    """Return the positions of all batches of an epoch, `[num_batches, batch_size]`."""
    rng = generator(key)
    per_class = batching.samples_per_class
    num_batches = order.num_batches
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
    number = num_batches * batching.classes  # of groups
    chosen = shuffled[sequence[is_taken]][: number * per_class]
    groups = chosen.reshape(batching.classes, num_batches, per_class)
    owners = np.repeat(np.arange(len(turns)), wanted)[:number].reshape(batching.classes, num_batches)
    batches = np.empty((num_batches, batching.classes, per_class), dtype=groups.dtype)
    places = rng.permutation(num_batches)
    batches[places, 0] = groups[0]
    for slot in range(1, batching.classes):
        taken = places[owners[slot - 1] == owners[slot, 0]]  # the batches that the class has groups in already
        places = _apart(rng.permutation(num_batches), taken, int((owners[slot] == owners[slot, 0]).sum()))
        batches[places, slot] = groups[slot]
    return batches.reshape(num_batches, batching.batch_size)


def _apart(places: NDArray[Any], taken: NDArray[Any], number: int) -> NDArray[Any]:
    """Return a permutation, changed so that its first `number` entries are none of `taken`."""
    if not len(taken):
        return places
    is_taken = np.isin(places, taken)
    wrong = np.flatnonzero(is_taken[:number])
    free = number + np.flatnonzero(~is_taken[number:])[: len(wrong)]
    places[wrong], places[free] = places[free], places[wrong]
    return places
