"""The ways in which `deal` cuts the epochs of an indexed source into batches, one class for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from kdpipes.core.errors import ChainError, DataError, check_count, check_flag, check_seed, reject_field
from kdpipes.core.map_pipe import BatchShares, MapPipe, indexed
from kdpipes.core.plan_pipe import warn_of_fixed
from kdpipes.core.randomness import hash_key, planning
from kdpipes.delivery.by_class import ByClass, ClassEpoch, read_classes
from kdpipes.delivery.by_length import ByLength, LengthEpoch, read_lengths
from kdpipes.delivery.by_shard import ShardOrder, WindowedOrder, read_shards
from kdpipes.delivery.by_source import SourceOrder, shares_of
from kdpipes.delivery.dealer import Shuffle
from kdpipes.delivery.layout import EqualEpoch, Layout, Sharding, Uneven
from kdpipes.delivery.own_order import ContinuedOrder, OwnOrder
from kdpipes.delivery.packing import PackEpoch, Packing, Packs
from kdpipes.selection import Permutation
from kdpipes.storage.shared import Shared

__all__ = ["Cut", "Epoch", "cut_of"]


class Epoch(Protocol):
    """An epoch, cut into the batches of one rank."""

    num_batches: int
    num_samples: int
    full_size: int  # the number of samples in a global batch; if sizes differ, in the last one

    def ordinals(self, batch: int) -> range:
        """Return the ordinals of a batch. Those not below `num_samples` are padding."""

    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions in the source of the samples of a batch."""

    def windows(self, batch: int) -> Iterator[NDArray[Any]]:
        """Yield the positions that this machine needs from `batch` on, if the epoch goes shard by shard; else none."""


class Cut(ABC):
    """A way to cut epochs into batches.

    What a cut reads of the source is read once, when it is needed first, and shared by all copies of the chain.

    Args:
        layout: The sizes of batches.
        is_shuffled: Whether each epoch has its own order.
    """

    fixed_by: ClassVar[str | None] = None  # the call that needs the same samples in every epoch
    substitutes: ClassVar[bool] = True  # whether a bad sample may be replaced by any other
    row_size: int | None = None  # the number of tokens in a row of packed samples

    def __init__(self, layout: Any, *, is_shuffled: bool) -> None:
        self.layout = layout
        self.is_fixed = False  # whether every epoch has the samples that the plan chooses in epoch 0
        self._is_shuffled = is_shuffled
        self._order: Shared[Any] | None = None

    @property
    def has_quick_length(self) -> bool:
        """Whether the number of batches is known without reading the source."""
        return self._order is not None

    def prepare(self, source: Any, num_ranks: int) -> Any:
        """Return what the cut reads of the source; read it first if need be."""
        self.fix(source)
        if self._order is None:
            self._order = Shared(self._read(source, num_ranks))
        return self._order.value

    def fix(self, source: Any) -> None:
        """Keep the samples that the plan chooses in epoch 0, with a warning if it would choose others later."""
        if self.fixed_by is None or self.is_fixed or not isinstance(source, MapPipe):
            return
        redrawn = source.redrawn_by()
        if redrawn is not None:
            warn_of_fixed(redrawn, self.fixed_by)
            self.is_fixed = True

    def fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        """Return what decides the batches, besides the seed and the layout."""
        return (self.prepare(source, num_ranks),)

    def why_empty(self, epoch: Epoch, num_ranks: int) -> str:
        """Return why an epoch of some samples has no batch."""
        return f"`deal(uneven='drop')` drops all {epoch.num_samples} samples: a global batch has {epoch.full_size}."

    @abstractmethod
    def num_batches(self, source: Any, num_ranks: int) -> int:
        """Return the number of batches of a rank."""

    @abstractmethod
    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        """Return an epoch by its number."""

    def _read(self, source: Any, num_ranks: int) -> Any:
        """Return what the cut needs to know of the source, besides its length."""
        return None

    def _key(self, seed: int, number: int) -> tuple[int, int] | None:
        return (seed, number) if self._is_shuffled else None


class EqualCut(Cut):
    """Batches of equal size, of all samples in order, or of a permutation, which takes no memory."""

    has_quick_length = True

    def prepare(self, source: Any, num_ranks: int) -> Any:
        return len(source)

    def fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return ()

    def num_batches(self, source: Any, num_ranks: int) -> int:
        number: int = self.layout.num_batches(len(source), num_ranks)
        return number

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order = self.order(source, seed, number) if self._is_shuffled else None
        return EqualEpoch(len(source), self.layout, sharding, order)

    def order(self, source: Any, seed: int, number: int) -> Permutation | WindowedOrder:
        """Return the order of a shuffled epoch."""
        return Permutation(len(source), key=hash_key("order", seed, number))


class ShardCut(EqualCut):
    """Batches of equal size, shard after shard, shuffled within windows.

    Args:
        layout: The sizes of batches.
        window: The least number of samples in a window; None for those of 8 shards.
    """

    def __init__(self, layout: Layout, window: int | None) -> None:
        super().__init__(layout, is_shuffled=True)
        self._window = window

    def prepare(self, source: Any, num_ranks: int) -> Any:
        return self._shards(source, 0)

    def fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return self._window, self._shards(source, 0)

    def order(self, source: Any, seed: int, number: int) -> Permutation | WindowedOrder:
        return WindowedOrder(self._shards(source, 0 if self.is_fixed else number), self._window, (seed, number))

    def _shards(self, source: Any, epoch: int) -> ShardOrder:
        if epoch and isinstance(source, MapPipe) and source.redrawn_by() is not None:
            with planning(epoch):  # whose samples may lie in other shards
                return read_shards(source)
        if self._order is None:
            self._order = Shared(read_shards(source))
        found: ShardOrder = self._order.value
        return found


class ContinuedCut(Cut):
    """A fixed number of batches, whose samples continue where the previous epoch has ended.

    Args:
        cut: The order of each pass over the source.
        num_batches: The number of batches of a rank.
    """

    fixed_by = "deal(num_batches=...)"
    has_quick_length = True

    def __init__(self, cut: EqualCut, num_batches: int, *, is_shuffled: bool) -> None:
        super().__init__(cut.layout, is_shuffled=is_shuffled)
        self._cut, self._num_batches = cut, num_batches

    def prepare(self, source: Any, num_ranks: int) -> Any:
        return self._cut.prepare(source, num_ranks)

    def fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return *self._cut.fingerprint(source, num_ranks), ("num_batches", self._num_batches)

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self._num_batches

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        size, num_samples = len(source), self._num_batches * self.layout.size_of(sharding.num_ranks)
        if not size:
            raise ChainError("`deal(num_batches=...)` needs samples, but its source is empty.")
        self.fix(source)
        self._cut.is_fixed = self.is_fixed
        order_of = partial(self._cut.order, source, seed) if self._is_shuffled else None
        return EqualEpoch(num_samples, self.layout, sharding, ContinuedOrder(size, number * num_samples, order_of))


class OwnCut(EqualCut):
    """Batches of equal size, in the order of a function or sampler of the user's.

    Args:
        layout: The sizes of batches.
        order: A function that returns the positions of an epoch.
    """

    def __init__(self, layout: Layout, order: OwnOrder) -> None:
        super().__init__(layout, is_shuffled=False)
        self._positions_of = order

    def fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return ((self._positions_of, self._positions(source, num_ranks, 0)),)

    def num_batches(self, source: Any, num_ranks: int) -> int:
        number: int = self.layout.num_batches(len(self._positions(source, num_ranks, 0)), num_ranks)
        return number

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        positions = self._positions(source, sharding.num_ranks, number)
        return EqualEpoch(len(positions), self.layout, sharding, positions)

    def _positions(self, source: Any, num_ranks: int, epoch: int) -> NDArray[Any]:
        """Return the positions of an epoch; raise if epochs differ in length."""
        self._positions_of.reject_ranks(num_ranks)
        if self._order is None:
            self._order = Shared(self._positions_of.positions(0, len(source)))
        first = self._order.value
        positions = self._positions_of.positions(epoch, len(source)) if epoch else first
        if len(positions) != len(first):
            raise ValueError(
                f"`order` must give equally many positions in each epoch, but gave {len(first)} for epoch 0 and "
                f"{len(positions)} for epoch {epoch}. `deal(num_batches=...)` makes epochs of any length."
            )
        return positions


class SourceCut(Cut):
    """Batches of equal size with fixed shares of the sources of a `mix`.

    Args:
        layout: The sizes of batches.
        shares: The shares of the sources that the mix asks for.
        is_shuffled: Whether each epoch has its own order.
    """

    has_quick_length = True

    def __init__(self, layout: Layout, shares: BatchShares, *, is_shuffled: bool) -> None:
        super().__init__(layout, is_shuffled=is_shuffled)
        self._shares = shares

    def fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return ()

    def num_batches(self, source: Any, num_ranks: int) -> int:
        number: int = self.layout.num_batches(self._size(source, num_ranks), num_ranks)
        return number

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order: SourceOrder = self.prepare(source, sharding.num_ranks)
        size = self._size(source, sharding.num_ranks)
        return EqualEpoch(size, self.layout, sharding, order.of_epoch(self._key(seed, number)))

    def _size(self, source: Any, num_ranks: int) -> int:
        """Return the length of an epoch. Ranks do not share what remains, or their batches had other shares."""
        size, global_size = len(self.prepare(source, num_ranks)), self.layout.size_of(num_ranks)
        if 0 < size < global_size:
            raise DataError(
                f"`mix` fills fewer batches in an epoch ({size // self.layout.batch_size}) than there are ranks "
                f"({num_ranks}). Use fewer ranks, or smaller batches."
            )
        return size if self.layout.uneven == "pad" else size - size % global_size

    def _read(self, source: Any, num_ranks: int) -> SourceOrder:
        # Each batch of a rank is composed, or each global batch if its size is given.
        size = self.layout.batch_size if self.layout.batch_size is not None else self.layout.size_of(num_ranks)
        return SourceOrder(source.source_numbers(), self._shares, size)


class LengthCut(Cut):
    """Batches of samples of similar length."""

    layout: ByLength
    fixed_by = "deal(batch_by=...)"
    substitutes = False

    def prepare(self, source: Any, num_ranks: int) -> Any:
        order = super().prepare(source, num_ranks)
        self.layout.reject_long(source, order, num_ranks)
        return order

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return int(self.prepare(source, num_ranks).buckets(self.layout, num_ranks).num_kept(self.layout.uneven))

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order = self.prepare(source, sharding.num_ranks)
        return LengthEpoch(order, self.layout, sharding, self._key(seed, number))

    def _read(self, source: Any, num_ranks: int) -> Any:
        return read_lengths(source, self.layout.column)


class PackCut(Cut):
    """Batches of rows, each of which holds several samples."""

    layout: Packing
    fixed_by = "deal(pack=True)"
    substitutes = False

    @property
    def row_size(self) -> int:  # type: ignore[override]
        return self.layout.max_tokens

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self.layout.rows.num_batches(len(self.prepare(source, num_ranks)), num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        packs = self.prepare(source, sharding.num_ranks)
        return PackEpoch(packs, self.layout, sharding, self._key(seed, number))

    def _read(self, source: Any, num_ranks: int) -> Any:
        return Packs(read_lengths(source, self.layout.column), source, self.layout)


class ClassCut(Cut):
    """Batches of some samples of some classes each."""

    layout: ByClass
    fixed_by = 'deal(batch_by="class")'

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return int(self.prepare(source, num_ranks).num_batches // num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order = self.prepare(source, sharding.num_ranks)
        return ClassEpoch(order, self.layout, sharding, self._key(seed, number) or (seed, 0))

    def why_empty(self, epoch: Epoch, num_ranks: int) -> str:
        made = epoch.num_samples // (epoch.full_size // num_ranks)
        return (
            f'`deal(batch_by="class")` can make {made} batches, but there are {num_ranks} ranks, so no rank gets a '
            f"batch. Use at most {made} ranks, or smaller batches."
        )

    def _read(self, source: Any, num_ranks: int) -> Any:
        return read_classes(source, self.layout)


def cut_of(
    source: Any,
    batch_by: str | None,
    sizes: dict[str, Any],
    tokens: dict[str, Any],
    of_classes: dict[str, Any],
    *,
    pack: bool,
    shuffle: Shuffle,
    window: int | None,
    order: Any,
    num_batches: int | None,
    seed: int,
    uneven: Uneven,
) -> Cut:
    """Return the cut that the arguments of `deal` describe; raise an error if some of them exclude others."""
    is_by_class = any(argument is not None for argument in of_classes.values())
    is_by_length = not is_by_class and any(argument is not None for argument in (batch_by, *tokens.values()))
    is_shuffled = bool(shuffle)
    if is_by_class:
        _reject_other_cuts(batch_by, of_classes, {**sizes, **tokens, "window": window}, uneven)
    if window is not None and (shuffle != "shards" or is_by_length):
        raise ValueError('`window` must be given with `deal(shuffle="shards")`, and only there.')
    if shuffle == "shards" and (is_by_length or is_by_class):
        raise ValueError('`shuffle` must be True or False with `batch_by`, but is "shards" instead.')
    window = None if window is None else check_count("window", window)
    num_batches = None if num_batches is None else check_count("num_batches", num_batches)
    own_order = None if order is None else OwnOrder(order, check_seed(seed))
    _reject_together(order=order, num_batches=num_batches, batch_by=batch_by)
    _reject_together(order=order, shuffle=shuffle or None)
    if num_batches is not None and uneven != "keep":
        raise ValueError("`uneven` cannot be used with `num_batches`, with which no batch is short. Remove it.")
    is_one_row = tokens["max_tokens"] is not None and tokens["global_max_tokens"] is None and not is_by_class
    if check_flag("pack", pack) and not is_one_row:
        raise ValueError(
            "`pack=True` needs the lengths and the size of a row: "
            '`deal(batch_by="length", pack=True, max_tokens=4096)`.'
        )
    shares = shares_of(source)
    cut: Cut
    column: Any = batch_by
    if pack:
        one = {"batch_size": 1} if all(size is None for size in sizes.values()) else {}
        rows = Layout(**(sizes | one), uneven=uneven)
        cut = PackCut(Packing(column, tokens["max_tokens"], rows), is_shuffled=is_shuffled)
    elif is_by_class:
        cut = ClassCut(ByClass(**of_classes), is_shuffled=is_shuffled)
    elif is_by_length:
        cut = LengthCut(ByLength(column, is_shuffled, sizes | tokens, uneven), is_shuffled=is_shuffled)
    else:
        layout = Layout(**sizes, uneven=uneven)
        equal = ShardCut(layout, window) if shuffle == "shards" else EqualCut(layout, is_shuffled=is_shuffled)
        if num_batches is not None:
            cut = ContinuedCut(equal, num_batches, is_shuffled=is_shuffled)
        elif own_order is not None:
            cut = OwnCut(layout, own_order)
        else:
            cut = equal if shares is None else SourceCut(layout, shares, is_shuffled=is_shuffled)
    if shares is not None:
        others = {"batch_by": batch_by, "order": order, "num_batches": num_batches}
        _reject_for_mix(**others, shuffle="shards" if shuffle == "shards" else None)
    if pack or is_by_length:
        known = indexed(source, "deal", takes_samples=False).field_names()
        if known is not None and column not in known:
            hint = f'`.add_field({column!r}, lambda sample: len(sample["x"]))` adds one, for example.'
            reject_field(column, "The source", known, hint)
    return cut


def _reject_other_cuts(batch_by: Any, of_classes: dict[str, Any], others: dict[str, Any], uneven: str) -> None:
    """Raise if arguments that cut batches of classes come with others, or not together."""
    missing = next((name for name, value in of_classes.items() if value is None), None)
    if missing is not None or batch_by != "class":
        raise ValueError(
            '`batch_by="class"`, `classes_per_batch` and `samples_per_class` must be given together: '
            '`deal(batch_by="class", classes_per_batch=8, samples_per_class=4)`.'
        )
    other = next((name for name, value in others.items() if value is not None), None)
    if other is not None:
        raise ValueError(f"`{other}` and `classes_per_batch` cannot be given together. Remove one of them.")
    if uneven == "pad":
        raise ValueError(
            '`uneven="pad"` cannot be used with `batch_by="class"`, whose batches are all full. Remove it.'
        )


def _reject_for_mix(**others: Any) -> None:
    """Raise if an argument would compose batches otherwise than a `mix` upstream does."""
    other = next((name for name, value in others.items() if value is not None), None)
    if other is not None:
        raise ValueError(
            f"`{other}` cannot be used after `mix(per_batch=...)` or `mix(batches=...)`, which compose the batches. "
            "Remove one of them; `shuffle=True` is possible."
        )


def _reject_together(**arguments: Any) -> None:
    """Raise if two arguments are given that exclude each other."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"`{given[0]}` and `{given[1]}` cannot be given together. Remove one of them.")
