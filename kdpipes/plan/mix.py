"""Several sources in given proportions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe

from kdpipes.core.errors import ChainError, check_choice, check_flag, check_seed, is_number, must_be
from kdpipes.core.iter_pipe import IterPipe, samples_of, seed_upstream
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import gives_samples
from kdpipes.core.plan_pipe import PlanPipe, shared_class_names
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.traits import Traits
from kdpipes.selection import interleave, smallest_int

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


def _checked(num_sources: int, weights: Any, seed: int, stop: Stop) -> tuple[tuple[float, ...], int, Stop]:
    """Return the arguments of both flavours, or raise."""
    check_choice("stop", stop, ("first", "all"))
    return _check_weights(weights, num_sources), check_seed(seed), stop


def _turns(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield for ever whose turn it is."""
    chosen, size = 0, 1024
    while True:
        turns, _ = interleave([size] * len(weights), weights, seed, until_all=False)
        yield from turns[chosen:].tolist()
        chosen, size = len(turns), 2 * size


class _Mix:
    """The source of each sample, and its position there.

    Each epoch begins `shifts[n]` samples further on in source n, which has `lengths[n]` samples, so that all epochs
    share the arrays of epoch 0.
    """

    def __init__(
        self,
        chosen: NDArray[Any],
        positions: NDArray[Any],
        lengths: NDArray[Any],
        shifts: NDArray[Any],
        epoch: int = 0,
    ) -> None:
        self._chosen, self._positions, self._lengths, self._shifts = chosen, positions, lengths, shifts
        self._epoch = epoch

    def at(self, epoch: int) -> _Mix:
        """Return the mix of another epoch."""
        return _Mix(self._chosen, self._positions, self._lengths, self._shifts, epoch)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        chosen, positions = self._chosen[index], self._positions[index]
        if self._epoch:
            lengths = self._lengths[chosen]
            positions = (positions + self._epoch * self._shifts[chosen] % lengths) % lengths
        return chosen, positions


@functional_pipe("mix", flavour="map")
class MixerMapDataPipe(PlanPipe):
    """Mixes several sources in given proportions (functional name: ``mix``).

    Each source gives its samples in its own order. If an epoch uses only a part of a source, the next epoch continues
    there. A source that is sorted by class, like an image folder, then has other classes in each epoch, so
    `permute(seed)` it first. In any stretch of the mix, the number of samples of a source differs from its exact share
    by less than the number of sources. `deal(shuffle=True)` changes the order.

    A stream begins anew in every epoch. If an epoch uses only a part of it, put `.shuffle(buffer_size=...)` before the
    mix, or `deal(shuffle="shards")` after it.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        others: One other pipe of the same kind, or several; those that know the names of their classes must agree on
            them.
        weights: The proportions, this source's first; equal by default.
        seed: Of which source comes first where several could, from 0 up to 2**64.
        stop: "first": the mix ends when the first source is used up; on streams, when one that is due has ended. "all":
            when all are, sources that are used up before being read again from their start.
        redraw: Of indexed sources only: whether each epoch of `deal` continues in each source where the previous epoch
            stopped. False: every epoch begins with the first samples of each source.

    Length: known from the sources' lengths; not known on streams.

    Memory: eight bytes for each sample, shared by all workers; on streams, one sample.

    Raises:
        ChainError: The sources number their classes differently: `map_classes` makes them agree.

    Example:
        >>> letters, digits = kdp.from_dataset(list("abcd"), "x"), kdp.from_dataset(list("12"), "x")
        >>> "".join(letters.mix(digits, weights=[2, 1]).column("x"))
        '1ab2cd'
    """

    goes_by = "number"

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
        super().__init__(source_datapipe, *_as_tuple(others), redraws=check_flag("redraw", redraw))
        self._weights, self._mix_seed, self._stop = _checked(len(self.sources), weights, seed, stop)

    def plan(self, epoch: int) -> _Mix:
        if epoch:
            mix: _Mix = self.chosen().at(epoch)
            return mix
        sizes = [len(source) for source in self.sources]
        chosen, counts = interleave(sizes, self._weights, self._mix_seed, until_all=self._stop == "all")
        lengths = np.asarray([max(size, 1) for size in sizes])
        positions = (counts % lengths[chosen]).astype(smallest_int(max(sizes)))
        shifts = np.bincount(chosen, minlength=len(sizes)) % lengths
        self.redraws = self.redraws and bool(shifts.any())
        return _Mix(chosen, positions, lengths, shifts)


@functional_pipe("mix", flavour="iter", doc_of=MixerMapDataPipe)
class MixerIterDataPipe(IterPipe):
    traits = Traits(role="plan", reads=frozenset(), changes=frozenset())

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
        self.sources = tuple(gives_samples(source, "mix") for source in (source_datapipe, *_as_tuple(others)))
        self._weights, self._mix_seed, self._stop = _checked(len(self.sources), weights, seed, stop)
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
