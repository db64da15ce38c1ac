"""What tells a folder that was copied here from one that a user put here: small files, as KappaData leaves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from kdpipes.storage.files import CAN_HOLD, HeldFile

__all__ = ["END", "MARKERS", "PARTIAL", "PARTS", "START", "State", "copied_parts", "held_start", "state_of"]

START, END = "autocopy_start.txt", "autocopy_end.txt"
PARTIAL = "autocopy_partial.txt"  # files come here one by one, as they are needed
PARTS = ".autocopy"  # files that are on their way
MARKERS = frozenset({START, END, PARTIAL, PARTS})

State = Literal["missing", "partial", "unfinished", "complete", "own"]


def state_of(folder: Path, root: Path) -> State:
    """Return what there is of a folder.

    Args:
        folder: The folder.
        root: It, or one above, up to which folders may say that they are filled file by file.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return "missing"
    if (folder / START).exists():
        return "complete" if (folder / END).exists() else "unfinished"
    if _is_partial(folder, root):
        return "partial"
    return "own"


def _is_partial(folder: Path, root: Path) -> bool:
    for each in (folder, *folder.parents):
        if (each / END).exists():
            return False
        if (each / PARTIAL).exists():
            return True
        if each == root:
            break
    return False


def copied_parts(folder: Path) -> list[Path] | None:
    """Return the folders below that were copied on their own, or None if there is anything else."""
    found = []
    for entry in folder.iterdir():
        below = [entry] if (entry / START).exists() else copied_parts(entry) if entry.is_dir() else None
        if not below:
            return None
        found += below
    return found


@contextmanager
def held_start(folder: Path) -> Iterator[Path]:
    """Yield the start marker of a folder, made if need be, held against all others: for that they are waited for."""
    with _held(folder) if CAN_HOLD else nullcontext():
        yield folder / START


def _held(folder: Path) -> HeldFile:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = HeldFile(folder / START, os.O_RDWR | os.O_CREAT)
        try:
            file.hold_alone(waits=True)
            if file.is_in_place():
                return file
        except BaseException:
            file.close()
            raise
        file.close()
