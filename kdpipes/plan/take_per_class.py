"""Some samples of each class."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from kdpipes.core.errors import check_count, check_one_of, check_seed, is_number, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe, refuse_flavour
from kdpipes.plan._classes import labels_of
from kdpipes.selection import take_per_class

__all__ = ["PerClassTakerMapDataPipe"]


@functional_pipe("take_per_class", flavour="map")
class PerClassTakerMapDataPipe(PlanPipe):
    """Takes so many samples, or such a share, of each class (functional name: ``take_per_class``).

    They keep the source's order. Samples without a label (-1 or None) are left out. Reads the labels, field `y`, alone.

    Args:
        source_datapipe: An indexed pipe of samples.
        num_samples: How many of each class; of a smaller class, all.
        share: Which share of each class, above 0.0 up to 1.0, rounded up; exactly one of the two is given.
        seed: Of a choice at random; None takes the first. A class's choice does not depend on the others.

    Length: at most the source's.

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
        if share is not None and not is_number(share):
            raise TypeError(must_be("share", rule, share))
        if share is not None and not 0 < share <= 1:
            raise ValueError(must_be("share", rule, share, "25 percent are 0.25." if share > 1 else ""))
        self._num_samples = None if num_samples is None else check_count("num_samples", num_samples)
        self._share = None if share is None else float(share)
        self._choice_seed = None if seed is None else check_seed(seed)

    def plan(self, epoch: int) -> NDArray[Any]:
        return take_per_class(labels_of(self.source, "take_per_class"), self._number_of, self._choice_seed)

    def _number_of(self, size: int) -> int:
        return math.ceil(size * self._share) if self._share is not None else min(self._num_samples or 0, size)


refuse_flavour(
    "take_per_class", flavour="iter", way_out="A stream cannot count ahead: `kdp.open_shards` is an indexed source."
)
