"""What goes wrong with storage, with which requests, and as which error."""

from __future__ import annotations

import errno
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from kdpipes.core.errors import check_choice, check_count, is_number, must_be

__all__ = ["BEFORE_THE_ANSWER", "ErrorStyle", "Fault", "error_of"]

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
    """What goes wrong, and with which requests.

    Requests are numbered for each path on its own, those of its kind only, so that a schedule does not depend on which
    path is read first, on the time, or on which process reads. `every` and `probability` are given one at a time; with
    neither, all requests are hit.

    Args:
        kind: `latency` and `slow` (needs `bytes_per_s`) take time. `reset` comes before the body, `reset_midway` in its
            middle; `timeout`, `unavailable` (503), `io_error` (EIO), `too_many_requests` (429) and `missing` come at
            the start. `truncate` (half of the body), `flip_bit` and `wrong_range` (bytes of another offset) give wrong
            bytes without an error. `new_etag` and `new_size` make `info` say that the object has been replaced.
        every: Hit each `every`-th request.
        probability: Hit each request with this probability, drawn from the seed.
        after: Leave this many requests alone first.
        times: Hit this many requests of a path at most; None is without end.
        paths: Hit paths that match this glob, where `*` goes across folders.
        on: Hit requests of this kind: `info`, `list`, or a body that is read `whole` or as a `range`; None is any kind
            that has what goes wrong.
        seconds: How long it takes before that; `latency` does nothing else.
        bytes_per_s: How fast bodies are with `slow`.
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
    """Return what s3fs raises, where that is a class of botocore or aiohttp."""
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
