"""Caches of fields: in memory, on disk, in Redis, and caches opened without their source.

`cache` is the pipe, `key` identifies entries, and `store` is the interface of `lmdb_store`, `file_store` and
`redis_store`. `folder` and `shared_folder` decide where entries are, `warm_up` fills a cache, and `watched_calls` and
`replayed` keep what transforms recorded beside the values. To begin with, read `cache` and `store`.
"""
