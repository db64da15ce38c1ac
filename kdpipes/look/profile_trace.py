"""A profile as a trace: for chrome://tracing and https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdpipes.storage.files import replace_file

if TYPE_CHECKING:
    from kdpipes.loader.profile import WorkerTimes
    from kdpipes.look.profile import Profile

__all__ = ["trace_events", "write_trace"]


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
        yield _name("process_name", lane, f"process {lane.process}")
        yield _name("thread_name", lane, f"worker {lane.worker}" if profile.num_workers else "the loop")
        for number, start, end in lane.batches:
            yield _event(f"batch {number}", "batch", lane, start - begin, end - start)
        for place, what, start, end in lane.events:
            name = "(sending)" if place is None else profile.names[place]
            yield _event(what or name, name, lane, start - begin, end - start)


def _name(kind: str, lane: WorkerTimes, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": lane.process, "tid": lane.worker, "args": {"name": name}}


def _event(name: str, category: str, lane: WorkerTimes, start_s: float, seconds: float) -> dict[str, Any]:
    place = {"pid": lane.process, "tid": lane.worker}
    return {"name": name, "cat": category, "ph": "X", "ts": start_s * 1e6, "dur": seconds * 1e6, **place}
