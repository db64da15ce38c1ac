"""Keep or drop classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import UNLABELLED, keep_classes, missing_of
from kdpipes.core.errors import check_one_of
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.labels import labels_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import counted, warn
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.plan._classes import check_classes, class_in, to_labels

Classes = Sequence[int | str]


class _Choice:
    """The arguments `valid` and `invalid`, exactly one of which is not None."""

    def __init__(self, valid: Classes | None, invalid: Classes | None) -> None:
        check_one_of(valid=valid, invalid=invalid)
        self.param = "valid" if valid is not None else "invalid"
        self.classes = check_classes(self.param, valid if valid is not None else invalid)
        self.keep = valid is not None


@functional_pipe("filter_classes", flavour="map")
class ClassFilterMapDataPipe(PlanPipe):
    """Keeps or drops the samples of some classes (functional name: ``filter_classes``).

    Only the labels, field `y`, are read, and they do not change. Samples without a label (-1 or None) are class -1:
    `invalid=[-1]` drops them.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        valid: The classes to keep, by number or name. Pass either `valid` or `invalid`.
        invalid: The classes to drop, by number or name.

    Length: The number of samples that are kept; unknown for a stream.

    Raises:
        ValueError: A class is not among the class names of the source; or it is a name, but labels are numbers and the
            source has no class names. The error is raised when the plan is made, or when the first sample of a stream
            passes. A choice by number that keeps no sample of an indexed source is only a warning.

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
        are_names = missing_of(labels) == ""
        present = np.unique(labels).tolist() if are_names else None
        names = self.source.class_names()
        classes = to_labels(choice.param, choice.classes, names, are_names=are_names, present=present)
        positions = keep_classes(labels, classes, keep=choice.keep)
        if not len(positions):
            known = ", ".join(filter(None, map(str, np.unique(labels).tolist()[:20])))
            warn(
                f"`filter_classes({choice.param}={list(choice.classes)})` keeps none of "
                f"{counted(len(labels), 'sample')}; their classes are {known}.",
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
        choice = self._choice
        names = self.class_names()
        labels_by = cache(lambda are_names: to_labels(choice.param, choice.classes, names, are_names=are_names))
        for sample in samples_of(self.source, "filter_classes"):
            label = class_in(sample, "filter_classes")
            if label == UNLABELLED:
                if (label in choice.classes) == choice.keep:
                    yield sample
                continue
            if (label in labels_by(isinstance(label, str))) == choice.keep:
                yield sample
