"""The file METADATA of a cache in a folder: which version and layout it has, and how it was set up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kdpipes.errors import DataError
from kdpipes.storage.drafts import create_file

__all__ = ["METADATA", "create_metadata", "metadata_of", "read_metadata"]

METADATA = "METADATA"
_FORMAT = 1


def metadata_of(content: bytes, place: str, layout: str) -> dict[str, Any]:
    """Return what a METADATA file says.

    Raises:
        DataError: It is that of another version or layout, or no such file.
    """
    way_out = "Give another folder, or delete this one."
    try:
        said = json.loads(content)
        written = said["format"], said["layout"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{place!r} is no cache, or its {METADATA} file is damaged. {way_out}") from error
    if written != (_FORMAT, layout):
        ours = f"This version of kdpipes reads format {_FORMAT}, here of layout {layout!r}"
        raise DataError(f"{place!r} is a cache of format {written[0]} and layout {written[1]!r}. {ours}. {way_out}")
    return dict(said)


def metadata_bytes(layout: str, options: dict[str, Any]) -> bytes:
    """Return the content of a METADATA file."""
    return json.dumps({"format": _FORMAT, "layout": layout, **options}, indent=1).encode()


def read_metadata(folder: Path, layout: str) -> dict[str, Any] | None:
    """Return what the METADATA file of a folder of this machine says, None if there is none."""
    try:
        content = (folder / METADATA).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return metadata_of(content, str(folder), layout)


def create_metadata(folder: Path, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make a folder a cache, unless it is one, and return what its METADATA file says: the first process decides.

    Raises:
        DataError: The folder holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = read_metadata(folder, layout)
    if found is not None:
        return found
    others = [path.name for path in folder.iterdir() if not path.name.startswith((".", METADATA))]
    if others:
        found = read_metadata(folder, layout)  # another process has been quicker
        if found is None:
            raise DataError(
                f"{str(folder)!r} is no cache, but holds {others[0]!r}. Give an empty folder, or a new one."
            )
        return found
    create_file(folder / METADATA, metadata_bytes(layout, options))
    return read_metadata(folder, layout) or {}
