"""`IterPipe`, the base class of streams of samples, and functions with which loaders seed the streams of a chain."""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from torch.utils.data import get_worker_info

from kdpipes.core.callback import Callback, call_with_key
from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import ChainError, check_count
from kdpipes.core.fingerprint import stock_fingerprint
from kdpipes.core.operation import finished
from kdpipes.core.pipe import Pipe
from kdpipes.core.randomness import (
    EpochCounter,
    SampleKey,
    current_epoch,
    hash_key,
    is_replaying,
    items_with,
    with_stream_keys,
)
from kdpipes.core.registry import note_methods, note_name, pipe_name
from kdpipes.core.sample import Sample, as_sample
from kdpipes.core.stock import Seeded, has_own_seed, is_of_torchdata, shards
from kdpipes.core.torch_pipes import Collator, IterDataPipe, Mapper, ShardingFilter, _SnapshotState
from kdpipes.core.tracebacks import with_short_tracebacks

if TYPE_CHECKING:
    from kdpipes._fluent import IterChain
else:
    IterChain = IterDataPipe

Item = TypeVar("Item")
_open = weakref.WeakSet[Any]()  # open iterators of streams
Stream = TypeVar("Stream", bound="IterPipe")
_STANDING = (
    *("_epochs", "_renewed", "_snapshot_state", "_number_of_samples_yielded", "_valid_iterator_id"),
    "_fast_forward_iterator",
)


@atexit.register
def _close_streams() -> None:
    """Close open iterators while the modules that their cleanup needs still exist."""
    for iterator in list(_open):
        with suppress(ValueError):  # another thread is running it
            iterator.close()


class Streaming(Pipe, Generic[Item]):
    """A stream whose `__iter__` is not wrapped by torch's metaclass, so that errors keep their type and arguments."""

    for_users: ClassVar[tuple[str, ...]] = ("set_epoch",)

    def iterate(self) -> Iterator[Item]:
        """Yield the items of one epoch."""
        raise TypeError(f"{type(self).__name__} must implement `iterate`.")

    def __iter__(self) -> Iterator[Item]:
        # torch's `_simple_graph_snapshot_restoration` puts an iterator, already advanced, into this attribute.
        forwarded: Iterator[Item] | None = self.__dict__.pop("_fast_forward_iterator", None)
        if forwarded is None:
            items = self.iterate()
            if not isinstance(items, Generator):  # iterators of the loader have more methods than generators
                return items
            _open.add(shortening := with_short_tracebacks(items))
            return shortening
        self._snapshot_state = _SnapshotState.Iterating
        return forwarded

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"`{pipe_name(self)}` is a stream and cannot be indexed. `next(iter(pipe))` returns its first item; "
            "`kdp.open_shards` opens shards as an indexed source."
        )

    def __bool__(self) -> bool:
        return True  # without a length, too

    def map(self, fn: Callable[..., Any], input_col: Any = None, output_col: Any = None) -> MapperIterDataPipe:
        """Apply a function to each item, like torch's `.map`, but with the same random numbers in any worker.

        After `deal` and one-to-one pipes (`collate_samples`, `mixup`, `map`, ...), the random numbers depend on the
        seed of `deal`, the epoch, the batch and this operation. Before `deal`, they depend on the position in the
        stream. The global generators of `random`, NumPy and torch are seeded for each call and restored afterwards, and
        threads take turns. A function with a parameter `rng` gets a `numpy.random.Generator` instead; for a function
        with an attribute `is_random = False`, nothing is seeded. After any other built-in torch pipe, and after
        `to_device`, `.map` is torch's own and seeds nothing.

        Args:
            fn: The function.
            input_col: The index or key, or several, of the part of an item that `fn` gets; None passes the whole item.
            output_col: The index or key under which the result is stored; None replaces the part that `input_col`
                names.
        """
        return MapperIterDataPipe(self, fn, input_col, output_col)

    def collate(self, *args: Any, **kwargs: Any) -> CollatorIterDataPipe:
        """Apply a collate function to each item: torch's `.collate`, seeded like `map`."""
        return CollatorIterDataPipe(self, *args, **kwargs)


class MapperIterDataPipe(Streaming[Any], Mapper):  # type: ignore[type-arg]
    """Torch's `Mapper`, whose function draws the same random numbers in any worker; see `Streaming.map`."""

    def __init__(self, datapipe: Any, fn: Callable[..., Any], input_col: Any = None, output_col: Any = None) -> None:
        called = Callback("fn", fn, check=False)
        is_given = "rng" in called.parameters  # bind `rng` for torch's check of the signature, which does not expect it
        Mapper.__init__(self, datapipe, functools.partial(fn, rng=None) if is_given else fn, input_col, output_col)
        self._note(called)

    def _note(self, called: Callback) -> None:
        self.fn = called.function
        self._called = called
        number = len(Chain.of(self).of_type(Mapper))
        self._place = "map" if number == 1 else f"map_{number}"

    def iterate(self) -> Iterator[Any]:
        key_of = self._numbering()
        applied = SimpleNamespace(input_col=self.input_col, output_col=self.output_col)
        for number, data in enumerate(self.datapipe):
            sample_key = key_of(number)
            applied.fn = self.fn
            if sample_key is not None:
                applied.fn = functools.partial(call_with_key, self._called, sample_key, self._place)
            # `_apply_fn` reads only these three attributes.
            yield type(self)._apply_fn(applied, data)  # type: ignore[arg-type,no-untyped-call]

    def fingerprint(self) -> Any:
        return stock_fingerprint(self)

    def _numbering(self) -> Callable[[int], SampleKey | None]:
        """Return a function that returns the `SampleKey` of the n-th item of an epoch."""
        chain = Chain.of(self)
        dealer = chain.numbering_deal()
        if dealer is not None:
            return lambda number: dealer.batch_key()
        stream = next(iter(chain.of_type(IterPipe)), None)
        stride, offset = _part_of(self)
        begun: list[tuple[int, int]] = []

        def key_of(number: int) -> SampleKey | None:
            if not begun:  # pipes upstream know their epoch only after they have yielded an item
                opened = current_epoch() or (None if stream is None else stream.this_epoch())
                begun.extend([] if opened is None else [opened])
            return SampleKey(*begun[0], number * stride + offset) if begun else None

        return key_of


class CollatorIterDataPipe(MapperIterDataPipe, Collator):
    """Torch's `Collator`, whose function draws the same random numbers in any worker; see `Streaming.map`."""

    def __init__(self, datapipe: Any, *args: Any, **kwargs: Any) -> None:
        Collator.__init__(self, datapipe, *args, **kwargs)
        self._note(Callback("collate_fn", self.fn, check=False))


note_name(MapperIterDataPipe, "map")
note_name(CollatorIterDataPipe, "collate")


class IterPipe(Streaming[Any], IterChain):
    """A stream of samples. A subclass implements `samples`, which yields them in order.

    Without `deal`, sample n of iteration k has ordinal n in epoch k.
    """

    computed: ClassVar[tuple[str, ...]] = _STANDING

    def __new__(cls: type[Stream], *args: Any, **kwargs: Any) -> Stream:
        # This is not in `__init__`, so that users' pipes work without `super().__init__()`.
        made = super().__new__(cls, *args, **kwargs)
        made._epochs = EpochCounter()
        made._renewed = None
        return made

    _epochs: EpochCounter
    _renewed: tuple[int, int] | None

    def __len__(self) -> int:
        raise TypeError(
            f"`{pipe_name(self)}` is a stream and has no length. `kdp.open_shards` opens shards as an indexed source, "
            "and `deal(num_batches=...)` sets the length of an epoch."
        )

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of one epoch, new objects each time."""
        raise TypeError(f"{type(self).__name__} must implement `samples`.")

    def iterate(self) -> Iterator[Any]:
        self._check_sharding()
        if is_replaying():
            yield from (finished(self, sample) for sample in self.samples())
            return
        epoch = self._epochs.begin()
        seed = self._renewed[0] if self._renewed is not None else 0
        stride, offset = _part_of(self)
        for number, sample in enumerate(with_stream_keys(self.samples(), seed, epoch)):
            sample.bind(SampleKey(seed, epoch, number * stride + offset))
            yield finished(self, sample)

    def set_seed(self, seed: int) -> IterPipe:
        """Count an epoch: loaders call this at its start. `seed` is ignored in favour of that of `deal`."""
        self._epochs.seeded()
        return self

    def renew(self, seed: int, epoch: int) -> None:
        """Set the seed and the number of the next epoch."""
        self._renewed = seed, epoch
        self._epochs.set(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0."""
        self._epochs.set(check_count("epoch", epoch, minimum=0))

    def next_epoch(self) -> int:
        """Return the number of the next epoch."""
        return self._epochs.peek()

    def this_epoch(self) -> tuple[int, int]:
        """Return the seed and the number of the current epoch."""
        return self._renewed[0] if self._renewed is not None else 0, self._epochs.peek() - 1

    def column(self, name: str) -> Any:
        """Raise TypeError, because a stream has no columns."""
        raise TypeError(
            f"`{pipe_name(self)}` is a stream and has no columns. `kdp.open_shards` opens shards as an indexed source."
        )

    def _check_sharding(self) -> None:
        """Raise ChainError if every worker of torch's DataLoader would yield every sample."""
        info = get_worker_info()
        if info is None or info.num_workers < 2:
            return
        chain = Chain.of(info.dataset).pipes if isinstance(info.dataset, IterDataPipe) else []
        if self in chain and not any(map(shards, chain)):
            raise ChainError(
                f"Each of the {info.num_workers} workers would yield every sample of `{pipe_name(self)}`. "
                "End the chain with `.deal(batch_size=...)`, or put `.sharding_filter()` after its source."
            )


def samples_of(source_datapipe: Any, name: str) -> Iterator[Sample]:
    """Yield the samples of a stream, which may be a stock pipe, for the pipe `name`."""
    if isinstance(source_datapipe, IterPipe):
        return source_datapipe.samples()
    return (as_sample(item, index, name) for index, item in enumerate(source_datapipe))


def _part_of(pipe: Any) -> tuple[int, int]:
    """Return the stride and the offset of the ordinals that a sharding filter upstream assigns to this worker."""
    sharder = next(iter(Chain.of(pipe).of_type(ShardingFilter)), None)
    return (1, 0) if sharder is None else (sharder.num_of_instances, sharder.instance_id)


def seed_streams(
    nodes: Iterable[Node], seed: int, epoch: int, *, place: int = 0, round: int = 0, keeps_own_seeds: bool = False
) -> None:
    """Seed streams, and all other random pipes in a chain, for an epoch.

    Without this, stock pipes such as `shuffle` would draw different random numbers in each worker, so that samples
    would be lost and duplicated.

    Args:
        nodes: The nodes of the chain, starting at its end.
        seed: The seed of all epochs.
        epoch: The epoch number, from 0.
        place: The number of nodes at the end of the chain that `nodes` omits.
        round: The number of times that the streams have been read in this epoch.
        keeps_own_seeds: Whether to leave out stock pipes with a seed of their own, `.shuffle().set_seed(1)`.
    """
    for node in nodes:
        pipe = node.pipe
        if isinstance(pipe, IterPipe):
            pipe.renew(seed, epoch)
        elif not (keeps_own_seeds and has_own_seed(pipe)):
            number = int.from_bytes(hash_key(seed, epoch, "upstream", place, round)[:7], "little")
            if isinstance(pipe, Seeded):
                pipe.set_seed(number)
            elif is_of_torchdata(pipe, "SampleMultiplexer"):  # it has no `set_seed`, and would keep its state
                pipe.random.seed(number)
        place += not node.traits.is_transparent  # a state taken without a cache must fit a chain with one


class Tolerance(NamedTuple):
    """The errors that `.on_error(...)` downstream tolerates.

    Args:
        gives_up: A function that is called if the rest of a shard cannot be read, with the shard's name in the keys of
            samples, the number of samples of the stream so far, and the error. It returns whether to skip the rest.
        keeps_failures: Whether a sample that cannot be made is passed on with its error, `Sample.failure`.
    """

    gives_up: Callable[[str, int, Exception], bool]
    keeps_failures: bool = False


_tolerance: ContextVar[Tolerance | None] = ContextVar("kdpipes_tolerance", default=None)
tolerance = _tolerance.get


def with_tolerance(tolerance: Tolerance, items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of a stream, with errors of samples and shards treated as `tolerance` says."""
    return items_with(_tolerance, tolerance, items)


note_methods(IterPipe, flavour="iter")
