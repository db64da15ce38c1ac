"""What one worker measures of itself, and says now and then."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

from kdpipes.delivery import meter
from kdpipes.delivery.meter import OUTSIDE, size_of
from kdpipes.delivery.probes import Probes, copy_pipes
from kdpipes.delivery.producer import Frame, Kind, Order, Producer

__all__ = ["SENDING", "ProfiledProducer", "producer_of"]

SENDING = -1  # in the place of a pipe
_SHARE = 0.005  # of the time, that may go into measuring
_CALL_S = 3.5e-6  # what measuring one call costs, with all that goes with it, on a slow machine
_EVERY_S = 0.1  # how often a worker tells
_END: Any = object()
_numbers = itertools.count()


def producer_of(chain: Any, worker: int, num_workers: int, *, is_profiled: bool) -> Producer:
    """Return what makes a worker's items, measured or not."""
    return (ProfiledProducer if is_profiled else Producer)(chain, worker, num_workers)


class ProfiledProducer(Producer):
    """A producer that measures its copy of the chain.

    So that measuring takes half a hundredth of the time, it is on for the first item, and then for as many as that
    allows. An item that was measured stands for those before it that were not.

    Args:
        chain: The chain; a copy of its pipes is measured.
        worker: The number of the worker.
        num_workers: How many there are.
    """

    def __init__(self, chain: Any, worker: int, num_workers: int) -> None:
        copied = copy_pipes(chain)
        super().__init__(copied, worker, num_workers)
        self._probes = Probes(copied)
        self._sending = self._probes.node(SENDING)
        self._id = f"{os.getpid()}-{next(_numbers)}"
        self._totals: dict[int, list[float]] = {}
        self._num_items = 0
        self._work_s = self._idle_s = 0.0
        self._cost_s = 0.0  # what measuring has cost
        self._pending_s = 0.0  # what was not measured since
        self._batches: list[tuple[int, float, float]] = []  # number, start and end; of those that were measured
        self._begun: float | None = None
        self._told = 0.0

    def epoch(self, order: Order, first_epoch: int, send: Callable[[Frame], None]) -> Iterator[None]:
        """Make the items of one epoch, measured; see `Producer`."""
        number = order.position.number

        def say(frame: Frame) -> None:
            nonlocal number
            number = frame.number
            if frame.kind in (Kind.END, Kind.ERROR):
                self._end()
                self._tell(send)
            self._probes.run(self._sending, send, frame)
            if frame.kind is Kind.ITEM and self._probes.is_on:
                self._probes.meters.here.meter.rows[self._sending][2] += size_of(frame.content)
                self._probes.meters.here.meter.leave_out()

        made = super().epoch(order, first_epoch, say)
        while True:
            self._begin()
            if next(made, _END) is _END:
                return
            paused = self._end(number)
            self._num_items += 1
            if paused - self._told >= _EVERY_S:
                self._tell(send)
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
        spent, self._begun = now - self._begun, None
        self._work_s += spent
        if self._probes.is_on:
            self._stand_for(number, now - spent, now)
        else:
            self._pending_s += spent
        return now

    def _stand_for(self, number: int | None, begun: float, now: float) -> None:
        """Count an item that was measured, and as many like it as took the time that was not."""
        spent = now - begun
        if number is None or spent <= 0:  # the end of an epoch is like no item
            self._count(1.0)
            return
        self._batches.append((number, begun, now))
        self._count(1 + self._pending_s / spent)
        self._pending_s = 0.0

    def _count(self, weight: float) -> None:
        for node, row in self._probes.meters.take().items():
            if node != OUTSIDE:
                total = self._totals.setdefault(node, [0.0, 0.0, 0.0])
                total[:] = [so_far + weight * part for so_far, part in zip(total, row, strict=True)]
                self._cost_s += row[1] * _CALL_S

    def _tell(self, send: Callable[[Frame], None]) -> None:
        self._told = meter.clock()
        nodes, batches = self._probes.nodes, self._batches
        self._batches = []
        send(
            Frame(
                Kind.TIMES,
                content={
                    "id": self._id,
                    "worker": self._worker,
                    "process": os.getpid(),
                    "items": self._num_items,
                    "work_s": self._work_s,
                    "idle_s": self._idle_s,
                    "rows": [(*nodes[node], *row) for node, row in self._totals.items()],
                    "events": [(*nodes[node], *times) for node, *times in self._probes.meters.take_events()],
                    "batches": batches,
                },
            )
        )
