"""Take a fixed number of random samples of each class, for few-shot learning."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import class_counts, missing_of, take_per_class
from kdpipes.core.errors import DataError, check_count, check_flag, check_seed
from kdpipes.core.labels import labels_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import counted
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.plan._classes import shown


@functional_pipe(
    "few_shot",
    flavour="map",
    otherwise="The classes of a stream cannot be counted in advance. `kdp.open_shards` is indexed.",
)
class FewShotTakerMapDataPipe(PlanPipe):
    """Takes exactly `shots` random samples of each class (functional name: ``few_shot``).

    The samples keep the order of the source. The choice within a class depends only on the seed and the class. Samples
    without a label (-1 or None) are left out. Only the labels, field `y`, are read.

    Args:
        source_datapipe: An indexed pipe of samples.
        shots: The number of samples of each class.
        seed: The seed of the random choice, from 0 to 2**64 - 1.
        rest: Whether to take all other labeled samples instead, to evaluate on.

    Length: `shots` times the number of classes; with `rest`, the other samples that have a label.

    Raises:
        DataError: A class has fewer samples. The error is raised when the plan is made. `take_per_class` takes as many
            samples as are available.

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
        for label, count in class_counts(labels).items():
            if label != missing_of(labels) and count < self._shots:
                name = shown(label, self.source.class_names())
                raise DataError(
                    f"Class {name} has {counted(count, 'sample')}, fewer than the {self._shots} of `few_shot`. "
                    f"`.take_per_class(num_samples={self._shots}, seed=...)` takes as many as there are."
                )
        chosen = take_per_class(labels, lambda size: self._shots, self._choice_seed)
        if not self._takes_rest:
            return chosen
        return np.setdiff1d(np.flatnonzero(labels != missing_of(labels)), chosen).astype(chosen.dtype)
