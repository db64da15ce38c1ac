"""Measure the pipes of a chain from outside, by wrapping their methods. Pipes contain no profiling code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import MapDataPipe
from torch.utils.data.datapipes.iter import ShardingFilter

from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import IterPipe, Streaming
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.sample import Sample
from kdpipes.delivery.meter import Meters, size_of
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe, is_ready

__all__ = ["COPYING", "Probes"]

COPYING = "copying batches in a thread"
_BESIDES = {"finish": "giving samples", "prefetch": "reading ahead"}  # methods
_NUM_EVENTS = 20_000  # of a thread, for a trace


class Probes:
    """Measures the pipes of a chain while they are on.

    A pipe of kdpipes' gets methods of its own as attributes of the instance, a stock pipe a subclass of its class. What
    is called for each sample is put there and taken off; iterators live for an epoch, and ask whether it is on. The
    values that a pipe promises are measured when they are made, which is in a later pipe, and count for the pipe that
    has promised them; so do the pixels of an image that is decoded late.

    Args:
        chain: A copy of a part of the chain, which nobody else uses.
        first: The place of its last pipe among the pipes of the whole chain, last one first.
    """

    def __init__(self, chain: Any, first: int = 0) -> None:
        self.meters = Meters(_NUM_EVENTS)
        self.nodes: list[tuple[int | None, str]] = []  # the place of a pipe, and what it does
        self.is_on = False
        self._numbers: dict[tuple[int | None, str], int] = {}
        self._late: dict[tuple[type, int], Any] = {}
        self._by_sample: list[tuple[Any, dict[str, Any]]] = []  # a pipe, and the methods that it gets
        for place, pipe in enumerate(Chain.of(chain).pipes, first):
            self._by_sample.append((pipe, _prepared(self, pipe, place)))

    def node(self, place: int | None, what: str = "") -> int:
        """Return the number of what is measured for itself; the place None is the way to the main process."""
        number = self._numbers.get((place, what))
        if number is None:
            number = self._numbers[place, what] = len(self.nodes)
            self.nodes.append((place, what))
        return number

    def on(self) -> None:
        """Start measuring. Call this only between two items."""
        if not self.is_on:
            self.is_on = True
            for pipe, methods in self._by_sample:
                vars(pipe).update(methods)

    def off(self) -> None:
        """Stop measuring. Call this only between two items."""
        if self.is_on:
            self.is_on = False
            for pipe, methods in self._by_sample:
                for name in methods:
                    vars(pipe).pop(name, None)

    def run(self, node: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, and measure it if measuring is on."""
        return self.meters.here.meter.run(node, function, *args) if self.is_on else function(*args)

    def watch(self, sample: Any, place: int) -> Any:
        """Let the values that a pipe has promised count for it when they are made."""
        if isinstance(sample, Sample):
            for value in sample.scope().values():
                value.wrap(lambda load, what: self._timed(load, place, what))
            self.meters.here.meter.leave_out()
        return sample

    def column(self, place: int, what: str, make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the values of a field of many samples, whose work counts for a pipe."""
        node = self.node(place, what)
        meter = self.meters.here.meter
        values = meter.run(node, make)
        made = [self.late(value, node) for value in values]
        row = meter.rows[node]
        row[1] += len(values) - 1
        row[2] += sum(size_of(value) for value, late in zip(values, made, strict=True) if late is value)
        meter.leave_out()
        return made

    def _timed(self, load: Any, place: int, what: str) -> Any:
        return None if type(load) is _Timed else _Timed(self, self.node(place, what), load)

    def late(self, value: Any, node: int) -> Any:
        """Return a value whose work is not done yet as one that is measured when it is."""
        methods = getattr(type(value), "late_methods", ())
        if not methods:
            return value
        kind = self._late.get((type(value), node))
        if kind is None:
            kind = self._late[type(value), node] = _late_class(self, type(value), methods, node)
        made = kind.__new__(kind)
        for name in type(value).__slots__:
            setattr(made, name, getattr(value, name))
        return made


class _Timed:
    """What computes the value of a field, measured.

    Args:
        probes: Whether and where.
        node: Whose time it is.
        load: Computes it.
    """

    __slots__ = ("_load", "_node", "_probes")

    def __init__(self, probes: Probes, node: int, load: Callable[..., Any]) -> None:
        self._probes, self._node, self._load = probes, node, load

    def __call__(self, sample: Sample, *values: Any) -> Any:
        probes, node = self._probes, self._node
        if not probes.is_on:
            return self._load(sample, *values)
        meter = probes.meters.here.meter
        value = meter.run(node, self._load, sample, *values)
        made = probes.late(value, node)
        if made is value:  # otherwise the bytes are those that it was given, and what it makes of them is to come
            meter.rows[node][2] += size_of(value)
        meter.leave_out()
        return made


def _late_class(probes: Probes, base: Any, methods: tuple[str, ...], node: int) -> Any:
    made = _subclass(base, {"__slots__": (), "late_methods": ()})
    for name in methods:
        setattr(made, name, _late_method(probes, getattr(base, name), node))
    return made


def _late_method(probes: Probes, method: Callable[..., Any], node: int) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not probes.is_on:
            return method(self, *args, **kwargs)
        meter = probes.meters.here.meter
        value = meter.run(node, partial(method, self, **kwargs), *args)
        meter.rows[node][2] += size_of(value)
        meter.leave_out()
        return value

    return run


def _subclass(base: Any, namespace: dict[str, Any]) -> Any:
    """Return a subclass that calls itself as its base does."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (base,), {**names, **namespace})


def _prepared(probes: Probes, pipe: Any, place: int) -> dict[str, Any]:
    """Let a pipe give measured iterators; return the measured methods that are called for each sample."""
    node = probes.node(place)
    if isinstance(pipe, MapPipe):
        return _indexed_methods(probes, pipe, place, node)
    if isinstance(pipe, Streaming):
        return _stream_methods(probes, pipe, place, node)
    _measure_stock(probes, pipe, node)
    return {}


def _indexed_methods(probes: Probes, pipe: MapPipe, place: int, node: int) -> dict[str, Any]:
    methods = {
        name: _measured(probes, getattr(pipe, name), probes.node(place, what)) for name, what in _BESIDES.items()
    }
    methods["read_fields"] = _measured_columns(probes, pipe.read_fields, node, place)
    methods["read_items"] = _measured_columns(probes, pipe.read_items, node, place)
    fetch = _measured(probes, pipe.fetch, node)
    return {**methods, "fetch": fetch if pipe.traits.is_plan else lambda index: probes.watch(fetch(index), place)}


def _stream_methods(probes: Probes, pipe: Any, place: int, node: int) -> dict[str, Any]:
    if isinstance(pipe, DeviceMoverIterDataPipe):
        vars(pipe)["copy"] = _measured(probes, pipe.copy, probes.node(place, COPYING))
    if not isinstance(pipe, IterPipe):
        vars(pipe)["iterate"] = _measured_items(probes, pipe.iterate, node, None)
        return {}
    samples = _measured_items(probes, pipe.samples, node, None if pipe.traits.is_plan else place)
    iterate = _measured_items(probes, pipe.iterate, probes.node(place, "binding samples"), None)
    vars(pipe).update(samples=samples, iterate=iterate)
    return {"finish": _measured(probes, pipe.finish, probes.node(place, _BESIDES["finish"]))}


def _measure_stock(probes: Probes, pipe: Any, node: int) -> None:
    base = type(pipe)
    if base is ShardingFilter:  # torch and torchdata look for exactly this class
        return
    kind = _subclass(base, {})  # torch's metaclass would wrap what stands in the body of the class
    if isinstance(pipe, MapDataPipe):
        kind.__getitem__ = lambda self, index: probes.run(node, base.__getitem__, self, index)
    else:
        kind.__iter__ = lambda self: _Items(probes, base.__iter__(self), node, None)
    pipe.__class__ = kind


def _measured(probes: Probes, method: Callable[..., Any], node: int) -> Callable[..., Any]:
    here = probes.meters.here

    def run(*args: Any) -> Any:
        return here.meter.run(node, method, *args)

    return run


def _measured_columns(
    probes: Probes, method: Callable[..., Any], node: int, place: int
) -> Callable[..., Sequence[Any] | None]:
    """Return a method that reads many samples at once, measured. Each sample counts as one call."""

    def run(*args: Any) -> Any:
        *_, positions, bulk = args
        meter = probes.meters.here.meter
        before, bulk.measure = bulk.measure, partial(probes.column, place)
        try:
            made = meter.run(node, method, *args)
        finally:
            bulk.measure = before
        meter.rows[node][1] += -1 if made is None else len(positions) - 1
        return made

    return run


def _measured_items(
    probes: Probes, method: Callable[[], Iterator[Any]], node: int, watched: int | None
) -> Callable[[], Iterator[Any]]:
    beginning = probes.node(probes.nodes[node][0], "beginning an epoch")
    return lambda: _Items(probes, probes.run(beginning, method), node, watched)


class _Items:
    """The items of a stream, each measured as it is made.

    Args:
        probes: Whether and where.
        items: The items.
        node: Whose time it is.
        watched: The place of the pipe, where it promises values.
    """

    def __init__(self, probes: Probes, items: Iterator[Any], node: int, watched: int | None) -> None:
        self._probes, self._items, self._node, self._watched = probes, items, node, watched

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
        return item if self._watched is None else probes.watch(item, self._watched)
