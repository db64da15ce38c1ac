"""Keep or drop classes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe

from kdpipes.core.errors import check_one_of
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.plan._classes import check_classes, label_of, labels_of, to_labels
from kdpipes.selection import UNLABELLED, keep_classes

__all__ = ["ClassFilterIterDataPipe", "ClassFilterMapDataPipe"]

Classes = Sequence[int | str]


class _Choice:
    """The two arguments, of which exactly one is given."""

    def __init__(self, valid: Classes | None, invalid: Classes | None) -> None:
        check_one_of(valid=valid, invalid=invalid)
        self.param = "valid" if valid is not None else "invalid"
        self.classes = check_classes(self.param, valid if valid is not None else invalid)
        self.keep = valid is not None


@functional_pipe("filter_classes", flavour="map")
class ClassFilterMapDataPipe(PlanPipe):
    """Keeps or drops the samples of some classes (functional name: ``filter_classes``).

    Reads the labels, field `y`, and nothing else. The labels of what is kept stay as they are. Samples without a label
    (-1 or None) are a class -1: `invalid=[-1]` drops them.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        valid: The classes to keep, by number or by name.
        invalid: The classes to drop; exactly one of the two is given.

    Length: the number of samples of these classes; not known on a stream.

    Raises:
        ValueError: A class is not among the source's names, or is a name where labels are numbers and the source has no
            names. (When the plan is made, or the first sample of a stream passes. A choice by number that leaves
            nothing of an indexed source is a warning.)

    Source: KappaData's ClassFilterWrapper.

    Example:
        >>> pipe = kdp.from_dataset(["a", "b", "c"], "x", labels=[0, 1, 0], class_names=["heron", "stork"])
        >>> pipe.filter_classes(valid=["heron"]).column("x")
        array(['a', 'c'], dtype='<U1')
    """

    goes_by = "labels"

    def __init__(
        self, source_datapipe: MapPipe, *, valid: Classes | None = None, invalid: Classes | None = None
    ) -> None:
        super().__init__(source_datapipe)
        self._choice = _Choice(valid, invalid)

    def plan(self, epoch: int) -> NDArray[Any]:
        labels = labels_of(self.source, "filter_classes")
        if not len(labels):
            return np.zeros(0, dtype=np.int32)
        choice = self._choice
        are_names = labels.dtype.kind == "U"
        present = np.unique(labels).tolist() if are_names else None
        names = self.source.class_names()
        classes = to_labels(choice.param, choice.classes, names, are_names=are_names, present=present)
        positions = keep_classes(labels, classes, keep=choice.keep)
        if not len(positions) and choice.classes:
            known = ", ".join(map(str, np.unique(labels).tolist()[:20]))
            warnings.warn(
                f"`filter_classes({choice.param}={list(choice.classes)})` keeps none of {len(labels)} samples; "
                f"their classes are {known}.",
                stacklevel=2,
            )
        return positions


@functional_pipe("filter_classes", flavour="iter", doc_of=ClassFilterMapDataPipe)
class ClassFilterIterDataPipe(StreamPlanPipe):
    traits = replace(StreamPlanPipe.traits, holds_back=False)

    def __init__(
        self, source_datapipe: IterDataPipe[Any], *, valid: Classes | None = None, invalid: Classes | None = None
    ) -> None:
        super().__init__(source_datapipe)
        self._choice = _Choice(valid, invalid)

    def samples(self) -> Iterator[Sample]:
        choice, names = self._choice, self.class_names()
        by_kind: dict[bool, frozenset[int | str]] = {}
        for sample in samples_of(self.source, "filter_classes"):
            label = label_of(sample["y"])
            label = UNLABELLED if label is None else label
            is_name = isinstance(label, str)
            if is_name not in by_kind:
                by_kind[is_name] = frozenset(to_labels(choice.param, choice.classes, names, are_names=is_name))
            if (label in by_kind[is_name]) == choice.keep:
                yield sample
