"""A cache on disk, or in object storage, that later runs and other machines use."""

from __future__ import annotations

import os

from kdpipes.cache.cacher import CacheIterDataPipe, CacheMapDataPipe, Cacher, Verify
from kdpipes.cache.disk_store import Layout, layout_in
from kdpipes.cache.file_store import FileStore
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.core.sample_pipe import register_operation
from kdpipes.errors import check_choice, check_flag, must_be
from kdpipes.storage.urls import is_local

__all__ = ["CacherOnDisk"]


class CacherOnDisk(Cacher):
    """Keeps fields on disk, or in object storage, for later runs (functional name: ``cache_on_disk``).

    torchdata's `on_disk_cache` keeps files that a pipe of one's own names; this cache stands in the work of a chain,
    and names entries itself: what they are known by, and what is kept, says `cache_in_memory`. Any number of processes
    fill it at once. `warm_up()` fills it with all samples, and goes on where it was broken off; what is complete opens
    without the source, by `kdp.open_cache(url)`, also where its folder has been moved or packed to.

    Args:
        url: A folder, by path or by any URL that fsspec knows. It need not be there.
        layout: "lmdb", one file, for folders of this machine (no network file system); "files", one per entry, in any
            storage. By default that of the cache that is there, else "lmdb" for paths and "files" for URLs.
        max_bytes: How large an LMDB file may become; by default half of what is free on the disk.
        is_durable: Whether each entry of LMDB waits for the disk. Without it, filling is much faster, but a cache that
            was written when the machine went down must be deleted.
        max_files_per_folder: Of the layout "files": how many may lie in one folder, at least 32.
        num_entries: Of the layout "files": how many are expected at most.
        compression: Of the layout "files": None, "zlib" (quick), "gzip", "bz2", "lzma"; or what takes a package: "zstd"
            (zstandard), "lz4" (lz4), "snappy" (python-snappy).
        verify: When checksums are compared: "always", "once" per process and entry, or "never".
        version: Anything else that tells these entries from others, a string or an integer.
        freeze_randomness: Whether what random operations upstream make may be kept, the same for all epochs.
        allow_pickle: Whether to pickle values that are no plain data, and to execute what the cache says then.

    Memory: none but that of the system's file cache.

    Workers: They share the cache, as do other processes and, by a URL, machines. Arrays that come from it are
        read-only.

    Raises:
        ChainError: An operation upstream draws random numbers: where the chain is built, if that can be seen, or when a
            field is first read.
        TypeError: A value cannot be kept as plain data.
        ImportError: The package of the file system (`gs://`: gcsfs) or of a compression is not installed.
        DataError: The folder holds something else, or a cache of another version.

    Example:
        >>> cached = kdp.from_dataset([("heron", 0), ("stork", 1)]).transform("x", str.upper).cache_on_disk("cached")
        >>> cached.warm_up().entries, kdp.open_cache("cached")[1]["x"]
        (4, 'STORK')
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        max_bytes: int | None = None,
        is_durable: bool = True,
        max_files_per_folder: int = 1000,
        num_entries: int = 1_000_000,
        compression: str | None = None,
        verify: Verify = "always",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        if not isinstance(url, str | os.PathLike):
            raise TypeError(must_be("url", "a path or a URL", url))
        if not os.fspath(url):
            raise ValueError(must_be("url", "the name of a folder", url))
        place = os.fspath(url).removeprefix("file://")
        check_choice("layout", layout, ("lmdb", "files", None))
        check_flag("is_durable", is_durable)
        of_files = (max_files_per_folder, num_entries, compression) != (1000, 1_000_000, None)
        if layout is None:
            layout = "files" if of_files or not is_local(place) or layout_in(place) == "files" else "lmdb"
        if layout == "lmdb" and of_files:
            raise ValueError(must_be("layout", '"files"', layout, "Other layouts have no folders and no compression."))
        if layout == "files" and max_bytes is not None:
            raise ValueError(must_be("max_bytes", "None", max_bytes, 'The layout "files" has no limit of its own.'))
        super().__init__(
            LmdbStore(place, max_bytes=max_bytes, is_durable=is_durable)
            if layout == "lmdb"
            else FileStore(
                place, num_entries=num_entries, max_files_per_folder=max_files_per_folder, compression=compression
            ),
            verify=verify,
            version=version,
            freeze_randomness=freeze_randomness,
            allow_pickle=allow_pickle,
        )


register_operation("cache_on_disk", CacherOnDisk, CacherOnDisk, (CacheMapDataPipe, CacheIterDataPipe))
