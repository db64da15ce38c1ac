"""Put samples into a fixed random order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import smallest_int
from kdpipes.core.errors import check_seed
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe


@functional_pipe("permute", flavour="map", otherwise="Use torch's `.shuffle(buffer_size=1000)` instead.")
class PermuterMapDataPipe(PlanPipe):
    """Puts the samples into a random order that is the same in every epoch (functional name: ``permute``).

    For an order that differs between epochs, use `deal(shuffle=True)`. Unlike torch's `shuffle`, this pipe keeps the
    columns (per-sample values such as labels) that plan pipes read.

    Args:
        source_datapipe: An indexed pipe of samples.
        seed: The seed of the order, from 0 to 2**64 - 1.

    Length: The length of the source.

    Source: KappaData's ShuffleWrapper, which yields the same order.

    Example:
        >>> kdp.from_dataset(["a", "b", "c", "d"], "x").permute(seed=5).column("x")
        array(['d', 'b', 'c', 'a'], dtype='<U1')
    """

    goes_by = "number"

    def __init__(self, source_datapipe: MapPipe, seed: int) -> None:
        super().__init__(source_datapipe)
        self._order_seed = check_seed(seed)

    def plan(self, epoch: int) -> NDArray[Any]:
        size = len(self.source)
        positions = np.arange(size)
        np.random.default_rng(self._order_seed).shuffle(positions)
        return positions.astype(smallest_int(size))
