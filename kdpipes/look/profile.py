"""Show where a chain spends its time: as text, HTML, a chart or a trace; and the live rates of a loader."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import ChainError, check_callable, is_number, must_be
from kdpipes.core.messages import counted
from kdpipes.core.pipe import counters_of
from kdpipes.core.registry import pipe_name
from kdpipes.core.torch_pipes import MapDataPipe
from kdpipes.loader import profile as loader_profile
from kdpipes.loader.loader import Loader
from kdpipes.loader.profile import COPYING, Measured, WorkerTimes
from kdpipes.look.batch import BATCH_SIZE, chain_in
from kdpipes.look.figures import Figure, bar_chart
from kdpipes.look.rendering import bytes_text, render, seconds_text, table_lines
from kdpipes.storage.files import replace_file

Kind = Literal["storage", "plan", "decoding", "transforms", "cache", "transfer", "device"]
SENDING, BORROWED = "(sending)", "(deal)"  # these take time, but are not pipes of the chain
_HARDLY = 0.05  # below this share of waiting, a faster chain gains almost nothing
_LEAST = 0.02  # smaller shares of the steps of a pipe are not shown
_EVERY_S = 0.5  # how often live rates are updated
_END: Any = object()
_HEAD = ("pipe", "share", "time", "made", "per s", "size", "cached")
_COLORS: dict[Kind, str] = {
    "storage": "#4ea8de",
    "plan": "#a3a3a3",
    "decoding": "#e4572e",
    "transforms": "#76b041",
    "cache": "#c77dff",
    "transfer": "#17bebb",
    "device": "#7a6ff0",
}
_BY_ROLE: dict[str, Kind] = {
    "cache": "cache",
    "deal": "transfer",
    "batch": "transfer",
    "plan": "plan",
    "join": "plan",
    "device": "device",
}
_BY_NAME: dict[str, Kind] = {"decode_images": "decoding", "map": "transforms", "pin_memory": "device"}


def _kind_of(node: Node) -> Kind:
    """Return the kind of work that a pipe does."""
    if not node.upstream:
        return "storage"
    other: Kind = "transfer" if node.operation is None else "transforms"
    return _BY_ROLE.get(node.traits.role) or _BY_NAME.get(node.name, other)


class StepTime(NamedTuple):
    """One of the steps of a pipe: "applying 'resize' to field 'x'"."""

    what: str
    seconds: float


class PipeTime(NamedTuple):
    """The time of one pipe.

    Args:
        pipe: The name of the pipe. Names in brackets are not pipes of the chain: "(sending)" to the main process, and
            the "(deal)" with which an indexed chain is measured.
        kind: The kind of its work: "storage", "plan", "decoding", "transforms", "cache", "transfer" (batches, and their
            way from a worker to the main process), "device".
        is_main: Whether it runs in the main process, after the workers.
        share: The pipe's share of the time of all pipes.
        seconds: The pipe's time in all workers together, without the time of pipes upstream.
        calls: The number of samples that it made; after `deal`, of batches.
        num_bytes: The size of its results, as far as it is known.
        hits: The number of fields that a cache had.
        misses: The number of fields that a cache did not have.
        steps: The steps of the pipe, if they are measured separately.
    """

    pipe: str
    kind: Kind
    is_main: bool
    share: float
    seconds: float
    calls: float
    num_bytes: float
    hits: int | None
    misses: int | None
    steps: tuple[StepTime, ...]


@dataclass(frozen=True, repr=False)
class Profile:
    """The time that each pipe of a chain takes, as a table in a terminal or notebook.

    Args:
        pipes: The time of each pipe, from the source on.
        num_batches: The number of batches that the loop received.
        num_samples: The number of their samples, if `deal` counts them.
        num_workers: The number of workers; 0 if the loop makes the batches itself.
        loop_s: The duration of the loop.
        wait_s: The part of `loop_s` spent waiting for batches (or making them, without workers).
        main_s: The part of `loop_s` spent in pipes that run after the workers, such as `to_device`.
        work_s: The time that the workers were busy, summed over all workers.
        idle_s: The time that the workers waited for the loop to take batches, summed over all workers.
        workers: The reports of each worker, for the trace.
        names: The names of all pipes of the chain, from the source on, for the trace.
    """

    pipes: tuple[PipeTime, ...]
    num_batches: int
    num_samples: int
    num_workers: int
    loop_s: float
    wait_s: float
    main_s: float
    work_s: float
    idle_s: float
    workers: tuple[WorkerTimes, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def consumer_s(self) -> float:
        """The time that the loop was busy with its batches."""
        return max(self.loop_s - self.wait_s - self.main_s, 0.0)

    @property
    def wait_share(self) -> float:
        """The share of the loop spent waiting for batches or making them."""
        return min(self.wait_s / self.loop_s, 1.0) if self.loop_s else 0.0

    @property
    def bound(self) -> Literal["chain", "consumer"]:
        """Whether the consumer waits for the chain, or the chain for the consumer."""
        idle_share = self.idle_s / (self.work_s + self.idle_s or 1.0) if self.num_workers else 1 - self.wait_share
        return "chain" if self.wait_share >= max(idle_share, _HARDLY) else "consumer"

    def __repr__(self) -> str:
        rows = [cells for cells, _, _ in self._rows()]
        return "\n".join([*table_lines([_HEAD, *rows]), *self._sentences()])

    def _repr_html_(self) -> str:
        rows = [{"cells": cells, "color": _COLORS[kind], "share": share} for cells, kind, share in self._rows()]
        return render("profile", _HEAD, rows, self._sentences())

    def _rows(self) -> Iterator[tuple[tuple[str, ...], Kind, float]]:
        """Yield the cells of each pipe and of its steps, with the kind of work and the share of the time."""
        for pipe in self.pipes:
            rate = f"{pipe.calls / pipe.seconds:,.0f}" if pipe.seconds and pipe.calls else ""
            cached = "" if pipe.hits is None else f"{pipe.hits} of {pipe.hits + (pipe.misses or 0)}"
            size = bytes_text(pipe.num_bytes) if pipe.num_bytes else ""
            name = pipe.pipe + (" (main process)" if pipe.is_main else "")
            times = f"{pipe.share:.1%}", seconds_text(pipe.seconds), f"{pipe.calls:,.0f}"
            yield (name, *times, rate, size, cached), pipe.kind, pipe.share
            for step in pipe.steps if len(pipe.steps) > 1 else ():
                share = pipe.share * step.seconds / pipe.seconds if pipe.seconds else 0.0
                if share >= _LEAST:
                    cells = f"  {step.what}", f"{share:.1%}", seconds_text(step.seconds), "", "", "", ""
                    yield cells, pipe.kind, share

    def _sentences(self) -> list[str]:
        """Return sentences that describe who waits for whom."""
        text = f"{counted(self.num_batches, 'batch')} in {seconds_text(self.loop_s)}"
        text += f", {self.num_samples / self.loop_s:,.0f} samples/s." if self.loop_s else "."
        copying = [step.seconds for pipe in self.pipes for step in pipe.steps if step.what == COPYING]
        if copying:
            text += f" A thread copied batches to the device for {seconds_text(sum(copying))}, beside the loop."
        if not self.num_workers:
            return [text, f"No workers: {self.wait_share:.0%} of the loop made batches, the rest was the consumer's."]
        idle_share = self.idle_s / (self.work_s + self.idle_s or 1.0)
        workers = "the worker" if self.num_workers == 1 else f"the {self.num_workers} workers"
        return [
            text,
            f"The loop waited for {self.wait_share:.0%} of its time, {workers} for {idle_share:.0%} of theirs: "
            f"the {self.bound} is the bottleneck.",
        ]

    def plot(self) -> Figure:
        """Return a bar for each pipe as a figure: notebooks show it, and `.save("profile.svg")` writes it."""
        bars = [(one.pipe, [(one.share, f"{one.share:.1%} {one.kind}", _COLORS[one.kind])]) for one in self.pipes]
        return bar_chart(bars, f"the time of {len(bars)} pipes", bar=18, gap=6)

    def to_trace(self, path: str | Path) -> Path:
        """Write the pieces of work of each worker for chrome://tracing or https://ui.perfetto.dev.

        Args:
            path: The JSON file to write. An existing file is replaced. It holds the last 20,000 batches of each worker
                that were measured, and up to 20,000 pieces of work above 20 microseconds.
        """
        content = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self._trace_events())})
        replace_file(Path(path), content.encode())
        return Path(path)

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield Chrome's trace events: the names of workers, and their work, with times in microseconds."""
        times = [start for worker in self.workers for _, start, _ in worker.batches]
        times += [start for worker in self.workers for _, _, start, _ in worker.events]
        begin = min(times, default=0.0)
        for worker in self.workers:
            place = {"pid": worker.process, "tid": worker.worker}
            shown = f"worker {worker.worker}" if self.num_workers else "the loop"
            for kind, name in (("process_name", f"process {worker.process}"), ("thread_name", shown)):
                yield {"name": kind, "ph": "M", **place, "args": {"name": name}}
            found = [(f"batch {number}", "batch", start, end) for number, start, end in worker.batches]
            for number, what, start, end in worker.events:
                name = SENDING if number is None else self.names[number]
                found.append((what or name, name, start, end))
            for name, category, start, end in found:
                span = {"ts": (start - begin) * 1e6, "dur": (end - start) * 1e6}
                yield {"name": name, "cat": category, "ph": "X", **span, **place}

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, fit for JSON."""
        names = ("num_batches", "num_samples", "num_workers", "loop_s", "wait_s", "main_s", "work_s", "idle_s")
        pipes = [{**pipe._asdict(), "steps": [step._asdict() for step in pipe.steps]} for pipe in self.pipes]
        found = {name: getattr(self, name) for name in names}
        return {**found, "consumer_s": self.consumer_s, "bound": self.bound, "pipes": pipes}

    @classmethod
    def of(cls, measured: Measured, before: Sequence[dict[str, int]] = ()) -> Profile:
        """Return the profile of what a loader has measured.

        Args:
            measured: The result of `Loader.measured()`.
            before: The counters of the pipes before that.
        """
        names = tuple(pipe_name(pipe) for pipe in measured.pipes)
        work_s = sum(lane.work_s for lane in measured.workers)
        return cls(
            pipes=_pipe_times(measured, names, work_s, before),
            num_batches=measured.num_batches,
            num_samples=measured.num_samples,
            num_workers=measured.num_workers if measured.has_workers else 0,
            loop_s=measured.busy_s,
            wait_s=measured.wait_s,
            main_s=sum(row.seconds for row in measured.main_rows if row.what != COPYING),
            work_s=work_s,
            idle_s=sum(lane.idle_s for lane in measured.workers) if measured.has_workers else 0.0,
            workers=tuple(measured.workers),
            names=names,
        )


def _pipe_times(
    measured: Measured, names: tuple[str, ...], work_s: float, before: Sequence[dict[str, int]]
) -> tuple[PipeTime, ...]:
    probed_s = sum(row.seconds for row in measured.rows)
    scale = work_s / probed_s if probed_s else 1.0  # the last items may not have been measured
    rows = [row._replace(seconds=row.seconds * scale) for row in measured.rows] + measured.main_rows
    total_s = sum(row.seconds for row in rows) or 1.0
    kinds = {id(node.pipe): _kind_of(node) for node in Chain.of(measured.pipes[0])}

    def time_of(place: int | None, name: str, kind: Kind) -> PipeTime:
        own = [row for row in rows if row.place == place]
        seconds = sum(row.seconds for row in own)
        is_main = place is not None and place < measured.num_main
        calls = sum(row.calls for row in own if not row.what)
        num_bytes = sum(row.num_bytes for row in own)
        steps = tuple(StepTime(row.what, row.seconds) for row in own if row.what)
        return PipeTime(name, kind, is_main, seconds / total_s, seconds, calls, num_bytes, None, None, steps)

    found = []
    for place, (name, counts) in enumerate(zip(names, _cache_counts(measured), strict=True)):
        hits, misses = (
            counts[key] - (before[place].get(key, 0) if before else 0) if key in counts else None
            for key in ("cache_hits", "cache_misses")
        )
        found.append(time_of(place, name, kinds[id(measured.pipes[place])])._replace(hits=hits, misses=misses))
    if measured.has_workers and any(row.place is None for row in rows):
        found.insert(measured.num_main, time_of(None, SENDING, "transfer"))
    return tuple(reversed(found))


def _cache_counts(measured: Measured) -> list[dict[str, int]]:
    return list(map(counters_of, measured.pipes))


def profile(
    source: Any,
    seconds: float = 10.0,
    *,
    num_workers: int = 0,
    reading_service: Any = None,
    step: Callable[[Any], Any] | None = None,
) -> Profile:
    """Return where the time of a chain goes, pipe by pipe.

    The time to load or decode a field counts for the pipe that makes the field, not for the one that reads it first. If
    a decoder gives a transform only the region that it needs, that time counts as decoding. The callables of one
    transform are listed separately.

    Args:
        source: A chain, or torch's DataLoader of one, which is run for `seconds`, over several epochs if necessary; an
            indexed chain without `deal` is run in batches of 16. Or a loader that was made with
            `kdp.Loader(..., profile=True)`; the result is then what it has measured so far.
        seconds: The minimum time to run the chain. It runs until each worker has made at least two batches.
        num_workers: See `Loader`.
        reading_service: See `Loader`.
        step: A function that is called with each batch, such as a training step. Its duration determines whether the
            chain or the training step is the bottleneck.

    Raises:
        ChainError: The chain yields nothing.

    Example:
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(8)]).select("x").deal(batch_size=4)
        >>> [pipe.pipe for pipe in kdp.profile(pipe, seconds=0.01).pipes]
        ['from_dataset', 'select', 'deal']
    """
    if isinstance(source, Loader):
        return Profile.of(source.measured())
    if not is_number(seconds) or not 0 < seconds < float("inf"):
        raise ValueError(must_be("seconds", "a number above 0", seconds))
    if step is not None:
        check_callable("step", step)
    source = chain_in(source, "kdp.profile")
    is_borrowed = isinstance(source, MapDataPipe)
    source = source.deal(batch_size=BATCH_SIZE) if is_borrowed else source
    with Loader(source, num_workers, reading_service=reading_service, profile=True) as loader:
        before = _cache_counts(loader.measured())
        loader.warm_up()  # to start workers takes time that no later epoch takes
        _run(loader, seconds, step)
        found = Profile.of(loader.measured(), before)
    if is_borrowed:
        pipes = tuple(pipe._replace(pipe=BORROWED) if pipe.pipe == "deal" else pipe for pipe in found.pipes)
        found = replace(found, pipes=pipes, names=(BORROWED, *found.names[1:]))
    return found


def _run(loader: Loader, seconds: float, step: Callable[[Any], Any] | None) -> None:
    end = loader_profile.clock() + seconds
    num_left = 2 * loader.measured().num_workers  # what a worker says of the first comes before its second
    while True:
        batch = _END
        for batch in loader:
            if step is not None:
                step(batch)
            num_left -= 1
            if num_left <= 0 and loader_profile.clock() >= end:
                return
        if batch is _END:
            raise ChainError("The chain yields no batch. Look at `len(pipe)` after each filter.")


def loader_html(loader: Loader) -> str:
    """Return the rates of a loader as a piece of HTML; only its pipes if a foreign reading service runs it."""
    try:
        stats = loader.stats()
    except TypeError:  # the reading service is not one of kdpipes'
        return render("shares", repr(loader), [])
    rows: list[tuple[str, str, float | None]] = [
        ("epoch", f"{loader.epoch}", None),
        ("batches", f"{stats['batches']:,.0f}, {stats['batches_per_s']:,.1f} per s", None),
        ("samples", f"{stats['samples']:,.0f}, {stats['samples_per_s']:,.0f} per s", None),
        ("waited for batches", f"{stats['wait_share']:.0%} of the loop, {stats['wait_s']:.1f} s", stats["wait_share"]),
        ("batches ready", f"{stats['queue_depth']:,.0f}", None),
    ]
    if tried := stats.get("cache_hits", 0) + stats.get("cache_misses", 0):
        hits = stats.get("cache_hits", 0)
        rows.append(("found in caches", f"{hits:,.0f} of {tried:,.0f} fields", hits / tried))
    for name in ("skipped_samples", "skipped_shards", "worker_deaths"):
        if stats[name]:
            rows.append((name.replace("_", " "), f"{stats[name]:,.0f}", None))
    return render("shares", repr(loader), rows)


def _bundle(loader: Loader) -> dict[str, str]:
    return {"text/html": loader_html(loader), "text/plain": repr(loader)}


def show_live(loader: Loader) -> None:
    """Show the rates of a loader in a notebook, and update them while batches are delivered."""
    import IPython.display  # installed where a notebook calls this

    display: Any = IPython.display.display
    handle = display(_bundle(loader), raw=True, display_id=True)
    shown = weakref.ref(loader)
    last = time.monotonic()

    def update() -> None:
        nonlocal last
        current = shown()
        if current is not None and time.monotonic() - last >= _EVERY_S:
            last = time.monotonic()
            handle.update(_bundle(current), raw=True)

    loader.on_batch(update)
