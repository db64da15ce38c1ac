"""Threads that a test began, waited for until they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

PATIENCE_S = 20


def threads_left(before: Collection[threading.Thread] = (), *, name: str = "") -> list[threading.Thread]:
    """Return the threads that were not there before, with a name if one is given, and do not end.

    They are looked at, not joined: one that is about to end may be starting another, which cannot be joined yet.
    """
    deadline = time.monotonic() + PATIENCE_S
    while left := [one for one in threading.enumerate() if one not in before and one.name.startswith(name)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return left
