"""Caches know entries by what functions and objects hold: images, other pipes, and objects that pickle themselves."""

from __future__ import annotations

import functools
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint


class Stamp:
    """Holds a value as an attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, x: Any) -> Any:
        return x, self.value is None


def second(held: Any, x: Any) -> Any:
    return x, held is None


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def image(level: int, mode: str = "L") -> Image.Image:
    return Image.new(mode, (4, 4), level)


def table(level: int) -> Any:
    return kdp.from_table({"text": ["a", str(level)], "y": [0, level]})


class Reads(kdp.SampleSource):
    """A source that reads from another pipe."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 2

    def getitem_x(self, index: int) -> Any:
        return self.inner[index]["y"]


VALUES: dict[str, Callable[[int], Any]] = {
    "an image": image,
    "an image in a list": lambda level: [image(level)],
    "an image of a palette": lambda level: image(level, "P"),
    "an array": lambda level: np.full(3, level),
    "a tensor": lambda level: torch.full((3,), level),
    "a module": lambda level: (
        torch.nn.Linear(1, 1, bias=False).requires_grad_(False).apply(lambda m: m.weight.fill_(level))
    ),
    "an object": lambda level: Stamp(Slotted(level)),
    "a pipe": table,
    "a pipe with work": lambda level: table(1).transform("text", lambda text: text * level),
    "a pipe with a plan": lambda level: table(1).repeat_until(repetitions=level),
    "a pipe of labels": lambda level: kdp.from_ids(["a"], [level], load=str),
    "a method": lambda level: Stamp(level).__call__,
    "a stock pipe": lambda level: torch.utils.data.datapipes.map.SequenceWrapper([level, 1]),
}
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a closure": lambda value: lambda x: (x, value is None),
    "a default": lambda value: lambda x, held=value: (x, held is None),
    "an attribute": Stamp,
    "an argument of a partial": lambda value: functools.partial(second, value),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("what", VALUES)
def test_what_a_function_holds_counts(what: str, holder: str, tmp_path: Path) -> None:
    def hits(level: int) -> int:
        pipe = kdp.from_dataset([(1, 0)]).transform("x", HOLDERS[holder](VALUES[what](level)))
        cached = pipe.cache_on_disk(tmp_path)
        assert cached[0]["x"][0] == 1
        return int(cached.stats().hits)

    assert [hits(level) for level in (2, 3, 2, 3)] == [0, 0, 1, 1]


@pytest.mark.parametrize("what", [name for name in VALUES if "pipe" in name])
def test_what_a_source_reads_from_counts(what: str, tmp_path: Path) -> None:
    def hits(level: int) -> int:
        inner = VALUES[what](level)
        if not isinstance(inner, kdp.MapPipe):
            inner = inner.to_samples(fields="y", key=str)
        cached = Reads(inner)[:1].cache_on_disk(tmp_path)
        cached[0]["x"]
        return int(cached.stats().hits)

    if what != "a pipe of labels":  # which needs no more than one sample
        assert [hits(level) for level in (2, 3, 2)] == [0, 0, 1]


def test_a_dataset_that_holds_a_pipe_counts(tmp_path: Path) -> None:
    class Dataset:
        def __init__(self, level: int) -> None:
            self.inner = table(level)

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> tuple[int, int]:
            return int(self.inner[1]["y"]), 0

    found = [kdp.from_dataset(Dataset(level)).cache_on_disk(tmp_path)[0]["x"] for level in (2, 3, 2)]
    assert found == [2, 3, 2]


class Database:
    """A dataset with a connection."""

    def __init__(self) -> None:
        self.connection: Any = sqlite3.connect(":memory:")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[int, int]:
        return 1, 0


class Careful(Database):
    """The same, which leaves the connection out when it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "connection": None}


class DatabaseSource(Database, kdp.SampleSource):
    """The same as a source."""

    def getitem_x(self, index: int) -> int:
        return 1


@pytest.mark.parametrize("is_source", [True, False])
def test_attributes_that_cannot_be_hashed_are_named(is_source: bool, tmp_path: Path) -> None:
    database = DatabaseSource() if is_source else Database()
    pipe: Any = database if is_source else kdp.from_dataset(database)
    with pytest.warns(UserWarning, match=r"`connection` of `Database\w*` \(Connection\).*Pass `version=`"):
        pipe.cache_on_disk(tmp_path)[0]["x"]
    database.connection.close()


def test_attributes_that_an_object_does_not_pickle_are_no_data(tmp_path: Path) -> None:
    database = Careful()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kdp.from_dataset(database).cache_on_disk(tmp_path)[0]["x"] == 1
    database.connection.close()


def test_a_state_tells_images_apart() -> None:
    def state(level: int) -> str:
        return fingerprint(Stamp(image(level)))

    assert state(1) == state(1) != state(2)
