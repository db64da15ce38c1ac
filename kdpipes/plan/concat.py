"""Several sources, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import ChainError
from kdpipes.core.map_pipe import MapPipe, as_column, indexed
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Sample
from kdpipes.core.traits import Traits
from kdpipes.plan._several import joined_shards, shared_class_names, shared_fields

__all__ = ["ConcatenatorMapDataPipe"]


@called_as("concat")
class ConcatenatorMapDataPipe(MapPipe):
    """The samples of several indexed pipes, one pipe after the other (`kdp.concat(one, other, ...)`).

    Upstream's `concat` loses the columns that plan pipes read.

    Args:
        source_datapipes: Indexed pipes of samples; those that know the names of their classes must agree on them.

    Length: the sum of the sources'.

    Raises:
        ChainError: The sources number their classes differently: `map_classes` makes them agree.

    Example:
        >>> birds, pets = kdp.from_dataset(["a"], "x", labels=[0]), kdp.from_dataset(["b", "c"], "x", labels=[1, 0])
        >>> kdp.concat(birds, pets).column("x")
        array(['a', 'b', 'c'], dtype='<U1')
    """

    traits = Traits(role="join", reads=frozenset(), changes=frozenset())

    def __init__(self, *source_datapipes: MapPipe) -> None:
        first: Any = source_datapipes[0] if source_datapipes else []
        if isinstance(first, list | tuple):
            raise ChainError("`concat` takes at least one source, one after the other: `kdp.concat(one, other)`.")
        self.sources = tuple(indexed(source, "concat") for source in source_datapipes)
        self._names = shared_class_names("concat", self.sources)

    def fingerprint(self) -> Any:
        return self._names

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def fetch(self, index: int) -> Sample:
        for number, source in enumerate(self.sources):
            if index < len(source):
                return source.fetch(index).come_from(number)
            index -= len(source)
        raise IndexError(index)

    def announce(self, positions: NDArray[Any]) -> None:
        start = 0
        for source in self.sources:
            here = positions - start
            source.announce(here[(here >= 0) & (here < len(source))])
            start += len(source)

    def shard_numbers(self) -> NDArray[Any] | None:
        return joined_shards([source.shard_numbers() for source in self.sources])

    def expect(self, positions: NDArray[Any]) -> None:
        start = 0
        for source in self.sources:
            here = positions - start
            source.expect(here[(here >= 0) & (here < len(source))])
            start += len(source)

    def column(self, name: str) -> NDArray[Any]:
        columns = [source.column(name) for source in self.sources if len(source)]
        if len({column.dtype.kind for column in columns}) > 1:  # numbers and names: NumPy would make names of all
            return as_column([value for column in columns for value in column.tolist()])
        return np.concatenate(columns) if columns else self.sources[0].column(name)

    def class_names(self) -> tuple[str, ...] | None:
        return self._names

    def field_names(self) -> frozenset[str] | None:
        return shared_fields(self.sources)
