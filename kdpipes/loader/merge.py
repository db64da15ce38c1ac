"""Merge the items of several workers into one order, that of their numbers; count what happens."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError, add_note
from kdpipes.core.messages import warn
from kdpipes.core.registry import shown_name
from kdpipes.delivery.clock import EpochClock, Position
from kdpipes.delivery.lanes import Cursor, Cursors, LanePlan, merged
from kdpipes.delivery.layout import group_ranks
from kdpipes.delivery.skipping import Skip, SkipLimits, keep_skip
from kdpipes.loader.channel import Kind, Message
from kdpipes.loader.profile import Row, WorkerTimes
from kdpipes.loader.receipt import Delivered
from kdpipes.loader.worker import Assignment, Worker
from kdpipes.storage.access import Threads

_MOST_PIECES = 20_000  # of each worker, for a trace
_MOST_WORKERS = 256  # measurements of so many workers are kept
_PATIENCE_S = 30.0  # to wait for other ranks without a warning
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # for small messages, by default group


@dataclass
class Counters:
    """The counts of a reading service over its lifetime."""

    num_items: int = 0
    num_samples: int = 0
    num_deaths: int = 0
    num_copied: int = 0
    num_slow: int = 0
    busy_s: float = 0.0  # from the first item asked for to the last one delivered, epoch by epoch
    wait_s: float = 0.0  # of that, the time in which no item was there
    num_skipped: Counter[bool] = field(default_factory=Counter)  # by whether it is a shard
    skips: dict[Any, Skip] = field(default_factory=dict)  # the latest ones, by their places
    dropped_skips: int = -1  # the last epoch of which not all skips are kept
    banned: dict[str, str] = field(default_factory=dict)  # why samples are left out untried, by key
    times: dict[str, tuple[WorkerTimes, list[Row]]] = field(default_factory=dict)  # by the one that has measured
    delivered: Delivered = field(default_factory=Delivered)  # the batches of the last epoch

    def note(self, skip: Skip) -> None:
        """Note a sample or shard that was left out, once."""
        if skip.place not in self.skips:
            skip.log()
            self.num_skipped[skip.is_shard] += 1
        dropped = keep_skip(self.skips, skip)
        if dropped is not None:
            self.dropped_skips = dropped.epoch

    def note_times(self, sender: str, times: WorkerTimes, rows: list[Row]) -> None:
        """Note what a worker has measured so far. It sends each piece of work once: the latest are kept."""
        none = times._replace(events=deque(maxlen=_MOST_PIECES), batches=deque(maxlen=_MOST_PIECES))
        kept, _ = self.times.pop(sender, (none, rows))
        if len(self.times) >= _MOST_WORKERS:
            del self.times[next(iter(self.times))]
        kept.events.extend(times.events)
        kept.batches.extend(times.batches)
        self.times[sender] = times._replace(events=kept.events, batches=kept.batches), rows


@dataclass(eq=False)
class Merger:
    """The items of one epoch, from all workers, in the order of their numbers.

    Batch n comes from worker n modulo the number of workers; of a stream that is read in lanes, the number of its group
    of lanes, modulo the number of workers. Numbers that a worker leaves out are passed over.

    Args:
        workers: The workers.
        position: Where the epoch begins.
        clock: Gets the position after each item.
        seeds: The seeds of the stock pipes of each worker.
        counters: What is counted.
        plan: The lanes of the stream, if it is read in lanes.
        agreement: What makes ranks end together, if the stream is read in lanes and other ranks wait for this one.
        limits: The limits of `on_error` on skipped samples.
    """

    workers: Sequence[Worker]
    position: Position
    clock: EpochClock
    seeds: Sequence[Any]
    counters: Counters
    plan: LanePlan | None = None
    agreement: Agreement | None = None
    limits: SkipLimits | None = None

    def __post_init__(self) -> None:
        self._is_empty = True
        self._num_groups = len(self.workers) if self.plan is None else self.plan.num_groups
        self._turn = -1  # the one that the ranks have agreed on
        self._due: list[bool] = []  # which groups of lanes give a batch in that turn
        self._begin()

    def __iter__(self) -> Merger:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        try:
            if any(worker.is_torn for worker in self.workers):
                self._begin()
            return self._next()
        except StopIteration:
            raise
        except Exception:
            self._ended.update(range(len(self.workers)))  # nothing comes after an error
            agreement = self.agreement
            self.agreement = None
            if agreement is not None and self.plan is not None:
                agreement.fail(self.plan)
            raise
        except BaseException:  # Ctrl-C: messages on their way may be lost
            for worker in self.workers:
                worker.is_torn = True
            raise
        finally:
            self.counters.wait_s += time.perf_counter() - started

    def is_ready(self) -> bool:
        """Return whether the next item has arrived, so that `next` returns it without waiting."""
        number = self.position.number
        if self.agreement is not None and number // self._num_groups != self._turn:
            return False
        index = number % self._num_groups % len(self.workers)
        worker = self.workers[index]
        if index in self._ended or worker.is_torn or not worker.is_ready():
            return False
        message = worker.peek()
        return message.kind is Kind.ITEM and message.number == number

    def _begin(self) -> None:
        # Workers without lanes are never asked.
        self._ended = set(range(self._num_groups, len(self.workers)))
        self._same_damage = SameDamage(len(self.workers))
        for worker, seeds in zip(self.workers, self.seeds, strict=True):
            worker.begin(Assignment(self.position, seeds, self.counters.banned))
            worker.is_torn = False

    def _next(self) -> Any:
        while self.agreement is not None or len(self._ended) < len(self.workers):
            number = self.position.number
            if self.agreement is not None:
                if number // self._num_groups != self._turn and not self._agree(self.agreement):
                    break
                if not self._due[number % self._num_groups]:
                    self.position = self.position._replace(number=number + 1)
                    continue
            index = number % self._num_groups % len(self.workers)
            worker = self.workers[index]
            message = None if index in self._ended else worker.peek()
            # Skipped samples are counted in the order of batches, too.
            if message is None or message.number > number:
                self.position = self.position._replace(number=number + 1)
            elif self._takes_aside(index, message):
                continue
            elif message.kind is Kind.TURN or message.number < number:  # of a new worker, or not due on all ranks
                worker.take()
            else:
                self._same_damage.check(index, message.number)
                item = worker.take()
                delivered = self.counters.delivered
                # Of streams, whose epochs may not end, receipts need no numbers of batches without items.
                if message.kind is Kind.OVER and not self.position.offset and not delivered.stream.order:
                    delivered.dropped.add((self.position.epoch, number))
                self.position = self.position.after(message.number, message.progress)
                if message.kind is Kind.ITEM:
                    self._is_empty = False
                    self.counters.num_items += 1
                    self.counters.num_samples += message.progress.num_samples
                    self.clock.ahead.append(self.position)
                    return item
        if self._is_empty and self.limits is not None:
            self.limits.end()
        raise StopIteration

    def _agree(self, agreement: Agreement) -> bool:
        """Agree with the other ranks on the batches of the next turn; return whether there are any."""
        assert self.plan is not None
        self._turn = self.position.number // self._num_groups
        lanes: dict[int, tuple[bool, Cursor | None]] = {}
        for index, worker in enumerate(self.workers):
            is_known = False
            while not is_known and index not in self._ended:
                message = worker.peek()
                if not self._takes_aside(index, message):
                    content = worker.take()
                    is_known = message.kind is Kind.TURN and message.number == self._turn * self._num_groups
                    lanes |= content if is_known else {}
        self._due, cursors = agreement.on_turn(self.plan, lanes)
        self.position = self.position._replace(cursors=merged(self.position.cursors, cursors))
        return any(self._due)

    def _takes_aside(self, index: int, message: Message) -> bool:
        """Handle a worker's next message if it is not about the items of a batch, and return whether it was handled.

        Raises:
            Exception: The worker's error.
        """
        worker = self.workers[index]
        if message.kind is Kind.ERROR:
            raise _as_error(worker.take())
        if message.kind is Kind.SKIP:
            skip = worker.take()
            self.counters.note(skip)
            if self.limits is not None:
                self.limits.count(skip)
            if skip.is_shard and self.plan is None:
                self._same_damage.note(index, message.number, skip)
        elif message.kind is Kind.TIMES:
            self.counters.note_times(*worker.take())
        elif message.kind is Kind.END:
            worker.take()
            self._ended.add(index)
            self._same_damage.check(index, math.inf)
        else:
            return False
        return True


class SameDamage:
    """Checks that workers that read the same stream gave up the same shards.

    Otherwise, their batches would not fit together.
    """

    def __init__(self, num_workers: int) -> None:
        self._given_up: list[dict[Skip, int]] = [{} for _ in range(num_workers)]
        self._agreed: dict[Any, Skip] = {}  # what all have given up; a replaced worker reports it again
        self._done = [-1.0] * num_workers

    def note(self, worker: int, number: int, skip: Skip) -> None:
        """Note a shard that a worker has given up, before the batch or item `number` that it comes to next."""
        if skip.place not in self._agreed:
            self._given_up[worker][skip] = number

    def check(self, worker: int, batch: float) -> None:
        """Compare a worker with the others up to a batch; infinity is the end.

        Raises:
            DataError: One of them could read a shard that the other could not.
        """
        self._done[worker] = batch
        if not any(self._given_up):
            return
        for other, done in enumerate(self._done):
            both = min(done, batch)
            mine, theirs = (
                {skip.place: skip for skip, number in self._given_up[one].items() if number <= both}
                for one in (worker, other)
            )
            odd = mine.keys() ^ theirs.keys()
            if odd:
                skip = {**mine, **theirs}[min(odd)]
                raise DataError(
                    f"Shard {skip.key!r} could be read by only one of workers {worker} and {other} ({skip.error}). "
                    "Each worker reads the whole stream to make its own batches: samples would be lost and duplicated. "
                    "Resume from the last state, or use `deal(split=kdp.lanes())`."
                )
        compared = min(self._done)
        for skips in self._given_up:
            for skip in [skip for skip, number in skips.items() if number <= compared]:
                del skips[skip]
                keep_skip(self._agreed, skip)


def _as_error(error: BaseException) -> Exception:
    """Return an error of a worker as one that ends the loop and not the program, nor ends it as if all were there."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    notes: list[str] = getattr(error, "__notes__", [])
    place = next((note.removeprefix("kdpipes: ") for note in notes if note.startswith("kdpipes: while ")), "")
    raised = RuntimeError(f"A worker raised {type(error).__name__}: {error}{place and f', {place}'}")
    raised.__cause__ = error
    for note in notes:
        add_note(raised, note)
    return raised


def compare_ranks(chain: Any, position: Position, pipes: list[str]) -> None:
    """Compare where the ranks of torch's process group begin an epoch, and their chains.

    Returns when all ranks have begun it. Does nothing without a group, or if batches are dealt to fewer ranks.

    Args:
        chain: The chain, whose batches are dealt to the ranks.
        position: Where this rank begins.
        pipes: The fingerprints of the chain.

    Raises:
        RuntimeError: The ranks begin different epochs, or at different batches, or their chains differ. It is raised on
            all ranks.
    """
    ranks = group_ranks()
    dealer = Chain.of(chain).resumable_deal()
    if ranks is None or ranks.num_ranks == 1 or (dealer is not None and dealer.sharding().num_ranks != ranks.num_ranks):
        return
    starts: list[Any] = [None] * ranks.num_ranks
    # Ctrl-C interrupts this thread while it waits for another one, but not while torch waits for other ranks.
    request = Threads(1, "kdpipes ranks").submit(
        lambda: dist.all_gather_object(starts, (position[:3], pipes), group=_group())
    )
    if not wait([request], _PATIENCE_S).done:
        warn(
            f"Rank {ranks.rank} has waited {_PATIENCE_S:g} s for the other ranks to begin an epoch. If only this rank "
            "reads the chain, use `deal(..., ranks=1)`."
        )
    request.result()
    first, chain_of_first = starts[0]
    for rank, (begun, pipes_there) in enumerate(starts):
        if begun != first:
            raise RuntimeError(
                f"Rank 0 begins epoch {first[0]} at batch {first[1]}, but rank {rank} begins epoch {begun[0]} at batch "
                f"{begun[1]}, so that samples would be lost and duplicated. Call `set_epoch` with the same number on "
                "all ranks, or load the same state, and begin each epoch on all ranks."
            )
        if pipes_there != chain_of_first:
            pairs = zip_longest(reversed(chain_of_first), reversed(pipes_there))  # the cause is upstream
            name = next(one or other for one, other in pairs if one != other).rpartition(":")[0]
            raise RuntimeError(
                f"The chain of rank {rank} is not that of rank 0: `{shown_name(name)}`, or its arguments, code or "
                "data, differs. Make the same chain on all ranks; functions may read the rank when they are called."
            )


def _group() -> Any:
    """Return a gloo group of all ranks for kdpipes alone. It is created once per default group."""
    world = dist.group.WORLD
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


class Agreement:
    """Agrees with the other ranks on the batches of each turn, in which each lane gives one: one small sum over gloo.

    It also gives each rank the cursors of all lanes, so that the state of any rank is that of all. A rank that has died
    is an error after the process group's timeout.

    Args:
        is_padded: Whether a group of lanes goes on until its last lane has ended, not only until the first one has.
    """

    def __init__(self, *, is_padded: bool) -> None:
        self._is_padded = is_padded
        self._has_failed = False
        self._failure: Any = None  # keeps the sum that `fail` has begun

    def on_turn(self, plan: LanePlan, lanes: Mapping[int, tuple[bool, Cursor | None]]) -> tuple[list[bool], Cursors]:
        """Return which groups give a batch in the turn, and the known cursors of all lanes before it.

        Args:
            lanes: Whether each of this rank's lanes has samples for the turn, and its cursor.

        Raises:
            RuntimeError: Another rank has failed.
        """
        table = torch.zeros(plan.num_lanes + 1, 6, dtype=torch.int64)  # each rank fills the rows of its lanes
        for lane, (has_samples, cursor) in lanes.items():
            table[lane] = torch.tensor([has_samples, cursor is not None, *(cursor or Cursor(0, 0, 0, 0))])
        dist.all_reduce(table, group=_group())
        if table[-1].any():
            self._has_failed = True
            raise RuntimeError("Another rank has failed while it made a batch. See the error of that rank.")
        has = table[:-1, 0].reshape(plan.num_groups, plan.num_pieces).bool()
        due: list[bool] = (has.any(1) if self._is_padded else has.all(1)).tolist()
        rows = enumerate(table[:-1].tolist())
        return due, tuple((lane, Cursor(*cursor)) for lane, (_, is_known, *cursor) in rows if is_known)

    def fail(self, plan: LanePlan) -> None:
        """Tell the other ranks that this one has failed, without waiting: they may not get to this turn."""
        if self._has_failed:  # another rank has reported it
            return
        table = torch.zeros(plan.num_lanes + 1, 6, dtype=torch.int64)
        table[-1] = 1
        self._failure = table, dist.all_reduce(table, group=_group(), async_op=True)
