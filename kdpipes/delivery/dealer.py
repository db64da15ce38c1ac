"""`Dealer`, the base class of both flavours of `deal`: epochs, sharding, state and skipped samples."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch.utils.data import get_worker_info

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, DataError, add_note, check_choice, check_count, check_seed, must_be
from kdpipes.core.iter_pipe import IterPipe, Streaming, seed_streams
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.on_use import call_slot
from kdpipes.core.operation import items_of
from kdpipes.core.pipe import Pipe, form_of
from kdpipes.core.randomness import RowKey, SampleKey, using_key
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample import Block, Sample
from kdpipes.core.stock import Seeded, Sharded, is_of_torchdata, shards, upstream_of
from kdpipes.core.torch_pipes import SHARDING_PRIORITIES, Batcher, IndexedBatcher, IterDataPipe
from kdpipes.core.traits import Traits
from kdpipes.delivery.batching import Batching
from kdpipes.delivery.by_shard import ByShard, Shuffle
from kdpipes.delivery.clock import EpochClock, Position
from kdpipes.delivery.lanes import Cursors
from kdpipes.delivery.layout import NEW_LOADER, Layout, Ranks, Sharding, check_ranks, group_ranks, ranks_now
from kdpipes.delivery.skipping import LEFT_OUT, Skip, SkipLimits, Skipper
from kdpipes.delivery.state import load_state, state_of

_STAMP = "stamp"
Batch = list[Any]
DealRanks = Literal["auto", 1]


@dataclass(frozen=True)
class Dealt:
    """The description of a batch before its items are made.

    Args:
        number: The number of the batch among those of this rank.
        num_samples: The number of its samples.
        cursors: The cursors of its lanes after the batch; empty if pipes upstream buffer samples.
        hashes: The hashes of the samples of a stream, 8 bytes each, added as they are made; see `hash_of_sample`.
    """

    number: int
    num_samples: int
    cursors: Cursors = ()
    hashes: bytearray = field(default_factory=bytearray)


class Monitor:
    """Follows the batches that `deal` makes. This base class logs skipped samples, and does not limit their number.

    Attributes:
        banned: The samples to skip without loading them: the reason for each key.
        seen: Called with each sample before it is loaded.
        is_worker: Whether this is a worker of a kdpipes loader, which merges the batches of lanes.
    """

    banned: Mapping[str, str] = MappingProxyType({})
    seen: Callable[[Sample], None] | None = None
    is_worker = False

    def begin_batch(self, dealt: Dealt) -> None:
        """Called before a batch is made."""

    def report_turn(self, number: int, lanes: Mapping[int, tuple[bool, Any]]) -> None:
        """Called before the batches of each round of the lanes, if other ranks wait for this one.

        Args:
            number: The number of the first batch of the round.
            lanes: For each lane, whether it has samples for the round, and its cursor before the round.
        """

    def skip(self, skip: Skip) -> None:
        """Called for each skipped sample or shard."""
        skip.log()


@dataclass
class Run:
    """The state of one iteration of `deal`.

    Args:
        start: The position at which it begins.
        sharding: The rank and worker for which it makes batches.
        skipper: Skips samples that fail, if the chain has `on_error`.
        limits: The limits of `on_error`, unless a loader checks them.
        batch: The number of the batch being read.
        key: The random key of the batch yielded last.
        is_empty: Whether no batch with items has been yielded so far.
    """

    start: Position
    sharding: Sharding
    skipper: Skipper | None = None
    limits: SkipLimits | None = None
    batch: int = 0
    key: SampleKey = field(default_factory=SampleKey)
    is_empty: bool = True


class Resumable(Streaming[Any]):
    """A pipe with `deal` at or before it: trainers set its epoch, and save and load its state."""

    for_users: ClassVar[tuple[str, ...]] = ("load_state_dict", "set_epoch", "state_dict")

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0."""
        for dealer in Chain.of(self).of_type(Dealer):
            dealer.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the next epoch and batch as a small dict that can be saved as JSON.

        In a worker of torchdata's StatefulDataLoader, this is the state of that worker's part.

        Raises:
            ChainError: A pipe after `deal` may hold batches back or change their number.
        """
        return state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume the next iteration where `state_dict` was taken. Later iterations are the epochs after that.

        Args:
            state_dict: The return value of `state_dict`.
            strict: Whether the state of another chain raises an error; if False, it issues a warning.

        Raises:
            ValueError: The state belongs to another chain, and `strict` is True.
        """
        load_state(self, state_dict, strict=strict)


class Dealer(Resumable):
    """The common base of both flavours: batching, epochs, and this copy's share of the batches."""

    source: Any
    traits = Traits(role="deal", gives="batches")
    is_for_all_ranks = False  # whether every rank gets all batches
    has_unique_keys = False  # whether two samples of an epoch that have the same key are a mistake
    has_lanes = False  # whether workers and ranks read parts of a stream, not all of it
    _num_dropped = 0  # pipes at the end of `source` that this copy leaves out
    reads_ahead = True  # whether remote sources prefetch the next batches

    def _configure(self, sizing: Layout | Batching, shuffle: Shuffle, seed: int, ranks: DealRanks) -> None:
        call_slot("hold_dealt_chains")
        self.traits = replace(self.traits, item_form=form_of(self.source))
        self._sizing, self.uneven = sizing, sizing.uneven  # what happens to a short last batch
        if isinstance(ranks, bool) or ranks not in ("auto", 1):
            hint = "1 gives every rank all batches; another library may then split them between ranks."
            raise ValueError(must_be("ranks", '"auto" or 1', ranks, hint))
        self.is_for_all_ranks = ranks == 1
        if not isinstance(shuffle, bool | ByShard):
            check_choice("shuffle", shuffle, (True, False, "shards"))
        self._shuffle: Shuffle = "shards" if isinstance(shuffle, ByShard) else shuffle
        self._seed = check_seed(seed)
        self.clock = EpochClock()
        self.known_pipes: list[str] | None = None  # the fingerprints, cached by `state_dict`
        self.monitor: Monitor | None = None  # a worker that follows the iteration
        self._run = Run(Position(), Sharding())  # the last one
        self._sharding = Sharding()  # for the last epoch begun
        self._is_rank_fixed = False
        self._is_in_group = False  # if the rank is fixed: whether ranks of a process group wait for each other
        self._dealt_by_workers: tuple[int, Ranks] | None = None  # process id, and the ranks of its workers
        if isinstance(self.source, Batcher | IndexedBatcher):
            raise ChainError("`.deal()` takes samples, but `.batch()` upstream yields batches. Remove `.batch()`.")
        sharder = next(filter(shards, Chain.of(self.source).pipes), None)
        if sharder is not None:
            raise ChainError(
                f"`.deal()` shards the chain, but `{pipe_name(sharder)}` upstream shards it as well, and samples would "
                "be lost. Remove it."
            )
        # From the second pass on, random stock pipes are not seeded.
        for cycler in Chain.of(self.source).pipes:
            if is_of_torchdata(cycler, "Cycler") and any(
                isinstance(pipe, Seeded) and not isinstance(pipe, IterPipe) for pipe in Chain.of(cycler).pipes
            ):
                raise ChainError(
                    "`.cycle()` reads a random pipe again, in a different order in each worker. Samples would be lost "
                    "and duplicated. Use `.repeat_until(repetitions=...)` instead."
                )

    def apply_sharding(
        self, num_of_instances: int, instance_id: int, sharding_group: Any = SHARDING_PRIORITIES.DEFAULT
    ) -> None:
        """Called by loaders to set the rank or worker number of this copy, and their total number."""
        check_count("num_of_instances", num_of_instances)
        if sharding_group == SHARDING_PRIORITIES.DISTRIBUTED and self.is_for_all_ranks:
            return
        num_ranks = 1
        if sharding_group == SHARDING_PRIORITIES.DEFAULT:
            # torch's DataLoader passes ranks times workers, but its spawned workers do not know the process group.
            info = get_worker_info()
            group = group_ranks() or Ranks()
            num_ranks = group.num_ranks if info is None else max(num_of_instances // info.num_workers, 1)
        applied = self._sharding.applied(num_of_instances, instance_id, sharding_group, num_ranks)
        if sharding_group == SHARDING_PRIORITIES.DISTRIBUTED:
            self._is_rank_fixed = True
            self._is_in_group = group_ranks() is not None
        elif self.is_for_all_ranks or self._is_rank_fixed:
            applied = replace(applied, rank=self._sharding.rank, num_ranks=self._sharding.num_ranks)
        elif sharding_group == SHARDING_PRIORITIES.DEFAULT:
            self._is_rank_fixed = self._is_in_group = info is not None and num_ranks > 1
        self._sharding = applied

    def sharding(self) -> Sharding:
        """Return the rank and worker of this copy. The rank is the one fixed by a loader, otherwise the current one."""
        if self._is_rank_fixed or self.is_for_all_ranks:
            return self._sharding
        rank, num_ranks = ranks_now()
        return replace(self._sharding, rank=rank, num_ranks=num_ranks)

    def ranks_of(self, ranks: Ranks) -> Ranks:
        """Return the ranks that share the batches of an epoch, where `ranks` were the current ones when it began."""
        return self._sharding.ranks() if self._is_rank_fixed or self.is_for_all_ranks else ranks

    def fix_rank(self) -> None:
        """Fix the current rank for this pipe and its copies in other processes."""
        self._sharding = self._checked_sharding()
        self._is_rank_fixed = True
        self._is_in_group = group_ranks() is not None

    def has_waiting_ranks(self) -> bool:
        """Return whether other ranks of a process group wait for this one's batches."""
        is_in_group = self._is_in_group if self._is_rank_fixed else group_ranks() is not None
        return is_in_group and self.sharding().num_ranks > 1

    def _checked_sharding(self) -> Sharding:
        """Return the sharding for a new epoch; raise ChainError if another library splits the batches as well."""
        sharding = self.sharding()
        info = get_worker_info()
        if sharding.num_ranks > 1 and call_slot("is_shared_out_by_accelerate", self):
            raise ChainError(
                f"Accelerate splits the batches of this chain between {sharding.num_ranks} ranks, but `deal` splits "
                "them between ranks as well, so batches would be lost. Use `.deal(..., ranks=1)` with "
                "`accelerator.prepare(DataLoader(...))` and transformers' Trainer; or use `kdp.Loader(chain)`, which "
                "reads only this rank's part."
            )
        if info is not None and info.num_workers > 1 and sharding.num_workers == 1 and holds(info.dataset, self):
            raise ChainError(
                f"Each of the {info.num_workers} workers would yield every batch: torch's DataLoader shards chains, "
                f"but here a {type(info.dataset).__name__} wraps the chain. Use `DataLoader(chain, batch_size=None)`, "
                "`kdp.Loader(chain)` or `num_workers=0`."
            )
        return sharding

    def set_shuffle(self, shuffle: bool) -> None:
        """Called by DataLoader with its argument `shuffle`. True is an error, because `deal` defines the order."""
        # Without this method, torch would append a `.shuffle()` of whole batches.
        if shuffle:
            hint = "`deal` defines the order: use `deal(shuffle=True)`."
            raise ValueError(must_be("shuffle", "None", shuffle, hint))

    def set_seed(self, seed: int) -> Any:
        """Called by loaders at the start of an epoch. The order still comes from `deal(seed=...)`."""
        self.clock.seeded()
        self._prepare()
        # Persistent workers of torch's DataLoader cannot adapt to other ranks.
        ranks = self._checked_sharding().ranks()
        process = os.getpid()
        if self._dealt_by_workers is not None and self._dealt_by_workers[0] == process:
            check_ranks(self._dealt_by_workers[1], ranks, NEW_LOADER)
        self._dealt_by_workers = process, ranks
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0. A state loaded for that epoch stays valid."""
        self.clock.choose(check_count("epoch", epoch, minimum=0))

    def seed_epoch(self, epoch: int) -> None:
        """Seed the random pipes upstream for an epoch."""
        seed_streams(reversed(Chain.of(self.source)), self._seed, epoch, place=self._num_dropped)

    def close_kept(self) -> None:
        """Close the files kept open between epochs."""

    def next_epoch(self) -> int:
        """Return the number of the next iteration."""
        return self.clock.peek()

    def stop_listening(self) -> None:
        """Drop the monitor of an epoch and all references to it, because a worker refers to this chain."""
        self.monitor = None
        self._run = Run(Position(), Sharding())

    def whole_samples(
        self, epoch: int, batch: int, *, seed: int | None = None, seen: Callable[[Sample], None] | None = None
    ) -> Batch | None:
        """Return the samples of one batch before `select`; None if the epoch has no such batch."""
        number, samples = next(self.whole_batches(epoch, seed=seed, seen=seen, first=batch), (None, None))
        return samples if number == batch else None

    def whole_batches(
        self, epoch: int, *, seed: int | None = None, seen: Callable[[Sample], None] | None = None, first: int = 0
    ) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of an epoch from `first` on, as lists of samples before `select`, with their numbers.

        `seed` replaces the dealer's, and `seen` is called with each sample before it is loaded.
        """
        dealer = copy.copy(self)
        is_selected = isinstance(self.source, Pipe) and self.source.traits.gives == "items"
        dealer.source = self.source.source if is_selected else self.source
        dealer.clock = EpochClock()
        dealer._num_dropped = int(is_selected)
        dealer._seed = self._seed if seed is None else seed
        dealer.monitor = Monitor()
        dealer.monitor.seen = seen
        dealer.clock.resume_at(Position(epoch, first))
        for samples in dealer.iterate():
            if samples and not isinstance(samples[0], Sample):
                raise ChainError(
                    f"`deal` takes samples, but `{pipe_name(dealer.source)}` yields {type(samples[0]).__name__}. Put "
                    "stock pipes before `.select()`."
                )
            yield dealer.clock.position.number - 1, samples

    def iterate(self) -> Iterator[Batch]:
        run = self._run = self._begin()
        with closing(self.batches_of(run)) as batches:
            for dealt, make in batches:
                if items := self._batch(run, dealt, make):
                    yield items
        self.clock.end(is_part=get_worker_info() is not None)  # in torch's DataLoader
        is_only_part = run.sharding.num_ranks * run.sharding.num_workers == 1
        if run.limits is not None and run.is_empty and is_only_part:  # otherwise, this part may have only bad samples
            run.limits.end()

    def batches_of(self, run: Run) -> Generator[tuple[Dealt, Callable[[], Iterable[Any]]]]:
        """Yield the batches of this copy, each with a function that makes its items."""
        raise TypeError(f"{type(self).__name__} must implement `batches_of`.")

    def _begin(self) -> Run:
        self._sharding = self._checked_sharding()
        self._dealt_by_workers = None
        start = self.clock.start()
        sharding = self._sharding
        monitor = self.monitor
        run = Run(start, sharding, batch=start.number)
        handler = Chain.of(self).error_handler()
        if handler is not None:
            if monitor is None:
                monitor = Monitor()
                run.limits = SkipLimits(
                    handler,
                    sharding.num_ranks * sharding.num_workers,
                    start.number,
                    rejects_twins=self.has_unique_keys,
                )
            run.skipper = Skipper(handler, monitor, run.limits, is_indexed=isinstance(self.source, MapPipe))
        return run

    def sizes(self) -> dict[str, Any]:
        """Return the sizes on which the batches depend, besides the fingerprint."""
        return self._sizing.sizes(self.sharding().num_ranks)

    def num_ranks_in(self, state: Mapping[str, Any]) -> int:
        """Return the number of ranks of the run that a state comes from; the current one if the state does not say."""
        if "num_ranks" in state:
            return check_count("state['num_ranks']", state["num_ranks"])
        alone = self._sizing.sizes(1).get("global_batch_size")
        together = state.get("global_batch_size")
        if alone and together and together != alone:
            return int(together // alone)
        return self.sharding().num_ranks

    def row_size(self) -> int | None:
        """Return the number of tokens in a row of packed samples; None if samples are not packed."""
        return None

    def batch_size(self) -> int | None:
        """Return the number of samples in a full batch of this rank; None if batches differ in size."""
        return self._sizing.batch_size_of(self.sharding().num_ranks)

    def __getstate__(self) -> dict[str, Any]:
        if IterDataPipe.getstate_hook is not None:
            state: dict[str, Any] = IterDataPipe.getstate_hook(self.__dict__)
            return state
        self._prepare()
        return {**self.__dict__, "_run": Run(Position(), Sharding()), _STAMP: call_slot("stamp")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        call_slot("hold_dealt_chains")  # for a process that has built no chain
        self.__dict__.update({name: value for name, value in state.items() if name != _STAMP})
        if _STAMP in state:
            call_slot("check_stamp", state[_STAMP])

    def _prepare(self) -> None:
        """Compute values that all copies of the chain need, before it is copied."""

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch has a different order."""
        return bool(self._shuffle)

    def batch_key(self) -> SampleKey:
        """Return the random key of the batch yielded last."""
        return self._run.key

    def _batch(self, run: Run, dealt: Dealt, make: Callable[[], Iterable[Any]]) -> Batch:
        """Return the items that `make` returns for a batch, without skipped ones."""
        if self.monitor is not None:
            self.monitor.begin_batch(dealt)
        sharding = run.sharding
        now = self.sharding()
        batch = dealt.number
        if now is not sharding:  # the rank is not fixed
            check_ranks(sharding.ranks(), now.ranks())
        run.key = SampleKey(self._seed, run.start.epoch, batch * sharding.num_ranks + sharding.rank)
        try:
            items = [item for item in make() if item is not LEFT_OUT]
            if not items and sharding.num_ranks > 1:
                raise DataError(
                    f"All samples of batch {batch} failed (see the log). Skipping the batch would make the other ranks "
                    "wait forever. Use larger batches, or remove the samples from the plan."
                )
        except BaseException as error:
            add_note(error, f"kdpipes: while making batch {batch} of epoch {run.start.epoch} (seed {self._seed})")
            raise
        self.clock.note(run.start.epoch, batch + 1, dealt.cursors)
        run.is_empty = run.is_empty and not items
        return items


def item_of(run: Run, key: SampleKey, batch: int, fetch: Callable[[], Any], finish: Callable[[Any], Any]) -> Any:
    """Return `finish(fetch())`, or LEFT_OUT if that fails and `on_error` skips the sample."""
    if run.skipper is None:
        return finish(fetch())
    return run.skipper.make(key, batch, fetch, finish)


def items_at_once(blocks: Sequence[Block], source: Any, seed: int, epoch: int) -> dict[int, Any]:
    """Return the items of some blocks, keyed by their number in the batch."""
    items: dict[int, Any] = {}
    try:
        with using_key(RowKey(seed, epoch)):
            for block in blocks:
                items |= zip(block.places, items_of(source, block), strict=True)
    finally:
        for block in blocks:
            block.release()
    return items


def fix_ranks(chain: Any) -> Ranks | None:
    """Fix the current ranks in the sharding pipes of a chain, before it is copied to workers, and return the ranks.

    Returns None if the ranks do not matter, as with `deal(ranks=1)`.
    """
    ranks = ranks_now()
    is_for_all_ranks = False
    for pipe in Chain.of(chain).pipes:
        if isinstance(pipe, Dealer):
            pipe.fix_rank()
            is_for_all_ranks = is_for_all_ranks or pipe.is_for_all_ranks
        elif ranks.num_ranks > 1 and isinstance(pipe, Sharded):
            pipe.apply_sharding(ranks.num_ranks, ranks.rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return None if is_for_all_ranks else ranks


def holds(dataset: Any, pipe: Any) -> bool:
    """Return whether a dataset is a chain that contains `pipe`, or another library's wrapper of one."""
    return any(pipe in Chain.of(held) for held in upstream_of(dataset))
