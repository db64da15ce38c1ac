"""Fixtures of all tests: the shipped photos on disk, and the proof that a test leaves nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import settings

import kdpipes as kdp
from kdpipes.demo import write_photo_folder, write_photo_shards
from kdpipes.testing import s3_server

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # which asks the network for its newest version on import
torch.set_num_threads(1)
settings.register_profile("kdpipes", deadline=None, database=None)  # a busy machine is slow, not wrong
settings.load_profile("kdpipes")


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 photos in 8 class folders."""
    return write_photo_folder(tmp_path_factory.mktemp("photos") / "folder")


@pytest.fixture(scope="session")
def photo_shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same photos as 4 tars, as a brace range."""
    return write_photo_shards(tmp_path_factory.mktemp("photos") / "shards")


@pytest.fixture
def letters() -> kdp.MapPipe:
    """Six samples whose x are letters, with classes 0, 1, 0, 2, 0, 1."""
    return kdp.from_dataset(
        list(zip("abcdef", [0, 1, 0, 2, 0, 1], strict=True)), class_names=["heron", "stork", "gull"]
    )


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket of a real S3 store."""
    with s3_server() as url:
        yield url


@pytest.fixture
def s3(bucket: str) -> Iterator[str]:
    """The URL of an empty folder of an S3 store, which fsspec reaches without being told how."""
    yield f"{bucket}/{secrets.token_hex(8)}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="session", autouse=True)
def has_a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what kdpipes keeps for later runs out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDPIPES_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def keeps_collections_quick() -> None:
    """Take what importing torch has made out of the collections that the fixture below asks for."""
    gc.collect()
    gc.freeze()


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """After each test there is no process and no shared memory that was not there before."""
    before = _shared_memory()
    yield
    gc.collect()
    children = multiprocessing.active_children()
    for child in children:
        child.join(10)
    assert not multiprocessing.active_children()
    mine = {name for name in _shared_memory() - before if f"_{os.getpid()}_" in name}
    assert not mine
