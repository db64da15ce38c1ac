"""The few samples of each class that few-shot learning takes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError, check_count, check_flag, check_seed
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe, refuse_flavour
from kdpipes.plan._classes import labels_of, shown
from kdpipes.selection import UNLABELLED, class_counts, take_per_class

__all__ = ["FewShotTakerMapDataPipe"]


@functional_pipe("few_shot", flavour="map")
class FewShotTakerMapDataPipe(PlanPipe):
    """Takes exactly so many samples of each class, at random (functional name: ``few_shot``).

    They keep the source's order; a class's choice depends on the seed and the class alone. Samples without a label (-1
    or None) are left out. Reads the labels, field `y`, and nothing else.

    Args:
        source_datapipe: An indexed pipe of samples.
        shots: How many of each class.
        seed: Of the choice, from 0 up to 2**64.
        rest: Whether to take all other labelled samples instead, to evaluate on.

    Length: `shots` times the number of classes; with `rest`, the other samples that have a label.

    Raises:
        DataError: A class has fewer samples. (When the plan is made; `take_per_class` takes what there is.)

    Example:
        >>> pipe = kdp.from_dataset(["a", "b", "c", "d"], "x", labels=[0, 1, 0, 1])
        >>> len(pipe.few_shot(shots=1, seed=0))
        2
    """

    goes_by = "labels"

    def __init__(self, source_datapipe: MapPipe, shots: int, *, seed: int = 0, rest: bool = False) -> None:
        super().__init__(source_datapipe)
        self._takes_rest = check_flag("rest", rest)
        self._shots = check_count("shots", shots)
        self._choice_seed = check_seed(seed)

    def plan(self, epoch: int) -> NDArray[Any]:
        labels = labels_of(self.source, "few_shot")
        counts = {label: count for label, count in class_counts(labels).items() if label != UNLABELLED}
        rare = next((label for label, count in counts.items() if count < self._shots), None)
        if rare is not None:
            name = shown(rare, self.source.class_names())
            raise DataError(
                f"Class {name} has {counts[rare]} samples, fewer than the {self._shots} of `few_shot`. "
                f"`.take_per_class(num_samples={self._shots}, seed=...)` takes what there is."
            )
        chosen = take_per_class(labels, lambda size: self._shots, self._choice_seed)
        if not self._takes_rest:
            return chosen
        is_rest = labels != UNLABELLED
        is_rest[chosen] = False
        return np.flatnonzero(is_rest).astype(chosen.dtype)


refuse_flavour("few_shot", flavour="iter", way_out="A stream cannot count ahead: `kdp.open_shards` is indexed.")
