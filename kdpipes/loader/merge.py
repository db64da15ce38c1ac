"""Merge the items of several workers into one order, that of their numbers; count what happens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from kdpipes.core.errors import DataError, add_note
from kdpipes.delivery.skipping import Skip, SkipLimits
from kdpipes.loader.channel import Kind
from kdpipes.loader.receipt import Delivered
from kdpipes.loader.worker import Order, Position, Worker

__all__ = ["Agreement", "Counters", "Merger", "SameDamage"]

_MOST_PIECES = 20_000  # of each worker, for a trace


@dataclass
class Counters:
    """What is counted over the life of a reading service."""

    num_items: int = 0
    num_samples: int = 0
    num_deaths: int = 0
    num_copied: int = 0
    num_slow: int = 0
    busy_s: float = 0.0  # from the first item asked for to the last one delivered, epoch by epoch
    wait_s: float = 0.0  # of that, the time in which no item was there
    skips: dict[tuple[Any, ...], Skip] = field(default_factory=dict)  # by their places
    banned: dict[str, str] = field(default_factory=dict)  # why samples are left out untried, by key
    times: dict[str, dict[str, Any]] = field(default_factory=dict)  # what workers have measured of themselves
    delivered: Delivered = field(default_factory=Delivered)  # the batches of the last epoch

    def note(self, skip: Skip) -> None:
        """Note a sample or shard that was left out, once."""
        if skip.place not in self.skips:
            skip.log()
        self.skips[skip.place] = skip

    def note_times(self, times: dict[str, Any]) -> None:
        """Note what a worker has measured so far. It sends each piece of work once: the latest are kept."""
        before = self.times.get(times["id"], {})
        for name in ("events", "batches"):
            kept = before.get(name, deque(maxlen=_MOST_PIECES))
            kept.extend(times[name])
            times[name] = kept
        self.times[times["id"]] = times


class Merger:
    """The items of one epoch, from all workers, in the order of their numbers.

    Batch n comes from worker n modulo the number of workers; numbers that a worker leaves out are passed over.

    Args:
        workers: The workers.
        orders: The order of each of them.
        counters: What is counted.
        has_own_cursors: Whether each worker reads shards of its own.
        limits: The limits of `on_error` on skipped samples.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        orders: Sequence[Order],
        counters: Counters,
        *,
        has_own_cursors: bool = False,
        limits: SkipLimits | None = None,
    ) -> None:
        self._limits = limits
        self._is_empty = True
        self._has_own_cursors = has_own_cursors
        self._workers = workers
        self._orders = orders
        self._counters = counters
        self._ended: set[int] = set()
        self.position: Position = orders[0].position
        self._begin()

    def __iter__(self) -> Merger:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        try:
            if any(worker.is_torn for worker in self._workers):
                self._begin()
            return self._next()
        except StopIteration:
            raise
        except Exception:
            self._ended.update(range(len(self._workers)))  # nothing comes after an error
            raise
        except BaseException:  # Ctrl-C: messages on their way may be lost
            for worker in self._workers:
                worker.is_torn = True
            raise
        finally:
            self._counters.wait_s += time.perf_counter() - started

    def _begin(self) -> None:
        self._ended.clear()
        self._same_damage = SameDamage(len(self._workers))
        for worker, order in zip(self._workers, self._orders, strict=True):
            worker.begin(replace(order, position=self.position, banned=self._counters.banned))
            worker.is_torn = False

    def _next(self) -> Any:
        while len(self._ended) < len(self._workers):
            number = self.position.number
            place = number % len(self._workers)
            worker = self._workers[place]
            message = None if place in self._ended else worker.peek()
            if message is None:
                self.position = self.position._replace(number=number + 1)
            elif message.kind is Kind.ERROR:
                raise _as_error(worker.take())
            elif message.kind is Kind.SKIP and message.number <= number:
                self._note(place, worker.take())
            elif message.kind is Kind.TIMES:
                self._counters.note_times(worker.take())
            elif message.kind is Kind.END:
                worker.take()
                self._ended.add(place)
                self._same_damage.check(place, math.inf)
            elif message.number > number:  # also for skipped samples, which are counted in the order of the batches
                self.position = self.position._replace(number=number + 1)
            else:
                self._same_damage.check(place, message.number)
                item = worker.take()
                self.position = self.position.after(message, place if self._has_own_cursors else 0)
                if message.kind is Kind.ITEM:
                    self._is_empty = False
                    self._counters.num_items += 1
                    self._counters.num_samples += message.num_samples
                    return item
        if self._is_empty and self._limits is not None:
            self._limits.end()
        raise StopIteration

    def _note(self, place: int, skip: Skip) -> None:
        self._counters.note(skip)
        if self._limits is not None:
            self._limits.count(skip)
        if skip.is_shard and not self._has_own_cursors:
            self._same_damage.note(place, skip)


class SameDamage:
    """Checks that workers which read the same stream have given up the same shards, or their batches would not fit.

    Args:
        num_workers: How many there are.
    """

    def __init__(self, num_workers: int) -> None:
        self._given_up: list[set[Skip]] = [set() for _ in range(num_workers)]
        self._done = [-1.0] * num_workers

    def note(self, worker: int, skip: Skip) -> None:
        """Note a shard that a worker has given up, before the batch that it comes to next."""
        self._given_up[worker].add(skip)

    def check(self, worker: int, batch: float) -> None:
        """Compare a worker with the others up to a batch.

        Args:
            worker: The number of the worker.
            batch: The number of the batch; infinity at the end.

        Raises:
            DataError: One of them could read a shard that the other could not.
        """
        self._done[worker] = batch
        if not any(self._given_up):
            return
        for other, done in enumerate(self._done):
            both = min(done, batch)
            mine, theirs = (
                {skip.place: skip for skip in self._given_up[one] if skip.batch <= both} for one in (worker, other)
            )
            odd = mine.keys() ^ theirs.keys()
            if odd:
                skip = {**mine, **theirs}[min(odd)]
                raise DataError(
                    f"Shard {skip.key!r} could be read by one of workers {worker} and {other}, and not by the other "
                    f"({skip.error}). Each reads the whole stream to make its own batches: samples would be lost and "
                    'doubled. Go on from the last state, or use `deal(split="shards")`.'
                )


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


_FAILED, _ENDED, _HAS = -1, 0, 1


class Agreement:
    """Asks all ranks before each item whether they have one: one number over gloo. All ranks make it at the same time.

    A rank that has died is an error after the process group's timeout.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                'With `deal(split="shards")`, ranks need a process group to agree on where an epoch ends. Call '
                '`torch.distributed.init_process_group("gloo")`, or use `deal(split="samples")`.'
            )
        is_gloo = dist.get_backend() == "gloo"
        self._group: Any = None if is_gloo else dist.new_group(backend="gloo")

    def next_of(self, items: Iterator[Any]) -> Any:
        """Return the next item, if every rank has one.

        Raises:
            StopIteration: Some rank has none.
            RuntimeError: Some other rank has failed.
        """
        item, error = None, None
        try:
            item, mine = next(items), _HAS
        except StopIteration:
            mine = _ENDED
        except Exception as raised:
            error, mine = raised, _FAILED
        word = torch.tensor(mine)
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._group)
        if error is not None:
            raise error
        if word.item() == _FAILED:
            raise RuntimeError("Another rank has failed while it made a batch; its own error says why.")
        if word.item() == _ENDED:
            raise StopIteration
        return item
