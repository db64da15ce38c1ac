"""Files, remote objects, memory and formats. This package does not depend on pipes.

A file in any storage has a `Reader` (read, stream), implemented by `readers` (local files), `filesystems` (fsspec) and
`object_store` (obstore). `access` holds the options, time limits and retry policy for all requests; `files` reads,
lists and writes by URL; `remote` prefetches. Formats: `tar` and `tar_headers`, `shard_index`, `index_home` (locations
of indexes and notes), `catalog` (indexes of many shards), `records`, `codec` (cache entries), and `decoding` (members
and images). Start reading with `readers` and `files`.
"""
