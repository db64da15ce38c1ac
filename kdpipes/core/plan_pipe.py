"""Base classes of pipes that choose samples and pass them on unchanged: `PlanPipe` (indexed) and `StreamPlanPipe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Joined, Pairs
from kdpipes.core.column import as_column
from kdpipes.core.errors import ChainError, check_choice
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.labels import Names, number_column, number_fields
from kdpipes.core.map_pipe import (
    MapPipe,
    before_work,
    blocks_at,
    has_column,
    indexed,
    redrawing_name,
    shard_numbers_of,
)
from kdpipes.core.messages import warn
from kdpipes.core.order import Order
from kdpipes.core.pipe import class_names_of, fields_of, gives_samples
from kdpipes.core.randomness import choosing, plan_epoch, planning
from kdpipes.core.registry import note_methods, pipe_name
from kdpipes.core.sample import Block, Rows
from kdpipes.core.shared import Shared
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import Traits


class BatchShares(NamedTuple):
    """The composition of each batch that a `mix` asks for.

    Args:
        kind: "fixed": `shares` samples of each source; "stratified": samples in proportion to `shares`; "per_source":
            samples of a single source.
        shares: The share of each source.
    """

    kind: Literal["fixed", "stratified", "per_source"]
    shares: tuple[float, ...]


class Composition(NamedTuple):
    """The requirements of a `mix` that composes batches, for `deal`.

    Args:
        shares: How each batch must be composed.
        numbers: A function that returns the source number of each sample, `[num_samples] int`.
    """

    shares: BatchShares
    numbers: Callable[[], NDArray[Any]]


class PlanPipe(MapPipe):
    """A choice of samples from one or several indexed sources. The samples pass unchanged.

    A subclass implements `plan`. The length, samples, columns, class names, shards, prefetching and the fingerprint
    follow from it. The fingerprint consists of all attributes that the subclass sets, except those named in `computed`.

    A choice that depends on values is valid only for the samples of epoch 0. Pipes upstream that would choose different
    samples in each epoch then keep those of epoch 0, and a warning is issued.

    Args:
        source_datapipes: The sources, indexed pipes of samples.
        redraws: Whether `plan` chooses different samples in each epoch. `plan(0)` may set this attribute to False.

    Attributes:
        goes_by: What `plan` depends on besides the arguments: "number" (the number of samples), "labels" or "values".
        warns_of_fixed: Whether to warn if pipes upstream keep the choice of epoch 0.

    Example:
        >>> class EveryOther(PlanPipe):
        ...     def plan(self, epoch):
        ...         return np.arange(0, len(self.source), 2)
        >>> EveryOther(kdp.from_dataset(["a", "b", "c"], "x")).column("x")
        array(['a', 'c'], dtype='<U1')
    """

    traits = Traits(role="plan", holds_back=False)
    computed: ClassVar[tuple[str, ...]] = (
        *(*MapPipe.computed, "sources", "redraws", "_names", "_added_names", "_planned", "_recent", "_is_fixed"),
        "_from_root",
    )
    set_by_init: ClassVar[tuple[str, ...]] = ("source", *computed)
    goes_by: ClassVar[Literal["number", "labels", "values"]] = "values"
    warns_of_fixed: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_choice("goes_by", cls.goes_by, ("number", "labels", "values"))

    def __init__(self, *source_datapipes: MapPipe, redraws: bool = False) -> None:
        name = pipe_name(self)
        self.sources = tuple(indexed(source, name) for source in source_datapipes)
        self.redraws = redraws
        self._names, self._added_names = shared_class_names(name, self.sources)
        self._planned: Shared[Any] | None = None
        self._recent = _Recent()
        self._is_fixed = False
        self._from_root: Shared[NDArray[Any]] | None = None

    @property
    def source(self) -> MapPipe:
        """The first source."""
        return self.sources[0]

    def plan(self, epoch: int) -> Any:
        """Return the chosen samples of an epoch.

        This is called for epoch 0 when the plan is first needed. With `redraws`, it is also called for each later
        epoch, and must return the same number of samples. Columns of the sources are those of epoch 0.

        Args:
            epoch: The epoch number, from 0.

        Returns:
            Positions in the source, `[n] int`. For several sources, a pair: the source number of each sample and the
            position in that source, both `[n] int`. Computable positions need not be in memory: return an object with
            `__len__` and a `__getitem__` that takes an integer or an array, like `arithmetic.Stretch`.
        """
        raise TypeError(f"{type(self).__name__} must implement `plan`.")

    def chosen(self, epoch: int = 0) -> Any:
        """Return the plan of an epoch. It must not be modified."""
        if self._planned is None:
            with planning(0), choosing(pipe_name(self)):
                made = self._kept(self.plan(0))
            redrawn = None if self.goes_by == "number" else self._redrawn_upstream(of_labels=self.goes_by == "labels")
            self._is_fixed = redrawn is not None
            if redrawn is not None and self.warns_of_fixed:
                warn_of_fixed(redrawn, pipe_name(self))
            self._planned = Shared(made)
        if not (epoch and self.redraws):
            return self._planned.value
        return self._recent.of(epoch, self._redrawn)

    def _redrawn(self, epoch: int) -> Any:
        made = self._kept(self.plan(epoch))
        size = len(self.chosen())
        if len(made) != size:
            raise ValueError(
                f"`plan` of `{pipe_name(self)}` must return {size} positions in every epoch, as in epoch 0, but "
                f"returned {len(made)} in epoch {epoch}."
            )
        return made

    def plans_alike(self) -> bool:
        """Return whether `plan(0)` returns the same plan again, as it must in another process."""
        with planning(0):
            again = self._kept(self.plan(0))
        positions = np.arange(len(self.chosen()))
        return len(again) == len(positions) and np.array_equal(self.chosen()[positions], again[positions])

    def _kept(self, plan: Any) -> Any:
        """Return a plan as one object with read-only arrays, after checking it.

        Raises:
            TypeError: The positions are not integers.
            IndexError: A position lies outside the source.
        """
        if isinstance(plan, tuple) and len(plan) != 2:
            raise TypeError(
                f"`plan` of `{pipe_name(self)}` must return an array or a list of positions, or for several sources a "
                f"pair of arrays, but returned a tuple of {len(plan)}."
            )
        if isinstance(plan, tuple):
            numbers, positions = (self._checked(part) for part in plan)
            sizes = np.asarray([len(source) for source in self.sources])
            self._check_range(numbers, len(sizes))
            self._check_range(positions, sizes[numbers] if len(positions) else 0)
            return Pairs(numbers, positions)
        if isinstance(plan, Sized) and not isinstance(plan, np.ndarray | list | range | torch.Tensor):
            return plan  # positions computed on demand
        if plan is None or isinstance(plan, Iterator):
            shown = "None: a `return` may be missing" if plan is None else f"a {type(plan).__name__}: make it a list"
            raise TypeError(f"`plan` of `{pipe_name(self)}` must return integer positions, but returned {shown}.")
        positions = self._checked(plan)
        self._check_range(positions, len(self.source))
        return positions

    def _checked(self, positions: Any) -> NDArray[Any]:
        found = np.asarray(positions)
        if found.shape == (0,) and found.dtype == np.float64:  # NumPy's type of an empty list
            found = found.astype(np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            hint = " A mask gives positions by `np.flatnonzero(mask)`." if found.dtype.kind == "b" else ""
            raise TypeError(
                f"`plan` of `{pipe_name(self)}` must return integer positions, `[n] int`, but returned {found.dtype} "
                f"of shape {list(found.shape)} instead.{hint}"
            )
        found.flags.writeable = False
        return found

    def _check_range(self, positions: NDArray[Any], size: Any) -> None:
        wrong = np.flatnonzero((positions < 0) | (positions >= size))
        if len(wrong):
            raise IndexError(
                f"`plan` of `{pipe_name(self)}` returned position {positions[wrong[0]]} for sample {wrong[0]}, which "
                f"lies outside the source. Positions begin at 0; the source has {len(self.source)} samples."
            )

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._planned is not None or (may_plan and self._plans_quickly())

    def _plans_quickly(self) -> bool:
        """Return whether `plan` neither calls a user function nor reads data."""
        return self.goes_by == "number" or (self.goes_by == "labels" and has_column(self, "y"))

    def has_column(self, name: str) -> bool:
        return all(has_column(source, name) for source in self.sources)

    def locate(self, index: Any, epoch: int) -> tuple[Any, Any]:
        """Return the source numbers of samples, and their positions in these sources.

        Args:
            index: The position of a sample, or an array of positions.
            epoch: The epoch number, from 0.
        """
        found = self.chosen(epoch)[index]
        return found if len(self.sources) > 1 else (0, found)

    def __len__(self) -> int:
        return len(self.chosen())

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        chosen = self.chosen(rows.planned)[rows.positions]
        planned = 0 if self._is_fixed else rows.planned
        if len(self.sources) == 1:
            return blocks_at(self.source, rows.at(chosen, planned))
        numbers, positions = (np.asarray(part) for part in chosen)
        blocks: list[Block] = []
        for number in np.unique(numbers).tolist():
            here = rows.at(positions, planned).part(np.flatnonzero(numbers == number).tolist())
            blocks += self._blocks_of(number, here)
        return blocks

    def _blocks_of(self, number: int, rows: Rows) -> Sequence[Block]:
        """Return blocks of one of several sources, with labels numbered by the class names of the other sources."""
        blocks = blocks_at(self.sources[number], rows)
        for block in blocks:
            block.route = (*block.route, number)
            number_fields(block.fields, self._added_names[number])
        return blocks

    def redrawn_by(self, *, of_labels: bool) -> str | None:
        """See `redrawing_name`."""
        self.chosen()
        if self.redraws:
            return pipe_name(self)
        return None if self._is_fixed else self._redrawn_upstream(of_labels=of_labels)

    def _redrawn_upstream(self, *, of_labels: bool) -> str | None:
        names = (redrawing_name(source, of_labels=of_labels) for source in self.sources)
        return next((name for name in names if name is not None), None)

    def fingerprint(self) -> Any:
        if self.redraws:
            self.chosen()  # `plan(0)` may set `redraws` to False
        return (super().fingerprint(), "redraw") if self.redraws else super().fingerprint()

    def prefetch(self, order: Order) -> None:
        epoch = plan_epoch()
        with self._upstream():
            for number, source in enumerate(self.sources):
                source.prefetch(order.through(partial(self._positions_in, number, epoch)))

    def _positions_in(self, number: int, epoch: int, index: NDArray[Any]) -> NDArray[Any]:
        """Return the positions, in source `number`, of the samples that come from it."""
        numbers, positions = self.locate(index, epoch)
        here: NDArray[Any] = positions if len(self.sources) == 1 else positions[numbers == number]
        return here

    def shard_numbers(self) -> NDArray[Any] | None:
        """Return the shard number of each sample, `[len(self)] int`; None if a source has no shards.

        Each round of a repetition has its own shard numbers, so that `deal(shuffle="shards")` keeps the rounds apart.
        """
        epoch = plan_epoch()
        with self._upstream():
            numbers = join_shards(list(map(shard_numbers_of, self.sources)))
        return None if numbers is None else numbers[self._all(epoch)]

    def other_sources(self) -> tuple[MapPipe, ...]:
        """Return additional sources from which samples take fields."""
        return ()

    def composition(self) -> Composition | None:
        """See `composition_of`."""
        upstream = composition_of(self.source) if len(self.sources) == 1 else None
        if upstream is None:
            return None
        return upstream._replace(numbers=partial(self._chosen_numbers, upstream.numbers))

    def _chosen_numbers(self, numbers: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the source number in `mix` of each chosen sample, given those of all samples upstream."""
        self.chosen()  # this may set `redraws` to False
        if self.redraws:
            raise ChainError(
                f"`{pipe_name(self)}` chooses other samples in each epoch, so batches cannot have fixed shares of the "
                f"sources of `mix`. Put it before `mix`, or write `{pipe_name(self)}(..., redraw=False)`."
            )
        with planning(0):
            chosen: NDArray[Any] = numbers()[self._all(0)]
        return chosen

    def _upstream(self) -> AbstractContextManager[None]:
        return planning(0) if self._is_fixed else nullcontext()

    def _all(self, epoch: int) -> Any:
        """Return the positions of all samples in the concatenated sources, or a slice if they are in order."""
        chosen = self.chosen(epoch)
        if isinstance(chosen, Joined):
            return slice(None)
        if isinstance(chosen, np.ndarray):
            return chosen
        numbers, positions = self.locate(np.arange(len(chosen)), epoch)
        starts = np.cumsum([0, *map(len, self.sources)])[:-1]
        return positions if len(self.sources) == 1 else starts[numbers] + positions

    def column(self, name: str) -> NDArray[Any]:
        with planning(0):
            if len(self.sources) == 1:
                root, positions = self.traced()
                return root.column(name)[positions]  # type: ignore[no-any-return]
            parts = zip(self.sources, self._added_names, strict=True)
            known = [(source.column(name), names) for source, names in parts if len(source)]
            try:
                columns = [number_column(column, name, names) for column, names in known]
            except ValueError:  # a label has no name; reading it raises an error that names the sample
                return self.read_column(name)
            joined: NDArray[Any]
            if len({column.dtype.kind for column in columns}) > 1:  # NumPy would convert numbers to text
                joined = as_column([value for column in columns for value in column.tolist()])
            else:
                joined = np.concatenate(columns or [self.source.column(name)])
            return joined[self._all(0)]  # type: ignore[no-any-return]

    def traced(self) -> tuple[MapPipe, Any]:
        """Return the nearest pipe upstream with columns of its own, and the positions of epoch 0's samples in it.

        Each plan keeps these positions, so that a column is indexed only once, however many plans there are.
        """
        source = self.source
        is_passing = isinstance(source, PlanPipe) and len(source.sources) == 1
        if not is_passing or type(source).column is not PlanPipe.column:
            return source, self._all(0)
        root, positions = source.traced()
        if self._from_root is not None:
            return root, self._from_root.value
        composed = positions[self._all(0)]
        if isinstance(self.chosen(), np.ndarray):  # a computed plan takes no memory, and is composed on each call
            self._from_root = Shared(composed)
        return root, composed

    def class_names(self) -> tuple[str, ...] | None:
        return self._names if len(self.sources) > 1 else self.source.class_names()

    def field_names(self) -> frozenset[str] | None:
        known = [source.field_names() for source in self.sources]
        return None if None in known else frozenset.intersection(*known)  # type: ignore[arg-type]


note_methods(PlanPipe, flavour="map")


def composition_of(pipe: Any) -> Composition | None:
    """Return how `deal` must compose each batch from the sources of a `mix` upstream; None if there is no such rule."""
    origin = before_work(pipe)
    return origin.composition() if isinstance(origin, PlanPipe) else None


class _Recent:
    """A cache of the plans of the last two epochs, because worker threads may be in either. Copies start empty."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Recent, ()

    def of(self, epoch: int, make: Callable[[int], Any]) -> Any:
        """Return the plan of an epoch."""
        plan = self._kept.get(epoch)
        if plan is None:
            with planning(0):  # labels are those of epoch 0
                plan = make(epoch)
            self._kept = {**dict(list(self._kept.items())[-1:]), epoch: plan}
        return plan


def warn_of_fixed(redrawn: str, by: str) -> None:
    """Warn that a pipe keeps the samples of epoch 0, because otherwise the length of a pipe downstream would change."""
    warn(
        f"`{redrawn}` gives the same samples in every epoch here, because `{by}` after it depends on their values, "
        f"and the length of an epoch must not change. Put `{by}` before `{redrawn}`, or write "
        f"`{redrawn}(..., redraw=False)`.",
    )


def shared_class_names(name: str, sources: Sequence[Any]) -> tuple[Names, list[Names]]:
    """Return the class names of several sources, and, for each source, the names that it lacks itself.

    Raise ChainError if sources number their classes differently.
    """
    if len(sources) == 1:
        return None, [None]
    names: list[Any] = list(map(class_names_of, sources))
    known = [place for place, found in enumerate(names) if found is not None]
    shared: Any = names[known[0]] if known else None
    different = next((place for place in known if names[place] != shared), None)
    if different is not None:
        raise ChainError(
            f"The sources of `{name}` number their classes differently: source {known[0]} has {', '.join(shared)}, but "
            f"source {different} has {', '.join(names[different])}. Use `.map_classes(...)`, or pass the same "
            "`class_names=` to both."
        )
    return shared, [shared if found is None else None for found in names]


def join_shards(numbers: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return the shard numbers of concatenated sources, distinct across sources; None if a source has no shards."""
    if len(numbers) == 1:
        return numbers[0]
    joined = []
    start = 0
    for part in numbers:
        if part is None:
            return None
        joined.append(part + start)
        start += int(part.max()) + 1 if len(part) else 0
    return np.concatenate(joined)


class StreamPlanPipe(IterPipe):
    """A choice of samples of a stream, made as they pass."""

    traits = Traits(role="plan")
    set_by_init = ("source",)

    def __init__(self, source_datapipe: IterDataPipe[Any]) -> None:
        self.source = gives_samples(source_datapipe, pipe_name(self))

    def class_names(self) -> tuple[str, ...] | None:
        return class_names_of(self.source)

    def field_names(self) -> frozenset[str] | None:
        return fields_of(self.source)
