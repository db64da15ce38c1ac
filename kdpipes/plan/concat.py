"""Concatenate sources."""

from __future__ import annotations

from typing import Any

from kdpipes.core.arithmetic import Joined, Stretch
from kdpipes.core.errors import ChainError, is_sequence
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import called_as


@called_as("concat")
class ConcatenatorMapDataPipe(PlanPipe):
    """Concatenates indexed pipes (`kdp.concat(one, other, ...)`).

    Unlike torch's `concat`, it keeps the columns that plan pipes read.

    Args:
        source_datapipes: Indexed pipes of samples. Sources with class names must have the same ones. The labels of
            other sources are numbered by these names; a label without a name is an error when it is read.

    Length: The sum of the lengths of the sources.

    Memory: None. Positions are computed.

    Raises:
        ChainError: The sources number their classes differently. Use `map_classes` to make them agree.

    Example:
        >>> birds, pets = kdp.from_dataset(["a"], "x", labels=[0]), kdp.from_dataset(["b", "c"], "x", labels=[1, 0])
        >>> kdp.concat(birds, pets).column("x")
        array(['a', 'b', 'c'], dtype='<U1')
    """

    goes_by = "number"

    def __init__(self, *source_datapipes: MapPipe) -> None:
        first: Any = source_datapipes[0] if source_datapipes else []
        if is_sequence(first):
            raise ChainError("`concat` takes one or more sources as separate arguments: `kdp.concat(one, other)`.")
        super().__init__(*source_datapipes)

    def plan(self, epoch: int) -> Joined | Stretch:
        sizes = [len(source) for source in self.sources]
        return Joined(sizes) if len(sizes) > 1 else Stretch(range(sizes[0]))
