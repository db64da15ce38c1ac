"""`MapPipe`, the base class of indexed pipes of samples."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core.call_text import copy_call
from kdpipes.core.callback import Callback, call_with_key
from kdpipes.core.chain import Chain
from kdpipes.core.column import as_column
from kdpipes.core.entries import entry_of, field_of, value_of
from kdpipes.core.errors import ChainError, check_count, check_type, is_sequence, must_be
from kdpipes.core.fingerprint import stock_fingerprint
from kdpipes.core.frozen import Reads
from kdpipes.core.messages import shown_if_slow
from kdpipes.core.operation import finished, operation_of
from kdpipes.core.order import Order
from kdpipes.core.pipe import Pipe, gives_samples
from kdpipes.core.randomness import SampleKey, chooser, current_epoch, current_key, planning, using_key
from kdpipes.core.registry import note_methods, note_name, pipe_name
from kdpipes.core.sample import Block, Rows, Sample, as_sample, one_row
from kdpipes.core.shared import Shared
from kdpipes.core.stock import upstream_of
from kdpipes.core.torch_pipes import IndexedConcater as Concater
from kdpipes.core.torch_pipes import IndexedMapper as Mapper
from kdpipes.core.torch_pipes import IndexedShuffler as Shuffler
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe, default_fn
from kdpipes.core.torch_pipes import Shuffler as StreamShuffler
from kdpipes.core.tracebacks import shorten, with_short_tracebacks

if TYPE_CHECKING:
    from kdpipes._fluent import MapChain
else:
    MapChain = MapDataPipe

_KEPT_LABELS = "_kdpipes_kept_labels"  # an attribute of users' classes as well
_EPOCH = "_kdpipes_epoch"
_READS = "_kdpipes_reads"
_DRAWING = "_kdpipes_drawing"
MEASURED_ROWS = "_kdpipes_measured_rows"  # attribute of a profiled pipe: what `blocks_at` calls
_WATCHED = 8  # number of samples of a column that are checked for values drawn at random
_BULK = 512  # number of samples of a column requested from a remote source at a time


class MapPipe(Pipe, MapChain):
    """An indexed pipe of samples: `len(pipe)`, `pipe[3]`, `pipe[5:-3:2]`, `pipe.column("y")`.

    A subclass implements `__len__` and `fetch`. For a pipe that chooses samples of other pipes, subclass `PlanPipe`.
    """

    for_users: ClassVar[tuple[str, ...]] = ("column", "set_epoch")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        signature = inspect.signature(cls.fetch)
        try:
            signature.bind(None, 0)
        except TypeError:
            raise TypeError(
                f"`{cls.__name__}.fetch` must take a position, `fetch(self, index)`, but is `fetch{signature}` "
                "instead. Random numbers are drawn in `transform`, `add_field` or methods of `kdp.SampleSource`."
            ) from None

    computed: ClassVar[tuple[str, ...]] = (_KEPT_LABELS, _EPOCH, _READS, _DRAWING)

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must implement `__len__`.")

    def fetch(self, index: int) -> Sample:
        """Return a new sample object for a position, from 0 to `len(self) - 1`."""
        if type(self).read_blocks is MapPipe.read_blocks:
            raise TypeError(f"{type(self).__name__} must implement `fetch`.")
        (block,) = self.read_blocks(one_row(index))
        return block.sample()

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        """Return new blocks with the samples at the given positions. Fields are loaded lazily.

        `places` of a block says to which rows its samples belong. A subclass implements either this or `fetch`.
        """
        return _one_by_one(rows, self.fetch, pipe_name(self))

    def prefetch(self, order: Order) -> None:
        """Start to read samples before they are fetched. Sources that read over a network override this.

        This is called at the start of an epoch with the order of the epoch (`order.is_epoch` is True), and then
        repeatedly with the positions of the next batches.
        """

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> MapPipe: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int:
            if isinstance(index, slice):
                return _pick(self, range(len(self))[index])
            if getattr(index, "dtype", None) in (bool, torch.bool):
                mask = np.asarray(index)
                if mask.shape != (len(self),):
                    rule = f"A mask must have one entry for each of {len(self)} samples"
                    raise IndexError(f"{rule}, but its shape is {mask.shape}.")
                return _pick(self, np.flatnonzero(mask))
            if (is_sequence(index) and not isinstance(index, tuple)) or bool(getattr(index, "ndim", 0)):
                return _pick(self, index)
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                values = f"`pipe.column({index!r})` returns a field of all samples, `pipe[0][{index!r}]` that of one."
                hint = values if isinstance(index, str) else ""
                raise TypeError(must_be("index", "an integer, a slice or a sequence of integers", index, hint))
        size = len(self)
        position = index.__index__()
        if not size:
            raise IndexError(f"`{pipe_name(self)}` is empty; there is no index {position}.")
        if not -size <= position < size:
            raise IndexError(f"`index` must be from {-size} to {size - 1}, but is {position} instead.")
        position %= size
        try:
            if current_epoch() is None:
                _note_read(self, position)
            return item_at(self, position)
        except BaseException as error:
            shorten(error)
            raise error  # KDPIPES_TRACEBACK=full shows the frames in between

    def set_epoch(self, epoch: int) -> None:
        """Make `pipe[i]` return sample i of an epoch.

        If neither this method nor `deal` is used, random transforms repeat in every epoch.

        Persistent workers of torch's DataLoader have a copy of the pipe, which this method does not change.

        Args:
            epoch: The epoch number, from 0.
        """
        self.__dict__[_EPOCH] = check_count("epoch", epoch, minimum=0)
        self.__dict__.pop(_READS, None)

    def __iter__(self) -> Iterator[Any]:
        return with_short_tracebacks(map(functools.partial(item_at, self), range(len(self))))

    def map(self, fn: Callable[..., Any] = default_fn) -> MapperMapDataPipe:
        """Apply a function to each item, like torch's `.map`, but with the same random numbers in any worker.

        The random numbers depend on the seed of `deal`, the epoch, the position and this operation. The global
        generators of `random`, NumPy and torch are seeded for each call and restored afterwards. A function with a
        parameter `rng` gets a `numpy.random.Generator` instead; for one with an attribute `is_random = False`, nothing
        is seeded.

        Args:
            fn: The function.
        """
        return MapperMapDataPipe(self, fn)

    def column(self, name: str) -> NDArray[Any]:
        """Return one field of all samples, `[len(self)]`. The array must not be modified.

        `column("json.width")` returns the entry "width" of the field `json`, which holds dictionaries, and
        `column("jpg.width")` the width in the header of each image file. `column("key")` returns the keys of the
        samples, unless there is a field of that name. The labels `y` are read only once. If each epoch draws other
        samples (`sample_weighted`), this is the column of epoch 0.
        """
        check_type("name", name, str, "the name of a field")
        kept: Shared[NDArray[Any]] | None = self.__dict__.get(_KEPT_LABELS)
        if name != "y":
            column = self._checked_column(name)
        elif kept is None:
            column = self._checked_column(name)
            self.__dict__[_KEPT_LABELS] = Shared(column)
        else:
            column = kept.value
        self._reject_drawn(name)
        return column

    def _reject_drawn(self, name: str) -> None:
        """Raise ChainError if samples are to be chosen by values that are drawn at random."""
        drawing = self.__dict__.get(_DRAWING, {})
        by = chooser()
        operation = next((drawing[field] for field in drawing if f"{name}.".startswith(f"{field}.")), None)
        if operation is not None and by is not None:
            raise ChainError(
                f"`{by}` chooses samples by {name!r}, which `{operation}` draws at random: the samples that are "
                f"delivered would have other values. Put `{by}` before `{operation}`, or draw the values once, before "
                "the source is made."
            )

    def _checked_column(self, name: str) -> NDArray[Any]:
        field = None
        if "." in name:
            len(self)  # a source that has not been opened yet does not know its fields and columns. `len` opens it
            field = None if has_column(self, name) else field_of(name, self.field_names() or ())
        with planning(0):
            if field is not None and len(self) and not isinstance(self.fetch(0)[field], dict):
                column = MapPipe.read_column(self, name)  # not all images at a time
            else:
                column = as_column(self.read_column(name if field is None else field))
                if field is not None:
                    column = as_column([entry_of(value, name[len(field) + 1 :], name) for value in column.tolist()])
        if len(column) != len(self):
            owner = type(self).__name__
            raise ChainError(
                f"`{owner}.read_column({name!r})` must return a value for each of {len(self)} samples, but returned "
                f"{len(column)}."
            )
        return column

    def read_column(self, name: str) -> NDArray[Any]:
        """Read one field of all samples. A source overrides this if it can read the field without making samples."""
        samples = iter(shown_if_slow(self._all_ahead(), len(self), f"reading {name!r}"))
        values = []
        watched = [*islice(samples, _WATCHED)]
        for sample in watched:
            with sample.watching_draws() as drawn:
                values.append(value_of(sample, name))
                operation = drawn()
            if operation is not None:
                self.__dict__[_DRAWING] = {**self.__dict__.get(_DRAWING, {}), name: operation}
        return as_column([*values, *(value_of(sample, name) for sample in samples)])

    def _all_ahead(self) -> Iterator[Sample]:
        """Yield all samples. The data that a remote source needs is read in bulk, one window ahead."""
        if not any(node.traits.is_remote for node in Chain.of(self)):
            yield from map(self.fetch, range(len(self)))
            return
        # The first window holds a single sample, which shows the source the fields to read.
        starts = [0, *range(1, len(self), _BULK), len(self)]
        windows = [range(start, stop) for start, stop in pairwise(starts)]
        for place, window in enumerate(windows):
            for later in windows[place + (place > 1) : place + (2 if place else 1)]:
                self.prefetch(Order.of_next(np.asarray(later)))
            yield from map(self.fetch, window)


note_methods(MapPipe, flavour="map")


@functools.cache
def _fetches(kind: Any) -> bool:
    """Return whether a class makes samples one by one, because its `fetch` overrides `read_blocks`."""
    names = [name for base in kind.__mro__ for name in ("read_blocks", "fetch") if name in vars(base)]
    return names[0] == "fetch"


def blocks_at(pipe: MapPipe, rows: Rows) -> Sequence[Block]:
    """Return blocks of the samples at some positions, through the measuring function of a profile if there is one."""
    measured: Callable[[Rows], Sequence[Block]] | None = vars(pipe).get(MEASURED_ROWS)
    return read_rows(pipe, rows) if measured is None else measured(rows)


def read_rows(pipe: MapPipe, rows: Rows) -> Sequence[Block]:
    """Call `read_blocks` or `fetch` of a pipe, whichever its class implements."""
    return MapPipe.read_blocks(pipe, rows) if _fetches(type(pipe)) else pipe.read_blocks(rows)


def _one_by_one(rows: Rows, fetch: Callable[[int], Any], name: str) -> Sequence[Block]:
    """Return one-sample blocks of the samples that `fetch` returns."""
    blocks = []
    for position, sample_key, place in zip(rows.positions.tolist(), rows.keys(), rows.places, strict=True):
        with planning(rows.planned), using_key(sample_key):
            sample = fetch(position)
        if not isinstance(sample, Sample):
            kind = type(sample).__name__
            raise TypeError(f"`fetch` of `{name}` must return a `kdp.Sample`, but returned {kind}.")
        sample.block.places = [place]
        blocks.append(sample.block)
    return blocks


def blocks_of(source: Any, rows: Rows, name: str) -> Sequence[Block]:
    """Return blocks of an indexed source, which may be a stock pipe, for the pipe `name`."""
    if isinstance(source, MapPipe):
        return blocks_at(source, rows)
    return _one_by_one(rows, lambda position: as_sample(source[position], position, name), name)


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
        return stock_fingerprint(self)

    def __getitem__(self, index: Any) -> Any:
        if current_key() is None:
            _note_read(self._source(), range(len(self))[index])
        return self.read_item(index)

    def read_item(self, index: Any) -> Any:
        """Return `pipe[index]`. Unlike indexing, this does not count as a read by a loader."""
        sample_key = current_key() or SampleKey(0, vars(self._source()).get(_EPOCH, 0), range(len(self))[index])
        try:
            with using_key(sample_key):
                item = self.datapipe[index]
            return call_with_key(self._called, sample_key, self._place, item)
        except BaseException as error:
            shorten(error)
            raise error  # KDPIPES_TRACEBACK=full shows the frames in between

    def _source(self) -> Any:
        """Return the nearest pipe of samples upstream, whose epoch is set by `set_epoch`."""
        pipe = self.datapipe
        while isinstance(pipe, Mapper):
            pipe = pipe.datapipe
        return pipe


note_name(MapperMapDataPipe, "map")


def item_at(pipe: Any, position: int) -> Any:
    """Return an item of an indexed pipe, which may be a stock pipe. Indexing counts as a read; this does not."""
    if isinstance(pipe, MapperMapDataPipe):
        return pipe.read_item(position)
    if not isinstance(pipe, MapPipe):
        return pipe[position]
    if current_epoch() is not None:
        return finished(pipe, pipe.fetch(position))
    with using_key(SampleKey(0, vars(pipe).get(_EPOCH, 0), position)):
        return finished(pipe, pipe.fetch(position))


def _note_read(pipe: MapPipe, position: int) -> None:
    """Record that a sample is read outside of an epoch of `deal`, and warn if random transforms repeat."""
    reads: Reads | None = vars(pipe).get(_READS)
    if reads is None:
        random_name = Chain.of(pipe).random_name() or redrawing_name(pipe)
        reads = vars(pipe)[_READS] = Reads(pipe, random_name, has_epoch=_EPOCH in vars(pipe))
    reads.note(position)


@runtime_checkable
class _Redrawing(Protocol):
    """A pipe that knows whether it or a pipe upstream chooses different samples in each epoch."""

    def redrawn_by(self, *, of_labels: bool) -> str | None: ...


def redrawing_name(pipe: Any, *, of_labels: bool = False) -> str | None:
    """Return the name of `pipe`, or of a pipe upstream, if it chooses different samples in each epoch; else None.

    In that case, `fetch`, `prefetch` and shard numbers refer to the samples of the current epoch of `deal`. Columns,
    and everything in a chain without `deal`, refer to the samples of epoch 0. The length is the same in every epoch.

    Args:
        pipe: The pipe.
        of_labels: Whether to ignore pipes that do not change the label at a position.
    """
    if isinstance(pipe, _Redrawing):
        return pipe.redrawn_by(of_labels=of_labels)
    sources = upstream_of(pipe) if isinstance(pipe, MapPipe) else []
    names = (redrawing_name(source, of_labels=of_labels) for source in sources)
    return next((name for name in names if name is not None), None)


@runtime_checkable
class _Sharded(Protocol):
    """A pipe with shard numbers: a source of shards, or a plan pipe."""

    def shard_numbers(self) -> NDArray[Any] | None: ...


def shard_numbers_of(pipe: Any) -> NDArray[Any] | None:
    """Return the shard number of each sample of an indexed pipe; None if a source has no shards."""
    origin = before_work(pipe)
    return origin.shard_numbers() if isinstance(origin, _Sharded) else None


def before_work(pipe: Any) -> Any:
    """Return the pipe before the work pipes at the end of a chain. It has the same samples at the same positions."""
    while operation_of(pipe) is not None:
        (pipe,) = upstream_of(pipe)
    return pipe


def _pick(pipe: Any, indices: Any) -> Any:
    """Return a pipe of the samples at the given indices. Samples are picked before `select` makes items of them."""
    operation = operation_of(pipe)
    if operation is not None and operation.traits.gives == "items":
        (source,) = upstream_of(pipe)
        if isinstance(source, MapPipe):
            picked = type(pipe)(_pick(source, indices), operation, pipe_name(pipe))
            copy_call(pipe, picked)
            return picked
    return pipe.subset(indices)


def has_column(pipe: Any, name: str) -> bool:
    """Return whether `pipe.column(name)` is already in memory."""
    if name == "y" and _KEPT_LABELS in vars(pipe):
        return True
    return isinstance(pipe, _Holding) and pipe.has_column(name)


@runtime_checkable
class _Holding(Protocol):
    def has_column(self, name: str) -> bool: ...


def is_key(name: str, fields: Container[str]) -> bool:
    """Return whether the column `name` holds the keys of the samples."""
    return name == "key" and name not in fields


_WITHOUT_COLUMNS: dict[Any, str] = {  # hints for stock pipes without columns
    Concater: "Use `kdp.concat(one, other)` instead.",
    Mapper: "Use `.transform(...)` or `.add_field(...)` instead, or put it after this pipe.",
    Shuffler: "Use `.permute(seed)` instead, or `deal(shuffle=True)` at the end.",
    StreamShuffler: "Use `.permute(seed)` instead, or `deal(shuffle=True)` at the end.",
}


def indexed(source_datapipe: Any, name: str, *, takes_samples: bool = True) -> MapPipe:
    """Return the source of the plan pipe `name`. Raise ChainError if it is not indexed or has no columns."""
    hint = next((hint for kind, hint in _WITHOUT_COLUMNS.items() if isinstance(source_datapipe, kind)), None)
    if isinstance(source_datapipe, IterDataPipe) and hint is None:
        raise ChainError(
            f"`{name}` needs indexed sources here, but `{pipe_name(source_datapipe)}` is a stream. `kdp.open_shards` "
            "is indexed." + (" Or begin with the stream: `stream.mix(...)` takes both." if name == "mix" else "")
        )
    if not isinstance(source_datapipe, MapPipe):
        raise ChainError(
            f"`.{name}()` needs a source with columns, but `{pipe_name(source_datapipe)}` has none. "
            + (hint or "Make samples of it first: `.to_samples(...)`.")
        )
    return gives_samples(source_datapipe, name) if takes_samples else source_datapipe
