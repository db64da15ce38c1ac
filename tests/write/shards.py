"""Shards of photos, for tests: how they are limited and written, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.write.shards import ShardsResult

QUIET = [  # webdataset leaves files to the garbage collector
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]
LIMITS: list[dict[str, int]] = [
    {"max_samples": 30},
    {"max_bytes": 150_000},
    {"max_samples": 40, "max_bytes": 150_000},
]


def tars_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".tar"}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(pipe: Any, folder: Path, **options: Any) -> ShardsResult:
    return kdp.write_shards(pipe, folder / "train-%06d.tar", **{"max_samples": 30, **options})
