"""What all pipes of samples have in common, in two flavours: indexed (`MapPipe`) and stream (`IterPipe`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import ShardingFilter

from kdpipes._graph import shards, walk
from kdpipes.draw import Draw, EarlyDraws, EpochCounter, drawing, hash_key, is_drawing, made_under
from kdpipes.errors import ChainError, check_count, closest, must_be
from kdpipes.sample import Sample, as_sample
from kdpipes.storage.shared import Shared

if TYPE_CHECKING:
    from kdpipes._fluent import IterChain, MapChain
else:
    IterChain, MapChain = IterDataPipe, MapDataPipe

__all__ = ["IterPipe", "MapPipe", "PlanPipe", "StreamPlanPipe", "Streaming", "indexed", "samples_of", "seed_upstream"]

Item = TypeVar("Item")


class UnknownPipeError(AttributeError):
    """The error for a method that is none; what was meant is looked up only if somebody reads it."""

    def __str__(self) -> str:
        owner, name, names = self.args
        return f"{owner} has no pipe or attribute {name!r}.{closest(name, names)}"


class _Suggesting:
    """A pipe whose unknown methods are errors that name the closest one."""

    functions: ClassVar[Any]
    reduce_ex_hook: ClassVar[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hook = type(self).reduce_ex_hook
        if hook is not None:  # torch walks the graph: it looks for pipes among the attributes
            try:
                return hook(self)
            except NotImplementedError:
                return object, (), self.__getstate__()  # the class may be one of a notebook, which does not pickle
        return super().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # torch's look-up of functional names
        except AttributeError:
            if name.startswith("_"):
                raise
            raise UnknownPipeError(type(self).__name__, name, tuple(type(self).functions)) from None


class MapPipe(_Suggesting, MapChain):
    """An indexed pipe of samples: `len(pipe)`, `pipe[3]`, `pipe[5:-3:2]`, `pipe.column("y")`.

    A pipe of one's own implements `__len__` and `fetch`; a plan pipe also `column`, if it can do so without opening
    samples.
    """

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must implement `__len__`.")

    def fetch(self, index: int) -> Sample:
        """Return a new sample for a position from 0 up to `len(self)`."""
        raise TypeError(f"{type(self).__name__} must implement `fetch`.")

    def finish(self, sample: Sample) -> Any:
        """Return what leaves the chain for `sample`: the sample, or what `select` makes of it."""
        return sample

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> MapPipe: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.pick(range(len(self))[index])
        if isinstance(index, list | range) or bool(getattr(index, "ndim", 0)):
            return self.pick(index)
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(must_be("index", "an integer, a slice or a sequence of integers", index))
        size, position = len(self), index.__index__()
        if not size:
            raise IndexError(f"{type(self).__name__} is empty; there is no index {position}.")
        if not -size <= position < size:
            raise IndexError(f"`index` must be from {-size} up to {size - 1}, but is {position} instead.")
        position %= size
        if is_drawing():
            return self.finish(self.fetch(position))
        with drawing(Draw(ordinal=position)):
            return self.finish(self.fetch(position))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def pick(self, indices: Any) -> MapPipe:
        """Return the pipe of the samples at some positions: what slicing does."""
        return cast("MapPipe", self.subset(indices))

    def column(self, name: str) -> NDArray[Any]:
        """Return one field of all samples, `[len(self)]`, not to be modified; `y`, the labels, is read only once."""
        if name != "y":
            return self.read_column(name)
        kept: Shared[NDArray[Any]] | None = self.__dict__.get("_labels")
        if kept is None:
            kept = self.__dict__["_labels"] = Shared(self.read_column(name))
        return kept.value

    def read_column(self, name: str) -> NDArray[Any]:
        """Read one field of all samples; a source that can do so without making samples overrides it."""
        return as_column([self.fetch(index)[name] for index in range(len(self))])

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes 0, 1, ... of field `y`, or None where the source does not know them."""
        return None

    def field_names(self) -> frozenset[str] | None:
        """Return the names of the fields that every sample has, or None where only the samples know."""
        return None


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


def indexed(source_datapipe: Any, name: str) -> MapPipe:
    """Return the source of the plan pipe `name`, or refuse one that has lost its columns."""
    if not isinstance(source_datapipe, MapPipe):
        way_out = "Make samples of it first: `.to_samples(...)`."
        raise ChainError(
            f"`.{name}()` needs a source with columns, but {type(source_datapipe).__name__} has none. {way_out}"
        )
    return gives_samples(source_datapipe, name)


PipeType = TypeVar("PipeType")


def gives_samples(source_datapipe: PipeType, name: str) -> PipeType:
    """Return the source of pipe `name`, or refuse one whose samples have been turned into tuples by `select`."""
    if getattr(source_datapipe, "is_selected", False):
        raise ChainError(
            f"`.{name}()` takes samples, but `.select()` has made tuples of them. Put `.{name}()` before `.select()`."
        )
    return a_datapipe(source_datapipe)


def a_datapipe(source_datapipe: PipeType) -> PipeType:
    """Return the source of a pipe, or refuse what is none."""
    if not isinstance(source_datapipe, IterDataPipe | MapDataPipe):
        raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe))
    return source_datapipe


class PlanPipe(MapPipe):
    """A choice of the source's samples, computed from its columns when it is first needed, and then kept.

    Subclasses implement `_plan`, which returns the positions of the source's samples.
    """

    def __init__(self, source_datapipe: MapPipe, name: str) -> None:
        self._source = indexed(source_datapipe, name)
        self._positions: Shared[NDArray[Any]] | None = None

    def _plan(self) -> NDArray[Any]:
        raise TypeError(f"{type(self).__name__} must implement `_plan`.")

    def positions(self) -> NDArray[Any]:
        """Return which samples of the source these are, in order, `[len(self)]`. Not to be modified."""
        if self._positions is None:
            positions = self._plan()
            positions.flags.writeable = False
            self._positions = Shared(positions)
        return self._positions.value

    def __len__(self) -> int:
        return len(self.positions())

    def fetch(self, index: int) -> Sample:
        return self._source.fetch(int(self.positions()[index]))

    def column(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = self._source.column(name)[self.positions()]
        return column

    def class_names(self) -> tuple[str, ...] | None:
        return self._source.class_names()

    def field_names(self) -> frozenset[str] | None:
        return self._source.field_names()


class Streaming(Generic[Item]):
    """An `__iter__` that torch's metaclass does not wrap, so that errors keep their type and arguments."""

    def iterate(self) -> Iterator[Item]:
        """Yield the items of one epoch."""
        raise TypeError(f"{type(self).__name__} must implement `iterate`.")

    def __iter__(self) -> Iterator[Item]:
        return self.iterate()


class IterPipe(_Suggesting, Streaming[Any], IterChain):
    """A stream of samples. A pipe of one's own implements `samples`, which yields them in order.

    Without `deal`, the n-th sample of the k-th iteration is ordinal n of epoch k.
    """

    def __init__(self) -> None:
        self._epochs = EpochCounter()
        self._renewed: tuple[int, int] | None = None

    def samples(self) -> Iterator[Sample]:
        """Yield new samples, front to back."""
        raise TypeError(f"{type(self).__name__} must implement `samples`.")

    def finish(self, sample: Sample) -> Any:
        """Return what leaves the chain for `sample`: the sample, or what `select` makes of it."""
        return sample

    def iterate(self) -> Iterator[Any]:
        self._refuse_doubling()
        epoch = self._epochs.begin()
        seed = self._renewed[0] if self._renewed is not None else 0
        stride, offset = _part_of(self)
        for number, sample in enumerate(made_under(EarlyDraws(seed, epoch), self.samples())):
            sample.bind(Draw(seed, epoch, number * stride + offset))
            yield self.finish(sample)

    def set_seed(self, seed: int) -> IterPipe:
        """Called by loaders at the start of an epoch. Tells epochs apart; randomness comes from `deal(seed=...)`."""
        self._epochs.seeded()
        return self

    def renew(self, seed: int, epoch: int) -> None:
        """Make the next iteration that of `epoch` under `seed`."""
        self._renewed = seed, epoch
        self._epochs.set(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0."""
        self._epochs.set(check_count("epoch", epoch, minimum=0))

    def skip_epochs(self, number: int) -> None:
        """Leave out the next `number` epochs."""
        self._epochs.skip(number)

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes 0, 1, ... of field `y`, or None where the source does not know them."""
        return None

    def field_names(self) -> frozenset[str] | None:
        """Return the names of the fields that every sample has, or None where only the samples know."""
        return None

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is a stream: it has no positions. `kdp.open_shards` gives an indexed source."
        )

    def column(self, name: str) -> Any:
        """Not on streams, which know nothing of what is to come."""
        raise TypeError(
            f"{type(self).__name__} is a stream: it has no columns. `kdp.open_shards` gives an indexed source."
        )

    def _refuse_doubling(self) -> None:
        info = get_worker_info()
        if info is None or info.num_workers < 2:
            return
        chain = walk(info.dataset) if isinstance(info.dataset, IterDataPipe) else []
        if self in chain and not any(shards(pipe) for pipe in chain):
            raise ChainError(
                f"Each of the {info.num_workers} workers would give every sample of {type(self).__name__}. "
                "End the chain with `.deal(batch_size=...)`, or put `.sharding_filter()` behind its source."
            )


def samples_of(source_datapipe: Any, name: str) -> Iterator[Sample]:
    """Yield the samples of a stream, kdpipes' own or a stock pipe's, for the pipe `name`."""
    if isinstance(source_datapipe, IterPipe):
        return source_datapipe.samples()
    return (as_sample(item, index, name) for index, item in enumerate(source_datapipe))


def _part_of(pipe: IterPipe) -> tuple[int, int]:
    """Return how the ordinals of a stream without `deal` are spread over the parts of a sharding filter upstream."""
    sharder = next((upstream for upstream in walk(pipe) if isinstance(upstream, ShardingFilter)), None)
    return (1, 0) if sharder is None else (sharder.num_of_instances, sharder.instance_id)


class StreamPlanPipe(IterPipe):
    """A choice of a stream's samples, made as they pass."""

    def __init__(self, source_datapipe: IterDataPipe[Any], name: str) -> None:
        super().__init__()
        self._source = gives_samples(source_datapipe, name)

    def class_names(self) -> tuple[str, ...] | None:
        return self._source.class_names() if isinstance(self._source, IterPipe) else None

    def field_names(self) -> frozenset[str] | None:
        return self._source.field_names() if isinstance(self._source, IterPipe) else None


def seed_upstream(pipe: Any, seed: int, epoch: int, *, round: int = 0) -> None:
    """Tell all random pipes upstream of `pipe` which epoch begins, whatever a worker's own seeds were.

    Stock pipes that draw (`shuffle`, `sample`, ...) would otherwise draw differently in every worker, and samples
    would be lost and doubled.

    Args:
        pipe: Where the seed comes from.
        seed: Of the epochs.
        epoch: The number of the epoch.
        round: How often the stream has been read in this epoch already.
    """
    for place, upstream in enumerate(walk(pipe)[1:]):
        if isinstance(upstream, IterPipe):
            upstream.renew(seed, epoch)
        elif callable(getattr(type(upstream), "set_seed", None)):
            upstream.set_seed(int.from_bytes(hash_key(seed, epoch, "upstream", place, round)[:7], "little"))
