"""What may fail once and succeed the next time: requests to storage elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NUM_TRIES", "retried"]

Result = TypeVar("Result")
NUM_TRIES = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_NOT_TO_BE_HELPED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_jitter = random.Random()


def retried(action: Callable[[], Result], *, num_tries: int = NUM_TRIES) -> Result:
    """Return what an action returns; if it fails, try again, at growing intervals that are drawn at random.

    Errors of any class count, as those of botocore and aiohttp are no OSErrors; but not what is missing or forbidden.
    The last error is raised.
    """
    for attempt in range(1, num_tries):
        try:
            return action()
        except _NOT_TO_BE_HELPED:
            raise
        except Exception:
            time.sleep(min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S) * _jitter.uniform(0.5, 1.5))
    return action()
