"""What one worker does in an epoch, wherever it runs: it numbers the items of its copy of the chain."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter import ShardingFilter
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from kdpipes.core.chain import Chain
from kdpipes.core.stock import Seeded
from kdpipes.delivery.behind_deal import DEALERS, dealer_of, one_to_one_path
from kdpipes.delivery.cursor import Cursor
from kdpipes.delivery.dealer import Dealt
from kdpipes.delivery.skipping import Skip

__all__ = ["Counting", "Frame", "Kind", "Order", "Position", "Producer"]


@runtime_checkable
class Counting(Protocol):
    """A pipe that counts its epochs."""

    def set_epoch(self, epoch: int) -> None: ...
    def skip_epochs(self, number: int) -> None: ...
    def next_epoch(self) -> int: ...


class Position(NamedTuple):
    """A place between two items of an epoch.

    Args:
        epoch: The number of the epoch, from 0.
        number: The number of the batch that is next, or that is being delivered; the number of the item, where nothing
            is dealt.
        offset: How many items of that batch have been delivered, where a batch becomes several items behind `deal`.
        cursors: Where a stream of shards stands, by worker, if they read shards of their own; by 0 if not.
    """

    epoch: int = 0
    number: int = 0
    offset: int = 0
    cursors: tuple[tuple[int, Cursor], ...] = ()

    def after(self, frame: Frame, lane: int = 0) -> Position:
        """Return the position after an item, or the end, of a batch that `lane` has made."""
        if not frame.is_over:
            offset = self.offset + 1 if frame.number == self.number else 1
            return self._replace(number=frame.number, offset=offset)
        if frame.cursor is None:
            return Position(self.epoch, frame.number + 1, 0, self.cursors)
        cursors = {**dict(self.cursors), lane: frame.cursor}
        return Position(self.epoch, frame.number + 1, 0, tuple(sorted(cursors.items())))


@dataclass(frozen=True)
class Order:
    """What a worker is told when an epoch begins.

    Args:
        position: Where it begins.
        seeds: torchdata's generator of seeds for the stock pipes of this worker.
        banned: Why samples are to be left out, by key.
    """

    position: Position
    seeds: Any = None
    banned: Mapping[str, str] = field(default_factory=dict)


class Kind(enum.IntEnum):
    """What a worker says."""

    ITEM = 0
    OVER = 1  # a batch is over that became several items, or none
    END = 2  # of the epoch
    ERROR = 3
    SKIP = 4  # a sample has been left out of the batch that comes, or the rest of a shard
    TIMES = 5  # what the worker has measured of itself so far


@dataclass
class Frame:
    """One thing that a worker says.

    Args:
        kind: What it is.
        number: Of the batch that it belongs to.
        content: The item or the error, as the lane carries it.
        is_last: Whether the item is the last one of its batch.
        num_samples: How many samples the batch has that the item is the first of.
        cursor: Where a stream of shards stands behind the batch.
    """

    kind: Kind
    number: int = 0
    content: Any = None
    is_last: bool = False
    num_samples: int = 0
    cursor: Cursor | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of the batch."""
        return self.is_last or self.kind is Kind.OVER


class Producer:
    """One worker's copy of the chain.

    Items carry the number of the batch that they come from. Where no `deal` numbers them, the k-th item of worker w of
    W has the number k * W + w.

    Args:
        chain: The copy; it is sharded here.
        worker: The number of the worker.
        num_workers: How many there are.
    """

    def __init__(self, chain: Any, worker: int, num_workers: int) -> None:
        self._chain = chain
        self._worker, self._num_workers = worker, num_workers
        graph_settings.apply_sharding(chain, num_workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
        self._dealer = dealer_of(chain)
        self._num_skipped = 0  # of the batch that is being made
        self._is_one_to_one = self._dealer is not None and one_to_one_path(chain)[-1] is self._dealer
        self._dealers = [pipe for pipe in Chain.of(chain).pipes if isinstance(pipe, DEALERS)]
        self._counting = [pipe for pipe in Chain.of(chain).pipes if isinstance(pipe, Counting)]
        self._first_epochs = [pipe.next_epoch() for pipe in self._counting]

    def epoch(self, order: Order, first_epoch: int, send: Callable[[Frame], None]) -> Iterator[None]:
        """Make the items of one epoch, and send each; to be resumed for the next one.

        Args:
            order: Where to begin.
            first_epoch: The number of the chain's first epoch, which the order's is counted from.
            send: Takes what there is to say, in order.
        """
        try:
            if order.seeds is not None:
                _seed_stock_pipes(self._chain, order.seeds)
            for pipe, first in zip(self._counting, self._first_epochs, strict=True):
                pipe.set_epoch(max(first + order.position.epoch - first_epoch, 0))
            for dealer in self._dealers:
                dealer.skip(order.banned, lambda skip: self._skip(skip, send))
            if self._dealer is None:
                yield from self._counted(order.position, send)
            else:
                yield from self._dealt(order.position, send)
        except Exception as error:
            send(Frame(Kind.ERROR, content=error))
        else:
            send(Frame(Kind.END))

    def _skip(self, skip: Skip, send: Callable[[Frame], None]) -> None:
        self._num_skipped += not (skip.is_shard or skip.is_replaced)
        send(Frame(Kind.SKIP, skip.batch, skip))

    def _dealt(self, start: Position, send: Callable[[Frame], None]) -> Iterator[None]:
        batch: Dealt | None = None
        made = 0

        def finish() -> None:
            if batch is not None and not self._is_one_to_one:
                send(Frame(Kind.OVER, batch.number, cursor=batch.cursor))

        def listen(dealt: Dealt) -> None:
            nonlocal batch, made
            finish()
            batch, made, self._num_skipped = dealt, 0, 0

        self._dealer.start_at(start.number, listen, cursor=self._cursor_in(start))
        for item in self._chain:
            made += 1
            assert batch is not None
            if batch.number == start.number and made <= start.offset:
                continue
            num_samples = batch.num_samples - self._num_skipped if made == 1 else 0
            send(Frame(Kind.ITEM, batch.number, item, self._is_one_to_one, num_samples, batch.cursor))
            yield
        finish()

    def _cursor_in(self, position: Position) -> Cursor | None:
        return dict(position.cursors).get(self._worker if self._dealer.is_split_by_shard else 0)

    def _counted(self, start: Position, send: Callable[[Frame], None]) -> Iterator[None]:
        for count, item in enumerate(self._chain):
            number = count * self._num_workers + self._worker
            if number >= start.number:
                send(Frame(Kind.ITEM, number, item, is_last=True))
                yield


def _seed_stock_pipes(chain: Any, seeds: Any) -> None:
    """Seed as torchdata does, all workers alike before a `sharding_filter`, but without its traversal.

    That sets hooks on torch's classes, which threads would find there.
    """
    pipes = Chain.of(chain).pipes
    shared = [pipe for filter_ in pipes if type(filter_) is ShardingFilter for pipe in Chain.of(filter_).pipes]
    for pipe in pipes:
        if isinstance(pipe, Seeded):
            is_shared = any(pipe is upstream for upstream in shared)
            pipe.set_seed(seeds.generate_shared_seed() if is_shared else seeds.generate_seed())


def seed_process(seeds: Any) -> None:
    """Seed the global generators of a worker process, which stock pipes and users' code may draw from."""
    random.seed(seeds.generate_seed())
    torch.manual_seed(seeds.generate_seed())
    np.random.seed(seeds.generate_seed() >> 32)
