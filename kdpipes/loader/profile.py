"""Profile a chain: each worker measures its own copy, and the main process adds up the results."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any, NamedTuple

from kdpipes.core.chain import Chain
from kdpipes.delivery import meter
from kdpipes.delivery.meter import OUTSIDE, size_of
from kdpipes.loader.channel import Kind, Message
from kdpipes.loader.probes import Probes
from kdpipes.loader.state import main_part
from kdpipes.loader.worker import Assignment, Options, Producer

__all__ = ["Measured", "ProfiledProducer", "Row", "WorkerTimes", "measured", "producer_of"]

_SHARE = 0.005  # of the time, that may go into measuring
_CALL_S = 3.5e-6  # what measuring one call costs, with all that goes with it, on a slow machine
_EVERY_S = 0.1  # how often a worker reports
_END: Any = object()
_numbers = itertools.count()


def producer_of(chain: Any, options: Options) -> Producer:
    """Return what makes a worker's items, measured or not."""
    return (ProfiledProducer if options.is_profiled else Producer)(chain, options)


class ProfiledProducer(Producer):
    """A producer that measures its copy of the chain.

    So that measuring takes half a hundredth of the time, it is on for the first item, and then for as many as that
    allows. An item that was measured stands for those before it that were not.
    """

    def __init__(self, chain: Any, options: Options) -> None:
        copied = Chain.of(chain).copy_pipes()
        super().__init__(copied, options)
        self._probes = Probes(copied, options.num_main)
        self._sending = self._probes.node(None)
        self._id = f"{os.getpid()}-{next(_numbers)}"
        self._totals: dict[int, list[float]] = {}
        self._num_items = 0
        self._work_s = self._idle_s = 0.0
        self._cost_s = 0.0  # what measuring has cost
        self._pending_s = 0.0  # what was not measured since
        self._batches: list[tuple[int, float, float]] = []  # number, start and end; of those that were measured
        self._begun: float | None = None
        self._reported_at = 0.0

    def epoch(self, assignment: Assignment, send: Callable[[Message], None]) -> Iterator[None]:
        """Make the items of one epoch, measured; see `Producer`."""
        number = assignment.position.number

        def measure(message: Message) -> None:
            nonlocal number
            number = message.number
            if message.kind in (Kind.END, Kind.ERROR):
                self._end()
                self._report(send)
            item = message.content  # a worker process packs it when it sends the message
            self._probes.run(self._sending, send, message)
            if message.kind is Kind.ITEM and self._probes.is_on:
                self._probes.meters.here.meter.rows[self._sending][2] += size_of(item)
                self._probes.meters.here.meter.leave_out()

        made = super().epoch(assignment, measure)
        while True:
            self._begin()
            if next(made, _END) is _END:
                return
            paused = self._end(number)
            self._num_items += 1
            if paused - self._reported_at >= _EVERY_S:
                self._report(send)
            yield
            self._idle_s += meter.clock() - paused

    def _begin(self) -> None:
        if self._cost_s <= _SHARE * self._work_s:
            self._probes.on()
            self._probes.meters.here.meter.leave_out()
        else:
            self._probes.off()
        self._begun = meter.clock()

    def _end(self, number: int | None = None) -> float:
        """Count the time since `_begin`, that of an item or of the end; return what time it is."""
        now = meter.clock()
        if self._begun is None:
            return now
        spent = now - self._begun
        self._work_s += spent
        if not self._probes.is_on:
            self._pending_s += spent
        else:
            weight = 1.0
            if number is not None and spent > 0:  # the end of an epoch stands for no item
                self._batches.append((number, self._begun, now))
                weight += self._pending_s / spent
                self._pending_s = 0.0
            for node, row in self._probes.meters.take().items():
                if node != OUTSIDE:
                    total = self._totals.setdefault(node, [0.0, 0.0, 0.0])
                    total[:] = [so_far + weight * part for so_far, part in zip(total, row, strict=True)]
                    self._cost_s += row[1] * _CALL_S
        self._begun = None
        return now

    def _report(self, send: Callable[[Message], None]) -> None:
        self._reported_at = meter.clock()
        nodes, batches, self._batches = self._probes.nodes, self._batches, []
        events: list[Any] = [(*nodes[node], *times) for node, *times in self._probes.meters.take_events()]
        counted = self._options.worker, os.getpid(), self._num_items, self._work_s, self._idle_s
        rows = [Row(*nodes[node], *row) for node, row in self._totals.items()]
        send(Message(Kind.TIMES, content=(self._id, WorkerTimes(*counted, events, batches), rows)))


class Row(NamedTuple):
    """The work of one pipe.

    Args:
        place: The place of the pipe among `Measured.pipes`; None is the way from a worker to the main process.
        what: What it does, where that is measured for itself: "applying 'resize' to field 'x'".
        seconds: Without what pipes upstream take.
        calls: How often it was called.
        num_bytes: The size of what it has made, as far as that is known.
    """

    place: int | None
    what: str
    seconds: float
    calls: float
    num_bytes: float


class WorkerTimes(NamedTuple):
    """What one worker has measured.

    Args:
        worker: The number of the worker.
        process: The ID of its process.
        num_items: The number of items that it has made.
        work_s: The time for which it has worked on them, in seconds.
        idle_s: The time for which it has waited until they were wanted, in seconds.
        events: The pieces of work, for a trace: place, what, start and end.
        batches: The measured batches: number, start and end.
    """

    worker: int
    process: int
    num_items: int
    work_s: float
    idle_s: float
    events: MutableSequence[tuple[int | None, str, float, float]]
    batches: MutableSequence[tuple[int, float, float]]


class Measured(NamedTuple):
    """The measurements of a chain, as `Loader.measured` returns them.

    Args:
        pipes: All pipes, the last one first.
        num_main: The number of these pipes that run in the main process.
        rows: The work of the pipes in workers, summed over all workers.
        main_rows: The work of the pipes in the main process.
        workers: The measurements of each worker.
        num_batches: The number of items that the loop received.
        num_samples: The number of samples in them, if `deal` counts them.
        busy_s: The duration of the loop, in seconds.
        wait_s: The part of it spent waiting for workers or, without workers, making the items.
        has_workers: Whether there are workers.
        num_workers: The number of workers; 1 if the loop makes the items itself.
    """

    pipes: list[Any]
    num_main: int
    rows: list[Row]
    main_rows: list[Row]
    workers: list[WorkerTimes]
    num_batches: int
    num_samples: int
    busy_s: float
    wait_s: float
    has_workers: bool
    num_workers: int


def measured(chain: Any, service: Any) -> Measured:
    """Return what a reading service has measured.

    Args:
        chain: All of the loader's chain.
        service: One of kdpipes', which measures.
    """
    ends, part = main_part(chain, has_workers=service.has_workers)
    counters, probes = service.counters, service.main_probes
    found = sorted(counters.times.items(), key=lambda item: (item[1][0].worker, item[0]))
    main_rows = (
        [] if probes is None else [Row(*probes.nodes[n], *row) for n, row in probes.meters.totals().items() if n >= 0]
    )
    total: dict[tuple[int | None, str], Row] = {}
    for _, (_, rows) in found:
        for place, what, *numbers in rows:
            before = total.get((place, what), Row(place, what, 0.0, 0.0, 0.0))
            total[place, what] = Row(place, what, *(a + b for a, b in zip(before[2:], numbers, strict=True)))
    return Measured(
        pipes=[*ends, *Chain.of(part).pipes],
        num_main=len(ends),
        rows=list(total.values()),
        main_rows=[row for row in main_rows if row.place is not None and row.place < len(ends)],
        workers=[times._replace(events=list(times.events), batches=list(times.batches)) for _, (times, _) in found],
        num_batches=counters.num_items,
        num_samples=counters.num_samples,
        busy_s=counters.busy_s,
        wait_s=counters.wait_s,
        has_workers=service.has_workers,
        num_workers=service.num_workers,
    )
