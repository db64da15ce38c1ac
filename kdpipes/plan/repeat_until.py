"""Repeat the whole source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from kdpipes.core.arithmetic import Rounds
from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError, check_count, check_one_of
from kdpipes.core.iter_pipe import samples_of, seed_streams
from kdpipes.core.map_pipe import MapPipe, shard_numbers_of
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe, join_shards
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.torch_pipes import IterDataPipe


class _Goal:
    """The arguments `min_size` and `repetitions`, exactly one of which is not None."""

    def __init__(self, min_size: int | None, repetitions: int | None) -> None:
        check_one_of(min_size=min_size, repetitions=repetitions)
        self.min_size = None if min_size is None else check_count("min_size", min_size)
        self.repetitions = None if repetitions is None else check_count("repetitions", repetitions)

    def rounds(self, size: int) -> int:
        if self.min_size is None:
            return self.repetitions or 0
        if size == 0:
            raise DataError(
                f"`.repeat_until()` cannot reach `min_size={self.min_size}` because its source is empty. Is a filter "
                "upstream too strict?"
            )
        return -(-self.min_size // size)


@functional_pipe("repeat_until", flavour="map")
class RepeaterUntilMapDataPipe(PlanPipe):
    """Repeats the whole source, round after round (functional name: ``repeat_until``).

    Each repetition of a sample is augmented differently. torch's `repeat` yields each item of a stream n times in a row
    instead.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream. A stream is read again in each round.
        min_size: The minimum number of samples. The source is repeated in whole rounds. Pass either `min_size` or
            `repetitions`.
        repetitions: The number of rounds.

    Length: The length of the source, if it has one, times the number of rounds.

    Memory: None. Positions are computed.

    Raises:
        DataError: `min_size` cannot be reached because the source is empty.

    Source: KappaData's RepeatWrapper.

    Example:
        >>> kdp.from_dataset([("a", 0), ("b", 1)]).repeat_until(min_size=3).column("x")
        array(['a', 'b', 'a', 'b'], dtype='<U1')
    """

    goes_by = "number"

    def __init__(
        self, source_datapipe: MapPipe, *, min_size: int | None = None, repetitions: int | None = None
    ) -> None:
        super().__init__(source_datapipe)
        self._goal = _Goal(min_size, repetitions)

    def plan(self, epoch: int) -> Rounds:
        size = len(self.source)
        return Rounds(size, self._goal.rounds(size))

    def shard_numbers(self) -> NDArray[Any] | None:
        numbers = shard_numbers_of(self.source)
        return None if numbers is None else join_shards([numbers] * self.chosen().num_rounds)


@functional_pipe("repeat_until", flavour="iter", doc_of=RepeaterUntilMapDataPipe)
class RepeaterUntilIterDataPipe(StreamPlanPipe):
    def __init__(
        self, source_datapipe: IterDataPipe[Any], *, min_size: int | None = None, repetitions: int | None = None
    ) -> None:
        super().__init__(source_datapipe)
        self._goal = _Goal(min_size, repetitions)
        self.traits = replace(self.traits, counts_whole=min_size is not None)

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
                seed_streams(reversed(Chain.of(self.source)), *self._renewed, round=done)
            yield from samples_of(self.source, "repeat_until")
