"""Threads for requests to remote storage."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kdpipes.storage.access import Access, current_access, using

__all__ = ["Threads"]


class Threads:
    """Daemon threads for requests. They do not delay the end of the process, and end when this object is dropped.

    Args:
        number: The maximum number of threads; each starts when a job would have to wait.
        name: The name of the threads.
    """

    def __init__(self, number: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], Access] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_missing, self._name = number, name
        weakref.finalize(self, _end, self._jobs, number)

    def submit(self, action: Callable[[], Any]) -> Future[Any]:
        """Run a function in one of the threads, with the caller's access."""
        future: Future[Any] = Future()
        with self._lock:
            self._jobs.put((action, future, current_access()))
            if self._num_missing and self._jobs.qsize():
                self._num_missing -= 1
                threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
        return future


def _work(jobs: Any) -> None:
    while (job := jobs.get()) is not None:
        action, future, access = job
        if future.set_running_or_notify_cancel():
            try:
                with using(access):
                    future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
        del job, action, future  # an idle thread must not keep the bytes that it has read


def _end(jobs: Any, number: int) -> None:
    for _ in range(number):
        jobs.put(None)
