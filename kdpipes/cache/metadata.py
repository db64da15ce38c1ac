"""The file METADATA of a cache in a folder, and its copy: which version and layout it has, and how it was set up."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdpipes.errors import DataError
from kdpipes.storage.files import create_file, replace_file

__all__ = [
    "COPY",
    "METADATA",
    "create_metadata",
    "heal_metadata",
    "metadata_bytes",
    "metadata_of",
    "read_metadata",
    "said_in",
]

METADATA = "METADATA"
COPY = f"{METADATA}.copy"
_FORMAT = 1
_WAY_OUT = "Give another folder, or delete this one."


def said_in(read: Callable[[str], bytes | None], place: str) -> dict[str, Any] | None:
    """Return what the METADATA file of a place says, or its copy, if it is damaged; None if there is none.

    Args:
        read: Returns the content of a file of the place, None if there is none.
        place: A folder or a URL, for errors.

    Raises:
        DataError: Both are damaged, or it is no such file.
    """
    content = read(METADATA)
    if content is None:
        return None
    said = _parsed(content) or _parsed(read(COPY))
    if said is None:
        raise DataError(f"{place!r} is no cache, or its {METADATA} file is damaged, and so is {COPY}. {_WAY_OUT}")
    return said


def metadata_of(said: dict[str, Any], place: str, layout: str) -> dict[str, Any]:
    """Return what a METADATA file says.

    Raises:
        DataError: It is that of another version or layout.
    """
    written = said["format"], said["layout"]
    if written != (_FORMAT, layout):
        ours = f"This version of kdpipes reads format {_FORMAT}, here of layout {layout!r}"
        raise DataError(f"{place!r} is a cache of format {written[0]} and layout {written[1]!r}. {ours}. {_WAY_OUT}")
    return said


def metadata_bytes(layout: str, options: dict[str, Any]) -> bytes:
    """Return the content of a METADATA file."""
    said = {"format": _FORMAT, "layout": layout, **options}
    return json.dumps({**said, "checksum": _checksum(said)}, indent=1).encode()


def _checksum(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def _parsed(content: bytes | None) -> dict[str, Any] | None:
    """Return what a METADATA file says; None if it is damaged. Those of earlier versions have no checksum."""
    try:
        said = dict(json.loads(content or b""))
        checksum = said.pop("checksum", None)
        is_whole = {"format", "layout"} <= set(said) and checksum in (None, _checksum(said))
    except (ValueError, TypeError, RecursionError):  # RecursionError: JSON nested too deeply
        return None
    return said if is_whole else None


def heal_metadata(folder: Any) -> tuple[int, int]:
    """Write METADATA again from its copy, or the copy from METADATA, and return how many were damaged and are healed.

    Args:
        folder: The cache's, a `LocalFolder` or `RemoteFolder`.
    """
    contents = {name: folder.read(name) for name in (METADATA, COPY)}
    whole = next((content for content in contents.values() if _parsed(content) is not None), None)
    num_damaged = num_healed = 0
    for name, content in contents.items():
        if whole is not None and _parsed(content) is None:
            num_damaged += content is not None
            with suppress(Exception):  # of any file system that cannot be written: then it is not healed
                folder.write(name, whole)
                num_healed += content is not None
    return num_damaged, num_healed


def read_metadata(folder: Path, layout: str) -> dict[str, Any] | None:
    """Return what the METADATA file of a folder of this machine says, None if there is none."""
    said = said_in(lambda name: _content_of(folder / name), str(folder))
    return None if said is None else metadata_of(said, str(folder), layout)


def _content_of(path: Path) -> bytes | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


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
    with suppress(OSError):  # a full disk: one does
        replace_file(folder / COPY, (folder / METADATA).read_bytes())
    return read_metadata(folder, layout) or {}
