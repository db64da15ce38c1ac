"""Take a contiguous share of the samples."""

from __future__ import annotations

import math

from kdpipes.core.arithmetic import Stretch
from kdpipes.core.errors import check_number
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe


@functional_pipe(
    "take_percent", flavour="map", otherwise="The length of a stream is unknown. `kdp.open_shards` is indexed."
)
class PercentTakerMapDataPipe(PlanPipe):
    """Takes a contiguous share of the samples (functional name: ``take_percent``).

    `take_percent(to_percent=p)` and `take_percent(from_percent=p)` split the source without overlap or gap. Put
    `permute(seed)` before both for a random split.

    Args:
        source_datapipe: An indexed pipe of samples.
        from_percent: The start of the share as a fraction of the source, from 0.0 to 1.0.
        to_percent: The end of the share as a fraction of the source, from `from_percent` to 1.0.
        ceil_from_index: Whether to round the first position up instead of down.
        ceil_to_index: Whether to round the last position up instead of down.

    Length: `int(to_percent * n) - int(from_percent * n)`; with `ceil_*_index`, the positions are rounded up instead.

    Memory: None. Positions are computed.

    Source: KappaData's PercentFilterWrapper, where `to_percent=0.0` takes all samples.

    Example:
        >>> letters = kdp.from_dataset(["a", "b", "c", "d"], "x")
        >>> letters.take_percent(from_percent=0.25, to_percent=0.75).column("x")
        array(['b', 'c'], dtype='<U1')
    """

    goes_by = "number"

    def __init__(
        self,
        source_datapipe: MapPipe,
        *,
        from_percent: float = 0.0,
        to_percent: float = 1.0,
        ceil_from_index: bool = False,
        ceil_to_index: bool = False,
    ) -> None:
        super().__init__(source_datapipe)
        hint = "Write 25 % as 0.25."
        self._begin = check_number("from_percent", from_percent, "a share from 0.0 to 1.0", 0, 1, hint)
        rule = f"a share from {self._begin} to 1.0"
        self._end = check_number("to_percent", to_percent, rule, self._begin, 1, hint)
        self._round_begin = math.ceil if ceil_from_index else math.floor
        self._round_end = math.ceil if ceil_to_index else math.floor

    def plan(self, epoch: int) -> Stretch:
        size = len(self.source)
        begin = self._round_begin(self._begin * size)
        end = self._round_end(self._end * size)
        return Stretch(range(begin, end))
