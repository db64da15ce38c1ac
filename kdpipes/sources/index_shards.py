"""`index_shards`: index tar shards, and store columns of their samples in the indexes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kdpipes.core.errors import check_flag
from kdpipes.core.messages import shown_if_slow
from kdpipes.storage.access import DEFAULT_S, Access, using
from kdpipes.storage.catalog import in_order, index_again, write_data_set_indexes
from kdpipes.storage.decoding import check_columns
from kdpipes.storage.files import forget_listings, matching_urls
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.index_home import forget_joined
from kdpipes.storage.urls import expand_urls


class IndexResult(NamedTuple):
    """The result of `index_shards`.

    Args:
        urls: The shards.
        num_samples: The number of samples of each shard.
        num_bytes: The size of each shard.
    """

    urls: list[str]
    num_samples: list[int]
    num_bytes: list[int]


def index_shards(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: str | Sequence[str] = (),
    checksums: bool = True,
    timeout_s: float | None = DEFAULT_S,
    storage_options: Mapping[str, Any] | None = None,
) -> IndexResult:
    """Index plain tar shards, so that `kdp.open_shards` opens them at once; `kdpipes index` does the same.

    The index of a shard, `NAME.tar.index`, is written beside it, or into the local cache if that location is read-only.
    It holds the offsets, classes and checksums of the members, and the columns. The indexes of remote shards are also
    written into one object for each folder, `kdpipes.index`, so that many shards open with a few requests.

    Sixteen remote shards, or four local ones, are indexed at a time. Existing indexes are replaced, and their columns
    are preserved. If the up-to-date index of a remote shard lacks only some columns, and its members are large, only
    the members that these columns need are read.

    Args:
        urls: Paths or fsspec URLs of uncompressed tars, with brace ranges or globs.
        columns: The values of each sample to store in the index, so that `filter_samples`, `filter_classes` and `split`
            need not read any members. These are fields, such as `"txt"`, or entries of JSON members, such as
            `"json.label,json.size.width"`, or of headers of images, `"jpg.width"` (also height, channels, format
            and bytes). They must be numbers, booleans, strings or null.
        checksums: Whether to also read the contents of local shards and store their checksums. Indexes of remote shards
            always have checksums.
        timeout_s: How long remote storage may take to respond to a request, in seconds, plus 1 s for each 256 KiB of a
            large one; a second timeout is an error. None waits without limit.
        storage_options: The arguments of fsspec's file system, for all URLs.

    Raises:
        FileNotFoundError: A shard is missing.
        FieldError: No sample of a shard has a value of a column.
        DataError: A shard is truncated, compressed, or not a tar, or a value of a column cannot be stored.

    Example:
        >>> from kdpipes.demo import write_photo_shards
        >>> kdp.index_shards(write_photo_shards("shards"), columns="cls").num_samples
        [40, 40, 40, 40]
    """
    names = check_columns(columns)
    with_checksums = check_flag("checksums", checksums)
    given = expand_urls(urls)
    check_filesystems("urls", given)
    with using(Access(timeout_s, storage_options, None)):
        forget_listings(given)
        found = matching_urls(given)
        index = partial(index_again, with_checksums=with_checksums, columns=names)
        indexes = list(shown_if_slow(in_order(index, found), len(found), "indexing", "shard"))
        write_data_set_indexes(dict(zip(found, indexes, strict=True)))
    forget_joined()
    return IndexResult(found, [len(index.keys) for index in indexes], [index.version.size for index in indexes])
