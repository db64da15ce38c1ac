"""Show a profile as text, HTML, a chart or a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdpipes.look.rendering import Figure, bar_chart, render
from kdpipes.storage.files import replace_file

if TYPE_CHECKING:
    from kdpipes.loader.profile import WorkerTimes
    from kdpipes.look.profile import PipeTime, Profile

__all__ = ["as_chart", "as_html", "as_text", "bytes_text", "write_trace"]

_HEAD = ("pipe", "share", "time", "made", "per s", "size", "cached")
_LEAST = 0.02  # smaller shares of the steps of a pipe are not shown
Line = tuple[str, ...]
_COLORS = {
    "storage": "#4ea8de",
    "plan": "#a3a3a3",
    "decoding": "#e4572e",
    "transforms": "#76b041",
    "cache": "#c77dff",
    "transfer": "#17bebb",
    "device": "#7a6ff0",
}


def as_text(profile: Profile) -> str:
    """Return a profile as lines of text."""
    lines = [_HEAD, *(cells for cells, _, _ in _rows(profile))]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEAD))]
    return "\n".join([*(_aligned(line, widths) for line in lines), *sentences(profile)])


def as_html(profile: Profile) -> str:
    """Return a profile as an HTML table."""
    rows = []
    for cells, pipe, share in _rows(profile):
        rows.append({"cells": cells, "color": _COLORS[pipe.kind], "share": share})
    return render("profile", _HEAD, rows, sentences(profile))


def sentences(profile: Profile) -> list[str]:
    """Return sentences that describe who waits for whom."""
    text = f"{profile.num_batches} batch{'' if profile.num_batches == 1 else 'es'} in {seconds_text(profile.loop_s)}"
    text += f", {profile.num_samples / profile.loop_s:,.0f} samples/s." if profile.loop_s else "."
    if not profile.num_workers:
        share = profile.wait_share
        return [text, f"No workers: {share:.0%} of the loop made batches, the rest was the consumer's."]
    busy_s = profile.work_s + profile.idle_s or 1.0
    workers = "the worker" if profile.num_workers == 1 else f"the {profile.num_workers} workers"
    return [
        text,
        f"The loop waited for {profile.wait_share:.0%} of its time, {workers} for {profile.idle_s / busy_s:.0%} of "
        f"theirs: the {profile.bound} bounds.",
    ]


def seconds_text(seconds: float) -> str:
    """Return a duration as text."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def bytes_text(size: float) -> str:
    """Return a size in bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _rows(profile: Profile) -> Iterator[tuple[Line, PipeTime, float]]:
    """Yield the cells of each pipe and of its steps, with the pipe and the share of the time."""
    for pipe in profile.pipes:
        rate = f"{pipe.calls / pipe.seconds:,.0f}" if pipe.seconds and pipe.calls else ""
        cached = "" if pipe.hits is None else f"{pipe.hits} of {pipe.hits + (pipe.misses or 0)}"
        size = bytes_text(pipe.num_bytes) if pipe.num_bytes else ""
        name = pipe.pipe + (" (main process)" if pipe.is_main else "")
        cells = (name, f"{pipe.share:.1%}", seconds_text(pipe.seconds), f"{pipe.calls:,.0f}", rate, size, cached)
        yield cells, pipe, pipe.share
        for step in pipe.steps if len(pipe.steps) > 1 else ():
            share = pipe.share * step.seconds / pipe.seconds if pipe.seconds else 0.0
            if share >= _LEAST:
                cells = (f"  {step.what}", f"{share:.1%}", seconds_text(step.seconds), "", "", "", "")
                yield cells, pipe, share


def _aligned(line: Line, widths: list[int]) -> str:
    numbers = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
    return "  ".join([line[0].ljust(widths[0]), *numbers]).rstrip()


def as_chart(profile: Profile) -> Figure:
    """Return a bar for each pipe of a profile, the source first, whose length is its share."""
    bars = [(pipe.pipe, [(pipe.share, f"{pipe.share:.1%} {pipe.kind}", _COLORS[pipe.kind])]) for pipe in profile.pipes]
    return bar_chart(bars, f"the time of {len(bars)} pipes", bar=18, gap=6)


def write_trace(profile: Profile, path: Path) -> Path:
    """Write the pieces of work of a profile as Chrome's trace events."""
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(profile))})
    replace_file(path, content.encode())
    return path


def trace_events(profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield Chrome's trace events: the names of workers, and their work, with times in microseconds."""
    times = [batch[1] for lane in profile.lanes for batch in lane.batches]
    times += [event[2] for lane in profile.lanes for event in lane.events]
    begin = min(times, default=0.0)
    for lane in profile.lanes:
        yield _named("process_name", lane, f"process {lane.process}")
        yield _named("thread_name", lane, f"worker {lane.worker}" if profile.num_workers else "the loop")
        for number, start, end in lane.batches:
            yield _event(f"batch {number}", "batch", lane, start - begin, end - start)
        for place, what, start, end in lane.events:
            name = "(sending)" if place is None else profile.names[place]
            yield _event(what or name, name, lane, start - begin, end - start)


def _named(kind: str, lane: WorkerTimes, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": lane.process, "tid": lane.worker, "args": {"name": name}}


def _event(name: str, category: str, lane: WorkerTimes, start_s: float, seconds: float) -> dict[str, Any]:
    place = {"pid": lane.process, "tid": lane.worker}
    return {"name": name, "cat": category, "ph": "X", "ts": start_s * 1e6, "dur": seconds * 1e6, **place}
