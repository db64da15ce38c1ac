"""Folders to copy from and to, and shards to compare others with."""

from __future__ import annotations

from pathlib import Path

import pytest

import kdpipes as kdp
from tests.write.copies import CONTENTS, write
from tests.write.shards import LIMITS, tars_in


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """The folder to copy."""
    return write(tmp_path / "origin", CONTENTS)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Where to; it is not there."""
    return tmp_path / "deep" / "local"


@pytest.fixture(scope="session")
def references(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The tars for each of the limits, as one process writes them."""
    found = {}
    for limits in LIMITS:
        folder = tmp_path_factory.mktemp("reference")
        kdp.write_shards(kdp.image_folder(photo_folder), folder / "train-%06d.tar", **limits)
        found[str(limits)] = tars_in(folder)
    return found
