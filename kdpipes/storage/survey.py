"""What is in shards, and what there is of their indexes: looked at, with nothing written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kdpipes.storage.catalog import find_index, in_order
from kdpipes.storage.files import Version, version_of
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.storage.tar import IndexBuilder, compression_of, index_shard, read_members
from kdpipes.storage.urls import is_local

__all__ = ["ShardSeen", "survey_shards"]


@dataclass(frozen=True)
class ShardSeen:
    """What is in a shard.

    Args:
        url: Where it lies.
        num_bytes: Its size.
        state: Of its index: "fresh", "stale" (of another shard), "damaged", "missing"; "impossible" for a compressed
            tar, which has no positions.
        index: What is in it; None if nobody has read it. Of a compressed tar, the sizes are right and the offsets mean
            nothing.
    """

    url: str
    num_bytes: int
    state: Literal["fresh", "stale", "damaged", "missing", "impossible"]
    index: ShardIndex | None


def survey_shards(urls: Sequence[str], *, scan: bool = True) -> Iterator[ShardSeen]:
    """Yield what is in each shard, in order. Nothing is written, beside the shards or into the local cache.

    Args:
        urls: Of tars, which may be compressed.
        scan: Whether to read shards without a fresh index: of a plain tar on this machine the headers, of others all.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard cannot be read.
    """
    return in_order(partial(_seen, scan=scan), urls)


def _seen(url: str, scan: bool) -> ShardSeen:
    version = version_of(url)
    if compression_of(url) is not None:
        return ShardSeen(url, version.size, "impossible", _read_through(url) if scan else None)
    found = find_index(url, version)
    if found.index is not None or not scan:
        return ShardSeen(url, version.size, found.state, found.index)
    index = index_shard(url, version) if is_local(url) else _read_through(url)
    return ShardSeen(url, version.size, found.state, index)


def _read_through(url: str) -> ShardIndex:
    """Return what is in a tar that may be compressed; offsets are those in the unpacked tar."""
    builder = IndexBuilder()
    for group in read_members(url):
        builder.add(group)
    return builder.index(Version(-1, ""))
