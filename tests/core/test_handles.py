"""Open files, connections and generators that workers must not share are found in what users' objects hold."""

from __future__ import annotations

import functools
import gzip
import io
import mmap
import random
import socket
import sqlite3
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.handles import Held, find_handles

Make = Callable[[Path], Any]

SHARED: dict[str, Make] = {
    "file": lambda path: path.open("rb"),
    "unbuffered": lambda path: path.open("rb", buffering=0),
    "text": lambda path: path.open(),
    "gzip": lambda path: gzip.open(path),  # noqa: SIM115
    "zip": zipfile.ZipFile,
    "tar": lambda path: tarfile.open(path.with_suffix(".tar")),  # noqa: SIM115
    "temporary": lambda path: tempfile.NamedTemporaryFile(),  # noqa: SIM115
    "socket": lambda path: socket.socket(),
    "database": lambda path: sqlite3.connect(":memory:"),
}
SAFE: dict[str, Make] = {
    "closed": lambda path: _closed(path.open("rb")),
    "memory": lambda path: io.BytesIO(path.read_bytes()),
    "zip in memory": lambda path: zipfile.ZipFile(io.BytesIO(path.read_bytes())),
    "map": lambda path: mmap.mmap(-1, 8),
    "array": lambda path: np.memmap(path, dtype=np.uint8, mode="r"),
    "log": lambda path: path.with_suffix(".log").open("w"),
    "path": lambda path: path,
    "class": lambda path: io.FileIO,
}
RANDOM: dict[str, Make] = {
    "numpy": lambda path: np.random.default_rng(0),
    "old numpy": lambda path: np.random.RandomState(0),
    "python": lambda path: random.Random(0),
    "torch": lambda path: torch.Generator(),
    "albumentations": lambda path: A.Compose([A.HorizontalFlip()]),
    "generator": lambda path: (n for n in range(3)),
}


class Rows(Dataset[Any]):
    """A dataset that holds something."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 0


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Source(kdp.SampleSource):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def getitem_x(self, index: int) -> int:
        return index


class Stream:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def _closed(file: Any) -> Any:
    file.close()
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is a zip, beside one that is a tar."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", b"a")
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    return tmp_path / "a.zip"


@pytest.fixture
def make(path: Path) -> Iterator[Callable[[Make], Any]]:
    made: list[Any] = []

    def make(how: Make) -> Any:
        made.append(how(path))
        return made[-1]

    yield make
    for each in made:
        if callable(getattr(each, "close", None)) and not isinstance(each, type):
            each.close()


def found_in(value: Any) -> list[tuple[str, bool]]:
    return [(held.name, held.is_random) for held in find_handles(value)]


@pytest.mark.parametrize("kind", SHARED)
def test_open_files_and_connections_of_a_dataset_are_found(kind: str, make: Callable[[Make], Any]) -> None:
    held = make(SHARED[kind])
    assert list(find_handles(kdp.from_dataset(Rows(held)))) == [Held("Rows.held", type(held).__name__, False)]


@pytest.mark.parametrize("kind", SAFE)
def test_what_processes_may_share_is_not(kind: str, make: Callable[[Make], Any]) -> None:
    assert found_in(kdp.from_dataset(Rows(make(SAFE[kind])))) == []


@pytest.mark.parametrize("kind", RANDOM)
def test_generators_of_a_dataset_are_found(kind: str, make: Callable[[Make], Any]) -> None:
    held = make(RANDOM[kind])
    assert found_in(kdp.from_dataset(Rows(held)).select("x")) == [("Rows.held", True)]


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda held: kdp.from_dataset(Rows([{"a": (held,)}])), "Rows.held"),
    "subset": (lambda held: kdp.from_dataset(Subset(Rows(held), [0])), "Rows.held"),
    "joined": (lambda held: kdp.from_dataset(ConcatDataset([Rows(0), Rows(held)])), "Rows.held"),
    "helper": (lambda held: kdp.from_dataset(Rows(Slotted(held))), "Slotted.held"),
    "cycle": (lambda held: kdp.from_dataset(in_a_cycle(held)), "Slotted.held"),
    "source": (Source, "Source.held"),
    "closure": (lambda held: kdp.from_ids(["a"], load=lambda name: held), "held` of `<lambda>"),
    "partial": (lambda held: kdp.from_ids(["a"], load=functools.partial(max, held)), "max"),
    "method": (lambda held: kdp.from_ids(["a"], load=Rows(held).__getitem__), "Rows.held"),
    "transform": (lambda held: kdp.from_dataset(Rows(0)).transform("x", lambda x: held), "held` of `<lambda>"),
    "stream": (lambda held: IterableWrapper(Stream(held)).to_samples(fields="x"), "Stream.held"),
    "deal": (lambda held: Source(held).select("x").deal(batch_size=1).collate_samples(), "Source.held"),
    "concat": (lambda held: kdp.concat(Source(0), Source(held)), "Source.held"),
}


def in_a_cycle(held: Any) -> Any:
    rows = Rows(Slotted(held))
    rows.rows = rows  # type: ignore[attr-defined]
    return rows


@pytest.mark.parametrize("place", PLACES)
def test_handles_are_found_wherever_they_are_held(place: str, make: Callable[[Make], Any]) -> None:
    chain, name = PLACES[place]
    held = make(SHARED["file"])
    assert found_in(chain(held)) == [(name, False)]


def test_kdpipes_own_objects_are_no_finding(tmp_path: Path, photo_folder: Path, photo_shards: str) -> None:
    for source in (kdp.image_folder(photo_folder), kdp.open_shards(photo_shards), kdp.stream_shards(photo_shards)):
        chain = source.cache_in_memory() if source.__class__.__name__.startswith("Image") else source
        next(iter(chain))
        assert found_in(chain.deal(batch_size=2)) == []
    shuffled = kdp.from_dataset(list(range(8)), "x").select("x").deal(batch_size=2).shuffle()
    list(shuffled)
    assert found_in(shuffled) == []
    flipped = kdp.from_dataset(Rows(0)).transform("x", A.Compose([A.HorizontalFlip()]), kdp.HorizontalFlip())
    assert found_in(flipped) == [], "the generators of transforms are seeded"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_loaders_warn_of_what_forked_workers_share(start_method: str, path: Path) -> None:
    class Late(Rows):
        def __getstate__(self) -> dict[str, Any]:
            return {"held": None}

    with path.open("rb") as file:
        chain = kdp.from_dataset(Late(file)).select("x").deal(batch_size=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)  # not that on threads that fork, of Python 3.12
            with kdp.Loader(chain, num_workers=2, start_method=start_method) as loader:
                for _ in range(2):
                    assert sum(len(batch) for batch in loader) == 8
    words = [str(warning.message) for warning in caught]
    assert len(words) == (start_method == "fork")
    assert all("share `Late.held` (BufferedReader)" in each and "os.getpid()" in each for each in words)


def test_loaders_without_processes_do_not_warn(path: Path) -> None:
    with path.open("rb") as file:
        chain = kdp.from_dataset(Rows(file)).select("x").deal(batch_size=4)
        for service in ({"num_workers": 0}, {"reading_service": kdp.ThreadReadingService(2)}):
            with kdp.Loader(chain, **service) as loader:
                assert sum(len(batch) for batch in loader) == 8


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_loaders_warn_of_generators(start_method: str) -> None:
    chain = kdp.from_dataset(Rows(np.random.default_rng(0))).select("x").deal(batch_size=4)
    loader = kdp.Loader(chain, num_workers=1, start_method=start_method)
    with loader, pytest.warns(UserWarning, match=r"`Rows\.held` \(Generator\) has a state of its own in each worker"):
        list(loader)


def test_processes_that_write_warn_as_well(path: Path, tmp_path: Path) -> None:
    with path.open("rb") as file, pytest.warns(UserWarning, match=r"share `Source\.held`"):
        kdp.write_shards(Source(file), tmp_path / "a-%06d.tar", max_samples=4, num_workers=2)
