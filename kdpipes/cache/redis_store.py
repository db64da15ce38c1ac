"""A cache in redis, for processes of several machines."""

from __future__ import annotations

import importlib
import re
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from kdpipes.cache.store import MORE_ROOM, PATIENCE_S, CacheStats, CacheStore, Rejection, check_key, claim_by
from kdpipes.core.errors import check_choice, check_count, is_number, must_be
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.codec import DamagedError

Result = TypeVar("Result")
_NAMESPACE = re.compile(r"[A-Za-z0-9_./-]+")
MOST_VALUE_BYTES = 512 << 20  # the limit of redis itself
_CLAIM_MS = int(2 * PATIENCE_S * 1000)  # the server removes what a killed process has left
_PAUSE_S = 5.0  # before a server that was away or full is asked again
_HINT = 'Start it, or go on without a cache while it is away: `on_unreachable="go_on"`.'


class RedisStore(CacheStore):
    """A `CacheStore` in a redis server. It touches only keys that begin with its namespace, and never flushes.

    Only the server decides what it evicts; when it is full, further entries are not kept. The server may be stopped and
    started again at any time; lost entries are loaded again. `cache_in_redis` describes the arguments.
    """

    layout = "redis"
    of_process = ("_client", "_silent_until", "_full_until", "rejection")

    _silent_until: float
    _full_until: float

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        ttl_s: float | None = None,
        on_unreachable: Literal["raise", "go_on"] = "raise",
        timeout_s: float = 5.0,
        max_value_bytes: int = MOST_VALUE_BYTES,
    ) -> None:
        _redis()
        if not isinstance(url, str) or urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError(must_be("url", "a URL that begins with redis://, rediss:// or unix://", url))
        if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
            raise ValueError(must_be("namespace", 'letters, digits, "_", ".", "/" and "-"', namespace))
        _check_seconds("timeout_s", timeout_s)
        if ttl_s is not None:
            _check_seconds("ttl_s", ttl_s)
        check_choice("on_unreachable", on_unreachable, ["raise", "go_on"])
        if check_count("max_value_bytes", max_value_bytes) > MOST_VALUE_BYTES:
            rule = f"at most {MOST_VALUE_BYTES:,}, the limit of redis"
            raise ValueError(must_be("max_value_bytes", rule, max_value_bytes))
        self._max_value_bytes = max_value_bytes
        self._url, self._prefix = url, f"{namespace}:".encode()
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._goes_on, self._timeout_s = on_unreachable == "go_on", timeout_s
        self.start()

    def get(self, key: bytes, *, is_known: bool = False) -> memoryview | None:
        name, nothing = self._name(key), None
        entry: bytes | None = self._asked(lambda client: client.get(name), nothing)
        if entry is not None and len(entry) > self._max_value_bytes:
            raise DamagedError(f"The entry is longer than `max_value_bytes`, {self._max_value_bytes:,}.")
        return None if entry is None else memoryview(entry)

    def put(self, key: bytes, buffers: Iterable[Any], *, replace: bool = False) -> bool:
        name, content = self._name(key), b"".join(buffers)
        if len(content) > self._max_value_bytes:
            raise ValueError(
                f"An entry has {len(content):,} bytes, but this cache in redis keeps at most "
                f"{self._max_value_bytes:,} bytes per entry (`max_value_bytes`)."
            )
        if time.monotonic() < self._full_until:
            return False

        def write(client: Any) -> bool:
            client.set(name, content, px=self._ttl_ms, nx=not replace)
            return True

        try:
            return self._asked(write, False)
        except _redis().exceptions.ResponseError as error:
            self._full_until = time.monotonic() + _PAUSE_S
            self.rejection = Rejection(f"takes no more ({error})", MORE_ROOM)
            self._warn(f"takes no more ({error}). It keeps what it has, and the rest is loaded each time.")
            return False

    def contains(self, key: bytes) -> bool:
        return bool(self._asked(lambda client: client.exists(self._name(key)), 0))

    def takes_more(self) -> bool:
        return time.monotonic() >= max(self._full_until, self._silent_until)

    def claim(self, name: bytes, *, waits: bool) -> AbstractContextManager[bool]:
        key = self._prefix[:-1] + b"#claim:" + name

        def create(content: bytes) -> bytes:
            def ask(client: Any) -> bytes:
                client.set(key, content, nx=True, px=_CLAIM_MS)
                return client.get(key) or content

            return self._asked(ask, content)

        return claim_by(
            create,
            lambda content: self._asked(lambda client: client.set(key, content, px=_CLAIM_MS), None),
            lambda: self._asked(lambda client: client.delete(key), None),
            waits=waits,
        )

    def stats(self) -> CacheStats:
        """Return the number of entries and bytes, for which all keys of the server are listed."""

        def sizes(client: Any) -> list[int]:
            found: list[int] = []
            names = list(client.scan_iter(match=self._prefix + b"*", count=1000))
            for start in range(0, len(names), 1000):
                pipeline = client.pipeline(transaction=False)
                for name in names[start : start + 1000]:
                    pipeline.strlen(name)
                found += pipeline.execute()
            return found

        nothing: list[int] = []
        found = self._asked(sizes, nothing)
        return CacheStats(bytes=sum(found), entries=len(found))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self.start()

    def start(self) -> None:
        self._client: Any = None
        self._silent_until = self._full_until = 0.0
        self.rejection = None
        forget_after_fork(self)  # a thread may hold a lock of the client that is forked

    def _name(self, key: bytes) -> bytes:
        return self._prefix + check_key(key)

    def _asked(self, ask: Callable[[Any], Result], otherwise: Result) -> Result:
        """Return what the server answers to `ask(client)`; `otherwise` if it is away and the epoch may go on."""
        if self._goes_on and time.monotonic() < self._silent_until:
            return otherwise
        redis = _redis()
        errors = redis.exceptions
        try:
            if self._client is None:
                self._client = redis.Redis.from_url(
                    self._url,
                    socket_timeout=self._timeout_s,
                    socket_connect_timeout=self._timeout_s,
                    retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),  # the server may have been restarted
                )
                weakref.finalize(self, self._client.close)
            return ask(self._client)
        except errors.AuthenticationError as error:
            raise PermissionError(
                f"The redis server at {self._place()} rejected the login: {error}. Check the password in `url`."
            ) from error
        except (errors.ConnectionError, errors.TimeoutError) as error:
            if not self._goes_on:
                reason = f"The redis server at {self._place()} cannot be reached: {error}"
                raise ConnectionError(f"{reason.rstrip('.')}. {_HINT}") from error
            self._silent_until = time.monotonic() + _PAUSE_S
            self.rejection = Rejection(
                f"cannot be reached ({error})", "Start the server, and warm up again: that continues where it stopped."
            )
            self._warn(f"cannot be reached ({error}): samples are loaded as if there were no cache, until it is back.")
            return otherwise

    def _warn(self, text: str) -> None:
        self.warn_once(f"The redis server at {self._place()} {text}")

    def _place(self) -> str:
        """Return where the server is, without the password."""
        parts = urlsplit(self._url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


def _redis() -> ModuleType:
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise ImportError('`RedisStore` needs redis: `pip install "kdpipes[redis]"`.') from error


def _check_seconds(param: str, value: Any) -> None:
    if not is_number(value) or not value >= 0.001:
        raise ValueError(must_be(param, "a number of seconds, of at least 0.001", value))
