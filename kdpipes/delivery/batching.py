"""Cut the epochs of an indexed source into batches: `Batching`, the base class, and batches of equal size."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Permutation
from kdpipes.core.call_text import shown_value
from kdpipes.core.errors import ChainError, check_choice, check_count, must_be
from kdpipes.core.map_pipe import MapPipe, redrawing_name
from kdpipes.core.messages import counted
from kdpipes.core.order import ranges
from kdpipes.core.plan_pipe import warn_of_fixed
from kdpipes.core.randomness import choosing, hash_key, planning
from kdpipes.core.shared import Shared
from kdpipes.delivery.by_shard import ByShard, ShardOrder, Shuffle, WindowedOrder, read_shards
from kdpipes.delivery.layout import Layout, Sharding, Uneven

_BLOCK = 1_024


class Epoch(ABC):
    """An epoch, cut into the batches of one rank."""

    num_batches: int
    num_samples: int
    shortest: int  # the number of the batch with the fewest samples
    full_size: int  # the number of samples in a global batch; if sizes differ, in the last one

    @abstractmethod
    def ordinals(self, batch: int) -> Sequence[int]:
        """Return the ordinals of a batch. Those not below `num_samples` are padding."""

    @abstractmethod
    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions in the source of the samples of a batch."""

    def parts(self, batches: Sequence[int], size: int) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Yield the batch, the ordinal and the position of each sample of some batches, about `size` at a time."""
        step = max(size // max(self.full_size, 1), 1)
        for start in range(0, len(batches), step):
            numbers = batches[start : start + step]
            ordinals = [np.asarray(self.ordinals(number)) for number in numbers]
            positions = [self.positions(number) for number in numbers]
            yield np.repeat(numbers, list(map(len, ordinals))), np.concatenate(ordinals), np.concatenate(positions)

    def windows(self, batch: int) -> Iterator[NDArray[Any]]:
        """Yield the positions that this machine needs from `batch` on, if the epoch goes shard by shard; else none."""
        return iter(())


class Arguments(NamedTuple):
    """The arguments of `deal` that decide how an epoch is cut into batches."""

    batch_size: int | None
    global_batch_size: int | None
    shuffle: Shuffle
    num_batches: int | None
    seed: int
    uneven: Uneven

    def given(self) -> list[str]:
        """Return the names of the arguments that differ from their defaults."""
        values = self._asdict() | {"seed": 0}
        return [name for name, value in values.items() if value != _DEFAULTS.get(name)]


_DEFAULTS = {"shuffle": False, "seed": 0, "uneven": "keep"}


class Batching(ABC):
    """Divides the epochs of an indexed chain into batches.

    Each chain has a copy of its own, made by `bind`. What it reads of the source is read once, when it is first needed,
    and shared by all copies of the chain.
    """

    rejects: ClassVar[tuple[str, ...]] = ()  # the arguments of `deal` that make no sense with it
    call: ClassVar[str] = "deal"  # the call, for errors
    fixed_by: str | None = None  # the call that needs the same samples in every epoch
    substitutes: ClassVar[bool] = True  # whether a bad sample may be replaced by any other
    row_size: int | None = None  # the number of tokens in a row of packed samples
    uneven: Uneven = "keep"
    is_shuffled = False  # whether each epoch has its own order
    is_fixed = False  # whether every epoch has the samples that the plan chooses in epoch 0
    _found: Shared[Any] | None = None

    def __repr__(self) -> str:
        return shown_value(self)

    def bind(self, source: Any, arguments: Arguments) -> Batching:
        """Return a copy for one chain; raise an error if the arguments of `deal` make no sense with it."""
        given = next((name for name in arguments.given() if name in self.rejects), None)
        if given is not None:
            raise ValueError(f"`{given}` cannot be used with `{self.call}(...)`. Remove it.")
        if arguments.shuffle not in (True, False) and not isinstance(self, EqualBatching):
            hint = f"`{self.call}(...)` makes an order of its own."
            raise ValueError(must_be("shuffle", "True or False", arguments.shuffle, hint))
        check_choice("uneven", arguments.uneven, ("keep", "pad", "drop"))
        bound = copy.copy(self)
        bound.uneven = arguments.uneven
        bound.is_shuffled = bool(arguments.shuffle)
        bound.set_up(source, arguments)
        return bound

    @abstractmethod
    def set_up(self, source: Any, arguments: Arguments) -> None:
        """Take what is needed of the arguments of `deal`, and check it."""

    @property
    def has_quick_length(self) -> bool:
        """Whether the number of batches is known without reading the source."""
        return self._found is not None

    @abstractmethod
    def prepare(self, source: Any, num_ranks: int) -> Any:
        """Return what it reads of the source; read it first if need be."""

    def fix(self, source: Any) -> None:
        """Keep the samples that the plan chooses in epoch 0, with a warning if it would choose others later."""
        if self.fixed_by is None or self.is_fixed or not isinstance(source, MapPipe):
            return
        redrawn = redrawing_name(source)
        if redrawn is not None:
            warn_of_fixed(redrawn, self.fixed_by)
            self.is_fixed = True

    def fingerprint(self) -> Any:
        """Return the arguments on which the batches depend, except for the sizes, which states name."""
        return self.uneven

    def source_fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        """Return what decides the batches besides the seed and the arguments."""
        return (self.prepare(source, num_ranks),)

    def why_empty(self, epoch: Epoch, num_ranks: int) -> str:
        """Return why an epoch of some samples has no batch."""
        return (
            f"`deal(uneven='drop')` makes no batch of {counted(epoch.num_samples, 'sample')}: a global batch has "
            f"{epoch.full_size}."
        )

    def batch_size_of(self, num_ranks: int) -> int | None:
        """Return the number of samples in a batch of one rank; None if batches differ in size."""
        return None

    @abstractmethod
    def sizes(self, num_ranks: int) -> dict[str, Any]:
        """Return the sizes on which the batches depend, by name."""

    @abstractmethod
    def num_batches(self, source: Any, num_ranks: int) -> int:
        """Return the number of batches of a rank."""

    @abstractmethod
    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        """Return an epoch by its number."""

    def _once(self, read: Callable[[], Any]) -> Any:
        """Return the result of `read`, which is called only the first time."""
        if self._found is None:
            with choosing("deal"):
                self._found = Shared(read())
        return self._found.value

    def _key(self, seed: int, number: int) -> tuple[int, int] | None:
        return (seed, number) if self.is_shuffled else None


class EqualBatching(Batching):
    """Batches of equal size, of all samples in order, of a permutation, which takes no memory, or shard after shard."""

    _layout: Layout
    _num_batches: int | None
    _shards: ByShard | None = None

    def set_up(self, source: Any, arguments: Arguments) -> None:
        self._layout = Layout(arguments.batch_size, arguments.global_batch_size, arguments.uneven)
        self._num_batches = number = arguments.num_batches
        if number is not None:
            self._num_batches = check_count("num_batches", number)
            self.fixed_by = "deal(num_batches=...)"
            if arguments.uneven != "keep":
                raise ValueError(
                    "`uneven` has no effect with `num_batches`, because no batch is short then. Remove `uneven`."
                )
        if not isinstance(arguments.shuffle, bool):
            self._shards = ByShard() if arguments.shuffle == "shards" else arguments.shuffle

    has_quick_length = True

    def prepare(self, source: Any, num_ranks: int) -> Any:
        return len(source) if self._shards is None else self._in_shards(source, 0)

    def source_fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        by_shard = () if self._shards is None else (self._shards.window, self._in_shards(source, 0))
        return by_shard if self._num_batches is None else (*by_shard, ("num_batches", self._num_batches))

    def batch_size_of(self, num_ranks: int) -> int | None:
        return self._layout.batch_size_of(num_ranks)

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        return self._layout.sizes(num_ranks)

    def num_batches(self, source: Any, num_ranks: int) -> int:
        if self._num_batches is not None:
            return self._num_batches
        return self._layout.num_batches(len(source), num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        if self._num_batches is None:
            order = self.pass_order(source, seed, number) if self.is_shuffled else None
            return EqualEpoch(len(source), self._layout, sharding, order)
        size = len(source)
        num_samples = self._num_batches * self._layout.size_of(sharding.num_ranks)
        if not size:
            raise ChainError("`deal(num_batches=...)` needs samples, but its source is empty. Is a filter too strict?")
        self.fix(source)
        order_of = partial(self.pass_order, source, seed) if self.is_shuffled else None
        return EqualEpoch(num_samples, self._layout, sharding, ContinuedOrder(size, number * num_samples, order_of))

    def pass_order(self, source: Any, seed: int, number: int) -> Permutation | WindowedOrder:
        """Return the order of a shuffled pass over the source."""
        if self._shards is None:
            return Permutation(len(source), key=hash_key("order", seed, number))
        shards = self._in_shards(source, 0 if self.is_fixed else number)
        return WindowedOrder(shards, self._shards.window, (seed, number))

    def _in_shards(self, source: Any, epoch: int) -> ShardOrder:
        if epoch and isinstance(source, MapPipe) and redrawing_name(source) is not None:
            with planning(epoch):  # whose samples may lie in other shards
                return read_shards(source)
        found: ShardOrder = self._once(lambda: read_shards(source))
        return found


class EqualEpoch(Epoch):
    """An epoch of an indexed source in batches of equal size.

    Args:
        num_samples: The length of the source.
        layout: How to divide the epoch into batches.
        sharding: The rank and worker, and their numbers.
        order: A map from ordinals to positions, `order[ordinals]`; None if positions equal ordinals.
    """

    def __init__(self, num_samples: int, layout: Layout, sharding: Sharding, order: Any = None) -> None:
        self.num_samples = num_samples
        self._layout = layout
        self._sharding = sharding
        self._order = order
        self._blocks: deque[dict[int, NDArray[Any]]] = deque(maxlen=4)  # some batches are prefetched
        self.num_batches = layout.num_batches(num_samples, sharding.num_ranks)
        self.full_size = layout.size_of(sharding.num_ranks)
        self.shortest = self.num_batches - 1

    def ordinals(self, batch: int) -> range:
        return self._layout.ordinals(batch, self.num_samples, self._sharding)

    def positions(self, batch: int) -> NDArray[Any]:
        block = next((block for block in self._blocks if batch in block), None)
        if block is None:
            block = self._block(batch)
            self._blocks.append(block)
        return block[batch]

    def _block(self, first: int) -> dict[int, NDArray[Any]]:
        """Return the positions of a batch and of this worker's next batches.

        They are computed together, because a thousand positions in a permutation of ten million take only twice as long
        as 32.
        """
        number = max(_BLOCK * self._sharding.num_ranks // self.full_size, 1)
        batches = range(first, self.num_batches, self._sharding.num_workers)[:number]
        parts = [self.ordinals(batch) for batch in batches]
        places = np.concatenate([np.arange(part.start, part.stop) for part in parts]) % self.num_samples
        positions = places if self._order is None else self._order[places]
        ends = np.cumsum([len(part) for part in parts])
        return dict(zip(batches, np.split(positions, ends[:-1]), strict=True))

    def windows(self, batch: int) -> Iterator[NDArray[Any]]:
        size = self.full_size
        if self._order is None:
            ranks = self._sharding.ranks_here()
            num_ranks = self._sharding.num_ranks
            for positions in ranges(batch * size, self.num_samples):
                place = positions % size
                is_here = (place >= size * ranks.start // num_ranks) & (place < size * ranks.stop // num_ranks)
                yield positions[is_here]
        elif isinstance(self._order, WindowedOrder | ContinuedOrder):
            yield from self._order.by_shard(batch * size)


class ContinuedOrder:
    """The order of an epoch that begins where the previous one has ended, in an endless sequence of passes.

    Each pass holds every sample once, in an order of its own.

    Args:
        size: The number of samples of a pass, at least 1.
        start: The number of samples of all earlier epochs.
        order_of: A function that returns the order of a pass by its number; None where positions are in order.
    """

    def __init__(self, size: int, start: int, order_of: Callable[[int], Any] | None) -> None:
        self._size = size
        self._start = start
        self._order_of = order_of
        self._passes: dict[int, Any] = {}

    def __getitem__(self, ordinals: NDArray[Any]) -> NDArray[Any]:
        """Return the positions of samples by their ordinals in the epoch."""
        passes, places = np.divmod(self._start + np.asarray(ordinals, dtype=np.int64), self._size)
        if self._order_of is None:
            return places
        positions = np.empty_like(places)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            positions[chosen] = self._pass(number)[places[chosen]]
        return positions

    def by_shard(self, first: int) -> Iterator[NDArray[Any]]:
        """Yield positions as `WindowedOrder.by_shard` does, endlessly: the next epoch continues there."""
        begin, place = divmod(self._start + first, self._size)
        for number in count(begin):
            order = self._pass(number)
            if not isinstance(order, WindowedOrder):
                return
            yield from order.by_shard(place)
            place = 0

    def _pass(self, number: int) -> Any:
        if self._order_of is None:
            return None
        if number not in self._passes:
            self._passes = {key: kept for key, kept in self._passes.items() if key >= number - 1}
            self._passes[number] = self._order_of(number)
        return self._passes[number]
