"""Forked processes that do a test's work beside it, or are killed at it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

PATIENCE_S = 20


def fork(work: Callable[[], object]) -> int:
    """Return a forked process that does `work`; one that hangs is ended by SIGALRM."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        try:
            work()
        except BaseException:  # nothing of the test may run on in the child
            os._exit(1)
        os._exit(0)
    return child


def exit_status(child: int) -> int:
    """Wait for a process, and return how it ended: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    """Return how a forked process ends that does `work`."""
    return exit_status(fork(work))
