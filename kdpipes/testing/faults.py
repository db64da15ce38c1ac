"""Storage faults: what goes wrong, with which requests, and a record of all requests."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

from kdpipes.core.errors import check_choice, check_count, is_number, must_be
from kdpipes.core.randomness import hash_key

__all__ = ["BEFORE_THE_ANSWER", "Begun", "ErrorStyle", "Fault", "Ledger", "Request", "error_of", "num_repeated"]

FaultKind = Literal[
    "latency",
    "slow",
    "reset",
    "reset_midway",
    "timeout",
    "unavailable",
    "io_error",
    "too_many_requests",
    "missing",
    "truncate",
    "flip_bit",
    "wrong_range",
    "new_etag",
    "new_size",
]
ErrorStyle = Literal["builtin", "s3fs"]
RequestKind = Literal["info", "list", "whole", "range"]
_OF_BODIES = ("slow", "reset_midway", "truncate", "flip_bit", "wrong_range")
_OF_INFO = ("new_etag", "new_size")
_BUSY = "An error occurred (429) when calling the GetObject operation (reached max retries: 4): Too Many Requests"
BEFORE_THE_ANSWER = ("reset", "timeout", "unavailable", "io_error", "too_many_requests", "missing")
_ERRORS: dict[str, tuple[type[OSError], int, str]] = {
    "reset": (ConnectionResetError, errno.ECONNRESET, "Connection reset by peer"),
    "reset_midway": (ConnectionResetError, errno.ECONNRESET, "Connection reset by peer"),
    "timeout": (TimeoutError, errno.ETIMEDOUT, "Connection timed out"),
    "unavailable": (OSError, errno.EBUSY, "Service Unavailable"),
    "io_error": (OSError, errno.EIO, "Input/output error"),
    "too_many_requests": (OSError, errno.EIO, _BUSY),
    "missing": (FileNotFoundError, errno.ENOENT, "The specified key does not exist."),
}
_ANY = -1  # stands for any fault, where requests are numbered
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Fault:
    """A fault of storage, and the requests that it hits.

    Requests are numbered separately for each path and each kind of request, so that a schedule does not depend on the
    order of paths, on time, or on the process that reads. Give either `every` or `probability`. With neither, all
    requests are hit.

    Args:
        kind: `latency` and `slow` (needs `bytes_per_s`) take time. `reset` comes before the body, `reset_midway` in the
            middle of it; `timeout`, `unavailable` (503), `io_error` (EIO), `too_many_requests` (429) and `missing` come
            at the start. `truncate` (half of the body), `flip_bit` and `wrong_range` (bytes of another offset) give
            wrong bytes without an error. With `new_etag` and `new_size`, `info` reports that the object has been
            replaced.
        every: Hit each `every`-th request.
        probability: Hit each request with this probability, which the seed decides.
        after: Skip this many requests first.
        times: Hit at most this many requests of a path; None for no limit.
        paths: Hit only paths that match this glob, in which `*` also matches slashes.
        on: Hit only requests of this kind: `info`, `list`, or a body that is read `whole` or as a `range`; None for any
            kind to which the fault applies.
        seconds: How long the request takes before that; `latency` does nothing else.
        bytes_per_s: The speed of bodies with `slow`.
    """

    kind: FaultKind
    every: int | None = None
    probability: float | None = None
    after: int = 0
    times: int | None = None
    paths: str = "*"
    on: RequestKind | None = None
    seconds: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(FaultKind))
        check_choice("on", self.on, (None, *get_args(RequestKind)))
        check_count("after", self.after, minimum=0)
        if self.every is not None:
            check_count("every", self.every)
        if self.times is not None:
            check_count("times", self.times)
        if self.probability is not None and not (is_number(self.probability) and 0 <= self.probability <= 1):
            raise ValueError(must_be("probability", "from 0 to 1", self.probability))
        if self.every is not None and self.probability is not None:
            raise ValueError("`every` and `probability` must not both be given.")
        if not is_number(self.seconds) or self.seconds < 0 or (self.kind == "latency" and not self.seconds):
            raise ValueError(must_be("seconds", "a number of seconds above 0", self.seconds))
        if (self.kind == "slow") != (self.bytes_per_s is not None) or not (self.bytes_per_s or 1) > 0:
            raise ValueError(must_be("bytes_per_s", "a number above 0 for `slow`, and None else", self.bytes_per_s))

    @property
    def is_numbered(self) -> bool:
        """Whether it depends on how many requests there were before."""
        is_scheduled = self.every is not None or self.probability is not None or self.times is not None or self.after
        return bool(is_scheduled) or self.kind in ("flip_bit", "wrong_range")

    def concerns(self, path: str, kind: str) -> bool:
        """Return whether a request is one that this fault counts."""
        is_body = kind in ("whole", "range")
        if (self.kind in _OF_BODIES and not is_body) or (self.kind in _OF_INFO and kind != "info"):
            return False
        return self.on in (None, kind) and fnmatch.fnmatchcase(path, self.paths)

    def hits(self, number: int, num_hits: int, draw: Callable[[], float]) -> bool:
        """Return whether request `number`, from 0, is hit, after `num_hits` hits of earlier ones."""
        number -= self.after
        if number < 0 or (self.times is not None and num_hits >= self.times):
            return False
        if self.probability is not None:
            return draw() < self.probability
        return self.every is None or (number + 1) % self.every == 0


def error_of(kind: str, path: str, style: ErrorStyle) -> Exception:
    """Return the error that a kind of fault raises."""
    error = _error_of_s3fs(kind, path) if style == "s3fs" else None
    builtin, number, text = _ERRORS[kind]
    return error or builtin(number, text)


def _error_of_s3fs(kind: str, path: str) -> Exception | None:
    """Return the error that s3fs raises, if it is a class of botocore or aiohttp."""
    if kind not in ("reset", "reset_midway", "timeout"):
        return None
    from aiohttp import ClientPayloadError
    from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

    made: dict[str, Exception] = {
        "reset": EndpointConnectionError(endpoint_url=path),
        "reset_midway": ClientPayloadError("Response payload is not completed"),
        "timeout": ReadTimeoutError(endpoint_url=path),
    }
    return made[kind]


class Request(NamedTuple):
    """One request for the bytes `start` to `stop` of `path`, of which `delivered` bytes came.

    `kind` is `info`, `list`, `whole` or `range`; `faults` are the numbers of the faults that hit it.
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

    Lines are appended whole. Without a fault that has a schedule, no lock is taken.
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
        """Record a request, and return its name, its number and the faults that hit it."""
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
        """Record the bytes that a request was for, and how many came."""
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
