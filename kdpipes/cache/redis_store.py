"""A cache in redis, for processes of several machines."""

from __future__ import annotations

import importlib
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

from kdpipes.cache.store import CacheStore
from kdpipes.core.errors import check_choice, check_count, is_number, must_be
from kdpipes.storage.codec import DamagedError

_NAMESPACE = re.compile(r"[A-Za-z0-9_./-]+")
MOST_VALUE_BYTES = 512 << 20  # the limit of redis
_HINT = 'Start it, or go on without a cache while it is away: `on_unreachable="go_on"`.'


class RedisStore(CacheStore):
    """A `CacheStore` in a redis server. It touches only keys that begin with its namespace, and never flushes.

    Eviction is up to the server. If it is full, further entries are not stored. The server may be restarted at any
    time; lost entries are loaded again. `cache_in_redis` describes the arguments.
    """

    def __init__(
        self,
        url: str,
        namespace: str = "kdpipes",
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
        self._url = url
        self._prefix = f"{namespace}:".encode()
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._timeout_s = timeout_s
        # A full server responds with a ResponseError, which never ends an epoch.
        is_needed = on_unreachable == "raise"
        self.errors = (_redis().ResponseError, *([] if is_needed else [ConnectionError]))

    def get(self, key: bytes) -> bytes | None:
        with self._asking() as client:
            entry: bytes | None = client.get(self._prefix + key)
        if entry is not None and len(entry) > self._max_value_bytes:
            raise DamagedError(f"The entry is longer than `max_value_bytes`, {self._max_value_bytes:,}.")
        return entry

    def put(self, key: bytes, content: bytes, *, replace: bool) -> None:
        if len(content) > self._max_value_bytes:
            raise ValueError(
                f"An entry has {len(content):,} bytes, but this cache in redis keeps at most "
                f"{self._max_value_bytes:,} bytes per entry (`max_value_bytes`)."
            )
        with self._asking() as client:
            client.set(self._prefix + key, content, px=self._ttl_ms, nx=not replace)

    def delete(self, key: bytes) -> None:
        with self._asking() as client:
            client.delete(self._prefix + key)

    def contains(self, key: bytes) -> bool:
        with self._asking() as client:
            return bool(client.exists(self._prefix + key))

    def size(self) -> tuple[int, int]:
        """Return the number of entries and bytes, which requires listing all keys of the server."""
        sizes: list[int] = []
        with self._asking() as client:
            names = list(client.scan_iter(match=self._prefix + b"*", count=1000))
            for start in range(0, len(names), 1000):
                pipeline = client.pipeline(transaction=False)
                for name in names[start : start + 1000]:
                    pipeline.strlen(name)
                sizes += pipeline.execute()
        return len(sizes), sum(sizes)

    @cached_property
    def _client(self) -> Any:
        redis = _redis()
        client = redis.Redis.from_url(
            self._url,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),  # the server may have been restarted
        )
        weakref.finalize(self, client.close)
        return client

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        """Yield the client, and explain connection errors."""
        errors = _redis().exceptions
        try:
            yield self._client
        except errors.AuthenticationError as error:
            raise PermissionError(f"{self} rejected the login: {error}. Check the password in `url`.") from error
        except (errors.ConnectionError, errors.TimeoutError) as error:
            reason = f"{self} cannot be reached: {error}"
            raise ConnectionError(f"{reason.rstrip('.')}. {_HINT}") from error

    def __str__(self) -> str:
        """Return the location of the server, without the password."""
        parts = urlsplit(self._url)
        place = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
        return f"the redis server at {place}"


def _redis() -> ModuleType:
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise ImportError('`RedisStore` needs redis: `pip install "kdpipes[redis]"`.') from error


def _check_seconds(param: str, value: Any) -> None:
    if not is_number(value) or not value >= 0.001:
        raise ValueError(must_be(param, "a number of seconds, of at least 0.001", value))
