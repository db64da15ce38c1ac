"""Files, remote objects, memory and formats. This package knows nothing of pipes.

A file of any storage has a `Reader` (`readers`: read, stream): of `memory` (local files), `filesystems` (fsspec)
or `object_store` (obstore). `retries` has the one policy for requests; `files` reads, lists and writes by URL; `remote`
reads ahead. Formats: `tar` and `tar_headers`, `shard_index`, `index_home` (where indexes lie) and `catalog` (of many
shards), `records`, `codec` (cache entries). To begin with, read `readers` and `files`.
"""
