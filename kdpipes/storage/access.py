"""The storage options of the current thread, and threads for requests that inherit them."""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from fsspec.utils import tokenize

from kdpipes.core.errors import is_number, must_be

Result = TypeVar("Result")

DEFAULT_S = 30.0  # default time limit of a request


def check_timeout(seconds: Any, param: str = "timeout_s") -> float | None:
    """Return a number of seconds, or None for no limit; raise for other values."""
    if seconds is None:
        return None
    if not is_number(seconds):
        raise TypeError(must_be(param, "a number of seconds, or None", seconds))
    if not (seconds > 0 and math.isfinite(seconds)):
        hint = "None waits for ever." if param == "timeout_s" else ""
        raise ValueError(must_be(param, "above 0 and finite", seconds, hint))
    return float(seconds)


class Access:
    """The storage options of a pipe. They may contain secrets, so neither `repr` nor errors show them.

    Args:
        timeout_s: The number of seconds that the storage may take to respond; None means no limit.
        storage_options: The arguments of fsspec's file system.
        hedge_s: The number of seconds without response after which a read is requested a second time; None means never.
        origin: The URL of the list that names the files. The hosts that it names must not be more private than its own.
    """

    def __init__(
        self,
        timeout_s: float | None = DEFAULT_S,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
        *,
        origin: str = "",
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
        self.origin = origin
        self.token = tokenize(self.storage_options, origin) if self.storage_options or origin else ""

    def __repr__(self) -> str:
        return f"Access(timeout_s={self.timeout_s})"


class _AccessOfThread(threading.local):
    access = Access()


_own = _AccessOfThread()


def current_access() -> Access:
    """Return the current thread's access settings."""
    return _own.access


@contextmanager
def using(access: Access) -> Iterator[None]:
    """Use access settings in this thread and in threads that it submits work to."""
    before = _own.access
    _own.access = access
    try:
        yield
    finally:
        _own.access = before


class Threads:
    """Daemon threads for requests. They do not delay interpreter exit, and end when this object is dropped.

    Args:
        number: The maximum number of threads. A thread is started when a job would otherwise have to wait.
        name: The name of the threads.
    """

    def __init__(self, number: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], Access] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_missing = number
        self._name = name
        weakref.finalize(self, _end, self._jobs, number)

    def submit(self, action: Callable[[], Result]) -> Future[Result]:
        """Run a function in one of the threads, with the caller's access settings."""
        future: Future[Result] = Future()
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
        del job, action, future  # an idle thread must not keep the bytes of its last job alive


def _end(jobs: Any, number: int) -> None:
    for _ in range(number):
        jobs.put(None)
