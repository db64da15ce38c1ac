"""Several sources in given proportions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe

from kdpipes.core.errors import ChainError, check_choice, check_flag, check_seed, is_number, must_be
from kdpipes.core.iter_pipe import IterPipe, samples_of, seed_upstream
from kdpipes.core.map_pipe import MapPipe, as_column, indexed
from kdpipes.core.pipe import a_datapipe, gives_samples
from kdpipes.core.randomness import plan_epoch, planning
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.traits import Traits
from kdpipes.plan._several import joined_shards, shared_class_names, shared_fields
from kdpipes.selection import interleave, smallest_int
from kdpipes.storage.shared import Shared

__all__ = ["MixerIterDataPipe", "MixerMapDataPipe"]

Stop = Literal["first", "all"]


def _check_weights(weights: Any, number: int) -> tuple[float, ...]:
    given = [1.0] * number if weights is None else weights
    is_sequence = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    if not is_sequence or not all(map(is_number, given)):
        raise TypeError(must_be("weights", "numbers above 0, one for each source", weights))
    if not all(0 < weight < math.inf for weight in given):
        way_out = "To take no samples from a source, leave it out."
        raise ValueError(must_be("weights", "finite and above 0", weights, way_out))
    if len(given) != number:
        raise ValueError(must_be("weights", f"one for each of {number} sources, the first of all included", weights))
    return tuple(float(weight) for weight in given)


def _as_tuple(others: Any) -> tuple[Any, ...]:
    sources = tuple(others) if isinstance(others, list | tuple) else (others,)
    if not sources:
        raise ChainError("`mix` takes at least one other source.")
    return sources


class _MixPlan(NamedTuple):
    """The source of each sample of epoch 0, and its position there.

    Each epoch begins `shifts[n]` samples further on in source n, which has `lengths[n]` samples.
    """

    chosen: NDArray[Any]
    positions: NDArray[Any]
    lengths: NDArray[Any]
    shifts: NDArray[Any]


@functional_pipe("mix", flavour="map")
class MixerMapDataPipe(MapPipe):
    """Mixes several sources in given proportions (functional name: ``mix``).

    Each source gives its samples in its own order. If an epoch uses only a part of a source, the next epoch continues
    there. A source that is sorted by class, like an image folder, then has other classes in each epoch, so
    `permute(seed)` it first. In any stretch of the mix, the number of samples of a source differs from its exact share
    by less than the number of sources. `deal(shuffle=True)` changes the order.

    Args:
        source_datapipe: An indexed pipe of samples.
        others: One other indexed pipe, or several; those that know the names of their classes must agree on them.
        weights: The proportions, this source's first; equal by default.
        seed: Of which source comes first where several could, from 0 up to 2**64.
        stop: "first": the mix ends when the first source is used up. "all": when all are, sources that are used up
            before being read again from their start.
        redraw: Whether each epoch of `deal` continues in each source where the previous epoch stopped. False: every
            epoch begins with the first samples of each source.

    Length: known from the sources' lengths.

    Raises:
        ChainError: The sources number their classes differently: `map_classes` makes them agree.

    Example:
        >>> letters, digits = kdp.from_dataset(list("abcd"), "x"), kdp.from_dataset(list("12"), "x")
        >>> "".join(letters.mix(digits, weights=[2, 1]).column("x"))
        '1ab2cd'
    """

    traits = Traits(role="join", reads=frozenset(), changes=frozenset())

    def __init__(
        self,
        source_datapipe: MapPipe,
        others: Any,
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        stop: Stop = "first",
        redraw: bool = True,
    ) -> None:
        self.sources = tuple(indexed(source, "mix") for source in (source_datapipe, *_as_tuple(others)))
        self._weights = _check_weights(weights, len(self.sources))
        self._mix_seed = check_seed(seed)
        check_choice("stop", stop, ("first", "all"))
        self._stop = stop
        self._redraw = check_flag("redraw", redraw)
        self._names = shared_class_names("mix", self.sources)
        self._plan: Shared[_MixPlan] | None = None

    def fingerprint(self) -> Any:
        known = self._weights, self._mix_seed, self._stop, self._names
        return (*known, "redraw") if self._moves_on() else known

    def redrawn_by(self, *, of_labels: bool = False) -> str | None:
        return "mix" if self._moves_on() else super().redrawn_by(of_labels=of_labels)

    def _moves_on(self) -> bool:
        """Return whether epochs take different parts of a source."""
        return self._redraw and bool(self._planned().shifts.any())

    def __len__(self) -> int:
        return len(self._planned().chosen)

    def fetch(self, index: int) -> Sample:
        number, position = self._places(index)
        return self.sources[int(number)].fetch(int(position)).come_from(int(number))

    def announce(self, positions: NDArray[Any]) -> None:
        chosen, places = self._places(positions)
        for number, source in enumerate(self.sources):
            source.announce(places[chosen == number])

    def shard_numbers(self) -> NDArray[Any] | None:
        numbers = joined_shards([source.shard_numbers() for source in self.sources])
        return None if numbers is None else self._mixed(numbers)

    def expect(self, positions: NDArray[Any]) -> None:
        chosen, places = self._places(positions)
        for number, source in enumerate(self.sources):
            source.expect(places[chosen == number])

    def column(self, name: str) -> NDArray[Any]:
        columns = [source.column(name) for source in self.sources]
        with planning(0):
            if len({column.dtype.kind for column in columns}) == 1:
                return self._mixed(np.concatenate(columns))
            chosen, positions = self._places(slice(None))
        pairs = zip(chosen.tolist(), positions.tolist(), strict=True)
        return as_column([columns[source][place] for source, place in pairs])

    def _mixed(self, column: NDArray[Any]) -> NDArray[Any]:
        """Return a column of all sources, one after the other, in the order of the mix."""
        chosen, positions = self._places(slice(None))
        starts = np.cumsum([0, *map(len, self.sources)])[:-1]
        mixed: NDArray[Any] = column[starts[chosen] + positions]
        return mixed

    def class_names(self) -> tuple[str, ...] | None:
        return self._names

    def field_names(self) -> frozenset[str] | None:
        return shared_fields(self.sources)

    def _places(self, index: Any) -> tuple[Any, Any]:
        """Return the source of some samples, and their positions there, in the epoch that is planned."""
        plan = self._planned()
        chosen, positions = plan.chosen[index], plan.positions[index]
        if self._redraw and (epoch := plan_epoch()):
            lengths = plan.lengths[chosen]
            positions = (positions + epoch * plan.shifts[chosen] % lengths) % lengths
        return chosen, positions

    def _planned(self) -> _MixPlan:
        if self._plan is None:
            sizes = [len(source) for source in self.sources]
            chosen, counts = interleave(sizes, self._weights, self._mix_seed, until_all=self._stop == "all")
            lengths = np.asarray([max(size, 1) for size in sizes])
            positions = (counts % lengths[chosen]).astype(smallest_int(max(sizes)))
            shifts = np.bincount(chosen, minlength=len(sizes)) % lengths
            self._plan = Shared(_MixPlan(chosen, positions, lengths, shifts))
        return self._plan.value


@functional_pipe("mix", flavour="iter")
class MixerIterDataPipe(IterPipe):
    """Mixes several streams in given proportions, as they pass (functional name: ``mix``).

    In every epoch, each stream gives its samples in its own order, from its start. If an epoch uses only a part of a
    stream, put `.shuffle(buffer_size=...)` before the mix, or `deal(shuffle="shards")` after it. In any stretch of the
    mix, the number of samples of a stream differs from its exact share by less than the number of streams.

    Args:
        source_datapipe: A stream of samples.
        others: One other stream, or several; those that know the names of their classes must agree on them.
        weights: The proportions, this stream's first; equal by default.
        seed: Of which stream comes first where several could, from 0 up to 2**64.
        stop: "first": the mix ends when a stream that is due has ended. "all": when all have ended, streams that end
            before being read again from their start.

    Length: none.

    Memory: one sample.

    Raises:
        ChainError: The streams number their classes differently: `map_classes` makes them agree.
    """

    traits = Traits(role="join", counts_whole=True, reads=frozenset(), changes=frozenset())

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        others: Any,
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None:
        super().__init__()
        self.sources = tuple(
            gives_samples(a_datapipe(source), "mix") for source in (source_datapipe, *_as_tuple(others))
        )
        self._weights = _check_weights(weights, len(self.sources))
        self._mix_seed = check_seed(seed)
        check_choice("stop", stop, ("first", "all"))
        self._stop = stop
        known = [source for source in self.sources if isinstance(source, IterPipe)]
        self._names = shared_class_names("mix", known)

    def samples(self) -> Iterator[Sample]:
        streams = [samples_of(source, "mix") for source in self.sources]
        is_new = [True] * len(streams)  # whether a stream has given nothing since it was begun
        ended = [False] * len(streams)
        rounds = count(1)
        for place in _turns(self._weights, self._mix_seed):
            sample = next(streams[place], None)
            if sample is None:
                ended[place] = True
                if self._stop == "first" or all(ended) or is_new[place]:
                    return
                if self._renewed is not None:
                    seed_upstream(self, *self._renewed, round=next(rounds))
                streams[place] = samples_of(self.sources[place], "mix")
                sample = next(streams[place], None)
            if sample is None:
                return
            is_new[place] = False
            yield sample.come_from(place)

    def class_names(self) -> tuple[str, ...] | None:
        return self._names


def _turns(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield for ever whose turn it is."""
    chosen = 0
    size = 1024
    while True:
        turns, _ = interleave([size] * len(weights), weights, seed, until_all=False)
        yield from turns[chosen:].tolist()
        chosen, size = len(turns), 2 * size
