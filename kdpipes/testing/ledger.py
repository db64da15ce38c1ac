"""The requests that storage has got, from all threads and processes."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from kdpipes._draw import hash_key
from kdpipes.testing.faults import Fault

__all__ = ["Begun", "Ledger", "Request", "num_repeated"]

_ANY = -1  # stands for any fault, where requests are numbered


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
    number: int
    number_of_path: int
    faults: list[Fault]


class Ledger:
    """The requests of all processes, in one file: a line when a request begins, one when its bytes are known."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_read = 0
        self.requests: list[Request] = []
        self._numbers: Counter[tuple[int, str]] = Counter()
        self._hits: Counter[tuple[int, str]] = Counter()

    def begin(self, faults: Sequence[Fault], seed: int, path: str, kind: str) -> Begun:
        """Write down a request, and return its numbers and the faults that hit it."""
        with self._locked() as file:
            concerned = [place for place, fault in enumerate(faults) if fault.concerns(path, kind)]
            hits = [place for place in concerned if self._is_hit(place, faults[place], seed, path)]
            self._append(file, ["begin", path, kind, os.getpid(), hits, [_ANY, *concerned]])
            hitting = [faults[place] for place in hits]
            return Begun(len(self.requests) - 1, self._numbers[_ANY, path] - 1, hitting)

    def end(self, number: int, start: int, stop: int, delivered: int) -> None:
        """Write down which bytes a request was for, and how many came."""
        with self._locked() as file:
            self._append(file, ["end", number, start, stop, delivered])

    def read(self) -> list[Request]:
        """Return all requests so far."""
        if Path(self._path).exists():
            with self._locked():
                pass
        return list(self.requests)

    def _is_hit(self, place: int, fault: Fault, seed: int, path: str) -> bool:
        number = self._numbers[place, path]
        draw = hash_key(seed, place, path, number)
        return fault.hits(number, self._hits[place, path], lambda: int.from_bytes(draw[:7], "little") / (1 << 56))

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """Open the file alone, among threads and processes, and read what others have written."""
        with Path(self._path).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._num_read)
            try:
                for line in file:
                    self._take(line)
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing it leaves the lock to a process forked meanwhile

    def _append(self, file: IO[bytes], entry: list[Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        file.write(line)
        file.flush()
        self._take(line)

    def _take(self, line: bytes) -> None:
        self._num_read += len(line)
        what, *entry = json.loads(line)
        if what == "end":
            number, start, stop, delivered = entry
            self.requests[number] = self.requests[number]._replace(start=start, stop=stop, delivered=delivered)
            return
        path, kind, pid, hits, concerned = entry
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
