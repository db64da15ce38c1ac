"""Index arithmetic for plans and epochs: pure functions and small objects on NumPy arrays, without torch or pipes."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_CHUNK = 1 << 16
_FNV_PRIME = np.uint64(0x100000001B3)  # prime of the 64-bit FNV-1a hash
UNLABELLED = -1  # the label of samples without a class
Ints = NDArray[np.integer[Any]]


def missing_of(labels: NDArray[Any]) -> int | str:
    """Return the label of samples without a class: -1 among numbers, and "" among names."""
    # Names that end in NUL are objects, because NumPy would strip the NUL.
    return "" if len(labels) and isinstance(labels[0], str) else UNLABELLED


def smallest_int(stop: int) -> type[np.integer[Any]]:
    """Return the integer type that holds positions below `stop` in the least memory: int32, or int64 from 2**31 on."""
    return np.int32 if stop <= np.iinfo(np.int32).max else np.int64


def number_classes(labels: NDArray[Any]) -> tuple[NDArray[Any], Ints]:
    """Return the distinct labels in ascending order, and the index among them of each input label.

    >>> number_classes(np.array([7, 2, 7]))[0]
    array([2, 7])
    """
    are_numbers = labels.dtype.kind in "iu" and len(labels) > 0 and labels.max() <= np.iinfo(np.int64).max
    lowest = int(labels.min()) if are_numbers else 0
    if not are_numbers or int(labels.max()) - lowest >= _CHUNK:
        classes, places = np.unique(labels, return_inverse=True)
        return classes, places.reshape(-1).astype(smallest_int(len(classes) + 1))
    # Numbers of 16 bits are counted in a table, in linear time.
    numbers = labels.astype(np.uint16) - np.uint16(lowest % _CHUNK)
    present = np.flatnonzero(np.bincount(numbers))
    table = np.zeros(_CHUNK, dtype=np.int32)
    table[present] = np.arange(len(present))
    return present + lowest, table[numbers]


def keep_classes(labels: NDArray[Any], classes: Sequence[Any], *, keep: bool) -> Ints:
    """Return the positions of the labels that are among `classes` (`keep=True`) or not among them, in order.

    >>> keep_classes(np.array([2, 0, 1, 0]), [0], keep=True)
    array([1, 3], dtype=int32)
    """
    known, numbers = number_classes(labels)
    wanted = set(classes)
    table = np.asarray([(label in wanted) == keep for label in known.tolist()], dtype=bool)
    return np.flatnonzero(table[numbers]).astype(smallest_int(len(labels)))


def class_counts(labels: NDArray[Any]) -> dict[Any, int]:
    """Return the number of labels of each class, in ascending order of the classes.

    >>> class_counts(np.array([2, 0, 2]))
    {0: 1, 2: 2}
    """
    return {label: len(positions) for label, positions in positions_by_class(labels)}


def positions_by_class(labels: NDArray[Any]) -> list[tuple[Any, Ints]]:
    """Return the classes in ascending order, each with its positions in ascending order."""
    classes, numbers = number_classes(labels)
    counts = np.bincount(numbers, minlength=len(classes))
    numbers = numbers.astype(np.uint16) if len(classes) <= 1 << 16 else numbers  # 16-bit integers sort in linear time
    order = np.argsort(numbers, kind="stable").astype(smallest_int(len(labels)))
    return list(zip(classes.tolist(), np.split(order, np.cumsum(counts)[:-1]), strict=False))


def _by_class(labels: NDArray[Any]) -> list[Ints]:
    """Return the positions of each class. Unlabelled samples are left out."""
    return [group for label, group in positions_by_class(labels) if label != missing_of(labels)]


def oversample_multiply(labels: NDArray[Any]) -> Ints:
    """Return all positions, then repeat each rarer class as often as it fits completely into the largest class.

    This is KappaData's mode "multiply". Unlabelled samples (-1) are not repeated.

    >>> oversample_multiply(np.array([0, 0, 0, 1, 0]))
    array([0, 1, 2, 3, 4, 3, 3, 3], dtype=int32)
    """
    groups = _by_class(labels)
    largest = max(map(len, groups), default=0)
    everything = np.arange(len(labels), dtype=smallest_int(len(labels)))
    return np.concatenate([everything, *(np.tile(group, largest // len(group) - 1) for group in groups)])


def oversample_exact(labels: NDArray[Any], epoch: int = 0) -> Ints:
    """Return the positions class by class, each class repeated to exactly the size of the largest one.

    Unlabelled samples (-1) are left out. A class is repeated as a whole as often as possible; the remainder is filled
    with samples that differ between epochs.

    >>> oversample_exact(np.array([0, 1, 0, 0]))
    array([0, 2, 3, 1, 1, 1], dtype=int32)
    >>> oversample_exact(np.array([0, 0, 0, 1, 1]), epoch=1)
    array([0, 1, 2, 3, 4, 4], dtype=int32)
    """
    groups = _by_class(labels)
    largest = max(map(len, groups), default=0)
    parts = [np.zeros(0, dtype=smallest_int(len(labels)))]
    for group in groups:
        num_rounds, num_extras = divmod(largest, len(group))
        extras = (np.arange(num_extras) + epoch * num_extras % len(group)) % len(group)
        parts += [np.tile(group, num_rounds), group[extras]]
    return np.concatenate(parts)


def take_per_class(labels: NDArray[Any], number_of: Callable[[int], int], seed: int | None) -> Ints:
    """Return the positions of some samples of each class, in ascending order. Unlabelled samples (-1) are left out.

    Args:
        labels: The labels of all samples, `[num_samples]`.
        number_of: A function from the size of a class to the number of samples to take.
        seed: The seed of the random choice, which depends only on the seed and the class; None takes the first samples.

    >>> take_per_class(np.array([0, 1, 0, 0]), lambda size: 1, None)
    array([0, 1], dtype=int32)
    """
    chosen = [np.zeros(0, dtype=smallest_int(len(labels)))]
    for group in _by_class(labels):
        number = number_of(len(group))
        if seed is not None:
            key = hashlib.blake2b(f"{seed}/{labels[group[0]]}".encode(), digest_size=16).digest()
            group = np.random.default_rng(int.from_bytes(key, "little")).permutation(group)
        chosen.append(group[:number])
    return np.sort(np.concatenate(chosen))


def divide_classes(labels: NDArray[Any], ends: Sequence[float], *, key: bytes) -> Ints:
    """Return the part number of each sample, drawn at random such that every part has the same class proportions.

    Unlabelled samples (-1) count as a class.

    Args:
        labels: The label of each sample.
        ends: Where the parts end, as cumulative shares: in ascending order, the last one is 1.
        key: The seed of the choice.

    >>> np.bincount(divide_classes(np.array([0, 0, 1, 1]), [0.5, 1], key=b"seed"))
    array([2, 2])
    """
    parts = np.zeros(len(labels), dtype=np.int64)
    for label, group in positions_by_class(labels):
        permutation = Permutation(len(group), key=key + str(label).encode())
        ranks = np.arange(len(group))
        bounds = [round(end * len(group)) for end in ends[:-1]]
        parts[group[permutation[ranks]]] = np.searchsorted(bounds, ranks, side="right")
    return parts


def assign_groups(groups: NDArray[Any], labels: NDArray[Any], ends: Sequence[float]) -> Ints:
    """Return the part number of each sample, such that no group is split and classes keep their proportions.

    Groups are assigned from the largest to the smallest, and groups of equal size in ascending order. Each group goes
    to the part with the smallest sum of `n * (have - want) / total` over the classes. Here, `n`, `have` and `total` are
    the numbers of samples of a class in the group, in the part so far and in the source, and `want` is the target
    number of the part.

    Args:
        groups: The group of each sample.
        labels: The label of each sample.
        ends: Where the parts end, as cumulative shares: in ascending order, the last one is 1.

    >>> assign_groups(np.array([0, 0, 1, 1, 2, 3]), np.array([0, 0, 0, 1, 1, 1]), [0.5, 1])
    array([0, 0, 1, 1, 0, 0])
    """
    numbers = number_classes(labels)[1]
    totals = np.bincount(numbers)
    surplus = -np.outer(np.diff(ends, prepend=0).round(9), totals)  # have - want, `[parts, classes]`
    parts = np.zeros(len(groups), dtype=np.int64)
    for _, group in sorted(positions_by_class(groups), key=lambda entry: -len(entry[1])):
        counts = np.bincount(numbers[group], minlength=len(totals))
        part = (surplus * (counts / totals)).sum(axis=1).argmin()
        surplus[part] += counts
        parts[group] = part
    return parts


def hash_values(values: NDArray[Any], key: bytes) -> NDArray[np.uint64]:
    """Return an evenly distributed hash of each value, which depends only on the value and `key`.

    >>> one, other = np.array(["a", "bcd"]), np.array(["bcd"])
    >>> bool(hash_values(one, b"")[1] == hash_values(other, b"")[0])
    True
    """
    seed = np.frombuffer(hashlib.blake2b(key, digest_size=8).digest(), dtype=np.uint64)[0]
    if values.dtype == object:
        values = np.asarray([str(value) for value in values.tolist()], dtype=np.str_)
    if values.dtype.kind == "f":
        values = np.asarray(values, dtype=np.float64).view(np.uint64)
    if values.dtype.kind in "biu":
        return mixed64(mixed64(values.astype(np.int64).view(np.uint64)) ^ seed)
    unit = np.uint32 if values.dtype.kind == "U" else np.uint8
    width = values.dtype.itemsize // np.dtype(unit).itemsize
    hashes = np.full(len(values), seed, dtype=np.uint64)
    for begin in range(0, len(values), _CHUNK):  # small chunks keep the temporary arrays in the processor's cache
        part = np.ascontiguousarray(values[begin : begin + _CHUNK]).view(unit).reshape(-1, width) if width else None
        state = hashes[begin : begin + _CHUNK]
        for column in part.T if part is not None else ():
            is_there = column != 0  # shorter texts are padded with zeros; ignore those
            state[is_there] = (state[is_there] ^ column[is_there]) * _FNV_PRIME
        state[:] = mixed64(state)
    return hashes


def interleave(sizes: Sequence[int], weights: Sequence[float], seed: int, *, until_all: bool) -> tuple[Ints, Ints]:
    """Return the source number of each sample of a mix, and how many samples of that source precede it.

    This is stride scheduling: sample k of a source with share s is scheduled at time (k + u) / s, with a random u from
    0 to 1.

    Args:
        sizes: The number of samples of each source.
        weights: The proportions of the sources.
        seed: The seed of u.
        until_all: Whether the mix ends when all sources are used up, instead of the first.

    >>> interleave([4, 2], [2, 1], 0, until_all=False)[0]
    array([1, 0, 0, 1, 0, 0], dtype=int32)
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    offsets = np.random.default_rng(seed).random(len(shares))
    ends = (np.asarray(sizes) + offsets) / shares  # time at which each source would need one sample more than it has
    if min(sizes) == 0:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
    last = int(ends.argmax() if until_all else ends.argmin())
    numbers = np.maximum(np.ceil(ends[last] * shares - offsets).astype(np.int64), 0)
    numbers[last] = sizes[last]  # the next sample of this source would end the mix; rounding must not change that
    return _by_stride(numbers, shares, offsets)


def interleave_exactly(numbers: Sequence[int], seed: int) -> tuple[Ints, Ints]:
    """Return what `interleave` returns, for a mix of exactly `numbers[n]` samples of source n, spread evenly.

    >>> interleave_exactly([4, 0, 2], 0)[0]
    array([2, 0, 0, 2, 0, 0], dtype=int32)
    """
    offsets = np.random.default_rng(seed).random(len(numbers))
    counts = np.asarray(numbers, dtype=np.int64)
    return _by_stride(counts, np.maximum(counts, 1) / max(counts.sum(), 1), offsets)


def _by_stride(numbers: Ints, shares: NDArray[np.float64], offsets: NDArray[np.float64]) -> tuple[Ints, Ints]:
    counts = np.concatenate([np.arange(number) for number in numbers])
    chosen = np.repeat(np.arange(len(shares), dtype=np.int32), numbers)
    order = np.argsort((counts + offsets[chosen]) / shares[chosen], kind="stable")
    return chosen[order], counts[order].astype(smallest_int(int(numbers.max())))


def share_exactly(total: int, weights: Sequence[float]) -> list[int]:
    """Return how many of `total` samples each source gets, rounded by largest remainder so that they add up.

    >>> share_exactly(7, [2, 1, 0])
    [5, 2, 0]
    """
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    rest = int(total - counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return [int(count) for count in counts]


class Stretch:
    """The positions of a `range`, computed instead of stored.

    >>> Stretch(range(10, 20, 2))[np.array([0, 3])]
    array([10, 16], dtype=int32)
    """

    def __init__(self, positions: range) -> None:
        self._positions = positions
        self._kind = smallest_int(max(positions.start, positions.stop, 0) + abs(positions.step))

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        index = index.astype(self._kind, copy=False) if isinstance(index, np.ndarray) else index
        return self._positions.start + index * self._positions.step


class Rounds:
    """All positions of a source with `size` samples, repeated `num_rounds` times.

    >>> Rounds(3, 2)[np.arange(6)]
    array([0, 1, 2, 0, 1, 2])
    """

    def __init__(self, size: int, num_rounds: int) -> None:
        self._size = size
        self.num_rounds = num_rounds

    def __len__(self) -> int:
        return self._size * self.num_rounds

    def __getitem__(self, index: Any) -> Any:
        return index % self._size


class Joined:
    """All positions of several sources, one source after the other, as pairs of the source and the position in it.

    >>> Joined([2, 0, 3])[np.arange(5)]
    (array([0, 0, 2, 2, 2]), array([0, 1, 0, 1, 2]))
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        if type(index) is int:  # NumPy would take ten times as long for one position
            number = bisect_right(self._starts, index) - 1
            return number, index - self._starts[number]
        starts = np.asarray(self._starts)
        numbers = starts.searchsorted(index, side="right") - 1
        return numbers, index - starts[numbers]


class Pairs:
    """The number of the source of each sample, and the position in that source."""

    def __init__(self, numbers: NDArray[Any], positions: NDArray[Any]) -> None:
        self._numbers = numbers
        self._positions = positions

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        return self._numbers[index], self._positions[index]


def by_label(labels: NDArray[Any], values: Mapping[Any, float]) -> NDArray[np.float64]:
    """Return the value of each label, or 0 for labels that are not in `values`.

    >>> by_label(np.array([1, 0, 2]), {1: 0.5, 2: 3.0})
    array([0.5, 0. , 3. ])
    """
    classes, numbers = number_classes(labels)
    table: NDArray[np.float64] = np.asarray([values.get(label, 0.0) for label in classes.tolist()], dtype=np.float64)
    return table[numbers]


def draw_weighted(
    generator: np.random.Generator, shares: NDArray[np.float64], number: int, *, replacement: bool
) -> Ints:
    """Return `number` positions drawn by their shares, which sum to 1.

    The result is exactly that of `generator.choice(len(shares), number, replace=replacement, p=shares)`, but faster:
    NumPy does a binary search per draw, which for 10^7 shares misses the processor's cache about twenty times.

    >>> draw_weighted(np.random.default_rng(0), np.array([0.1, 0.0, 0.9]), 4, replacement=True)
    array([2, 2, 0, 0], dtype=int32)
    """
    kind = smallest_int(len(shares))
    if replacement:
        return _find(_cumulated(shares), generator.random(number)).astype(kind, copy=False)
    left = shares.copy()
    found = np.zeros(number, dtype=kind)
    drawn = 0
    first = np.empty(len(shares), dtype=kind)
    while drawn < number:
        new = _find(_cumulated(left), generator.random(number - drawn))
        first[new[::-1]] = np.arange(len(new))[::-1]  # for equal indices, NumPy keeps the last assignment
        new = new[first[new] == np.arange(len(new))]
        found[drawn : drawn + len(new)] = new
        left[new] = 0
        drawn += len(new)
    return found


def _cumulated(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.cumsum(shares)
    sums /= sums[-1]
    return sums


def _find(sums: NDArray[np.float64], values: NDArray[np.float64]) -> Ints:
    """Return `sums.searchsorted(values, side="right")` for values from 0 to 1, in linear time for most sums.

    A table contains the result for the start of each of 2^k equal intervals. With a power of two, these starts are
    exact floats.
    """
    size = 1 << (len(sums) - 1).bit_length()
    if size < _LARGE or len(values) < size // 16:  # a table would cost more than it saves
        return sums.searchsorted(values, side="right")
    kind = smallest_int(len(sums))
    table = np.empty(size, dtype=kind)
    found = np.empty(len(values), dtype=kind)
    for start in range(0, size, _LARGE):
        table[start : start + _LARGE] = sums.searchsorted(np.arange(start, start + _LARGE) / size, side="right")
    for start in range(0, len(values), _LARGE):
        some = values[start : start + _LARGE]
        place = table[(some * size).astype(np.int64)]
        waiting = np.flatnonzero(sums[place] <= some)
        for _ in range(_NUM_STEPS):
            place[waiting] += 1
            waiting = waiting[sums[place[waiting]] <= some[waiting]]
        place[waiting] = sums.searchsorted(some[waiting], side="right")  # many small shares lie in one interval
        found[start : start + _LARGE] = place
    return found


_LARGE = 1 << 17  # number of sums that fit into the processor's cache; longer arrays are searched in windows
_NUM_STEPS = 8


_SPARE = np.uint64(1)  # a spare bit of a hash, so that adding to it does not overflow


class Permutation:
    """A seeded permutation of `range(size)` that is a function instead of an array, and takes no memory.

    `permutation[positions]` maps an array of positions. This is a balanced Feistel network of eight rounds over the
    next square, applied until the result is in range, which nearly always takes one application (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). For up to 4,096 elements, random numbers are sorted instead, because
    tiny Feistel networks reach only some of the orders.

    >>> sorted(Permutation(5, key=b"epoch 0")[np.arange(5)].tolist())
    [0, 1, 2, 3, 4]
    """

    _ROUNDS = 8
    _SORTED_UP_TO = 4_096

    def __init__(self, size: int, *, key: bytes) -> None:
        words = np.frombuffer(hashlib.blake2b(key, digest_size=8 * self._ROUNDS).digest(), dtype=np.uint64)
        self._size = size
        self._side = np.uint64(math.isqrt(max(size - 1, 0)) + 1)
        self._keys = words
        self._order: NDArray[np.int64] | None = None
        if size <= self._SORTED_UP_TO:
            generator = np.random.Generator(np.random.Philox(key=words[:2]))
            drawn = generator.integers(0, 1 << 63, size=size)
            self._order = np.argsort(drawn, kind="stable").astype(np.int64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Map positions in `range(size)` to elements of `range(size)`."""
        wanted = np.asarray(positions, dtype=np.int64)
        if self._order is not None:
            return np.asarray(self._order[wanted])
        image = self._network(wanted.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(image >= self._size)
        while outside.size:
            image[outside] = self._network(image[outside])
            outside = outside[image[outside] >= self._size]
        return image.astype(np.int64).reshape(wanted.shape)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, self._side)
        for key in self._keys:
            left, right = right, (left + (mixed64(right + key) >> _SPARE)) % self._side
        image: NDArray[np.uint64] = left * self._side + right
        return image


def mixed64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each output bit depends on all input bits."""
    mixed: NDArray[np.uint64] = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
