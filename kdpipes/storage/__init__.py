"""Files, remote objects, memory and formats. This package knows nothing of pipes.

Four seams: `files` (local and remote files by URL), `remote` (reading ahead by ranges, with `retries` and
`object_store`), LMDB (in `kdpipes.cache.lmdb_store`), and `memory` and `shared` (files and arrays that processes
share). Formats: `tar` and `tar_headers`, `shard_index` and `catalog` (indexes), `records`, `codec` (cache entries). To
begin with, read `files`.
"""
