"""A contiguous share of a source."""

from __future__ import annotations

import math
from typing import Any

from kdpipes.core.errors import is_number, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe, refuse_flavour
from kdpipes.selection import Stretch

__all__ = ["PercentTakerMapDataPipe"]


@functional_pipe("take_percent", flavour="map")
class PercentTakerMapDataPipe(PlanPipe):
    """Takes the samples between two shares of the source (functional name: ``take_percent``).

    `take_percent(to_percent=p)` and `take_percent(from_percent=p)` have no sample in common and leave none out. A split
    at random is `permute(seed)` before them.

    Args:
        source_datapipe: An indexed pipe of samples.
        from_percent: Where to begin, from 0.0 to 1.0.
        to_percent: Where to end, from `from_percent` to 1.0.
        ceil_from_index: Whether a beginning between two samples is rounded up, not down.
        ceil_to_index: Whether an end between two samples is rounded up, not down.

    Length: int(to_percent * n) - int(from_percent * n), with the rounding above.

    Memory: none; positions are computed.

    Source: KappaData's PercentFilterWrapper; there, `to_percent=0.0` takes everything.

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
        self._begin = _check_share("from_percent", from_percent, 0.0)
        self._end = _check_share("to_percent", to_percent, self._begin)
        self._round_begin = math.ceil if ceil_from_index else math.floor
        self._round_end = math.ceil if ceil_to_index else math.floor

    def plan(self, epoch: int) -> Stretch:
        size = len(self.source)
        begin, end = self._round_begin(self._begin * size), self._round_end(self._end * size)
        return Stretch(range(begin, end))


def _check_share(param: str, value: Any, minimum: float) -> float:
    rule = f"a share from {minimum} to 1.0"
    if not is_number(value):
        raise TypeError(must_be(param, rule, value))
    if not minimum <= value <= 1:
        raise ValueError(must_be(param, rule, value, "25 percent are 0.25." if value > 1 else ""))
    return float(value)


refuse_flavour(
    "take_percent", flavour="iter", way_out="A stream does not know its length: `kdp.open_shards` is indexed."
)
