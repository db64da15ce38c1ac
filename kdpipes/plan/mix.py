"""Mix sources in given proportions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import interleave, interleave_exactly, share_exactly, smallest_int
from kdpipes.core.callback import Callback
from kdpipes.core.chain import Chain
from kdpipes.core.errors import (
    ChainError,
    check_choice,
    check_count,
    check_flag,
    check_seed,
    is_number,
    is_sequence,
    must_be,
)
from kdpipes.core.iter_pipe import IterPipe, samples_of, seed_streams
from kdpipes.core.labels import number_fields
from kdpipes.core.map_pipe import MapPipe, redrawing_name, shard_numbers_of
from kdpipes.core.order import Order
from kdpipes.core.pipe import gives_samples
from kdpipes.core.plan_pipe import BatchShares, Composition, PlanPipe, join_shards, shared_class_names
from kdpipes.core.randomness import plan_epoch, planning
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.plan.sample_weighted import temperature_at

_MAX_EPOCHS = 1_000_000
Stop = Literal["first", "all"]
Batches = Literal["per_source", "stratified"]


def _check_weights(weights: Any, number: int, *, may_be_0: bool = False, param: str = "weights") -> tuple[float, ...]:
    are_several = is_sequence(weights) or isinstance(weights, np.ndarray)
    if not are_several or not all(map(is_number, weights)):
        raise TypeError(must_be(param, "numbers above 0, one for each source", weights))
    if not may_be_0 and not all(0 < weight < math.inf for weight in weights):
        hint = "To take no samples from a source, leave the source out."
        raise ValueError(must_be(param, "finite and above 0", weights, hint))
    if may_be_0 and not (all(0 <= weight < math.inf for weight in weights) and any(weights)):
        raise ValueError(must_be("weights", "finite and at least 0 in every epoch, and not all 0", weights))
    if len(weights) != number:
        raise ValueError(must_be(param, f"{number} numbers, one for each source, the first one included", weights))
    return tuple(float(weight) for weight in weights)


def _check_alone(**arguments: Any) -> None:
    """Raise if two mutually exclusive arguments are passed."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"`{given[0]}` and `{given[1]}` cannot be given together. Remove one of them.")


def _as_tuple(others: Any) -> tuple[Any, ...]:
    sources = tuple(others) if is_sequence(others) else (others,)
    if not sources:
        raise ChainError("`mix` takes at least one other source: `pipe.mix(other)`.")
    return sources


def _proportions(num_sources: int, weights: Any, per_batch: Any) -> tuple[float, ...]:
    if per_batch is not None:
        return _check_weights(per_batch, num_sources, param="per_batch")
    return _check_weights([1.0] * num_sources if weights is None else weights, num_sources)


def _turns(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Yield the number of the source of each sample, forever."""
    chosen = 0
    size = 1024
    while True:
        turns, _ = interleave([size] * len(weights), weights, seed, until_all=False)
        yield from turns[chosen:].tolist()
        chosen = len(turns)
        size = 2 * size


@dataclass(frozen=True, eq=False)
class _Mix:
    """The source of each sample, and its position in the source.

    An epoch takes `taken[n]` of the `lengths[n]` samples of source n, after the `starts[n]` samples taken by earlier
    epochs. If weights are numbers, all epochs share the arrays of epoch 0.
    """

    chosen: NDArray[Any]
    positions: NDArray[Any]  # as if the epoch began with each source's first sample
    lengths: NDArray[Any]
    taken: NDArray[Any]
    starts: NDArray[Any]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        chosen = self.chosen[index]
        positions = self.positions[index]
        if self.epoch:
            lengths = self.lengths[chosen]
            positions = (positions + self.starts[chosen] % lengths) % lengths
        return chosen, positions

    def rounds(self, index: Any) -> Any:
        """Return how often the source of each sample has been used up before, which is the epoch of the source.

        A source that is used more than once per epoch of the mix is in the same epoch as the mix.
        """
        chosen = self.chosen[index]
        lengths = self.lengths[chosen]
        rounds = (self.starts[chosen] + self.positions[index]) // lengths
        return np.where(self.taken[chosen] > lengths, self.epoch, rounds)


class SourceShare(NamedTuple):
    """The samples that a mix takes from one of its sources in an epoch.

    Args:
        size: The number of samples of the source.
        num_samples: The number of samples of the mix that are from this source.
        share: `num_samples`, divided by the length of the mix.
        num_epochs: How often each sample of the source is used per epoch, on average.
    """

    size: int
    num_samples: int
    share: float
    num_epochs: float


@functional_pipe("mix", flavour="map")
class MixerMapDataPipe(PlanPipe):
    """Mixes several sources in given proportions (functional name: ``mix``).

    The samples of each source keep their order. If an epoch uses only a part of a source, the next epoch continues
    where it stopped. A source that is sorted by class, such as an image folder, would then yield different classes in
    each epoch, so apply `permute(seed)` to it first. In any part of the mix, the number of samples of a source differs
    from its exact share by less than the number of sources. `deal(shuffle=True)` changes the order. A source that is
    itself a mix begins its next epoch once this mix has used it up.

    A stream starts from the beginning in each epoch. If an epoch uses only a part of it, put
    `.shuffle(buffer_size=...)` before the mix, or `deal(shuffle="shards")` after it.

    `per_batch` and `batches` decide how `deal` composes batches. Samples that do not fill a batch, and batches in
    excess of an equal number for all ranks, are then left out of the epoch. With `deal(shuffle=True)`, those samples
    differ from epoch to epoch. Between the mix and `deal`, samples may be filtered, but not redrawn in each epoch.

    `mixture()` returns the share of each source in an epoch, as a list of (size, num_samples, share, num_epochs).

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        others: One or several other pipes of the same kind. Sources with class names must have the same ones. The
            labels of other sources are numbered by these names.
        weights: The proportions of the sources, this one first. By default, they are equal. For indexed sources, this
            may also be a function that takes the epoch number, from 0, and returns the proportions, which may then be
            0. It is called in every worker, so it must depend only on the epoch.
        temperature: For indexed sources, instead of `weights`: use the sizes of the sources to the power of 1 /
            temperature as weights. With 1, samples are in proportion to the sizes; larger values favor small sources.
            May also be a function of the epoch number.
        num_samples: For indexed sources, the length of an epoch. By default, `stop` decides in epoch 0, and all epochs
            have that length.
        per_batch: Instead of `weights`: how many samples of each source every batch has, such as `[48, 16]` for
            `deal(batch_size=64)`. For streams, no pipe in between may leave out samples or change their order.
        batches: For indexed sources: "per_source": every batch has samples of one source, in proportion to `weights`;
            "stratified": every batch has samples of all sources, in proportion to `weights`.
        seed: The seed that breaks ties between sources, from 0 to 2**64 - 1.
        stop: When the mix ends. "first": when the next sample would come from a source that is used up, or from a
            stream that has ended. "all": when all sources are used up; sources that are used up earlier start again.
        redraw: For indexed sources only: whether each epoch of `deal` continues in each source where the previous epoch
            stopped. If False, every epoch begins with the first samples of each source.

    Length: `num_samples`, if given. Otherwise, for `stop="first"`, about `sum(weights) * min(size / weight)` over the
        sources, and for `stop="all"`, about `sum(weights) * max(size / weight)`; the difference is less than the number
        of sources. Unknown for streams.

    Memory: Eight bytes per sample, shared by all workers; in each worker if weights change. For streams, one sample.

    Raises:
        ChainError: The sources number their classes differently. Use `map_classes` to make them agree.

    Source: `batches` follows MosaicML Streaming; `temperature` is that of multilingual language models (XLM).

    Example:
        >>> letters, digits = kdp.from_dataset(list("abcd"), "x"), kdp.from_dataset(list("12"), "x")
        >>> "".join(letters.mix(digits, weights=[2, 1]).column("x"))
        '1ab2cd'
        >>> batches = letters.mix(digits, per_batch=[2, 1]).select("x", bare=True).deal(batch_size=3)
        >>> ["".join(batch) for batch in batches]
        ['1ab', '2cd']
    """

    goes_by = "number"
    for_users: ClassVar[tuple[str, ...]] = ("mixture",)
    computed = (*PlanPipe.computed, "_counts", "_is_nested")
    _per_batch: tuple[int, ...] | None = None
    _batches: Batches | None = None
    _num_samples: int | None = None
    _is_nested = False  # whether a source yields different samples in each epoch
    _temperature: float | Callback | None = None

    def __init__(
        self,
        source_datapipe: MapPipe,
        others: Any,
        *,
        weights: Sequence[float] | Callable[[int], Sequence[float]] | None = None,
        temperature: float | Callable[[int], float] | None = None,
        num_samples: int | None = None,
        per_batch: Sequence[int] | None = None,
        batches: Batches | None = None,
        seed: int = 0,
        stop: Stop = "first",
        redraw: bool = True,
    ) -> None:
        super().__init__(source_datapipe, *_as_tuple(others), redraws=check_flag("redraw", redraw))
        _check_alone(weights=weights, temperature=temperature, per_batch=per_batch)
        _check_alone(per_batch=per_batch, batches=batches, num_samples=num_samples)
        check_choice("stop", stop, ("first", "all"))
        self._counts: list[list[int]] = []
        # Unset attributes are not part of the fingerprint, which therefore equals that of earlier versions.
        self._weights: tuple[float, ...] | Callback
        if callable(weights):
            self._weights = Callback("weights", weights)
        else:
            self._weights = _proportions(len(self.sources), weights, per_batch)
        self._mix_seed = check_seed(seed)
        self._stop = stop
        if temperature is not None:
            self._temperature = Callback("temperature", temperature) if callable(temperature) else float(temperature)
            temperature_at(self._temperature, epoch=0)
        if self._is_changing() and not redraw:
            raise ValueError("`redraw=False` keeps the mix of epoch 0, so weights cannot be functions of the epoch.")
        if num_samples is not None:
            self._num_samples = check_count("num_samples", num_samples)
        if per_batch is not None:
            self._per_batch = tuple(check_count("per_batch", count) for count in per_batch)
        if batches is not None:
            check_choice("batches", batches, ("per_source", "stratified"))
            if self._is_changing():
                raise ValueError(f"`batches={batches!r}` needs weights that are numbers, the same in all epochs.")
            self._batches = batches

    def _is_changing(self) -> bool:
        return isinstance(self._weights, Callback) or isinstance(self._temperature, Callback)

    def _weights_of(self, epoch: int) -> tuple[float, ...]:
        if self._temperature is not None:
            power = 1 / temperature_at(self._temperature, epoch)
            return tuple(len(source) ** power if len(source) else 0.0 for source in self.sources)
        if isinstance(self._weights, Callback):
            return _check_weights(self._weights(epoch), len(self.sources), may_be_0=True)
        return self._weights

    def plan(self, epoch: int) -> _Mix:
        if epoch and not self._is_changing():
            mix: _Mix = self.chosen()
            return replace(mix, epoch=epoch, starts=epoch * mix.taken)
        sizes = [len(source) for source in self.sources]
        if epoch or self._num_samples is not None:
            chosen, counts = interleave_exactly(self._counts_of(epoch), self._mix_seed)
        else:
            chosen, counts = self._until_stop(sizes)
        lengths = np.asarray([max(size, 1) for size in sizes])
        starts = np.zeros_like(lengths)
        if epoch and self.redraws:  # start after the samples taken by earlier epochs
            starts = np.sum(self._counts[:epoch], axis=0)
        positions = (counts % lengths[chosen]).astype(smallest_int(max(sizes)))
        taken = np.bincount(chosen, minlength=len(sizes))
        if not epoch:
            self._is_nested = any(redrawing_name(source) is not None for source in self.sources)
        if self._is_changing():
            self._counts = self._counts or [taken.tolist()]
        else:
            self.redraws = self.redraws and bool((taken % lengths).any())
        return _Mix(chosen, positions, lengths, taken, starts, epoch)

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        if not self._is_moving():
            return super().read_blocks(rows)
        mix = self.chosen(rows.planned)
        numbers, positions = (np.asarray(part) for part in mix[rows.positions])
        turns = np.stack([numbers, np.asarray(mix.rounds(rows.positions))])
        blocks: list[Block] = []
        for number, turn in np.unique(turns, axis=1).T.tolist():
            here = np.flatnonzero((turns[0] == number) & (turns[1] == turn)).tolist()
            blocks += self._blocks_of(number, rows.at(positions, turn).part(here))
        return blocks

    def _is_moving(self) -> bool:
        """Return whether both the mix and one of its sources take different samples in each epoch.

        A source that yields different samples in each of its epochs, such as another mix, has its own epoch: it begins
        the next one once the mix has used it up. Otherwise, some of its samples might never be used.
        """
        self.chosen()
        return self.redraws and self._is_nested

    def prefetch(self, order: Order) -> None:
        if not self._is_moving():
            super().prefetch(order)
            return
        mix = self.chosen(plan_epoch())
        for number, source in enumerate(self.sources):
            for epoch in np.unique(mix.rounds(np.flatnonzero(mix.chosen == number))).tolist():
                with planning(epoch):
                    source.prefetch(order.through(partial(_positions_in, mix, number, epoch)))

    def shard_numbers(self) -> NDArray[Any] | None:
        if not self._is_moving():
            return super().shard_numbers()
        mix = self.chosen(plan_epoch())
        numbers = np.zeros(len(self), dtype=np.int64)
        (chosen, positions), rounds = mix[:], mix.rounds(slice(None))
        places = np.cumsum([0, *map(len, self.sources)])[chosen] + positions
        for epoch in np.unique(rounds).tolist():
            with planning(epoch):
                of_sources = join_shards(list(map(shard_numbers_of, self.sources)))
            if of_sources is None:
                return None
            numbers[rounds == epoch] = of_sources[places[rounds == epoch]]
        return numbers

    def _until_stop(self, sizes: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the mix of epoch 0. A source with weight 0 is not part of it, and does not end it."""
        weights = self._weights_of(0)
        used = [number for number, weight in enumerate(weights) if weight]
        chosen, counts = interleave(
            [sizes[number] for number in used],
            [weights[number] for number in used],
            self._mix_seed,
            until_all=self._stop == "all",
        )
        return np.asarray(used, dtype=np.int32)[chosen], counts

    def _counts_of(self, epoch: int) -> list[int]:
        """Return the number of samples that an epoch takes from each source."""
        if epoch > _MAX_EPOCHS:  # a damaged state: counting through all earlier epochs would take forever
            hint = "Load a state that `state_dict()` returned, unchanged."
            raise ValueError(must_be("epoch", f"at most {_MAX_EPOCHS} if the weights of `mix` change", epoch, hint))
        total = len(self) if self._num_samples is None else self._num_samples
        counts = list(self._counts)
        while len(counts) <= epoch:
            weights = self._weights_of(len(counts))
            empty = next((n for n, weight in enumerate(weights) if weight and not len(self.sources[n])), None)
            if empty is not None:
                raise ChainError(
                    f"Source {empty} of `mix` (counting from 0) is empty, but its weight is above 0. Remove it, "
                    "or give it the weight 0."
                )
            counts.append(share_exactly(total, weights))
        self._counts = counts  # in one step, because worker threads share the pipe
        return counts[epoch]

    def mixture(self, epoch: int = 0) -> list[SourceShare]:
        """Return the share of each source in an epoch.

        Args:
            epoch: The epoch number, from 0.
        """
        size = len(self)
        numbers = self.chosen(epoch).taken.tolist()
        return [
            SourceShare(length, number, number / max(size, 1), number / max(length, 1))
            for length, number in zip(map(len, self.sources), numbers, strict=True)
        ]

    def composition(self) -> Composition | None:
        if self._per_batch is not None:
            shares = BatchShares("fixed", self._per_batch)
        elif self._batches is not None:
            shares = BatchShares(self._batches, self._weights_of(0))
        else:
            return None
        return Composition(shares, lambda: self.chosen().chosen)


def _positions_in(mix: _Mix, number: int, epoch: int, index: NDArray[Any]) -> NDArray[Any]:
    """Return the positions in source `number` of the samples that come from one of its epochs."""
    chosen, positions = mix[index]
    here: NDArray[Any] = positions[(chosen == number) & (mix.rounds(index) == epoch)]
    return here


@functional_pipe("mix", flavour="iter", doc_of=MixerMapDataPipe)
class MixerIterDataPipe(IterPipe):
    traits = Traits(role="plan", reads=frozenset(), changes=frozenset())
    computed = (*IterPipe.computed, "_added_names")
    _per_batch: tuple[int, ...] | None = None  # set only if passed, so that other fingerprints do not change

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        others: Any,
        *,
        weights: Sequence[float] | None = None,
        per_batch: Sequence[int] | None = None,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None:
        super().__init__()
        self.sources = tuple(gives_samples(source, "mix") for source in (source_datapipe, *_as_tuple(others)))
        _check_alone(weights=weights, per_batch=per_batch)
        check_choice("stop", stop, ("first", "all"))
        self._weights = _proportions(len(self.sources), weights, per_batch)
        self._mix_seed = check_seed(seed)
        self._stop = stop
        if per_batch is not None:
            self._per_batch = tuple(check_count("per_batch", count) for count in per_batch)
        self._names, self._added_names = shared_class_names("mix", self.sources)

    def samples(self) -> Iterator[Sample]:
        streams = [samples_of(source, "mix") for source in self.sources]
        is_new = [True] * len(streams)  # whether a stream has yielded no item since it was started
        ended = [False] * len(streams)
        rounds = count(1)
        if self._per_batch is None:
            turns = _turns(self._weights, self._mix_seed)
        else:
            turns = cycle(interleave_exactly(self._per_batch, 0)[0].tolist())
        for place in turns:
            sample = next(streams[place], None)
            if sample is None:
                ended[place] = True
                if self._stop == "first" or all(ended) or is_new[place]:
                    return
                if self._renewed is not None:
                    seed_streams([*reversed(Chain.of(self))][1:], *self._renewed, round=next(rounds))
                streams[place] = samples_of(self.sources[place], "mix")
                sample = next(streams[place], None)
            if sample is None:
                return
            is_new[place] = False
            number_fields(sample.block.fields, self._added_names[place])
            yield sample.come_from(place)

    def class_names(self) -> tuple[str, ...] | None:
        return self._names
