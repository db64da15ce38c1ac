"""A cache in shared memory: one copy for all workers."""

from __future__ import annotations

from kdpipes.cache.cacher import CacheIterDataPipe, CacheMapDataPipe, Cacher, Verify
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.core.sample_pipe import register_operation

__all__ = ["CacherInMemory"]


class CacherInMemory(Cacher):
    """Keeps fields in shared memory, one copy for all workers (functional name: ``cache_in_memory``).

    torchdata's `in_memory_cache` keeps whole samples, in each worker for itself, and in their first order; this cache
    stands in the work of a chain, and changes neither order nor randomness. Fields are kept singly, when they are read,
    under the sample's key; what draws random numbers goes behind it. Before `.decode_images()` it keeps encoded images
    (small); behind it, it decodes them whole and keeps pixels (fast; crops may differ by a grey level or two from those
    that are decoded alone). Labels and the like that a source knows anyway are not kept.

    Entries are identified by the source (its arguments; path, size and date of local files, the ETag of remote files,
    from listings and shards), the sample's key, the field, and the work pipes upstream: their arguments, decoders, the
    code, defaults and closures of functions, and the globals that these read. Plan pipes do not count. Files that a
    function opens do not count either: change `version` if they change. A damaged entry is loaded again.

    A stream keeps its order. Where only work stands between `kdp.stream_shards` and the cache, what has passed once, to
    the end, is given again without opening a shard; of other streams the values are kept, and the source is read.

    Args:
        name: By which chains and processes of this user share it, all ranks of a host, say, while any of them has it.
            Without a name it goes with this chain.
        max_bytes: How large it may become; by default half of the shared memory that is free. It never evicts: when it
            is full, it keeps what it has, and the rest is loaded each time, with one warning.
        keep: Whether a named cache stays when nobody has it any more, until `kdpipes cache clear`.
        verify: When checksums are compared: "once" per process and entry, "always" or "never".
        version: Anything else that tells these entries from others, a string or an integer.
        freeze_randomness: Whether what random operations upstream make may be kept, the same for all epochs.
        allow_pickle: Whether to pickle values that are no numbers, strings, bytes, arrays, tensors, images, or lists
            and dictionaries of these.
        bytes_as_views: Whether bytes come as read-only memoryviews of the cache, as arrays do, instead of copies, which
            take a third of the time of a hit of 100 KB: for functions that take either, and for what does not leave
            the worker.

    Memory: the entries, once per host, in `/dev/shm`. On Linux they go with the process however it ends: a small
        process waits for that.

    Workers: Workers of any kind use the cache that was made with the chain. Arrays that come from it are read-only.

    Raises:
        ChainError: An operation upstream draws random numbers: where the chain is built, if that can be seen, or when a
            field is first read.
        TypeError: A value cannot be kept as plain data.

    Example:
        >>> cached = kdp.from_dataset([("heron", 0), ("stork", 1)]).transform("x", str.upper).cache_in_memory()
        >>> [cached[0]["x"] for epoch in range(3)]
        ['HERON', 'HERON', 'HERON']
        >>> cached.stats().hits, cached.stats().misses
        (2, 1)
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        keep: bool = False,
        verify: Verify = "once",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> None:
        super().__init__(
            LmdbStore.in_memory(name, max_bytes=max_bytes, keep=keep),
            verify=verify,
            version=version,
            freeze_randomness=freeze_randomness,
            allow_pickle=allow_pickle,
            bytes_as_views=bytes_as_views,
        )


register_operation("cache_in_memory", CacherInMemory, CacherInMemory, (CacheMapDataPipe, CacheIterDataPipe))
