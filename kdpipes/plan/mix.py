"""Mix sources in given proportions."""

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
        hint = "To take no samples from a source, leave the source out."
        raise ValueError(must_be("weights", "finite and above 0", weights, hint))
    if len(given) != number:
        raise ValueError(must_be("weights", f"one for each of {number} sources, including the first", weights))
    return tuple(float(weight) for weight in given)


def _as_tuple(others: Any) -> tuple[Any, ...]:
    sources = tuple(others) if isinstance(others, list | tuple) else (others,)
    if not sources:
        raise ChainError("`mix` takes at least one other source.")
    return sources


def _checked(num_sources: int, weights: Any, seed: int, stop: Stop) -> tuple[tuple[float, ...], int, Stop]:
    """Check and return the arguments that both flavours share."""
    check_choice("stop", stop, ("first", "all"))
    return _check_weights(weights, num_sources), check_seed(seed), stop


def _turns(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield the number of the source of each sample, forever."""
    chosen, size = 0, 1024
    while True:
        turns, _ = interleave([size] * len(weights), weights, seed, until_all=False)
        yield from turns[chosen:].tolist()
        chosen, size = len(turns), 2 * size


class _Mix:
    """The source of each sample and the position in it.

    All epochs share the arrays of epoch 0: each epoch starts `shifts[n]` samples later in source n, which has
    `lengths[n]` samples.
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

    The samples of each source keep their order. If an epoch uses only a part of a source, the next epoch continues
    where it stopped. A source that is sorted by class, such as an image folder, would then yield other classes in each
    epoch, so apply `permute(seed)` to it first. In any part of the mix, the number of samples of a source differs from
    its exact share by less than the number of sources. `deal(shuffle=True)` changes the order.

    A stream starts again in each epoch. If an epoch uses only a part of it, put `.shuffle(buffer_size=...)` before the
    mix, or `deal(shuffle="shards")` after it.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        others: One or several other pipes of the same kind. Sources that know their class names must have the same
            names.
        weights: The proportions, that of this source first. By default, they are equal.
        seed: The seed that decides between sources that are equally due, from 0 to 2**64 - 1.
        stop: When the mix ends. "first": when the first source is used up, or when a stream that is due has ended.
            "all": when all sources are used up; sources that are used up earlier start again.
        redraw: For indexed sources only: whether each epoch of `deal` continues in each source where the previous epoch
            stopped. If False, every epoch begins with the first samples of each source.

    Length: Follows from the lengths of the sources; unknown for streams.

    Memory: Eight bytes per sample, shared by all workers. For streams, one sample.

    Raises:
        ChainError: The sources number their classes differently. Use `map_classes` to make them agree.

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
        is_new = [True] * len(streams)  # whether a stream has yielded nothing since it was started
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
