"""What is in shards, or in a folder, by path or URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kdpipes.core.errors import check_count
from kdpipes.look.contents import Contents
from kdpipes.look.folder_contents import look_at_folder
from kdpipes.look.shard_contents import look_at_shards
from kdpipes.storage.files import forget_listings, matching_urls
from kdpipes.storage.urls import expand_urls, is_local

__all__ = ["inspect_data"]

_SHARDS = re.compile(r"\.(tar|tgz)\b|[*{]")  # elsewhere, what is no folder


def inspect_data(places: Sequence[str], *, num_samples: int = 3, scan: bool = True) -> Contents:
    """Return what is in shards, or in a folder. No member is decoded, and nothing is written.

    Args:
        places: One folder, or paths or fsspec URLs of tars, with brace ranges or globs.
        num_samples: How many of the first samples are listed.
        scan: Whether to read shards that have no fresh index: of plain tars on this machine the headers, of others all.

    Raises:
        FileNotFoundError: A shard or the folder is missing.
        DataError: A shard, or the index of records, cannot be read.
    """
    check_count("num_samples", num_samples, minimum=0)
    given = [Path(places[0]).expanduser().as_posix()] if len(places) == 1 and is_local(places[0]) else list(places)
    if len(given) == 1 and _is_folder(given[0]):
        return look_at_folder(given[0], num_samples=num_samples, scan=scan)
    urls = expand_urls(given)
    forget_listings(urls)
    return look_at_shards(matching_urls(urls), num_samples=num_samples, scan=scan)


def _is_folder(place: str) -> bool:
    return Path(place).is_dir() if is_local(place) else not _SHARDS.search(place)
