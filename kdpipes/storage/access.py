"""How storage is accessed: the options and threads of requests, their time limits, retries and errors.

Options belong to a thread, and the threads that it starts for requests inherit them. One retry policy (`retried`)
decides which errors to retry, and how long to wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, as_completed, wait
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from fsspec.utils import tokenize

from kdpipes.core.errors import DataError, is_number, must_be
from kdpipes.core.messages import logger
from kdpipes.core.secrets import masked

Result = TypeVar("Result")

DEFAULT_S = 30.0  # default time limit of a request
NUM_TRIES = 6
NUM_TRIES_WITH_COPY = 2  # maximum number of tries if a local copy is available
NUM_SILENT = 2  # maximum number of tries that time out: each takes the whole time limit
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_LONGEST_ASKED_S = 60.0  # maximum wait that a server may request by `Retry-After`
_SLOWEST = 1 << 18  # in bytes per second: large responses are given that much more time
_NAME = "kdpipes-request"  # name of threads that are abandoned with a late request
_PAUSE_S = 10.0  # between two warnings, because many threads may wait for the same server
_TEMPORARY_STATUSES = (408, 425, 429)
_log = logger(__name__)
_warned_at = -math.inf

_URL = re.compile(r"\S+://\S+")
_REJECTED_STATUSES = (401, 403, 407)
_REJECTED_CLASSES = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")  # classes of botocore
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, NotDone)  # different classes on Python 3.10
_OF_S3 = (
    "Are there credentials (`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or `AWS_PROFILE`; for a public bucket "
    """`FSSPEC_S3='{{"anon": true}}'`), may they read this, and is the endpoint right (`AWS_ENDPOINT_URL`)?"""
)
_OF_GS = (
    "Are there credentials (`GOOGLE_APPLICATION_CREDENTIALS`; for a public bucket "
    """`FSSPEC_GS='{{"token": "anon"}}'`), and may they read this?"""
)
_OF_HTTP = (
    "Does it need a name or a token? They are set as fsspec has it: "
    """`fsspec.config.conf["{0}"] = {{"client_kwargs": {{"headers": {{"Authorization": "..."}}}}}}`."""
)
_OF_ALL = 'Are there credentials, and may they read this? They are set as fsspec has it: `fsspec.config.conf["{0}"]`.'
_HINTS = {"s3": _OF_S3, "s3a": _OF_S3, "gs": _OF_GS, "gcs": _OF_GS, "http": _OF_HTTP, "https": _OF_HTTP}


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
        options: Any = {} if storage_options is None else storage_options
        if not isinstance(options, Mapping):
            kind = type(options).__name__  # the value may be a secret
            raise TypeError(f"`storage_options` must be a mapping of names to values, but is of {kind} instead.")
        if not all(isinstance(name, str) for name in options):
            raise TypeError("`storage_options` must have texts as names, but has others.")
        self.timeout_s = check_timeout(timeout_s)
        self.storage_options = dict(options)
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


class NoRangesError(DataError):
    """A server returned a whole file in response to a range request."""


class TooLargeError(DataError):
    """A file is larger than any file of its kind may be."""


class WrongResponseError(Exception):
    """A response does not contain the requested bytes; another attempt may succeed."""


class PrivateHostError(PermissionError):
    """A request was blocked because a public server would have directed it into a private network."""


class SilenceError(TimeoutError):
    """Storage has not responded within the time limit. The message names the URL and the limit."""

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(
            f"{masked(url)!r} has not responded within {seconds:.4g} s. Is its endpoint right, and can it be reached? "
            "A larger `timeout_s=` waits longer"
        )


_PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError),
    *(NoRangesError, TooLargeError),
)


def retried(
    action: Callable[[], Result],
    *,
    num_tries: int = NUM_TRIES,
    num_silent: int = NUM_SILENT,
    final: tuple[type[Exception], ...] = (),
) -> Result:
    """Return the result of an action. After a temporary error, try again after growing, randomized waits.

    Errors of any class are retried, because those of botocore and aiohttp are not OSErrors. Missing files, rejected
    requests, errors of the classes in `final`, and the `num_silent`-th timeout are raised at once.
    """
    num_timeouts = 0
    for attempt in range(1, num_tries):
        try:
            return action()
        except Exception as error:
            num_timeouts += isinstance(error, SilenceError)
            is_permanent = isinstance(error, _PERMANENT) and not _is_disguised(error)
            if num_timeouts == num_silent or isinstance(error, final) or is_permanent or is_rejected(error):
                raise
            _log_retry(attempt, num_tries, error)
            # A random factor from 0.5 to 1.5, without a generator: caches look for generators that samples use.
            jitter = 0.5 + os.urandom(1)[0] / 255
            wait_s = min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S) * jitter
            time.sleep(max(wait_s, _retry_after_s(error)))
    return action()


def _retry_after_s(error: BaseException) -> float:
    """Return the number of seconds that the server asks to wait, at most `_LONGEST_ASKED_S`; 0 if it does not ask.

    aiohttp and botocore expose the headers of a response, obstore does not.
    """
    for one in _with_causes(error):
        headers = getattr(one, "headers", None)
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore's response
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
        if headers and (text := headers.get("retry-after")):
            with suppress(ValueError, TypeError):
                seconds = float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
                return min(max(seconds, 0.0), _LONGEST_ASKED_S)
    return 0.0


def _log_retry(attempt: int, num_tries: int, error: Exception) -> None:
    """Log the first failure at level INFO and further ones as warnings, at most one per `_PAUSE_S`."""
    global _warned_at
    now = time.monotonic()
    is_due = attempt > 1 and now - _warned_at >= _PAUSE_S
    _warned_at = now if is_due else _warned_at
    text = masked(f"Storage does not respond, trying again ({attempt + 1} of {num_tries}): {_reason_of(error)}")
    _log.log(logging.WARNING if is_due else logging.INFO, "%s", text)


def is_missing(error: Exception) -> bool:
    """Return whether an error means that the file does not exist."""
    return isinstance(error, FileNotFoundError) and not _is_disguised(error) and not is_rejected(error)


def _is_disguised(error: Exception) -> bool:
    """Return whether a FileNotFoundError has another cause: fsspec raises one for every HTTP error status."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None or isinstance(cause, FileNotFoundError):
        return False
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status in _TEMPORARY_STATUSES or status >= 500
    return type(cause).__module__.startswith("aiohttp") or isinstance(cause, _TIMEOUTS)


def is_rejected(error: BaseException) -> bool:
    """Return whether storage has rejected a request (credentials, permissions), so that a retry cannot help."""
    return any(_is_rejection(one) for one in _with_causes(error))


def what_went_wrong(url: str, error: BaseException) -> str:
    """Return the reason for an error, without a full stop, with a hint if storage has rejected the request."""
    rejection = next((one for one in _with_causes(error) if _is_rejection(one)), None)
    if rejection is None:
        return _reason_of(error)
    if isinstance(rejection, PrivateHostError):
        return str(rejection)
    protocol = url.rpartition("::")[2].partition("://")[0]
    reason = str(rejection) or type(rejection).__name__
    hint = _HINTS.get(protocol, _OF_ALL).format(protocol)
    if "signature" in reason.lower():
        hint = (
            f"{hint} A proxy that changes requests, such as one that removes their ranges, breaks signatures as well."
        )
    return f"it is rejected ({reason}). {hint}".rstrip(".")


def _reason_of(error: BaseException) -> str:
    """Return the text of an error; if that is only a URL, the text of its cause, such as a rejected connection."""
    texts = [str(one) or type(one).__name__ for one in _with_causes(error)]
    return next((text for text in texts if not _URL.fullmatch(text)), texts[0])


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_rejection(error: BaseException) -> bool:
    status = getattr(error, "status", None) or getattr(error, "code", None)  # aiohttp's and gcsfs' attributes
    is_known = status in _REJECTED_STATUSES or type(error).__name__ in _REJECTED_CLASSES
    return is_known or isinstance(error, PermissionError)


def in_time(action: Callable[..., Result], url: str, num_bytes: int = 0, *, is_on_loop: bool = False) -> Result:
    """Return the result of an action within the time limit, which is longer for responses of many bytes.

    With `is_on_loop`, the action runs on fsspec's event loop and takes a timeout, after which fsspec drops the
    connection. Other actions cannot be cancelled: a late one keeps a daemon thread.

    Raises:
        SilenceError: It takes longer than the time limit.
    """
    seconds = current_access().timeout_s
    if seconds is None:
        return action()
    limit = seconds + num_bytes / _SLOWEST
    begin = time.monotonic()
    try:
        return action(timeout=limit) if is_on_loop else Threads(1, _NAME).submit(action).result(limit)
    except _TIMEOUTS as error:
        if time.monotonic() - begin < 0.9 * limit:  # the request itself raised it; some clocks are coarse
            raise
        raise SilenceError(url, limit) from error


def hedged(action: Callable[[], Result]) -> Result:
    """Return the result of a request. If it is slow, it is sent a second time, and the first response is returned."""
    seconds = current_access().hedge_s
    if seconds is None:
        return action()
    # The slower request cannot be cancelled. Its thread ends with it.
    requests = [Threads(1, _NAME).submit(action)]
    if not wait(requests, seconds).done:
        requests.append(Threads(1, _NAME).submit(action))
    for done in as_completed(requests):
        if done.exception() is None:
            break
    return done.result()
