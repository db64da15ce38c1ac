"""Indexed pipes of samples: `MapPipe`, and `PlanPipe`, which chooses among a source's samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.map import Mapper
from torch.utils.data.datapipes.map.callable import default_fn

from kdpipes.core.callback import Callback, call_with_key
from kdpipes.core.chain import Chain, upstream_of
from kdpipes.core.errors import ChainError, check_count, must_be
from kdpipes.core.pipe import Pipe, SamplePipe, gives_samples
from kdpipes.core.progress import shown_if_slow
from kdpipes.core.randomness import SampleKey, current_epoch, current_key, plan_epoch, planning, using_key
from kdpipes.core.registry import note_name, pipe_name
from kdpipes.core.sample import Sample
from kdpipes.core.traits import Traits
from kdpipes.storage.shared import Shared

if TYPE_CHECKING:
    from kdpipes._fluent import MapChain
else:
    MapChain = MapDataPipe

__all__ = ["MapPipe", "PlanPipe", "as_column", "indexed", "is_key", "warn_of_fixed"]

_KEPT_LABELS = "_kdpipes_kept_labels"  # an attribute of users' own classes, too
_EPOCH = "_kdpipes_epoch"


class MapPipe(SamplePipe, MapChain):
    """An indexed pipe of samples: `len(pipe)`, `pipe[3]`, `pipe[5:-3:2]`, `pipe.column("y")`.

    A pipe of one's own implements `__len__` and `fetch`; a plan pipe also `column`, if it can do so without opening
    samples.
    """

    computed: ClassVar[tuple[str, ...]] = (_KEPT_LABELS, _EPOCH)

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must implement `__len__`.")

    def fetch(self, index: int) -> Sample:
        """Return a new sample for a position from 0 up to `len(self)`."""
        raise TypeError(f"{type(self).__name__} must implement `fetch`.")

    def finish(self, sample: Sample) -> Any:
        """Return what leaves the chain for `sample`: the sample, or what `select` makes of it."""
        return sample

    def announce(self, positions: NDArray[Any]) -> None:
        """Say which positions will be fetched soon: a source that lies elsewhere begins to read them."""

    def shard_numbers(self) -> NDArray[Any] | None:
        """Return which shard each sample lies in, `[len(self)]` integers; None where they lie in none.

        A round of repetition has shards of its own: `deal(shuffle="shards")` keeps the rounds apart.
        """
        return None

    def expect(self, positions: NDArray[Any]) -> None:
        """Say the positions of an epoch that begins, in the order in which they will be fetched.

        That is said where the order goes shard by shard (in order, or shuffled by shards), of all workers of this
        machine; none are said where it does not.
        """

    def redrawn_by(self, *, of_labels: bool = False) -> str | None:
        """Return the name of this pipe, or one upstream, if it chooses other samples in each epoch; else None.

        In that case, `fetch`, `announce`, `expect` and `shard_numbers` refer to the samples of the epoch that `deal` is
        in. Without `deal`, and for columns, they refer to those of epoch 0. The length is the same in every epoch.

        Args:
            of_labels: Whether to ignore pipes that keep the label at each position.
        """
        sources = (source for source in upstream_of(self) if isinstance(source, MapPipe))
        names = (source.redrawn_by(of_labels=of_labels) for source in sources)
        return next((name for name in names if name is not None), None)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> MapPipe: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int:
            if isinstance(index, slice):
                return self.pick(range(len(self))[index])
            if getattr(index, "dtype", None) in (bool, torch.bool):
                return self.pick(_places_of(index, len(self)))
            if isinstance(index, list | range) or bool(getattr(index, "ndim", 0)):
                return self.pick(index)
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                raise TypeError(must_be("index", "an integer, a slice or a sequence of integers", index))
        size, position = len(self), index.__index__()
        if not size:
            raise IndexError(f"`{pipe_name(self)}` is empty; there is no index {position}.")
        if not -size <= position < size:
            raise IndexError(f"`index` must be from {-size} up to {size - 1}, but is {position} instead.")
        position %= size
        if current_epoch() is not None:
            return self.finish(self.fetch(position))
        with using_key(SampleKey(0, self.__dict__.get(_EPOCH, 0), position)):
            return self.finish(self.fetch(position))

    def set_epoch(self, epoch: int) -> None:
        """Make `pipe[i]` return sample i of `epoch`, from 0.

        Without `deal`, all epochs of a loader would be alike. Persistent workers of torch's DataLoader have their own
        copy of the pipe, so that this does not reach them.
        """
        self.__dict__[_EPOCH] = check_count("epoch", epoch, minimum=0)

    @property
    def has_epoch(self) -> bool:
        """Whether `set_epoch` has been called."""
        return _EPOCH in self.__dict__

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def pick(self, indices: Any) -> MapPipe:
        """Return the pipe of the samples at some positions: what slicing does."""
        return cast("MapPipe", self.subset(indices))

    def map(self, fn: Callable[..., Any] = default_fn) -> MapperMapDataPipe:
        """Apply a function to each item, like torch's `.map`, but with the same random numbers in any worker.

        They depend on the seed of `deal`, the epoch, the position and this operation. The global generators of
        `random`, NumPy and torch are seeded for each call and restored afterwards. A function with a parameter `rng`
        gets a `numpy.random.Generator` instead; for one with an attribute `is_random = False`, nothing is seeded.

        Args:
            fn: The function.
        """
        return MapperMapDataPipe(self, fn)

    def column(self, name: str) -> NDArray[Any]:
        """Return one field of all samples, `[len(self)]`, not to be modified; `y`, the labels, is read only once.

        `key` gives the samples' keys, unless a field has that name. If samples are drawn anew in each epoch
        (`sample_weighted`), the column is that of epoch 0.
        """
        if name != "y":
            return self._checked_column(name)
        kept: Shared[NDArray[Any]] | None = self.__dict__.get(_KEPT_LABELS)
        if kept is None:
            kept = self.__dict__[_KEPT_LABELS] = Shared(self._checked_column(name))
        return kept.value

    def _checked_column(self, name: str) -> NDArray[Any]:
        with planning(0):
            column = as_column(self.read_column(name))
        if len(column) != len(self):
            owner = type(self).__name__
            raise ChainError(
                f"`{owner}.read_column({name!r})` must return a value for each of {len(self)} samples, but returned "
                f"{len(column)}."
            )
        return column

    def read_column(self, name: str) -> NDArray[Any]:
        """Read one field of all samples; a source that can do so without making samples overrides it."""
        samples = shown_if_slow(map(self.fetch, range(len(self))), len(self), f"reading {name!r}")
        return as_column([sample.key if is_key(name, sample) else sample[name] for sample in samples])


class MapperMapDataPipe(Pipe, Mapper):  # type: ignore[type-arg]
    """Torch's `Mapper`, whose function draws the same random numbers in any worker; see `MapPipe.map`."""

    def __init__(self, datapipe: Any, fn: Callable[..., Any]) -> None:
        Mapper.__init__(self, datapipe, fn)
        self._called = Callback("fn", fn, check=False)
        number = len(Chain.of(self).of_type(Mapper))
        self._place = "map" if number == 1 else f"map_{number}"

    def map(self, fn: Callable[..., Any] = default_fn) -> MapperMapDataPipe:
        """See `MapPipe.map`."""
        return MapperMapDataPipe(self, fn)

    def fingerprint(self) -> Any:
        """Return the same data as for torch's own class, so that states fit both."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __getitem__(self, index: Any) -> Any:
        sample_key = current_key() or SampleKey(0, self._epoch(), range(len(self))[index])
        with using_key(sample_key):
            item = self.datapipe[index]
        return call_with_key(self._called, sample_key, self._place, item)

    def _epoch(self) -> int:
        """Return the epoch that `set_epoch` has set upstream."""
        pipe = self.datapipe
        while isinstance(pipe, Mapper):
            pipe = pipe.datapipe
        return int(vars(pipe).get(_EPOCH, 0))


note_name(MapperMapDataPipe, "map")


def _places_of(mask: Any, size: int) -> NDArray[Any]:
    """Return the positions where a mask is True."""
    if tuple(mask.shape) != (size,):
        raise IndexError(f"A mask has one entry for each sample, so {size}, but its shape is {tuple(mask.shape)}.")
    return np.flatnonzero(np.asarray(mask))


def is_key(name: str, fields: Container[str]) -> bool:
    """Return whether the column `name` is that of the samples' keys."""
    return name == "key" and name not in fields


def as_column(values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Return values as an array of one dimension: of numbers or strings where all are, of objects otherwise."""
    if hasattr(values, "numpy"):  # a tensor
        values = values.numpy()
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    values = [value.item() if _is_scalar(value) else value for value in values]
    kinds = {type(value) for value in values}
    if all(issubclass(kind, str) for kind in kinds) or all(issubclass(kind, Number | np.generic) for kind in kinds):
        return np.asarray(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0


_OURS = {  # stock pipes that lose the columns, and what keeps them
    "ConcaterMapDataPipe": "Put `kdp.concat(one, other)` in its place.",
    "MapperMapDataPipe": "Put `.transform(...)` or `.add_field(...)` in its place, or behind this pipe.",
    "ShufflerIterDataPipe": "Put `.permute(seed)` in its place, or `deal(shuffle=True)` at the end.",
}


def indexed(source_datapipe: Any, name: str, *, takes_samples: bool = True) -> MapPipe:
    """Return the source of the plan pipe `name`, or refuse one that has lost its columns, or its samples."""
    if isinstance(source_datapipe, IterDataPipe) and type(source_datapipe).__name__ not in _OURS:
        raise ChainError(
            f"`{name}` needs indexed sources here, but `{pipe_name(source_datapipe)}` is a stream. `kdp.open_shards` "
            "is indexed; or begin with the stream: `stream.mix(...)` takes both."
        )
    if not isinstance(source_datapipe, MapPipe):
        way_out = _OURS.get(type(source_datapipe).__name__, "Make samples of it first: `.to_samples(...)`.")
        raise ChainError(
            f"`.{name}()` needs a source with columns, but `{pipe_name(source_datapipe)}` has none. {way_out}"
        )
    return gives_samples(source_datapipe, name) if takes_samples else source_datapipe


def warn_of_fixed(redrawn: str, by: str) -> None:
    """Warn that a pipe keeps the draw of epoch 0, because the length of an epoch would change downstream."""
    warnings.warn(
        f"`{redrawn}` gives the same samples in every epoch here, because `{by}` after it depends on their values, "
        f"and the length of an epoch must not change. Put `{by}` before `{redrawn}`, or write "
        f"`{redrawn}(..., redraw=False)`.",
        stacklevel=2,
    )


class _Recent:
    """The positions of the last two epochs in this process, as worker threads may be in either; copies start empty."""

    def __init__(self) -> None:
        self._kept: dict[int, NDArray[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Recent, ()

    def of(self, epoch: int, choose: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        """Return the positions of an epoch."""
        positions = self._kept.get(epoch)
        if positions is None:
            with planning(0):  # labels are those of epoch 0
                positions = choose(epoch)
            positions.flags.writeable = False
            self._kept = {**dict(list(self._kept.items())[-1:]), epoch: positions}
        return positions


class PlanPipe(MapPipe):
    """A choice of the source's samples, computed from its columns when it is first needed, and then kept.

    Subclasses implement `_plan`, which returns the positions of the source's samples. A subclass that chooses anew in
    each epoch sets `_redraws` in the constructor or in `_plan`, and implements `_replan`.

    A choice by values is valid only for the samples of epoch 0, so pipes upstream of it keep the draw of epoch 0.
    `_goes_by` is "labels" if the choice depends only on labels, "number" if it depends on no values at all.
    """

    computed: ClassVar[tuple[str, ...]] = (*MapPipe.computed, "_positions", "_redraws", "_recent", "_is_fixed")
    traits = Traits(role="plan", reads=frozenset(), changes=frozenset(), holds_back=False)
    _goes_by: ClassVar[Literal["number", "labels", "values"]] = "values"
    _warns_of_fixed: ClassVar[bool] = True

    def __init__(self, source_datapipe: MapPipe, name: str, *, redraws: bool = False) -> None:
        self.source = indexed(source_datapipe, name)
        self._positions: Shared[NDArray[Any]] | None = None
        self._redraws = redraws
        self._recent = _Recent()
        self._is_fixed = False

    def _plan(self) -> NDArray[Any]:
        raise TypeError(f"{type(self).__name__} must implement `_plan`.")

    def _replan(self, epoch: int) -> NDArray[Any]:
        """Return the positions of an epoch from 1 on, as many as those of `_plan`."""
        raise TypeError(f"{type(self).__name__} must implement `_replan`.")

    def positions(self) -> NDArray[Any]:
        """Return which samples of the source these are, in order, `[len(self)]`. Not to be modified."""
        if self._positions is None:
            self._positions = self._planned()
        if self._redraws and (epoch := plan_epoch()):
            return self._recent.of(epoch, self._replan)
        return self._positions.value

    def _planned(self) -> Shared[NDArray[Any]]:
        with planning(0):
            positions = self._plan()
        positions.flags.writeable = False
        goes_by = self._goes_by
        redrawn = None if goes_by == "number" else self.source.redrawn_by(of_labels=goes_by == "labels")
        self._is_fixed = redrawn is not None
        if redrawn is not None and self._warns_of_fixed:
            warn_of_fixed(redrawn, pipe_name(self))
        return Shared(positions)

    def redrawn_by(self, *, of_labels: bool = False) -> str | None:
        self.positions()
        if self._redraws:
            return pipe_name(self)
        return None if self._is_fixed else super().redrawn_by(of_labels=of_labels)

    def __len__(self) -> int:
        return len(self.positions())

    def fetch(self, index: int) -> Sample:
        position = int(self.positions()[index])
        if self._is_fixed:
            with planning(0):
                return self.source.fetch(position)
        return self.source.fetch(position)

    def _upstream(self) -> Any:
        return planning(0) if self._is_fixed else nullcontext()

    def announce(self, positions: NDArray[Any]) -> None:
        positions = self.positions()[positions]
        with self._upstream():
            self.source.announce(positions)

    def shard_numbers(self) -> NDArray[Any] | None:
        positions = self.positions()
        with self._upstream():
            numbers = self.source.shard_numbers()
        return None if numbers is None else numbers[positions]

    def expect(self, positions: NDArray[Any]) -> None:
        positions = self.positions()[positions]
        with self._upstream():
            self.source.expect(positions)

    def column(self, name: str) -> NDArray[Any]:
        with planning(0):
            column: NDArray[Any] = self.source.column(name)[self.positions()]
        return column

    def class_names(self) -> tuple[str, ...] | None:
        return self.source.class_names()

    def field_names(self) -> frozenset[str] | None:
        return self.source.field_names()
