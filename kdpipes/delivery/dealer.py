"""`Dealer`, the base class of both flavours of `deal`: epochs, sharding, state and skipped samples."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch.utils.data import get_worker_info

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, DataError, add_note, check_choice, check_count, check_seed, must_be
from kdpipes.core.graph import upstream_of
from kdpipes.core.iter_pipe import IterPipe, Streaming
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.on_use import call_slot
from kdpipes.core.pipe import Pipe, form_of
from kdpipes.core.randomness import EpochCounter, RowKey, SampleKey, using_key
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample import Block, Sample
from kdpipes.core.stock import Seeded, Sharded, is_of_torchdata, shards
from kdpipes.core.torch_pipes import SHARDING_PRIORITIES, Batcher, IndexedBatcher, IterDataPipe
from kdpipes.core.traits import ItemForm, Traits
from kdpipes.delivery.batching import Batching
from kdpipes.delivery.by_shard import ByShard, Shuffle
from kdpipes.delivery.lanes import Cursors, merged
from kdpipes.delivery.layout import NEW_LOADER, Layout, Ranks, Sharding, check_ranks, group_ranks, ranks_now
from kdpipes.delivery.skipping import LEFT_OUT, Skip, SkipLimits, Skipper
from kdpipes.delivery.state import load_state, state_of
from kdpipes.delivery.stored import check_stamp, stamp

_STAMP = "stamp"
Batch = list[Any]
DealRanks = Literal["auto", 1]


@dataclass(frozen=True)
class Dealt:
    """What is known of a batch before it is made.

    Args:
        number: Among those of this rank.
        num_samples: The number of its samples.
        cursors: Where the lanes that it was made of stand after it; empty where pipes upstream hold samples back.
        hashes: What identifies the samples of a stream, 8 bytes each, as they are made; see `hash_of_sample`.
    """

    number: int
    num_samples: int
    cursors: Cursors = ()
    hashes: bytearray = field(default_factory=bytearray)


class _Start(NamedTuple):
    """Where the next iteration begins, in the epoch of a state that was loaded; None means whichever comes next."""

    epoch: int | None = None
    batch: int = 0
    cursors: Cursors = ()


Listener = Callable[[Dealt], None]
TurnListener = Callable[[int, Mapping[int, tuple[bool, Any]]], None]


class Resumable(Streaming[Any]):
    """A pipe with `deal` at or before it: trainers set its epoch, and save and load its state."""

    for_users: ClassVar[tuple[str, ...]] = ("load_state_dict", "set_epoch", "state_dict")

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0."""
        for dealer in Chain.of(self).of_type(Dealer):
            dealer.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the batch that come next: small plain data, fit for JSON.

        In a worker of torchdata's StatefulDataLoader, this is the state of that worker's part.

        Raises:
            ChainError: A pipe after `deal` may hold batches back or change their number.
        """
        return state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume the next iteration where `state_dict` was taken; later iterations are the epochs after it.

        Args:
            state_dict: The return value of `state_dict`.
            strict: Whether the state of another chain is an error or only a warning.

        Raises:
            ValueError: The state belongs to another chain, and `strict` is True.
        """
        load_state(self, state_dict, strict=strict)


class Dealer(Resumable):
    """What both flavours share: the cut, the count of epochs, and which part of the batches is this copy's."""

    source: Any
    traits = Traits(role="deal", gives="batches")
    is_for_all_ranks = False  # whether every rank gets all batches
    has_lanes = False  # whether workers and ranks read parts of a stream, not all of it
    continues = False  # whether an epoch begins where the lanes of the previous one have ended
    reads_ahead = True  # whether remote sources prefetch the next batches

    def _configure(self, sizing: Layout | Batching, shuffle: Shuffle, seed: int, ranks: DealRanks) -> None:
        call_slot("hold_dealt_chains")
        self._sizing, self.uneven = sizing, sizing.uneven  # what happens to a short last batch
        if isinstance(ranks, bool) or ranks not in ("auto", 1):
            hint = "1 gives every rank all batches; another library may then split them between ranks."
            raise ValueError(must_be("ranks", '"auto" or 1', ranks, hint))
        self.is_for_all_ranks = ranks == 1
        if not isinstance(shuffle, bool | ByShard):
            check_choice("shuffle", shuffle, (True, False, "shards"))
        self._shuffle: Shuffle = "shards" if isinstance(shuffle, ByShard) else shuffle
        self._seed = check_seed(seed)
        self._epochs = EpochCounter()
        self._start = _Start()
        self._stands: tuple[int, int] | None = None  # the next epoch and batch; None before the epoch begins
        self._first_cursors: Cursors = ()  # where the current iteration began
        self._cursors: Cursors = ()  # after the last batch
        self.known_pipes: list[str] | None = None  # the fingerprints, which `state_dict` reads once
        self._listener: Listener | None = None
        self._report_turn: TurnListener | None = None
        self._told_of_skips: Callable[[Skip], None] | None = None
        self._banned: Mapping[str, str] = {}
        self._skipper: Skipper | None = None
        self._limits: SkipLimits | None = None  # what `on_error` allows, if no loader checks it
        self._is_empty = True  # whether the epoch has given no batch so far
        self._seen: Callable[[Sample], None] | None = None
        self._sharding = Sharding()  # for the last epoch begun
        self._is_rank_fixed = False
        self._is_in_group = False  # if the rank is fixed: whether ranks of a process group wait for each other
        self._dealt_by_workers: tuple[int, Ranks] | None = None  # process id, and the ranks of its workers
        self._batch_key = SampleKey()
        if isinstance(self.source, Batcher | IndexedBatcher):
            raise ChainError("`.deal()` takes samples, but `.batch()` upstream gives batches. Remove `.batch()`.")
        sharder = next(filter(shards, Chain.of(self.source).pipes), None)
        if sharder is not None:
            raise ChainError(
                f"`.deal()` shards, but `{pipe_name(sharder)}` upstream does so as well, and samples would be lost. "
                "Remove it."
            )
        # From the second round on, random stock pipes draw as they like.
        for cycler in Chain.of(self.source).pipes:
            if is_of_torchdata(cycler, "Cycler") and any(
                isinstance(pipe, Seeded) and not isinstance(pipe, IterPipe) for pipe in Chain.of(cycler).pipes
            ):
                raise ChainError(
                    "`.cycle()` reads a random pipe again, each worker in another order: samples would be lost and "
                    "duplicated. Use `.repeat_until(repetitions=...)` instead."
                )

    def item_form(self) -> ItemForm | None:
        return form_of(self.source)

    def apply_sharding(
        self, num_of_instances: int, instance_id: int, sharding_group: Any = SHARDING_PRIORITIES.DEFAULT
    ) -> None:
        """Called by loaders: which of how many ranks or workers this copy is."""
        check_count("num_of_instances", num_of_instances)
        if sharding_group == SHARDING_PRIORITIES.DISTRIBUTED and self.is_for_all_ranks:
            return
        num_ranks = 1
        if sharding_group == SHARDING_PRIORITIES.DEFAULT:
            # torch's DataLoader passes ranks times workers, but its spawned workers do not know the process group.
            info, group = get_worker_info(), group_ranks() or Ranks()
            num_ranks = group.num_ranks if info is None else max(num_of_instances // info.num_workers, 1)
        applied = self._sharding.applied(num_of_instances, instance_id, sharding_group, num_ranks)
        if sharding_group == SHARDING_PRIORITIES.DISTRIBUTED:
            self._is_rank_fixed, self._is_in_group = True, group_ranks() is not None
        elif self.is_for_all_ranks or self._is_rank_fixed:
            applied = replace(applied, rank=self._sharding.rank, num_ranks=self._sharding.num_ranks)
        elif sharding_group == SHARDING_PRIORITIES.DEFAULT:
            self._is_rank_fixed = self._is_in_group = info is not None and num_ranks > 1
        self._sharding = applied

    def sharding(self) -> Sharding:
        """Return the rank and worker of this copy: the rank that a loader has fixed, else the current one."""
        if self._is_rank_fixed or self.is_for_all_ranks:
            return self._sharding
        rank, num_ranks = ranks_now()
        return replace(self._sharding, rank=rank, num_ranks=num_ranks)

    def ranks_of(self, ranks: Ranks) -> Ranks:
        """Return the ranks to which the batches of an epoch were dealt that began with `ranks`."""
        return self._sharding.ranks() if self._is_rank_fixed or self.is_for_all_ranks else ranks

    def fix_rank(self) -> None:
        """Fix the current rank, also for copies of this pipe in other processes."""
        self._sharding = self._checked_sharding()
        self._is_rank_fixed, self._is_in_group = True, group_ranks() is not None

    def has_waiting_ranks(self) -> bool:
        """Return whether other ranks of a process group wait for this one's batches."""
        is_in_group = self._is_in_group if self._is_rank_fixed else group_ranks() is not None
        return is_in_group and self.sharding().num_ranks > 1

    def _checked_sharding(self) -> Sharding:
        """Return the sharding of the epoch that begins; raise ChainError if another library splits batches as well."""
        sharding, info = self.sharding(), get_worker_info()
        if sharding.num_ranks > 1 and call_slot("is_shared_out_by_accelerate", self):
            raise ChainError(
                f"Accelerate splits the batches of this chain between {sharding.num_ranks} ranks, but `deal` splits "
                "them between ranks as well, so batches would be lost. Use `.deal(..., ranks=1)` with "
                "`accelerator.prepare(DataLoader(...))` and transformers' Trainer; or use `kdp.Loader(chain)`, which "
                "reads only this rank's part."
            )
        if info is not None and info.num_workers > 1 and sharding.num_workers == 1 and holds(info.dataset, self):
            raise ChainError(
                f"Each of the {info.num_workers} workers would give every batch: torch's DataLoader shards chains, but "
                f"here a {type(info.dataset).__name__} holds the chain. Use `DataLoader(chain, batch_size=None)`, "
                "`kdp.Loader(chain)` or `num_workers=0`."
            )
        return sharding

    def set_shuffle(self, shuffle: bool) -> None:
        """Called by DataLoader with its argument `shuffle`; reject True, because the chain has an order of its own."""
        # torch would add a `.shuffle()` of batches behind the chain.
        if shuffle:
            hint = "The chain has its own order: use `deal(shuffle=True)`."
            raise ValueError(must_be("shuffle", "None", shuffle, hint))

    def set_seed(self, seed: int) -> Any:
        """Called by loaders at the start of an epoch. The order still comes from `deal(seed=...)`."""
        self._epochs.seeded()
        self._stands = None
        self._prepare()
        # Persistent workers of torch's DataLoader cannot change the ranks that they deal to.
        ranks, process = self._checked_sharding().ranks(), os.getpid()
        if self._dealt_by_workers is not None and self._dealt_by_workers[0] == process:
            check_ranks(self._dealt_by_workers[1], ranks, NEW_LOADER)
        self._dealt_by_workers = process, ranks
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0; a state that was loaded for it stays valid."""
        self._epochs.set(check_count("epoch", epoch, minimum=0))
        self._stands = None

    def close_kept(self) -> None:
        """Close files that are kept open between epochs."""

    def next_epoch(self) -> int:
        """Return the number of the next iteration."""
        return self._epochs.peek()

    def start_at(
        self,
        batch: int,
        listener: Listener | None = None,
        *,
        cursors: Cursors = (),
        report_turn: TurnListener | None = None,
    ) -> None:
        """Let the next iteration begin at `batch`.

        Args:
            batch: The number of a batch of this rank.
            listener: Called for each batch before it is made.
            cursors: Where the lanes of the stream stood after the last batch before that, of those that are known.
            report_turn: Called before the batches of each turn of the lanes if other ranks wait for this one, with the
                number of the turn's first batch, and for each lane whether it has samples for the turn, and where it
                stood before.
        """
        self._start = _Start(None, batch, cursors)
        self._listener, self._report_turn = listener, report_turn

    def stop_listening(self) -> None:
        """Drop the functions that were passed for an epoch. They refer to the worker, which refers to this chain."""
        self._listener = self._report_turn = self._told_of_skips = self._skipper = None

    def resume_at(self, epoch: int, batch: int, cursors: Cursors) -> None:
        """Make the next iteration that of `epoch`, starting at `batch`."""
        self._epochs.move_to(epoch)
        self.start_at(batch)
        self._start, self._stands, self._cursors = _Start(epoch, batch, cursors), (epoch, batch), cursors

    def share_epochs(self, ahead: torch.Tensor, *, is_new: bool) -> None:
        """Count epochs together with the copies of this pipe in other processes: see `EpochCounter.share`."""
        self._epochs.share(ahead, is_new=is_new)

    def pass_over(self) -> None:
        """Make the next iteration the next epoch, if a state was loaded and the rest of its epoch was not requested."""
        if self._start.epoch is not None and self._start.batch:
            self._epochs.skip(1)
            self.start_at(0)
            self._stands = None

    @property
    def is_resumed(self) -> bool:
        """Whether the next iteration resumes from a state."""
        return self._start.epoch == self._epochs.peek()

    def position(self) -> tuple[int, int, Cursors]:
        """Return the next epoch and batch, and the cursors of the stream."""
        if self._stands is not None:
            return *self._stands, self._cursors
        epoch = self._epochs.peek()
        return epoch, *self._start_of(epoch)[1:]

    def _start_of(self, epoch: int) -> _Start:
        """Return where an epoch begins. A loaded state counts only for its own epoch."""
        return self._start if self._start.epoch in (None, epoch) else _Start()

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
        dealer.source, dealer._epochs = self.source.source if is_selected else self.source, EpochCounter()
        dealer._seed, dealer._seen = self._seed if seed is None else seed, seen
        dealer._told_of_skips = Skip.log  # they are logged, and the limits of `on_error` are not checked
        dealer.set_epoch(epoch)
        dealer.start_at(first)
        for samples in dealer.iterate():
            if samples and not isinstance(samples[0], Sample):
                raise ChainError(
                    f"`deal` takes samples, but `{pipe_name(dealer.source)}` gives {type(samples[0]).__name__}. Put "
                    "stock pipes before `.select()`."
                )
            yield dealer.position()[1] - 1, samples

    def skip(self, banned: Mapping[str, str], tell: Callable[[Skip], None]) -> None:
        """Leave out the samples with the keys `banned` untried, and call `tell` with each one that is left out."""
        self._banned, self._told_of_skips = dict(banned), tell

    def _begin(self) -> tuple[int, int]:
        """Return the epoch that begins and its first batch."""
        self._sharding, self._dealt_by_workers = self._checked_sharding(), None
        epoch = self._epochs.begin()
        start, self._start = self._start_of(epoch), _Start()
        self._first_cursors = self._cursors = start.cursors
        self._stands, self._is_empty = (epoch, start.batch), True
        handler, sharding = Chain.of(self).error_handler(), self._sharding
        self._skipper = self._limits = None
        if handler is not None:
            if self._told_of_skips is None:
                self._limits = SkipLimits(handler, sharding.num_ranks * sharding.num_workers, start.batch)
            self._skipper = Skipper(
                handler,
                self._banned,
                self._told_of_skips,
                self._seen,
                self._limits,
                is_indexed=isinstance(self.source, MapPipe),
            )
        return epoch, start.batch

    def _end(self, epoch: int) -> None:
        """Note that the epoch is over; in a worker, only its part is, as other workers may not be done."""
        if get_worker_info() is None:
            self._stands, self._cursors = (epoch + 1, 0), ()
        else:
            self._stands = epoch, max(self.position()[1], 1)
        is_only_part = self._sharding.num_ranks * self._sharding.num_workers == 1
        if self._limits is not None and self._is_empty and is_only_part:  # one of several may get only bad samples
            self._limits.end()

    def sizes(self) -> dict[str, Any]:
        """Return the numbers, besides the identity, on which the batches depend."""
        return self._sizing.sizes(self.sharding().num_ranks)

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
        return {**self.__dict__, _STAMP: stamp()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        call_slot("hold_dealt_chains")  # for a process that has made no chain itself
        self.__dict__.update({name: value for name, value in state.items() if name != _STAMP})
        if _STAMP in state:
            check_stamp(state[_STAMP])

    def _prepare(self) -> None:
        """Compute what all copies of the chain need, before it is copied."""

    @property
    def is_shuffled(self) -> bool:
        """Whether samples come in another order in each epoch."""
        return bool(self._shuffle)

    def batch_key(self) -> SampleKey:
        """Return the random key of the batch that was yielded last."""
        return self._batch_key

    def _batch(self, epoch: int, dealt: Dealt, make: Callable[[], Iterable[Any]]) -> Batch:
        """Return the items that `make` returns for a batch, without those that are left out."""
        if self._listener is not None:
            self._listener(dealt)
        sharding, now, batch = self._sharding, self.sharding(), dealt.number
        if now is not sharding:  # the rank is not fixed
            check_ranks(sharding.ranks(), now.ranks())
        self._batch_key = SampleKey(self._seed, epoch, batch * sharding.num_ranks + sharding.rank)
        try:
            items = [item for item in make() if item is not LEFT_OUT]
            if not items and sharding.num_ranks > 1:
                raise DataError(
                    f"All samples of batch {batch} failed (see the log). Skipping the batch would make the other ranks "
                    "wait forever. Use larger batches, or remove the samples from the plan."
                )
        except BaseException as error:
            add_note(error, f"kdpipes: while making batch {batch} of epoch {epoch} (seed {self._seed})")
            raise
        self._stands, self._cursors = (epoch, batch + 1), merged(self._cursors, dealt.cursors)
        self._is_empty = self._is_empty and not items
        return items


def items_at_once(blocks: Sequence[Block], source: Any, seed: int, epoch: int) -> dict[int, Any]:
    """Return the items of some blocks, by their numbers in the batch."""
    items: dict[int, Any] = {}
    try:
        with using_key(RowKey(seed, epoch)):
            for block in blocks:
                items |= zip(block.places, source.items_of(block), strict=True)
    finally:
        for block in blocks:
            block.release()
    return items


def fix_ranks(chain: Any) -> Ranks | None:
    """Fix the current ranks in the pipes that shard a chain, before its copies are sent to workers, and return them.

    None means that they do not matter, with `deal(ranks=1)`.
    """
    ranks, is_for_all_ranks = ranks_now(), False
    for pipe in Chain.of(chain).pipes:
        if isinstance(pipe, Dealer):
            pipe.fix_rank()
            is_for_all_ranks = is_for_all_ranks or pipe.is_for_all_ranks
        elif ranks.num_ranks > 1 and isinstance(pipe, Sharded):
            pipe.apply_sharding(ranks.num_ranks, ranks.rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return None if is_for_all_ranks else ranks


def holds(dataset: Any, pipe: Any) -> bool:
    """Return whether a dataset is a chain with `pipe`, or another library's object that holds one."""
    return any(pipe in Chain.of(held) for held in upstream_of(dataset))
