"""Choose samples by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Stretch, smallest_int
from kdpipes.core.errors import must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.shared import Shared


@functional_pipe(
    "subset",
    flavour="map",
    otherwise="`kdp.open_shards` and `kdp.from_dataset` are indexed sources. `.header(n)` takes n items of a stream.",
)
class SubsetterMapDataPipe(PlanPipe):
    """Chooses the samples at some positions, in the given order (functional name: ``subset``).

    `pipe[5:-3:2]` and `pipe[[4, 0, 4]]` are short forms. Positions may repeat. They refer to epoch 0: a subset has the
    same samples in every epoch, even if a pipe upstream draws different samples in each epoch.

    Args:
        source_datapipe: An indexed pipe of samples.
        indices: Positions in the source, `[n] int`. Negative positions count from the end.

    Length: n.

    Memory: Four bytes per position, shared by all workers; none for a slice or a `range`.

    Raises:
        IndexError: A position lies outside the source.

    Example:
        >>> kdp.from_dataset([("a", 0), ("b", 1), ("c", 0)]).subset([-1, 0]).column("x")
        array(['c', 'a'], dtype='<U1')
    """

    warns_of_fixed = False  # slices are often used only to look at a few samples

    def __init__(self, source_datapipe: MapPipe, indices: Sequence[int] | NDArray[Any]) -> None:
        super().__init__(source_datapipe)
        if not hasattr(indices, "__len__"):
            raise TypeError(must_be("indices", "a sequence of integers", indices))
        if not isinstance(indices, range):  # a slice of 10^8 samples takes no memory
            indices = np.asarray(indices, dtype=None if len(indices) else np.int64)
            if indices.ndim != 1 or indices.dtype.kind not in "iu":
                raise TypeError(must_be("indices", "a sequence of integers", indices))
            indices = indices.astype(np.int64)
        self._wanted: Shared[range | NDArray[np.int64]] = Shared(indices)

    def _plans_quickly(self) -> bool:
        return True

    def plan(self, epoch: int) -> Stretch | NDArray[Any]:
        size = len(self.source)
        wanted = self._wanted.value
        if isinstance(wanted, range):
            if not wanted or (min(wanted[0], wanted[-1]) >= 0 and max(wanted[0], wanted[-1]) < size):
                return Stretch(wanted)
            wanted = np.asarray(wanted)
        outside = wanted[(wanted < -size) | (wanted >= size)]
        if len(outside):
            raise IndexError(f"`indices` must be from {-size} to {size - 1}, but {int(outside[0])} is among them.")
        positions: NDArray[Any] = np.where(wanted < 0, wanted + size, wanted).astype(smallest_int(size))
        return positions
