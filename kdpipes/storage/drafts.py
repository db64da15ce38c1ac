"""Files of this machine that are there whole or not at all: written as drafts beside their places, and moved there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["create_file", "draft_of", "replace_file"]


@contextmanager
def draft_of(path: Path, draft: Path | None = None) -> Iterator[Path]:
    """Yield where the draft of a file is to be written; whoever has written it moves it, or it is removed.

    Args:
        path: Of the file.
        draft: Of the draft, in the same file system. By default it is hidden beside the file, `.NAME.RANDOM.part`:
            what a process leaves there that was killed is told by that name.
    """
    draft = draft or path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Write a file so that nobody sees half of it; what was there before is replaced.

    Args:
        path: Of the file.
        content: All of it.
        is_synced: Whether the content is on the disk before the name is, so that a loss of power cannot part them.
    """
    with draft_of(path) as draft:
        _write(draft, content, is_synced)
        draft.replace(path)


def create_file(path: Path, content: bytes, *, is_synced: bool = False) -> None:
    """Write a file so that nobody sees half of it, unless another process has: the first one decides.

    Args: as those of `replace_file`.
    """
    with draft_of(path) as draft:
        _write(draft, content, is_synced)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except FileNotFoundError:
            if not path.exists():  # whoever was faster may have removed the draft
                raise
        except OSError:  # of file systems that know no hard links
            draft.replace(path)


def _write(draft: Path, content: bytes, is_synced: bool) -> None:
    with draft.open("wb") as file:
        file.write(content)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())
