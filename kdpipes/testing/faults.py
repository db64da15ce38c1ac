"""Faults: what goes wrong with which requests to storage; a killed worker, a full disk, a slow consumer."""

from __future__ import annotations

import errno
import fnmatch
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kdpipes.core.errors import check_choice, check_count, is_number, must_be

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
        seconds: The delay of the request before the fault, in seconds. `latency` is this delay alone.
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
            raise ValueError("`every` and `probability` cannot be combined. Remove one of them.")
        if not is_number(self.seconds) or self.seconds < 0 or (self.kind == "latency" and not self.seconds):
            raise ValueError(must_be("seconds", "a number of seconds above 0", self.seconds))
        if (self.kind == "slow") != (self.bytes_per_s is not None) or not (self.bytes_per_s or 1) > 0:
            raise ValueError(must_be("bytes_per_s", "a number above 0 for `slow`, and None else", self.bytes_per_s))

    @property
    def is_numbered(self) -> bool:
        """Whether it depends on the number of earlier requests."""
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
    """Return the error that a kind of fault raises; those of s3fs are partly classes of botocore and aiohttp."""
    if style == "s3fs" and kind in ("reset", "reset_midway", "timeout"):
        from aiohttp import ClientPayloadError
        from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

        made: dict[str, Exception] = {
            "reset": EndpointConnectionError(endpoint_url=path),
            "reset_midway": ClientPayloadError("Response payload is not completed"),
            "timeout": ReadTimeoutError(endpoint_url=path),
        }
        return made[kind]
    builtin, number, text = _ERRORS[kind]
    return builtin(number, text)


def kill_one_worker() -> bool:
    """Kill one worker process of this process by SIGKILL, as the system does when memory runs out.

    A loader replaces it, and delivers the same batches.

    Returns:
        Whether there was one.
    """
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    if children:
        os.kill(children[0], getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only SIGTERM, which kills too
    return bool(children)


@contextmanager
def full_disk(max_bytes: int = 4096) -> Iterator[None]:
    """Limit the size of files in the block: writing beyond it raises OSError, as on a full disk.

    It applies to this process, and to workers that it forks inside; it does not work on Windows. The error is `EFBIG`,
    which kdpipes treats like `ENOSPC`.

    Example:
        >>> with full_disk(100), open("large.bin", "wb", buffering=0) as file:
        ...     file.write(bytes(100))
        ...     file.write(bytes(1))
        Traceback (most recent call last):
        OSError: [Errno 27] File too large
    """
    import resource  # Windows does not have it, but must be able to import this module

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (check_count("max_bytes", max_bytes, minimum=0), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def slow_consumer(batches: Iterable[Any], step: Callable[[Any], Any] = lambda batch: time.sleep(0.1)) -> Iterator[Any]:
    """Yield batches, each after a step that takes long, so that workers wait for room and buffers are full.

    Args:
        batches: A loader, or an iterator of one.
        step: A function that is called with each batch.
    """
    for batch in batches:
        step(batch)
        yield batch
