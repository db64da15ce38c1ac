"""The file METADATA of a cache in a folder: its format and layout, and how it was set up."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Literal

from kdpipes.core.errors import DataError
from kdpipes.storage.access import Access, current_access, using
from kdpipes.storage.files import create_file, read_url
from kdpipes.storage.urls import is_local, join_url

__all__ = ["METADATA", "Layout", "create_metadata", "layout_in", "metadata_bytes", "parse_metadata", "read_metadata"]

Layout = Literal["lmdb", "files"]
METADATA = "METADATA"
_FORMAT = 1
_HINT = "Give another folder, or delete this one."


def parse_metadata(content: bytes | None, place: str, layout: str | None = None) -> dict[str, Any] | None:
    """Return the content of a METADATA file as a dictionary, None if there is no such file.

    Args:
        content: The bytes of the file, None if it does not exist.
        place: The folder or URL, for errors.
        layout: The layout that the cache must have, None if it may have any format and layout.

    Raises:
        DataError: The file is damaged, or belongs to another format or layout.
    """
    if content is None:
        return None
    try:
        found = dict(json.loads(content))
        checksum = found.pop("checksum", None)  # missing in early caches of kdpipes 0.1
        is_whole = {"format", "layout"} <= set(found) and checksum in (None, _checksum(found))
    except (ValueError, TypeError, RecursionError):  # RecursionError: JSON nested too deeply
        is_whole = False
    if not is_whole:
        raise DataError(f"{place!r} is not a cache, or its {METADATA} file is damaged. {_HINT}")
    written = found["format"], found["layout"]
    if layout is not None and written != (_FORMAT, layout):
        ours = f"This version of kdpipes reads format {_FORMAT}, here of layout {layout!r}"
        raise DataError(f"{place!r} is a cache of format {written[0]} and layout {written[1]!r}. {ours}. {_HINT}")
    return found


def metadata_bytes(layout: str, options: dict[str, Any]) -> bytes:
    """Return the content of a METADATA file."""
    content = {"format": _FORMAT, "layout": layout, **options}
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def layout_in(url: str, access: Access | None = None) -> str | None:
    """Return the layout of the cache in a folder or at a URL, None if there is no cache."""
    try:
        place = Path(url).expanduser() / METADATA
        with using(access or current_access()):
            content = place.read_bytes() if is_local(url) else read_url(join_url(url, METADATA))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    found = parse_metadata(content, url)
    return None if found is None else str(found["layout"])


def read_metadata(folder: Path, layout: str) -> dict[str, Any] | None:
    """Return the METADATA of a local folder, None if there is none."""
    try:
        content = (folder / METADATA).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_metadata(content, str(folder), layout)


def create_metadata(folder: Path, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make a local folder a cache, unless it is one, and return its METADATA: the first process decides.

    Raises:
        DataError: The folder holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = [path.name for path in folder.iterdir() if not path.name.startswith((".", METADATA))]
    found = read_metadata(folder, layout)  # after the listing: another process may be making the cache just now
    if found is None and others:
        raise DataError(f"{str(folder)!r} is not a cache, but holds {others[0]!r}. Give an empty folder, or a new one.")
    if found is None:
        create_file(folder / METADATA, metadata_bytes(layout, options))
    return found or read_metadata(folder, layout) or {}
