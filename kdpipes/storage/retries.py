"""The policy for requests to remote storage: which errors to retry, how long to wait, how to explain failures."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotDone
from concurrent.futures import as_completed, wait
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TypeVar

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger
from kdpipes.core.secrets import masked
from kdpipes.storage.access import Threads, current_access

Result = TypeVar("Result")


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


NUM_TRIES = 6
NUM_TRIES_WITH_COPY = 2  # maximum number of tries if a local copy is available
NUM_SILENT = 2  # maximum number of tries that time out: each takes the whole time limit
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_LONGEST_ASKED_S = 60.0  # maximum wait that a server may request by `Retry-After`
_SLOWEST = 1 << 18  # in bytes per second: large responses are given that much more time
_NAME = "kdpipes-request"  # name of threads that are abandoned with a late request
_PAUSE_S = 10.0  # between two warnings, because many threads may wait for the same server
_PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError),
    *(NoRangesError, TooLargeError),
)
_TEMPORARY_STATUSES = (408, 425, 429)
_log = logger(__name__)
_warned_at = -math.inf

_URL = re.compile(r"\S+://\S+")
_REJECTED_STATUSES = (401, 403, 407)
_REJECTED_CLASSES = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")  # classes of botocore
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)  # two different classes on Python 3.10
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


def on_loop(call: Callable[..., Result], url: str, num_bytes: int) -> Result:
    """Return the result of a call on fsspec's event loop. After a timeout, fsspec also drops the connection."""
    limit = current_access().timeout_s
    if limit is None:
        return call()
    seconds = limit + num_bytes / _SLOWEST
    begin = time.monotonic()
    try:
        return call(timeout=seconds)
    except _TIMEOUTS as error:
        if time.monotonic() - begin < seconds:
            raise
        raise SilenceError(url, seconds) from error


def in_time(action: Callable[[], Result], url: str, num_bytes: int = 0) -> Result:
    """Return the result of an action that cannot be cancelled; when it is late, a daemon thread is left with it.

    Raises:
        SilenceError: It takes longer than the time limit, which is longer for responses of many bytes.
    """
    seconds = current_access().timeout_s
    if seconds is None:
        return action()
    limit = seconds + num_bytes / _SLOWEST
    request = Threads(1, _NAME).submit(action)
    try:
        return request.result(limit)
    except NotDone as error:
        if request.done():  # the request itself raised the TimeoutError
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
