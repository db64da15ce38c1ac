"""Every store is a `CacheStore`, as far as a type checker can tell."""

from __future__ import annotations

from kdpipes.cache.file_store import FileStore
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.redis_store import RedisStore
from kdpipes.cache.store import CacheStore


def every_store() -> list[CacheStore]:
    return [LmdbStore.in_memory(), FileStore("cache"), RedisStore("redis://localhost", "birds")]
