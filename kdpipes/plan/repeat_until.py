"""The whole source again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe

from kdpipes.core.errors import DataError, check_count, check_one_of
from kdpipes.core.iter_pipe import StreamPlanPipe, samples_of, seed_upstream
from kdpipes.core.map_pipe import MapPipe, indexed
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.traits import Traits
from kdpipes.plan._several import joined_shards

__all__ = ["RepeaterUntilIterDataPipe", "RepeaterUntilMapDataPipe"]

_EMPTY = "`.repeat_until()` cannot reach `min_size={}`: its source is empty. Is a filter upstream too strict?"


class _Goal:
    """The two arguments, of which exactly one is given."""

    def __init__(self, min_size: int | None, repetitions: int | None) -> None:
        check_one_of(min_size=min_size, repetitions=repetitions)
        self.min_size = None if min_size is None else check_count("min_size", min_size)
        self.repetitions = None if repetitions is None else check_count("repetitions", repetitions)

    def rounds(self, size: int) -> int:
        if self.repetitions is not None:
            return self.repetitions
        assert self.min_size is not None
        if size == 0:
            raise DataError(_EMPTY.format(self.min_size))
        return -(-self.min_size // size)


@functional_pipe("repeat_until", flavour="map")
class RepeaterUntilMapDataPipe(MapPipe):
    """Gives the whole source again and again, round robin (functional name: ``repeat_until``).

    Upstream's `repeat` gives each item n times in a row, and only on streams. A repeated sample is augmented anew.

    Args:
        source_datapipe: An indexed pipe of samples.
        min_size: Whole rounds until there are at least this many samples.
        repetitions: This many rounds; exactly one of the two is given.

    Length: the source's, times the number of rounds.

    Memory: none; positions are computed.

    Raises:
        DataError: The source is empty and `min_size` cannot be reached.

    Source: KappaData's RepeatWrapper.

    Example:
        >>> kdp.from_dataset([("a", 0), ("b", 1)]).repeat_until(min_size=3).column("x")
        array(['a', 'b', 'a', 'b'], dtype='<U1')
    """

    traits = Traits(role="plan", reads=frozenset(), changes=frozenset())

    def __init__(
        self, source_datapipe: MapPipe, *, min_size: int | None = None, repetitions: int | None = None
    ) -> None:
        self.source = indexed(source_datapipe, "repeat_until")
        self._goal = _Goal(min_size, repetitions)

    def __len__(self) -> int:
        size = len(self.source)
        return size * self._goal.rounds(size)

    def fetch(self, index: int) -> Sample:
        return self.source.fetch(index % len(self.source))

    def announce(self, positions: NDArray[Any]) -> None:
        self.source.announce(positions % len(self.source))

    def shard_numbers(self) -> NDArray[Any] | None:
        numbers = self.source.shard_numbers()
        return None if numbers is None else joined_shards([numbers] * self._goal.rounds(len(self.source)))

    def expect(self, positions: NDArray[Any]) -> None:
        self.source.expect(positions % len(self.source))

    def column(self, name: str) -> NDArray[Any]:
        return np.tile(self.source.column(name), self._goal.rounds(len(self.source)))

    def class_names(self) -> tuple[str, ...] | None:
        return self.source.class_names()

    def field_names(self) -> frozenset[str] | None:
        return self.source.field_names()


@functional_pipe("repeat_until", flavour="iter")
class RepeaterUntilIterDataPipe(StreamPlanPipe):
    """Gives the whole stream again and again (functional name: ``repeat_until``).

    Upstream's `repeat` gives each item n times in a row. A repeated sample is augmented anew.

    Args:
        source_datapipe: A stream of samples; read again for each round.
        min_size: Whole rounds until there are at least this many samples.
        repetitions: This many rounds; exactly one of the two is given.

    Length: the source's, if it has one, times the number of rounds.

    Raises:
        DataError: The source is empty and `min_size` cannot be reached.

    Source: KappaData's RepeatWrapper.
    """

    traits = replace(StreamPlanPipe.traits, counts_whole=True)

    def __init__(
        self, source_datapipe: IterDataPipe[Any], *, min_size: int | None = None, repetitions: int | None = None
    ) -> None:
        super().__init__(source_datapipe, "repeat_until")
        self._goal = _Goal(min_size, repetitions)

    def __len__(self) -> int:
        size = len(self.source)
        return size * self._goal.rounds(size)

    def samples(self) -> Iterator[Sample]:
        size = 0
        for sample in samples_of(self.source, "repeat_until"):
            size += 1
            yield sample
        for done in range(1, self._goal.rounds(size)):
            if self._renewed is not None:
                seed_upstream(self, *self._renewed, round=done)
            yield from samples_of(self.source, "repeat_until")
