"""Data sets to copy, for tests: what they hold, what has become of them, and copies that are broken off."""

from __future__ import annotations

import io
import os
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdpipes.write.copy import copy_to_local
from tests.processes import in_child

MARKERS = {"autocopy_start.txt", "autocopy_end.txt"}
CONTENTS = {
    "train/heron/1.jpg": b"h1",
    "train/heron/2.jpg": b"h22" * 1000,
    "train/stork/größe ☃.jpg": b"s1",
    "val/heron/3.jpg": b"",
    "val/.hidden": b".",
    "labels.csv": b"1,2",
}
TRAIN = {name.removeprefix("train/"): content for name, content in CONTENTS.items() if name.startswith("train/")}


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def zipped(contents: dict[str | zipfile.ZipInfo, bytes] | dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def read(folder: Path) -> dict[str, bytes]:
    """Return what lies in a folder, without its own markers and the lock that another process may hold."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in {*MARKERS, ".autocopy.lock"}}


def is_complete(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} >= MARKERS


def killed_after(number: int) -> Callable[..., Any]:
    """Return `Path.replace`, by which the process is killed once `number` files have been moved to their places."""
    moved, original = [0], Path.replace

    def replace(self: Path, target: Any) -> Any:
        if moved[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        moved[0] += 1
        return original(self, target)

    return replace


def interrupted(monkeypatch: pytest.MonkeyPatch, number: int, *arguments: Any, **options: Any) -> None:
    """Copy in a process that is killed in the middle."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed_after(number))
        assert in_child(lambda: copy_to_local(*arguments, num_workers=1, **options)) == -signal.SIGKILL
