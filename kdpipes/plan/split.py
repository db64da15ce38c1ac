"""Divide a source into disjoint parts, for training, validation and test."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import assign_groups, divide_classes, hash_values, positions_by_class, smallest_int
from kdpipes.core.errors import check_count, check_number, check_seed, must_be
from kdpipes.core.labels import labels_of
from kdpipes.core.map_pipe import MapPipe, has_column
from kdpipes.core.messages import counted, warn
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.randomness import hash_key
from kdpipes.core.registry import note_name
from kdpipes.plan._classes import shown


def split(
    source_datapipe: MapPipe,
    *unnamed: NoReturn,
    by: str = "key",
    groups: str | None = None,
    folds: int | None = None,
    seed: int = 0,
    **shares: float,
) -> Any:
    """Divide an indexed source into disjoint parts that together hold every sample, or into folds.

    To avoid leakage between the parts, name the field that identifies samples that belong together, such as all images
    of a patient: `groups="patient"`.

    Args:
        source_datapipe: An indexed pipe of samples.
        by: How samples are assigned to parts. `"key"`: by a hash of the key, so that a sample stays in its part when
            the dataset grows; the sizes of the parts are approximate. `"y"`: each class is divided at random in exactly
            these shares (stratified), rounded to whole samples. The name of another field, such as `"patient"`: by a
            hash of its value, so that all samples with the same value are in the same part, even when the dataset
            grows.
        groups: The name of a field: all samples with the same value are in the same part. With `by="y"`, each class is
            divided in these shares as closely as the groups allow; otherwise, only the total number of samples is. The
            largest groups are assigned first, each to the part that is furthest below its share. The seed breaks ties
            between groups of equal size.
        folds: The number of folds for cross-validation, at least 2, instead of shares.
        seed: The seed of the split, from 0 to 2**64 - 1.
        shares: The shares by the names of the parts, each above 0, such as `train=0.8, val=0.2`. They must sum to 1.

    Returns:
        A named tuple of indexed pipes, one for each part. With `folds`, a tuple of that many pairs `(train, val)`: each
        sample is in `val` of one pair, and in `train` of all others. Samples keep the order of the source.

    Warns:
        UserWarning: A class has fewer samples than there are folds, or is in fewer groups, so that some folds validate
            without it.

    Raises:
        ValueError: The shares do not sum to 1; a part would be empty, for example because there are fewer groups than
            folds; or `by` or `groups` names the labels, so that whole classes would move to one part: write `by="y"`.

    Example:
        >>> letters = kdp.from_dataset(list("abcdefghij"), "x", labels=[0, 1] * 5)
        >>> train, test = kdp.split(letters, train=0.6, test=0.4, by="y")
        >>> kdp.class_counts(train), kdp.class_counts(test)
        ({0: 3, 1: 3}, {0: 2, 1: 2})
        >>> for train, val in kdp.split(letters, folds=5, by="y"):
        ...     assert (len(train), kdp.class_counts(val)) == (8, {0: 1, 1: 1})
        >>> kdp.split(letters, 0.8)
        Traceback (most recent call last):
        ValueError: `split` needs the parts and their shares, like `kdp.split(pipe, train=0.8, val=0.2)`, or `folds=5`.
    """
    if unnamed or bool(shares) == (folds is not None):
        raise ValueError(
            "`split` needs the parts and their shares, like `kdp.split(pipe, train=0.8, val=0.2)`, or `folds=5`."
        )
    if folds is not None:
        shares = dict.fromkeys(map(str, range(check_count("folds", folds, minimum=2))), 1 / folds)
    for name, share in shares.items():
        check_number(name, share, "a share above 0 and at most 1", 1e-12, 1, "Write 80 % as 0.8.")
    total = sum(shares.values())
    if abs(total - 1) > 1e-9:
        hint = "Name the rest, too: `kdp.split(pipe, train=0.8, rest=0.2)`." if total < 1 else ""
        raise ValueError(f"The shares must sum to 1, but sum to {total:g}: {shares}. {hint}".rstrip())
    ends = tuple((np.cumsum(list(shares.values())) / total).tolist())
    take = partial(PartTakerMapDataPipe, source_datapipe, ends=ends, by=by, groups=groups, seed=seed)
    parts = [take(part) for part in range(len(shares))]
    # If the column must be read first, the check is left to the first use of a part.
    if (groups or by != "y") and has_column(parts[0].source, groups or by):
        _reject_labels(parts[0].source, groups or by)
    if folds is None:
        return namedtuple("Split", shares)(*parts)
    pair = namedtuple("pair", ["train", "val"])
    return tuple(pair(take(part, is_rest=True), val) for part, val in enumerate(parts))


class PartTakerMapDataPipe(PlanPipe):
    """One part of `kdp.split`: part number `part`, or with `is_rest`, all other parts.

    `ends` are cumulative shares, from above 0 to 1.
    """

    def __init__(
        self,
        source_datapipe: MapPipe,
        part: int,
        ends: tuple[float, ...],
        by: str,
        groups: str | None,
        seed: int,
        *,
        is_rest: bool = False,
    ) -> None:
        for param, name in {"by": by, "groups": groups or by}.items():
            if not isinstance(name, str) or not name:
                raise TypeError(must_be(param, 'the name of a field, like "key", "y" or "patient"', name))
        if groups is not None and by not in ("key", "y"):
            raise ValueError(must_be("by", '"y", or left out, if there are `groups`', by))
        super().__init__(source_datapipe)
        self._part = part
        self._ends = ends
        self._by = by
        self._split_seed = check_seed(seed)
        self._groups = groups
        self._is_rest = is_rest

    def plan(self, epoch: int) -> NDArray[Any]:
        numbers = self._part_numbers()
        name = self._groups or self._by
        empty = np.flatnonzero(np.bincount(numbers, minlength=len(self._ends)) == 0).tolist()
        if len(numbers) and empty and (self._is_rest or self._part in empty):
            hint = "Use fewer folds" if self._is_rest else "Give it a larger share"
            values = counted(len(set(self.source.column(name).tolist())), "different value")
            raise ValueError(
                f"`split` by {name!r} leaves part {empty[0]} (counting from 0) empty: {name!r} has {values}. {hint}, "
                "or choose a field with more."
            )
        if self._is_rest and self._by == "y":
            self._warn_of_rare(numbers)
        chosen = np.flatnonzero((numbers == self._part) != self._is_rest)
        return chosen.astype(smallest_int(len(numbers)))

    def _part_numbers(self) -> NDArray[Any]:
        """Return the part number of each sample."""
        key = hash_key("split", self._split_seed)
        if self._by == "y" and self._groups is None:
            return divide_classes(labels_of(self.source, "split"), self._ends, key=key)
        name = self._groups or self._by
        _reject_labels(self.source, name)
        drawn = hash_values(self.source.column(name), key)
        if self._groups is None:
            return np.searchsorted((np.asarray(self._ends[:-1]) * 2.0**64).astype(np.uint64), drawn, side="right")
        labels = labels_of(self.source, "split") if self._by == "y" else np.zeros(len(drawn), np.int64)
        return assign_groups(drawn, labels, self._ends)

    def _warn_of_rare(self, numbers: NDArray[Any]) -> None:
        """Warn if a class has no sample in one of the folds."""
        rare = [
            shown(label, self.class_names())
            for label, positions in positions_by_class(labels_of(self.source, "split"))
            if len(np.unique(numbers[positions])) < len(self._ends)
        ]
        if rare:
            warn(
                f"Some of the {len(self._ends)} folds have no sample of the classes {', '.join(rare[:5])}. Use fewer "
                "folds, or leave such classes out: `.filter_classes(invalid=[...])`."
            )


note_name(PartTakerMapDataPipe, "split")


def _reject_labels(source: MapPipe, name: str) -> None:
    """Raise ValueError if the values of a field are the labels under the same or another name."""
    if name == "key" or not has_column(source, "y"):
        return
    values, labels = (hash_values(source.column(column), seed) for column, seed in ((name, b"0"), ("y", b"1")))
    numbers = {len(np.unique(hashes)) for hashes in (values, labels, values ^ labels)}
    if len(numbers) == 1 and 1 < numbers.pop() < len(values):  # each value has one label, and each label has one value
        raise ValueError(
            f"Each value of {name!r} is a class, so whole classes would move to one part. "
            'Write `by="y"` to divide each class in these shares. `.filter_classes(...)` divides the classes.'
        )
