"""Take some samples of each class."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from kdpipes.core.arithmetic import take_per_class
from kdpipes.core.errors import check_count, check_number, check_one_of, check_seed
from kdpipes.core.labels import labels_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe


@functional_pipe(
    "take_per_class",
    flavour="map",
    otherwise="The classes of a stream cannot be counted in advance. `kdp.open_shards` is indexed.",
)
class PerClassTakerMapDataPipe(PlanPipe):
    """Takes a number or a share of the samples of each class (functional name: ``take_per_class``).

    The samples keep the order of the source. Samples without a label (-1 or None) are left out. Only the labels, field
    `y`, are read.

    Args:
        source_datapipe: An indexed pipe of samples.
        num_samples: The number of samples of each class. Of a smaller class, all samples are taken. Pass either
            `num_samples` or `share`.
        share: The share of the samples of each class, above 0.0 and at most 1.0, rounded up to whole samples.
        seed: The seed of a random choice, which does not depend on other classes; None takes the first samples.

    Length: At most the length of the source.

    Example:
        >>> pipe = kdp.from_dataset(["a", "b", "c", "d"], "x", labels=[0, 1, 0, 0])
        >>> pipe.take_per_class(num_samples=2).column("x")
        array(['a', 'b', 'c'], dtype='<U1')
    """

    goes_by = "labels"

    def __init__(
        self,
        source_datapipe: MapPipe,
        *,
        num_samples: int | None = None,
        share: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(source_datapipe)
        check_one_of(num_samples=num_samples, share=share)
        rule = "above 0.0 up to 1.0"
        hint = "Write 25 % as 0.25."
        self._share = None if share is None else check_number("share", share, rule, math.ulp(0), 1, hint)
        self._num_samples = None if num_samples is None else check_count("num_samples", num_samples)
        self._choice_seed = None if seed is None else check_seed(seed)

    def plan(self, epoch: int) -> NDArray[Any]:
        labels = labels_of(self.source, "take_per_class")
        share = self._share or 0
        return take_per_class(labels, lambda size: self._num_samples or math.ceil(size * share), self._choice_seed)
