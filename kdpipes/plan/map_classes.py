"""Rename, merge and drop classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import UNLABELLED, smallest_int
from kdpipes.core.column import as_column, filled
from kdpipes.core.errors import DataError, check_choice, check_class_names, must_be
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.labels import as_classes, label_of, no_class
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import warn
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.shared import Shared
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.plan._classes import plain, shown, to_labels

Unmapped = Literal["drop", "keep", "raise"]
_NUM_SHOWN = 5  # maximum number of dropped classes named in a warning
_DROPPED: Any = object()
_SEVERAL = ()  # the label of a sample with no object or several objects


class _Mapping:
    """The arguments of `map_classes`, and the label mapping computed from them."""

    def __init__(self, mapping: Any, unmapped: Unmapped | None, class_names: Sequence[str] | None) -> None:
        if not isinstance(mapping, Mapping) or not mapping:
            raise TypeError(must_be("mapping", 'a dictionary of classes, like {"pony": "horse"}', mapping))
        mapping = {plain(old): plain(new) for old, new in mapping.items()}
        classes = [entry for pair in mapping.items() for entry in pair]
        if not all(isinstance(entry, int | str) and not isinstance(entry, bool) for entry in classes):
            raise TypeError(must_be("mapping", "a dictionary of class numbers or names", mapping))
        if len({isinstance(entry, str) for entry in mapping.values()}) > 1:
            raise ValueError(must_be("mapping", "a mapping to numbers, or one to names, not to both", mapping))
        if unmapped is not None:
            check_choice("unmapped", unmapped, ("drop", "keep", "raise"))
        self._unmapped = unmapped or "drop"
        self._warns = unmapped is None
        self._class_names = check_class_names(class_names)
        self._mapping = dict(mapping)
        if self._class_names is not None:
            new = to_labels("mapping", list(mapping.values()), self._class_names, are_names=False)
            self._mapping = dict(zip(mapping, new, strict=True))

    def fingerprinted(self) -> Any:
        """Return the data that identifies the mapping."""
        known = {name: value for name, value in vars(self).items() if name not in ("_class_names", "_warns")}
        return known if self._class_names is None else (known, self._class_names)

    def names(self, known: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the names of the new classes 0, 1, ...; None if they have no names."""
        new = self._mapping.values()
        if self._class_names is not None:
            return self._class_names
        if known is None or not all(isinstance(entry, str) for entry in new):
            return None
        mapped = set(to_labels("mapping", list(self._mapping), known, are_names=False))
        kept = [name for number, name in enumerate(known) if number not in mapped]
        return tuple(dict.fromkeys([*map(str, new), *(kept if self._unmapped == "keep" else [])]))

    def table(self, label: Any, known: tuple[str, ...] | None) -> dict[Any, Any]:
        """Return the mapping from old to new labels. `label` is any of the old labels."""
        is_named = known is None and any(isinstance(old, str) for old in self._mapping)
        are_names = isinstance(label, str) if _is_class(label) else is_named
        names = None if are_names else self.names(known)
        old = to_labels("mapping", list(self._mapping), known, are_names=are_names)
        table: dict[Any, Any] = dict(zip(old, self._mapping.values(), strict=True))
        if names is not None and known is not None:
            if self._unmapped == "keep":
                table |= {number: self._kept(name) for number, name in enumerate(known) if number not in table}
            table = {old: names.index(new) if isinstance(new, str) else new for old, new in table.items()}
        return {**table, UNLABELLED: table[""]} if "" in table else table

    def warn_of(self, dropped: Sequence[Any], names: Any) -> None:
        """Warn that classes are dropped, unless `unmapped` was passed."""
        if not self._warns or not dropped:
            return
        several = ", ".join(shown(label, names) for label in dropped[:_NUM_SHOWN])
        more = f" and {len(dropped) - _NUM_SHOWN} more" if len(dropped) > _NUM_SHOWN else ""
        warn(
            f"`map_classes` drops all samples of the classes that `mapping` does not name: {several}{more}. Pass "
            '`unmapped="keep"` to keep them, or `unmapped="drop"` to drop them without this warning.',
        )

    def _kept(self, label: Any) -> Any:
        """Return the new label of a class that is kept by `unmapped="keep"`."""
        if label == "":
            return UNLABELLED
        if self._class_names is None or label == UNLABELLED:
            return label
        if label not in (*self._class_names, *range(len(self._class_names))):
            raise ValueError(
                f"`class_names` must include {label!r}, which `unmapped='keep'` keeps. Add it, or map it to a class."
            )
        return self._class_names.index(label) if isinstance(label, str) else label

    def apply(self, label: Any, table: Mapping[Any, Any], sample_of: Callable[[], Sample], names: Any) -> Any:
        """Return the new label of one sample, or _DROPPED. `sample_of` and the old `names` are needed for an error."""
        if label in table:
            return table[label]
        if isinstance(label, float):
            raise DataError(no_class("map_classes", sample_of(), label))
        if self._unmapped == "raise":
            raise DataError(
                f"Class {shown(label, names)} of sample {sample_of().key!r} is not in `mapping`. Add it, or pass "
                '`unmapped="drop"` or `unmapped="keep"`.'
            )
        return self._kept(label) if self._unmapped == "keep" and label != _SEVERAL else _DROPPED


def _only(label: Any) -> Any:
    """Return a label as a plain value. A list of labels, as in detection data, becomes its only entry."""
    label = label_of(label)
    if isinstance(label, list | tuple | np.ndarray):
        return _only(label[0]) if len(label) == 1 else _SEVERAL
    return label


def _is_class(label: Any) -> bool:
    """Return whether a label is a class, and not the label of an unlabeled sample."""
    return isinstance(label, str | int) and label not in (UNLABELLED, "")


@functional_pipe("map_classes", flavour="map")
class ClassMapperMapDataPipe(PlanPipe):
    """Renames and merges classes, and drops others (functional name: ``map_classes``).

    Only the labels, field `y`, are read. If the source knows its class names and the new classes are names, classes are
    renumbered: in the order of `class_names`, or else in the order in which the mapping first names them. Without
    `class_names`, text labels stay text, and classes that are mapped to numbers have no names. A label may be a list
    with one entry per object, as in detection data: a list of one label counts as that label, and other lists are
    treated as unmapped.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        mapping: A dictionary from old to new classes. Both are numbers or names.
        unmapped: What to do with unlabeled samples and samples of other classes: "drop" them, "keep" them unchanged,
            or "raise" an error. By default, they are dropped, with a warning that names the classes.
        class_names: The names of the new classes 0, 1, ...

    Length: The number of samples that are kept; unknown for a stream.

    Raises:
        ValueError: A new class is not among `class_names`; or, when the plan is made or the first sample of a stream
            passes, an old class is not among those of the source.
        DataError: There is a sample of another class, and `unmapped` is "raise". The error is raised when the plan is
            made, or when the sample of a stream passes.

    Example:
        >>> pets = kdp.from_dataset(["a", "b", "c"], "x", labels=[0, 1, 2], class_names=["cat", "pony", "dog"])
        >>> mapped = pets.map_classes({"pony": "horse", "cat": "cat"}, unmapped="drop")
        >>> mapped.column("y"), mapped.class_names()
        (array([1, 0]), ('horse', 'cat'))
    """

    traits = replace(PlanPipe.traits, changes=frozenset({"y"}))

    def __init__(
        self,
        source_datapipe: MapPipe,
        mapping: Mapping[Any, Any],
        *,
        unmapped: Unmapped | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(source_datapipe)
        self._mapping = _Mapping(mapping, unmapped, class_names)
        self._labels: Shared[NDArray[Any]] | None = None

    computed = (*PlanPipe.computed, "_labels")
    goes_by = "labels"

    def plan(self, epoch: int) -> NDArray[Any]:
        labels = as_classes(self.source.column("y"))
        if not len(labels):
            self._labels = Shared(labels)
            return np.zeros(0, dtype=np.int32)
        values, inverse = _distinct(labels)
        known = self.source.class_names()
        table = self._mapping.table(next(filter(_is_class, values), None), known)
        firsts = np.unique(inverse, return_index=True)[1].tolist()
        new = [
            self._mapping.apply(value, table, functools.partial(self.source.fetch, first), known)
            for value, first in zip(values, firsts, strict=True)
        ]
        dropped = [value for value, entry in zip(values, new, strict=True) if entry is _DROPPED and _is_class(value)]
        self._mapping.warn_of(dropped, known)
        positions = np.flatnonzero(np.asarray([entry is not _DROPPED for entry in new])[inverse])
        column = as_column([0 if entry is _DROPPED else entry for entry in new])
        self._labels = Shared(column[inverse[positions]])
        return positions.astype(smallest_int(len(labels)))

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        labels = dict(zip(rows.places, self.column("y")[rows.positions], strict=True))
        blocks = super().read_blocks(rows)
        for block in blocks:
            block.fields["y"] = filled([label_of(labels[place]) for place in block.places])
        return blocks

    def column(self, name: str) -> NDArray[Any]:
        if name != "y":
            return super().column(name)
        self.chosen()
        assert self._labels is not None
        return self._labels.value

    def class_names(self) -> tuple[str, ...] | None:
        return self._mapping.names(self.source.class_names())


def _distinct(labels: NDArray[Any]) -> tuple[list[Any], NDArray[Any]]:
    """Return the distinct labels, and the index of each sample's label among them, `[num_samples]`."""
    if labels.dtype != object:
        values, inverse = np.unique(labels, return_inverse=True)
        return values.tolist(), inverse.reshape(-1)
    alone = [_only(label) for label in labels]
    numbers = {value: number for number, value in enumerate(dict.fromkeys(alone))}
    return list(numbers), np.asarray([numbers[value] for value in alone])


@functional_pipe("map_classes", flavour="iter", doc_of=ClassMapperMapDataPipe)
class ClassMapperIterDataPipe(StreamPlanPipe):
    traits = replace(StreamPlanPipe.traits, changes=frozenset({"y"}), holds_back=False)

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        mapping: Mapping[Any, Any],
        *,
        unmapped: Unmapped | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(source_datapipe)
        self._mapping = _Mapping(mapping, unmapped, class_names)

    def samples(self) -> Iterator[Sample]:
        tables: dict[type, dict[Any, Any]] = {}
        known = super().class_names()
        dropped = set[Any]()
        for sample in samples_of(self.source, "map_classes"):
            label = _only(sample["y"])
            kind = type(label) if _is_class(label) else type(None)
            if kind not in tables:
                tables[kind] = self._mapping.table(label, known)
            new = self._mapping.apply(label, tables[kind], sample.fork, known)
            if new is not _DROPPED:
                sample["y"] = new
                yield sample
            elif _is_class(label) and label not in dropped:
                dropped.add(label)
                self._mapping.warn_of([label], known)

    def class_names(self) -> tuple[str, ...] | None:
        return self._mapping.names(super().class_names())
