"""A cache in a redis server, for processes of several machines."""

from __future__ import annotations

from typing import Literal

from kdpipes.cache.cacher import CacheIterDataPipe, CacheMapDataPipe, Cacher, Verify
from kdpipes.cache.redis_store import MOST_VALUE_BYTES, RedisStore
from kdpipes.core.sample_pipe import register_operation

__all__ = ["CacherInRedis"]


class CacherInRedis(Cacher):
    """Keeps fields in a redis server, for several machines (functional name: ``cache_in_redis``).

    `cache_in_memory` describes what is kept and how entries are identified. Only keys that begin with the namespace are
    touched, and the server is never flushed; evicted entries are loaded again. An entry is also loaded again and
    replaced if it is damaged, is a pickle, is longer than `max_value_bytes`, or belongs to another key (its checksum
    includes its key).

    Args:
        url: Of the server: `redis://`, `rediss://` (encrypted) or `unix://`, with user, password and database.
        namespace: What all keys begin with: letters, digits, and "_", ".", "/", "-".
        ttl_s: How long an entry stays, in seconds; None is for ever.
        on_unreachable: "raise", or "go_on" as if there were no cache, with a warning, until the server is back.
        timeout_s: How long to wait for an answer, in seconds.
        max_value_bytes: The maximum length of an entry, up to 512 MiB. A longer entry, which another writer must have
            put there, is not read; its value is loaded again and the entry replaced.
        verify: When checksums are compared: "always", "once" per process and entry, or "never".
        version: Anything else that tells these entries from others, a string or an integer.
        freeze_randomness: Whether what random operations upstream make may be kept, the same for all epochs.
        allow_pickle: Whether to pickle values that are no plain data, and to execute what the server says then.

    Memory: none but the server's.

    Workers: Each has a connection of its own.

    Raises:
        ImportError: redis is not installed.
        ConnectionError: When it is used: the server is away.
        ChainError: An operation upstream draws random numbers: where the chain is built, if that can be seen, or when a
            field is first read.
        TypeError: A value cannot be kept as plain data.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "kdpipes",
        ttl_s: float | None = None,
        on_unreachable: Literal["raise", "go_on"] = "raise",
        timeout_s: float = 5.0,
        max_value_bytes: int = MOST_VALUE_BYTES,
        verify: Verify = "always",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(
            RedisStore(
                url,
                namespace,
                ttl_s=ttl_s,
                on_unreachable=on_unreachable,
                timeout_s=timeout_s,
                max_value_bytes=max_value_bytes,
            ),
            verify=verify,
            version=version,
            freeze_randomness=freeze_randomness,
            allow_pickle=allow_pickle,
        )


register_operation("cache_in_redis", CacherInRedis, CacherInRedis, (CacheMapDataPipe, CacheIterDataPipe))
