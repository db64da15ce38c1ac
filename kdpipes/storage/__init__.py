"""Files, remote objects, memory and formats. This package does not depend on pipes.

A file in any storage has a `Reader` (`readers`: read, stream), implemented by `memory` (local files), `filesystems`
(fsspec) and `object_store` (obstore). `retries` holds the retry policy for all requests; `files` reads, lists and
writes by URL; `remote` prefetches. Formats: `tar` and `tar_headers`, `shard_index`, `index_home` (locations of
indexes), `catalog` (indexes of many shards), `records`, and `codec` (cache entries). Start reading with `readers` and
`files`.
"""
