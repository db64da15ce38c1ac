"""Which store a cache on disk has: LMDB in a folder of this machine, files elsewhere, or what is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from kdpipes.cache.file_store import FileStore
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.metadata import METADATA, said_in
from kdpipes.core.masked import masked
from kdpipes.storage.files import read_url
from kdpipes.storage.urls import is_local, join_url

__all__ = ["Layout", "layout_in", "store_in"]

Layout = Literal["lmdb", "files"]


def layout_in(url: str) -> str | None:
    """Return the layout of the cache in a folder, None if there is none."""
    said = said_in(lambda name: _content_of(url, name), url)
    return None if said is None else str(said["layout"])


def _content_of(url: str, name: str) -> bytes | None:
    if is_local(url):
        path = Path(url).expanduser() / name
        return path.read_bytes() if path.is_file() else None
    try:
        return read_url(join_url(url, name))
    except FileNotFoundError:
        return None


def store_in(url: str) -> Any:
    """Return the store of a cache that is there.

    Raises:
        FileNotFoundError: There is none.
    """
    url = url.removeprefix("file://")
    layout = layout_in(url)
    if layout is None:
        way_out = "`chain.cache_on_disk(...)` makes one, when a field of it is read."
        if url.endswith(".zip"):
            way_out = f"One that is packed, without its folder, opens as 'zip://::{url.rpartition('::')[2]}'."
        raise FileNotFoundError(masked(f"There is no cache in {url!r}: no file {METADATA}. {way_out}"))
    if layout == "lmdb" and not is_local(url):
        way_out = "Unpack it, or make it by `cache_on_disk(..., layout='files')`."
        raise ValueError(
            f"The cache in {masked(url)!r} is one database (LMDB), which opens in a local folder alone. {way_out}"
        )
    return LmdbStore(url) if layout == "lmdb" else FileStore(url)
