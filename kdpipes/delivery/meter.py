"""Measure how long each node of a chain works in each thread, for the profiler."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from kdpipes.core.processes import ForkLock
from kdpipes.core.sample import Sample

OUTSIDE = -1  # the node for time that belongs to no node
clock = time.perf_counter
_SHORTEST_S = 2e-5  # shorter calls are not part of a trace
_DEEP = 4
_choosing = ForkLock()


class Meter:
    """The clock of one thread. Time counts for the node that was entered last, so that none is counted twice."""

    __slots__ = ("_node", "_room", "_since", "events", "rows", "thread")

    def __init__(self, num_events: int) -> None:
        self.rows: dict[int, list[float]] = defaultdict(lambda: [0.0, 0, 0])  # seconds, calls, bytes; by node
        self.events: list[tuple[int, float, float]] = []
        self._room = num_events
        self._node = OUTSIDE
        self._since = clock()
        self.thread: threading.Thread

    def run(self, node: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function and count its time for `node`, without the calls of other nodes in it."""
        before, start = self._node, clock()
        self.rows[before][0] += start - self._since
        self._node, self._since = node, start
        try:
            return function(*args)
        finally:
            end = clock()
            row = self.rows[node]
            row[0] += end - self._since
            row[1] += 1
            self._node, self._since = before, end
            if end - start >= _SHORTEST_S and self._room:
                self._room -= 1
                self.events.append((node, start, end))

    def leave_out(self) -> None:
        """Do not count the time since the last call began or ended, which was spent on measuring."""
        self._since = clock()

    def take(self) -> dict[int, list[float]]:
        """Return the counts since the last call, and reset them."""
        taken, self.rows = self.rows, defaultdict(lambda: [0.0, 0, 0])
        return taken


class Meters:
    """The meters of all threads that work on one chain.

    Args:
        num_events: The maximum number of calls recorded per thread for a trace.
    """

    def __init__(self, num_events: int) -> None:
        self.all: list[Meter] = []
        self.here = _ThreadMeter(self.all, num_events)

    def take(self) -> dict[int, list[float]]:
        """Return the counts of all threads since the last call, and reset them."""
        return _total([meter.take() for meter in list(self.all)])

    def totals(self) -> dict[int, list[float]]:
        """Return the counts of all threads so far."""
        return _total([dict(meter.rows) for meter in list(self.all)])

    def take_events(self) -> list[tuple[int, float, float]]:
        """Return the calls of all threads since the last call of this method."""
        taken = []
        for meter in list(self.all):
            events, meter.events = meter.events, []
            taken += events
        return taken


def _total(counted: list[dict[int, list[float]]]) -> dict[int, list[float]]:
    total: dict[int, list[float]] = {}
    for rows in counted:
        for node, row in rows.items():
            so_far = total.setdefault(node, [0.0, 0, 0])
            so_far[:] = [one + other for one, other in zip(so_far, row, strict=True)]
    return total


class _ThreadMeter(threading.local):
    """The meter of the current thread."""

    def __init__(self, meters: list[Meter], num_events: int) -> None:
        with _choosing.lock:
            self.meter = next((meter for meter in meters if not meter.thread.is_alive()), None) or Meter(num_events)
            if self.meter not in meters:
                meters.append(self.meter)
            self.meter.thread = threading.current_thread()  # goes on where one that has ended stopped
        self.meter.leave_out()


def size_of(value: Any, depth: int = 0) -> int:
    """Return the approximate number of bytes in a value: arrays, tensors, images, bytes and text."""
    if isinstance(value, Sample):  # reading its fields would load them
        return 0
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, tuple | list | Mapping) and depth < _DEEP:
        parts = value.values() if isinstance(value, Mapping) else value
        return sum(size_of(part, depth + 1) for part in parts)
    held = getattr(value, "content", getattr(value, "pixels", None))  # an `EncodedImage` or `DecodedImage`
    if held is not None and depth < _DEEP:
        return size_of(held, depth + 1)
    bands = getattr(value, "getbands", None)  # a Pillow image
    return value.width * value.height * len(bands()) if bands is not None else 0
