"""Profile a chain: each worker measures its own copy, and the main process adds up the results.

`ProfiledProducer` decides which items of a worker are measured, and reports. `Probes` measure the pipes from outside,
by wrapping their methods: pipes contain no profiling code. A `Meter` is the clock of one thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import IterPipe, Streaming
from kdpipes.core.map_pipe import MEASURED_ROWS, MapPipe, read_rows
from kdpipes.core.operation import MEASURED_ITEMS
from kdpipes.core.processes import ForkLock
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.torch_pipes import MapDataPipe, ShardingFilter
from kdpipes.delivery.state import main_part
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe, is_ready
from kdpipes.loader.channel import Kind, Message
from kdpipes.loader.worker import Assignment, Options, Producer, Send

OUTSIDE = -1  # the node for time that belongs to no node
clock = time.perf_counter
_SHORTEST_S = 2e-5  # shorter calls are not part of a trace
_DEEP = 4
_choosing = ForkLock()
COPYING = "copying batches in a thread"
_NUM_EVENTS = 20_000  # of a thread, for a trace
_SHARE = 0.005  # of the time, that may go into measuring
_CALL_S = 3.5e-6  # what measuring one call costs, with all that goes with it, on a slow machine
_EVERY_S = 0.1  # how often a worker reports
_END: Any = object()
_numbers = itertools.count()
Function = Callable[..., Any]
Counts = dict[int, list[float]]  # seconds, calls and bytes, by node
Interval = tuple[int, float, float]  # the number of a node or a batch, start and end


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
        self._totals: Counts = {}
        self._num_items = 0
        self._work_s = self._idle_s = 0.0
        self._cost_s = 0.0  # what measuring has cost
        self._pending_s = 0.0  # what was not measured since
        # Number, start and end of each measured batch.
        self._batches: list[Interval] = []
        self._begun: float | None = None
        self._reported_at = 0.0

    def epoch(self, assignment: Assignment, send: Send) -> Iterator[None]:
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
            self._idle_s += clock() - paused

    def _begin(self) -> None:
        if self._cost_s <= _SHARE * self._work_s:
            self._probes.is_on = True
            self._probes.meters.here.meter.leave_out()
        else:
            self._probes.is_on = False
        self._begun = clock()

    def _end(self, number: int | None = None) -> float:
        """Count the time since `_begin`, that of an item or of the end; return what time it is."""
        now = clock()
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

    def _report(self, send: Send) -> None:
        self._reported_at = clock()
        nodes = self._probes.nodes
        batches = self._batches
        self._batches = []
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
    """The times that one worker measured.

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
    batches: MutableSequence[Interval]


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
    """Return what a reading service has measured of a loader's chain."""
    ends, part = main_part(chain, has_workers=service.has_workers)
    counters = service.counters
    probes = service.main_probes
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


class Probes:
    """Measures the pipes of a chain while it is on.

    A pipe of kdpipes gets measuring methods as attributes of the instance, a stock pipe a subclass of its class. They
    measure while `is_on` is True, which may change only between two items. Values that a pipe promises are computed in
    a later pipe but count for the pipe that promised them, as do the pixels of an image that is decoded late.

    Args:
        chain: A copy of a part of the chain, which nothing else uses.
        first: The place of its last pipe among the pipes of the whole chain, the end first.
    """

    def __init__(self, chain: Any, first: int = 0) -> None:
        self.meters = Meters(_NUM_EVENTS)
        self.nodes: list[tuple[int | None, str]] = []  # the place of a pipe, and what it does
        self.is_on = False
        self._numbers: dict[tuple[int | None, str], int] = {}
        self._late: dict[tuple[type, int], Any] = {}
        for place, pipe in enumerate(Chain.of(chain).pipes, first):
            self._measure(pipe, place)

    def node(self, place: int | None, what: str = "") -> int:
        """Return the number of something that is measured separately; place None is sending to the main process."""
        number = self._numbers.get((place, what))
        if number is None:
            number = self._numbers[place, what] = len(self.nodes)
            self.nodes.append((place, what))
        return number

    def run(self, node: int, function: Function, *args: Any) -> Any:
        """Call a function, and measure it if measuring is on."""
        return self.meters.here.meter.run(node, function, *args) if self.is_on else function(*args)

    def watch(self, block: Block, place: int) -> None:
        """Let the values that a pipe has promised count for it when they are made."""
        for column in block.fields.values():
            column.wrap(
                lambda load, what: None if type(load) is _Timed else _Timed(self, self.node(place, what), load),
                lambda load, what: partial(self._column, self.node(place, what), load),
            )
        self.meters.here.meter.leave_out()

    def _column(self, node: int, load: Callable[..., Sequence[Any] | None], *args: Any) -> Sequence[Any] | None:
        """Return the values of many samples, measured."""
        if not self.is_on:
            return load(*args)
        meter = self.meters.here.meter
        values = meter.run(node, load, *args)
        if values is None:
            return None
        made = [self.late(value, node) for value in values]
        row = meter.rows[node]
        row[1] += len(made) - 1
        row[2] += sum(size_of(value) for value, late in zip(values, made, strict=True) if late is value)
        meter.leave_out()
        return made

    def late(self, value: Any, node: int) -> Any:
        """Return a value whose work is not done yet as one that is measured when it is."""
        methods = getattr(type(value), "late_methods", ())
        if not methods:
            return value
        kind = self._late.get((type(value), node))
        if kind is None:
            kind = self._late[type(value), node] = _subclass(type(value), {"__slots__": (), "late_methods": ()})
            for name in methods:
                setattr(kind, name, self._late_method(getattr(type(value), name), node))
        made = kind.__new__(kind)
        for name in type(value).__slots__:
            setattr(made, name, getattr(value, name))
        return made

    def _late_method(self, method: Function, node: int) -> Function:
        def run(value: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return method(value, *args, **kwargs)
            meter = self.meters.here.meter
            made = meter.run(node, partial(method, value, **kwargs), *args)
            meter.rows[node][2] += size_of(made)
            meter.leave_out()
            return made

        return run

    def _measure(self, pipe: Any, place: int) -> None:
        """Let a pipe call measuring functions."""
        kind: Any = type(pipe)
        node, held = self.node(place), vars(pipe)
        if isinstance(pipe, MapPipe | IterPipe):
            held[MEASURED_ITEMS] = partial(self.run, self.node(place, "giving samples"))
        if isinstance(pipe, MapPipe):
            held[MEASURED_ROWS] = partial(self._rows, pipe, node, place)
            held["prefetch"] = partial(self.run, self.node(place, "reading ahead"), pipe.prefetch)
        # Methods of this pipe: `deal` copies the streams of its lanes, and copies must not read from the original.
        elif isinstance(pipe, IterPipe):
            samples = self._measured_items(kind.samples, node, None if pipe.traits.is_plan else place)
            iterate = self._measured_items(kind.iterate, self.node(place, "binding samples"), None)
            held["samples"], held["iterate"] = MethodType(samples, pipe), MethodType(iterate, pipe)
        elif isinstance(pipe, Streaming):
            if isinstance(pipe, DeviceMoverIterDataPipe):
                held["copy"] = partial(self.run, self.node(place, COPYING), pipe.copy)
            held["iterate"] = MethodType(self._measured_items(kind.iterate, node, None), pipe)
        else:
            self._measure_stock(pipe, node)

    def _measure_stock(self, pipe: Any, node: int) -> None:
        base = type(pipe)
        if base is ShardingFilter:  # torch and torchdata look for exactly this class
            return
        kind = _subclass(base, {})  # torch's metaclass would wrap methods in the class body
        if isinstance(pipe, MapDataPipe):
            kind.__getitem__ = lambda pipe, index: self.run(node, base.__getitem__, pipe, index)
        else:
            kind.__iter__ = lambda pipe: _Items(self, base.__iter__(pipe), node, None)
        pipe.__class__ = kind

    def _rows(self, pipe: Any, node: int, place: int, rows: Rows) -> Sequence[Block]:
        """Read samples, measured. Each counts as one call."""
        blocks: Sequence[Block] = self.run(node, read_rows, pipe, rows)
        if self.is_on:
            self.meters.here.meter.rows[node][1] += len(rows) - 1
            for block in () if pipe.traits.is_plan else blocks:
                self.watch(block, place)
        return blocks

    def _measured_items(
        self, method: Callable[[Any], Iterator[Any]], node: int, watched: int | None
    ) -> Callable[[Any], Iterator[Any]]:
        beginning = self.node(self.nodes[node][0], "beginning an epoch")
        return lambda pipe: _Items(self, self.run(beginning, method, pipe), node, watched)


def _subclass(base: Any, namespace: dict[str, Any]) -> Any:
    """Return a subclass that calls itself as its base does."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (base,), {**names, **namespace})


@dataclass(slots=True, eq=False)
class _Timed:
    """A function that computes the value of a field, measured."""

    _probes: Probes
    _node: int
    _load: Function

    def __call__(self, sample: Sample, *values: Any) -> Any:
        probes = self._probes
        node = self._node
        if not probes.is_on:
            return self._load(sample, *values)
        meter = probes.meters.here.meter
        value = meter.run(node, self._load, sample, *values)
        made = probes.late(value, node)
        # Otherwise it only holds the bytes that it was given, and its result is measured later.
        if made is value:
            meter.rows[node][2] += size_of(value)
        meter.leave_out()
        return made


@dataclass(eq=False)
class _Items:
    """The items of a stream, each measured as it is made; `watched` is the place of a pipe that promises values."""

    _probes: Probes
    _items: Iterator[Any]
    _node: int
    _watched: int | None

    def __iter__(self) -> _Items:
        return self

    def is_ready(self) -> bool:
        return is_ready(self._items)

    def __next__(self) -> Any:
        probes = self._probes
        if not probes.is_on:
            return next(self._items)
        meter = probes.meters.here.meter
        try:
            item = meter.run(self._node, next, self._items)
        except StopIteration:
            meter.rows[self._node][1] -= 1  # the end is no item
            raise
        if self._watched is not None and isinstance(item, Sample):
            probes.watch(item.block, self._watched)
        return item


class Meter:
    """The clock of one thread. Time counts for the node that was entered last, so that none is counted twice."""

    __slots__ = ("_node", "_room", "_since", "events", "rows", "thread")

    def __init__(self, num_events: int) -> None:
        self.rows: Counts = defaultdict(lambda: [0.0, 0, 0])
        self.events: list[Interval] = []
        self._room = num_events
        self._node = OUTSIDE
        self._since = clock()
        self.thread: threading.Thread

    def run(self, node: int, function: Function, *args: Any) -> Any:
        """Call a function and count its time for `node`, without the calls of other nodes in it."""
        before = self._node
        start = clock()
        self.rows[before][0] += start - self._since
        self._node = node
        self._since = start
        try:
            return function(*args)
        finally:
            end = clock()
            row = self.rows[node]
            row[0] += end - self._since
            row[1] += 1
            self._node = before
            self._since = end
            if end - start >= _SHORTEST_S and self._room:
                self._room -= 1
                self.events.append((node, start, end))

    def leave_out(self) -> None:
        """Do not count the time since the last call began or ended, which was spent on measuring."""
        self._since = clock()

    def take(self) -> Counts:
        """Return the counts since the last call, and reset them."""
        taken = self.rows
        self.rows = defaultdict(lambda: [0.0, 0, 0])
        return taken


class Meters:
    """The meters of all threads that work on one chain.

    Args:
        num_events: The maximum number of calls recorded per thread for a trace.
    """

    def __init__(self, num_events: int) -> None:
        self.all: list[Meter] = []
        self.here = _ThreadMeter(self.all, num_events)

    def take(self) -> Counts:
        """Return the counts of all threads since the last call, and reset them."""
        return _total([meter.take() for meter in list(self.all)])

    def totals(self) -> Counts:
        """Return the counts of all threads so far."""
        return _total([dict(meter.rows) for meter in list(self.all)])

    def take_events(self) -> list[Interval]:
        """Return the calls of all threads since the last call of this method."""
        taken = []
        for meter in list(self.all):
            events = meter.events
            meter.events = []
            taken += events
        return taken


def _total(counted: list[Counts]) -> Counts:
    total: Counts = {}
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
