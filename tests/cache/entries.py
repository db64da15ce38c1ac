"""Stores as caches use them: a storage that fails is a warning, and no error."""

from __future__ import annotations

import json
import zlib
from typing import Any

from kdpipes.cache import FileStore, LmdbStore, RedisStore
from kdpipes.cache.shared_folder import CacheCounters
from kdpipes.cache.store import Entries


def open_memory(*arguments: Any, **options: Any) -> Entries:
    return Entries(LmdbStore.in_memory(*arguments, **options), CacheCounters.shared())


def open_lmdb(*arguments: Any, **options: Any) -> Entries:
    return Entries(LmdbStore(*arguments, **options))


def open_files(*arguments: Any, **options: Any) -> Entries:
    return Entries(FileStore(*arguments, **options))


def open_redis(*arguments: Any, **options: Any) -> Entries:
    return Entries(RedisStore(*arguments, **options))


def metadata(**content: Any) -> str:
    """Return the METADATA file of a cache with a content, and its checksum."""
    return json.dumps({**content, "checksum": zlib.crc32(json.dumps(content, sort_keys=True).encode())})
