"""The requests that storage has got, from all threads and processes."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from kdpipes.core.randomness import hash_key
from kdpipes.testing.faults import Fault

__all__ = ["Begun", "Ledger", "Request", "num_repeated"]

_ANY = -1  # stands for any fault, where requests are numbered
_CHUNK = 1 << 20


class Request(NamedTuple):
    """One request: bytes `start` to `stop` of `path` were asked for, and from there `delivered` bytes came.

    `kind` is `info`, `list`, `whole` or `range`; `faults` are the places of those that hit it among the faults.
    """

    path: str
    kind: str
    pid: int
    faults: tuple[int, ...]
    start: int = 0
    stop: int = 0
    delivered: int = 0


class Begun(NamedTuple):
    name: str
    number_of_path: int
    faults: list[Fault]


class Ledger:
    """The requests of all processes, in one file: a line when a request begins, one when its bytes are known.

    Lines are appended whole, without a lock, by whom nothing of the others concerns: where no fault has a schedule.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_read = 0
        self.requests: list[Request] = []
        self._places: dict[str, int] = {}
        self._numbers: Counter[tuple[int, str]] = Counter()
        self._hits: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()
        self._names = count()
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def begin(self, faults: Sequence[Fault], seed: int, path: str, kind: str) -> Begun:
        """Write down a request, and return its name, its number and the faults that hit it."""
        concerned = [place for place, fault in enumerate(faults) if fault.concerns(path, kind)]
        name = f"{os.getpid()}-{next(self._names)}"
        if not any(faults[place].is_numbered for place in concerned):
            self._append(["begin", name, path, kind, os.getpid(), concerned, [_ANY, *concerned]])
            return Begun(name, 0, [faults[place] for place in concerned])
        with self._locked():
            hits = [place for place in concerned if self._is_hit(place, faults[place], seed, path)]
            self._append(["begin", name, path, kind, os.getpid(), hits, [_ANY, *concerned]])
            return Begun(name, self._numbers[_ANY, path], [faults[place] for place in hits])

    def end(self, name: str, start: int, stop: int, delivered: int) -> None:
        """Write down which bytes a request was for, and how many came."""
        self._append(["end", name, start, stop, delivered])

    def read(self) -> list[Request]:
        """Return all requests so far."""
        with self._locked():
            return list(self.requests)

    def _is_hit(self, place: int, fault: Fault, seed: int, path: str) -> bool:
        number = self._numbers[place, path]
        draw = hash_key(seed, place, path, number)
        return fault.hits(number, self._hits[place, path], lambda: int.from_bytes(draw[:7], "little") / (1 << 56))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the other threads and processes that number requests waiting, and read what they have written."""
        import fcntl  # imported late: Windows does not have it, but must be able to import this module

        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                self._take_new()
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing it leaves the lock to a process forked meanwhile

    def _append(self, entry: list[Any]) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def _take_new(self) -> None:
        content = b""
        while part := os.pread(self._descriptor, _CHUNK, self._num_read + len(content)):
            content += part
        lines = content.splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):  # somebody may be at the last one
                self._num_read += len(line)
                self._take(*json.loads(line))

    def _take(self, what: str, name: str, *entry: Any) -> None:
        if what == "end":
            start, stop, delivered = entry
            place = self._places[name]
            self.requests[place] = self.requests[place]._replace(start=start, stop=stop, delivered=delivered)
            return
        path, kind, pid, hits, concerned = entry
        self._places[name] = len(self.requests)
        self.requests.append(Request(path, kind, pid, tuple(hits)))
        self._numbers.update((place, path) for place in concerned)
        self._hits.update((place, path) for place in hits)


def num_repeated(requests: Sequence[Request]) -> int:
    """Return how many bytes have come more than once: all of them, less those of the union of the ranges."""
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        ranges[request.path].append((request.start, request.start + request.delivered))
    repeated = 0
    for places in ranges.values():
        end = 0
        for start, stop in sorted(places):
            repeated += max(min(end, stop) - start, 0)
            end = max(end, stop)
    return repeated
