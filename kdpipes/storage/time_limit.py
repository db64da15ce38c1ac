"""How long storage elsewhere may take to answer, whatever file system it is: what is silent is an error."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from typing import Any, TypeVar

from kdpipes.core.errors import is_number, must_be
from kdpipes.core.masked import masked

__all__ = [
    "DEFAULT_S",
    "SilenceError",
    "answer_of",
    "ask",
    "check_timeout",
    "in_time",
    "limited",
    "time_limit",
    "waiting",
]

Result = TypeVar("Result")
DEFAULT_S = 30.0
_SLOWEST = 1 << 18  # bytes per second, which a large answer may take
_own = threading.local()


class SilenceError(TimeoutError):
    """Storage that has not answered in time: names the URL and the seconds."""


def check_timeout(timeout_s: Any) -> float | None:
    """Return `timeout_s` as seconds, or None, which is for ever; refuse what is neither."""
    if timeout_s is None:
        return None
    if not is_number(timeout_s):
        raise TypeError(must_be("timeout_s", "a number of seconds, or None", timeout_s))
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(must_be("timeout_s", "above 0 and finite", timeout_s, "None waits for ever."))
    return float(timeout_s)


def time_limit() -> float | None:
    """Return how many seconds this thread waits for an answer; None is for ever."""
    seconds: float | None = getattr(_own, "seconds", DEFAULT_S)
    return seconds


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Let this thread, and those that it gives work to, wait so many seconds for an answer; None is for ever."""
    before = time_limit()
    _own.seconds = seconds
    try:
        yield
    finally:
        _own.seconds = before


@contextmanager
def waiting() -> Iterator[None]:
    """Let this thread wait itself for answers that cannot be broken off: somebody looks at the time for it."""
    _own.waits = True
    try:
        yield
    finally:
        _own.waits = False


def ask(filesystem: Any, method: str, url: str, *args: Any, num_bytes: int = 0, **kwargs: Any) -> Any:
    """Return what a method of a file system returns.

    Args:
        filesystem: Of fsspec.
        method: What it is called: "info", "cat_file".
        url: What errors name.
        args: Of the method.
        num_bytes: How large the answer is, for which there is more time.
        kwargs: Of the method.

    Raises:
        SilenceError: It takes longer than the time limit.
    """
    call, seconds = getattr(filesystem, method), time_limit()
    if seconds is None or not _is_asynchronous(filesystem, method):
        return in_time(lambda: call(*args, **kwargs), url, num_bytes)
    seconds, begin = seconds + num_bytes / _SLOWEST, time.monotonic()
    try:
        return call(*args, timeout=seconds, **kwargs)  # which fsspec takes, and lets go of the connection
    except TimeoutError as error:
        if time.monotonic() - begin < seconds:
            raise
        raise _silence(url, seconds) from error


def in_time(action: Callable[[], Result], url: str, num_bytes: int = 0) -> Result:
    """Return what an action returns; what is late is left to a daemon thread.

    Args:
        action: Asks storage for something.
        url: What errors name.
        num_bytes: How large the answer is, for which there is more time.

    Raises:
        SilenceError: It takes longer than the time limit.
    """
    seconds = time_limit()
    if seconds is None or getattr(_own, "waits", False):
        return action()
    future: Future[Result] = Future()
    threading.Thread(target=_answer, args=(action, future), name="kdpipes-request", daemon=True).start()
    return answer_of(future, url, num_bytes)


def answer_of(future: Future[Result], url: str, num_bytes: int = 0) -> Result:
    """Return what a thread that waits for an answer has got, or will have got in time.

    Raises:
        SilenceError: It takes longer than the time limit, from now on.
    """
    seconds = time_limit()
    limit = None if seconds is None else seconds + num_bytes / _SLOWEST
    try:
        return future.result(limit)
    except NotDone as error:
        if limit is None or future.done():  # an error of the action
            raise
        raise _silence(url, limit) from error


def _answer(action: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)


def _silence(url: str, seconds: float) -> SilenceError:
    return SilenceError(
        f"{masked(url)!r} has not answered within {seconds:.4g} s. Is its endpoint right, and can it be reached? "
        "A larger `timeout_s=` waits longer"
    )


def _is_asynchronous(filesystem: Any, method: str) -> bool:
    """Return whether fsspec has made a method of one that is asynchronous."""
    return bool(getattr(filesystem, "async_impl", False)) and method in vars(filesystem)
