"""What may fail once and succeed the next time: requests to storage elsewhere."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from kdpipes.core.masked import masked
from kdpipes.storage.refusals import is_refused, reason_of
from kdpipes.storage.time_limit import SilenceError

__all__ = ["NUM_SILENT", "NUM_TRIES", "is_missing", "retried"]

Result = TypeVar("Result")
NUM_TRIES = 6
NUM_SILENT = 2  # tries: each has taken its time
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_NOT_TO_BE_HELPED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_MAY_PASS = (408, 425, 429)
_jitter = random.Random()
_log = logging.getLogger(__name__)
_PAUSE_S = 10.0  # between two warnings, because many threads may wait for the same server
_told_at = -math.inf


def retried(
    action: Callable[[], Result],
    *,
    num_tries: int = NUM_TRIES,
    num_silent: int = NUM_SILENT,
    final: tuple[type[Exception], ...] = (),
) -> Result:
    """Return what an action returns; if it fails, try again, at growing intervals that are drawn at random.

    Errors of any class count, as those of botocore and aiohttp are no OSErrors; but not what is missing or forbidden.
    The last error is raised.

    Args:
        action: What to do.
        num_tries: How often, at most.
        num_silent: How often at most where no answer comes in time.
        final: Errors that are raised at once.
    """
    num_seen = 0
    for attempt in range(1, num_tries):
        try:
            return action()
        except Exception as error:
            num_seen += isinstance(error, SilenceError)
            if num_seen == num_silent:
                raise
            if (
                isinstance(error, final)
                or is_refused(error)
                or (isinstance(error, _NOT_TO_BE_HELPED) and not _is_disguised(error))
            ):
                raise
            _tell(attempt, num_tries, error)
            time.sleep(min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S) * _jitter.uniform(0.5, 1.5))
    return action()


def _tell(attempt: int, num_tries: int, error: Exception) -> None:
    """Log a retry: the first failure at level INFO, further ones as a warning, at most one per `_PAUSE_S`."""
    global _told_at
    now = time.monotonic()
    is_due = attempt > 1 and now - _told_at >= _PAUSE_S
    _told_at = now if is_due else _told_at
    text = masked(f"Storage does not answer, trying again ({attempt + 1} of {num_tries}): {reason_of(error)}")
    _log.log(logging.WARNING if is_due else logging.INFO, "%s", text)


def is_missing(error: Exception) -> bool:
    """Return whether an error says that there is no such file."""
    return isinstance(error, FileNotFoundError) and not _is_disguised(error) and not is_refused(error)


def _is_disguised(error: Exception) -> bool:
    """Return whether an error is no missing file at all: fsspec makes one of everything that HTTP servers refuse."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None or isinstance(cause, FileNotFoundError):
        return False
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status in _MAY_PASS or status >= 500
    return type(cause).__module__.startswith("aiohttp") or isinstance(cause, TimeoutError | asyncio.TimeoutError)
