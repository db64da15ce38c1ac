"""Which store a cache on disk has: LMDB in a folder of this machine, files elsewhere, or what is there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from kdpipes.cache.file_store import FileStore
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.metadata import METADATA
from kdpipes.errors import DataError
from kdpipes.storage.files import is_local, join_url, read_url

__all__ = ["Layout", "layout_in", "store_in"]

Layout = Literal["lmdb", "files"]


def layout_in(url: str) -> str | None:
    """Return the layout of the cache in a folder, None if there is none."""
    if is_local(url):
        path = Path(url).expanduser() / METADATA
        content = path.read_bytes() if path.is_file() else None
    else:
        try:
            content = read_url(join_url(url, METADATA))
        except FileNotFoundError:
            return None
    if content is None:
        return None
    try:
        return str(json.loads(content)["layout"])
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{url!r} is no cache, or its {METADATA} file is damaged.") from error


def store_in(url: str) -> Any:
    """Return the store of a cache that is there.

    Raises:
        FileNotFoundError: There is none.
    """
    url = url.removeprefix("file://")
    layout = layout_in(url)
    if layout is None:
        raise FileNotFoundError(f"There is no cache in {url!r}: no file {METADATA}.")
    return LmdbStore(url) if layout == "lmdb" else FileStore(url)
