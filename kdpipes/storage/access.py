"""How the current thread reaches remote storage: its time limit, the options of file systems, and hedged requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec.utils import tokenize

from kdpipes.core.errors import is_number, must_be

__all__ = ["DEFAULT_S", "Access", "check_timeout", "current_access", "time_limit", "using"]

DEFAULT_S = 30.0  # the time limit of a request


def check_timeout(seconds: Any, param: str = "timeout_s") -> float | None:
    """Return a number of seconds, or None for no limit; raise if it is neither."""
    if seconds is None:
        return None
    if not is_number(seconds):
        raise TypeError(must_be(param, "a number of seconds, or None", seconds))
    if not (seconds > 0 and math.isfinite(seconds)):
        hint = "None waits for ever." if param == "timeout_s" else ""
        raise ValueError(must_be(param, "above 0 and finite", seconds, hint))
    return float(seconds)


class Access:
    """How a pipe reaches remote storage. The options may hold secrets: neither `repr` nor errors show them.

    Args:
        timeout_s: How many seconds the storage may take to answer; None is without limit.
        storage_options: The arguments of fsspec's file system.
        hedge_s: After how many seconds a read that has no answer is requested a second time; None is never.
    """

    def __init__(
        self,
        timeout_s: float | None = DEFAULT_S,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        given: Any = storage_options
        if given is not None and not isinstance(given, Mapping):
            kind = type(given).__name__  # the value may be a secret
            raise TypeError(f"`storage_options` must be a mapping of names to values, but is of {kind} instead.")
        if storage_options is not None and not all(isinstance(name, str) for name in storage_options):
            raise TypeError("`storage_options` must have texts as names, but has others.")
        self.timeout_s = check_timeout(timeout_s)
        self.storage_options = dict(storage_options or {})
        self.hedge_s = check_timeout(hedge_s, "hedge_s")
        self.token = tokenize(self.storage_options) if self.storage_options else ""

    def __repr__(self) -> str:
        return f"Access(timeout_s={self.timeout_s})"


class _Own(threading.local):
    """The access of a thread."""

    access = Access()


_own = _Own()


def current_access() -> Access:
    """Return how this thread reaches storage."""
    return _own.access


@contextmanager
def using(access: Access) -> Iterator[None]:
    """Set how this thread, and the threads that it hands work to, reach storage."""
    before, _own.access = _own.access, access
    try:
        yield
    finally:
        _own.access = before


def time_limit() -> float | None:
    """Return how many seconds this thread waits for an answer; None means for ever."""
    return _own.access.timeout_s
