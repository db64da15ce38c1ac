"""Caches of fields: in memory, on disk, in Redis, in custom stores, and caches opened without their source.

`cache` is the pipe, `key` computes the keys of entries, and `store` is the interface of `lmdb_store`, `file_store` and
`redis_store`. `folder` and `shared_folder` manage the locations of entries, `warm_up` fills a cache, and `replayed`
repeats streams whose contents are cached. Start reading with `cache` and `store`.
"""

from typing import TYPE_CHECKING

from kdpipes.core.on_use import exports

if TYPE_CHECKING:
    from kdpipes.cache.file_store import FileStore
    from kdpipes.cache.lmdb_store import LmdbStore
    from kdpipes.cache.redis_store import RedisStore
    from kdpipes.cache.store import CacheStore

__all__ = ["CacheStore", "FileStore", "LmdbStore", "RedisStore"]

__getattr__ = exports(
    __name__,
    {
        "CacheStore": "kdpipes.cache.store",
        "FileStore": "kdpipes.cache.file_store",
        "LmdbStore": "kdpipes.cache.lmdb_store",
        "RedisStore": "kdpipes.cache.redis_store",
    },
)
