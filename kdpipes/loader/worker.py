"""The common part of process and thread workers: iterate a copy of the chain, and number its items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kdpipes.core.chain import Chain
from kdpipes.core.pipe import end_epoch
from kdpipes.core.randomness import hash_key
from kdpipes.core.stock import Seeded
from kdpipes.core.torch_pipes import SHARDING_PRIORITIES, ShardingFilter, graph_settings
from kdpipes.delivery.clock import Position, Progress
from kdpipes.delivery.dealer import Dealer, Dealt, Monitor
from kdpipes.delivery.skipping import Skip
from kdpipes.delivery.state import Counting
from kdpipes.loader.channel import Kind, Message

Send = Callable[[Message], None]


class Seeds:
    """The seeds of the stock pipes of one worker, with the methods of torchdata's `SeedGenerator`."""

    def __init__(self, seed: int, worker: int = 0) -> None:
        self.seed = seed
        self._worker = worker
        self._num_shared = self._num_own = 0

    def generate_shared_seed(self) -> int:
        """Return the next seed shared by all workers."""
        self._num_shared += 1
        return _seed_from(self.seed, "shared", self._num_shared)

    def generate_seed(self) -> int:
        """Return the next seed of this worker."""
        self._num_own += 1
        return _seed_from(self.seed, "worker", self._worker, self._num_own)

    def spawn(self, worker: int) -> Seeds:
        """Return the seeds of a worker."""
        return Seeds(self.seed, worker)


def seed_of(base_seed: int, epoch: int) -> int:
    """Return the seed for the `Seeds` of an epoch."""
    return int.from_bytes(hash_key(base_seed, epoch)[:7], "little")


def _seed_from(*parts: object) -> int:
    return int.from_bytes(hash_key(*parts)[:8], "little")


@dataclass(frozen=True)
class Assignment:
    """The message that starts an epoch in a worker.

    Args:
        position: The position at which the worker begins.
        seeds: The seeds of this worker's stock pipes: `Seeds`, or torchdata's `SeedGenerator` in a DataLoader2.
        banned: The samples to skip without loading them: the reason for each key.
    """

    position: Position
    seeds: Any = None
    banned: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """The options of a worker: see `ProcessReadingService`."""

    worker: int
    num_workers: int
    prefetch: int
    is_profiled: bool = False
    num_main: int = 0  # how many pipes run in the main process
    timeout_s: float | None = None
    num_buffers: int = 0
    max_bytes: int = 0
    num_threads: int = 1


class Worker(ABC):
    """One worker as seen by the thread that waits for its messages."""

    is_torn = False  # whether a call was interrupted, so that messages may be lost
    messages: deque[Message]  # that have arrived

    @abstractmethod
    def begin(self, assignment: Assignment) -> None:
        """Let the worker begin an epoch, even if it is in another one."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until something arrives."""

    def peek(self) -> Message:
        """Wait for the next message and return it. Its item may still be packed."""
        while not self.messages:
            self.wait()
        return self.messages[0]

    def take(self) -> Any:
        """Remove the message that `peek` returned, and return its content."""
        return self.messages.popleft().content

    def stop(self) -> None:  # noqa: B027 - only threads need it
        """Ask the worker to end, so that `close` has less to wait for."""

    @abstractmethod
    def close(self) -> None:
        """End the worker."""

    def is_ready(self) -> bool:
        """Return whether `peek` returns without waiting."""
        return bool(self.messages)


class _EpochMonitor(Monitor):
    """Reports the batches that `deal` makes in one epoch of a worker to the main process.

    Args:
        send: Sends a message.
        banned: The samples to skip without loading them: the reason for each key.
        splits: Whether pipes after `deal` may turn a batch into several items, or none.
    """

    def __init__(self, send: Send, banned: Mapping[str, str], *, splits: bool) -> None:
        self._send = send
        self._splits = splits
        self.banned = banned
        self.is_worker = True
        self.number: int | None = None  # of the next item, where no `deal` numbers the items
        self.step = 0  # between the numbers of two items
        self._batch: Dealt | None = None
        self._num_items = self._num_skipped = 0  # of that batch

    def begin_batch(self, dealt: Dealt) -> None:
        self.finish()
        self._batch = dealt
        self._num_items = 0
        self._num_skipped = 0

    def finish(self) -> None:
        """Report the end of the batch, unless its item has reported it."""
        if self._batch is not None and self._splits:
            self._send(Message(Kind.OVER, self._batch.number, progress=Progress(cursors=self._batch.cursors)))
        self._batch = None

    def report_turn(self, number: int, lanes: Mapping[int, tuple[bool, Any]]) -> None:
        self.finish()
        self._send(Message(Kind.TURN, number, lanes))

    def skip(self, skip: Skip) -> None:
        self._num_skipped += not (skip.is_shard or skip.is_replaced)
        # The merger skips all numbers before that of a message.
        self._send(Message(Kind.SKIP, skip.batch if self.number is None else self.number, skip))

    def send_item(self, item: Any, start: Position) -> bool:
        """Send an item of the batch, unless it comes before `start`; return whether it was sent."""
        if self.number is not None:
            number = self.number
            self.number += self.step
            if number >= start.number:
                self._send(Message(Kind.ITEM, number, item))
            return number >= start.number
        batch = self._batch
        assert batch is not None
        self._num_items += 1
        if batch.number == start.number and self._num_items <= start.offset:
            return False
        num_samples = 0
        hashes = b""
        if self._num_items == 1:
            num_samples = batch.num_samples - self._num_skipped
            hashes = bytes(batch.hashes)
        if self._splits:
            progress = Progress(self._num_items, num_samples, (), hashes)
        else:
            progress = Progress(0, num_samples, batch.cursors, hashes)
        self._send(Message(Kind.ITEM, batch.number, item, progress))
        return True


class Producer:
    """One worker's copy of the chain.

    Items carry the number of their batch. Without `deal`, item k of worker w has the number k * W + w, where W is the
    number of workers.

    Args:
        chain: The copy; it is sharded here.
        options: How the worker works.
    """

    def __init__(self, chain: Any, options: Options) -> None:
        self._chain = chain
        self._options = options
        graph_settings.apply_sharding(chain, options.num_workers, options.worker, SHARDING_PRIORITIES.MULTIPROCESSING)
        read = Chain.of(chain)
        self._dealer = read.resumable_deal()
        self.is_one_to_one = self._dealer is not None and read.numbering_deal() is self._dealer
        self._dealers = read.of_type(Dealer)
        self._pipes = read.pipes
        counting = [pipe for pipe in read.pipes if isinstance(pipe, Counting)]
        self._counting = [(pipe, pipe.next_epoch()) for pipe in counting]

    def epoch(self, assignment: Assignment, send: Send) -> Iterator[None]:
        """Make the items of one epoch, and pass each message to `send`. Yields after each item."""
        start = assignment.position
        has_numbers = self._dealer is not None
        monitor = _EpochMonitor(send, assignment.banned, splits=has_numbers and not self.is_one_to_one)
        if not has_numbers:
            monitor.is_worker = False
            monitor.number = self._options.worker
            monitor.step = self._options.num_workers
        try:
            if assignment.seeds is not None:
                _seed_stock_pipes(self._chain, assignment.seeds)
            for pipe, first in self._counting:  # positions count from the first epoch of the last pipe
                pipe.set_epoch(max(first + start.epoch - self._counting[0][1], 0))
            for dealer in self._dealers:
                dealer.monitor = monitor
            if has_numbers:
                clock = self._dealer.clock
                clock.resume_at(start._replace(epoch=clock.peek()))
            for item in self._chain:
                if monitor.send_item(item, start):
                    yield
            monitor.finish()
            for each in self._pipes:
                end_epoch(each, in_worker=True)
        except Exception as error:
            send(Message(Kind.ERROR, content=error))
        else:
            send(Message(Kind.END))
        finally:
            for dealer in self._dealers:
                dealer.stop_listening()

    def close(self) -> None:
        """Close the files that the chain keeps open between epochs."""
        for dealer in self._dealers:
            dealer.close_kept()


class Orders(Protocol):
    """The assignments for a worker, and the way of its messages to the main process."""

    def next_assignment(self) -> Assignment | None:
        """Wait for the assignment of an epoch; None means that the worker must end."""

    def may_go_on(self) -> bool:
        """Wait until there is room for another item; False means that this epoch is not wanted any more."""

    def send(self, message: Message) -> None:
        """Send a message of the epoch."""


def follow(producer: Producer, orders: Orders) -> None:
    """Make the items of each assignment until the worker must end."""
    while (assignment := orders.next_assignment()) is not None:
        if not orders.may_go_on():  # another assignment has come before this one has begun
            continue
        try:
            for _ in producer.epoch(assignment, orders.send):
                if not orders.may_go_on():
                    break
        except BaseException as error:  # such as SystemExit in a user's code, which would end the worker silently
            orders.send(Message(Kind.ERROR, content=error))
    producer.close()


def _seed_stock_pipes(chain: Any, seeds: Any) -> None:
    """Seed as torchdata does: all workers alike upstream of a `sharding_filter`."""
    # torchdata's own traversal sets hooks on torch's classes, which would affect other threads.
    pipes = Chain.of(chain).pipes
    shared = [pipe for filter_ in pipes if type(filter_) is ShardingFilter for pipe in Chain.of(filter_).pipes]
    for pipe in pipes:
        if isinstance(pipe, Seeded):
            is_shared = any(pipe is upstream for upstream in shared)
            pipe.set_seed(seeds.generate_shared_seed() if is_shared else seeds.generate_seed())
