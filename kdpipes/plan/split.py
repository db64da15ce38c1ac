"""Divide a source into disjoint parts, for training, validation and test."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import hash_values, smallest_int, take_stratum
from kdpipes.core.errors import check_number, check_seed, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.randomness import hash_key
from kdpipes.core.registry import note_name
from kdpipes.plan._classes import labels_of


def split(source_datapipe: MapPipe, *unnamed: NoReturn, by: str = "key", seed: int = 0, **shares: float) -> Any:
    """Divide an indexed source into disjoint parts that together hold every sample.

    To avoid leakage between the parts, choose `by` so that samples that belong together, such as all images of a
    patient, end up in the same part.

    Args:
        source_datapipe: An indexed pipe of samples.
        by: How samples are assigned to parts. `"key"`: by a hash of the key, so that a sample stays in its part when
            the dataset grows; the sizes of the parts are approximate. `"y"`: each class is divided at random in exactly
            these shares (stratified), rounded to whole samples. The name of another field, such as `"patient"`: by a
            hash of its value, so that all samples with the same value are in the same part.
        seed: The seed of the split, from 0 to 2**64 - 1.
        shares: The shares by the names of the parts, each above 0, such as `train=0.8, val=0.2`. They must sum to 1.

    Returns:
        A named tuple of indexed pipes, one for each part. Samples keep the order of the source.

    Raises:
        ValueError: The shares do not sum to 1; a part would be empty; or `by` names the column of the labels, so that
            whole classes would move to one part: write `by="y"`.

    Example:
        >>> letters = kdp.from_dataset(list("abcdefghij"), "x", labels=[0, 1] * 5)
        >>> train, test = kdp.split(letters, train=0.6, test=0.4, by="y")
        >>> kdp.class_counts(train), kdp.class_counts(test)
        ({0: 3, 1: 3}, {0: 2, 1: 2})
        >>> kdp.split(letters, 0.8)
        Traceback (most recent call last):
        ValueError: `split` needs the parts and their shares, like `kdp.split(pipe, train=0.8, val=0.2)`.
    """
    if unnamed or not shares:
        raise ValueError("`split` needs the parts and their shares, like `kdp.split(pipe, train=0.8, val=0.2)`.")
    for name, share in shares.items():
        check_number(name, share, "a share above 0 and at most 1", 1e-12, 1, "Write 80 % as 0.8.")
    total = sum(shares.values())
    if abs(total - 1) > 1e-9:
        hint = "Name the rest, too: `kdp.split(pipe, train=0.8, rest=0.2)`." if total < 1 else ""
        raise ValueError(f"The shares must sum to 1, but sum to {total:g}: {shares}. {hint}".rstrip())
    ends = tuple((np.cumsum(list(shares.values())) / total).tolist())
    parts = [PartTakerMapDataPipe(source_datapipe, part, ends, by, seed) for part in range(len(shares))]
    if parts[0].source.has_column(by):  # otherwise, the first use of a part finds it
        _reject_labels(parts[0].source, by)
    return namedtuple("Split", shares)(*parts)


class PartTakerMapDataPipe(PlanPipe):
    """One part of `kdp.split`: the one with the number `part`. `ends` are cumulative shares, from above 0 to 1."""

    def __init__(self, source_datapipe: MapPipe, part: int, ends: tuple[float, ...], by: str, seed: int) -> None:
        if not isinstance(by, str) or not by:
            raise TypeError(must_be("by", 'the name of a field, like "key", "y" or "patient"', by))
        super().__init__(source_datapipe)
        self._part, self._ends, self._by, self._split_seed = part, ends, by, check_seed(seed)

    def plan(self, epoch: int) -> NDArray[Any]:
        chosen = self._chosen()
        if len(self.source) and not len(chosen):
            raise ValueError(
                f"`split` by {self._by!r} leaves part {self._part} (counting from 0) empty. Give it a larger share, or "
                f"choose a field with more different values than {self._by!r}."
            )
        return chosen

    def _chosen(self) -> NDArray[Any]:
        bounds, key = (0.0, *self._ends)[self._part : self._part + 2], hash_key("split", self._split_seed)
        if self._by == "y":
            return take_stratum(labels_of(self.source, "split"), *bounds, key=key)
        _reject_labels(self.source, self._by)
        drawn = hash_values(self.source.column(self._by), key)
        lower, upper = (np.uint64(min(int(bound * 2**64), 2**64 - 1)) for bound in bounds)
        is_last = self._part == len(self._ends) - 1
        chosen = np.flatnonzero((drawn >= lower) & ((drawn < upper) | is_last))
        return chosen.astype(smallest_int(len(drawn)))


note_name(PartTakerMapDataPipe, "split")


def _reject_labels(source: MapPipe, by: str) -> None:
    """Raise ValueError if the values of `by` are the labels under another name."""
    if by in ("key", "y") or not source.has_column("y"):
        return
    values, labels = (list(map(str, source.column(name).tolist())) for name in (by, "y"))
    of_value, of_label = dict[str, str](), dict[str, str]()
    for value, label in zip(values, labels, strict=True):
        if of_value.setdefault(value, label) != label or of_label.setdefault(label, value) != value:
            return
    if 1 < len(of_value) < len(values):
        raise ValueError(
            f"`by` must not name the labels, but each value of {by!r} is a class, so whole classes would move to one "
            'part. Write `by="y"` to divide each class in these shares. `.filter_classes(...)` divides the classes.'
        )
