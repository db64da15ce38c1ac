"""Shards elsewhere, for tests: what they hold, how they are opened, and what was moved for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from tests.faulty_storage import FaultyFileSystem

NAME = "birds-{0..2}.tar"
PER_SHARD = 12
LARGE = 100_000  # more than lies between members that are read together
CLASSES = ["heron", "stork", "gull", "tern"]
TARS = "*.tar"
SHARDS = [f"birds-{n}.tar" for n in range(3)]

Service = Callable[[], dict[str, Any]]
SERVICES = [
    pytest.param(dict, id="inline"),
    pytest.param(lambda: {"num_workers": 2, "start_method": "fork"}, id="fork"),
    pytest.param(lambda: {"reading_service": kdp.ThreadReadingService(2)}, id="threads"),
]


def write(folder: Path, size: int = LARGE) -> str:
    """Write three shards of twelve samples, each with an image, a class and a mask that nobody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for shard in range(3):
        with TarWriter(str(folder / f"birds-{shard}.tar")) as writer:
            for n in range(PER_SHARD):
                row = {"jpg": draws.randbytes(size), "cls": n % len(CLASSES), "mask": draws.randbytes(size + size // 4)}
                writer.write({"__key__": f"{n:02}", **row})
    return str(folder)


def opened(root: str, name: str = NAME, **options: Any) -> Any:
    return kdp.open_shards(f"{root}{name}", class_names=CLASSES, **options).rename_fields(x="jpg", y="cls")


def dealt(chain: Any, **options: Any) -> Any:
    return chain.select("x y key").deal(batch_size=5, shuffle=True, seed=1, **options)


def epochs(chain: Any, service: Service = dict, number: int = 2) -> list[list[Any]]:
    with kdp.Loader(chain, **service()) as loader:
        return [list(loader) for _ in range(number)]


def body_bytes(files: FaultyFileSystem, since: int = 0) -> int:
    """Return how many bytes of tars have come."""
    return sum(request.delivered for request in files.requests()[since:] if request.path.endswith(".tar"))


def bodies(files: FaultyFileSystem, since: int = 0) -> list[Any]:
    """Return the requests for bytes of tars."""
    return [one for one in files.requests()[since:] if one.path.endswith(".tar") and one.kind in ("whole", "range")]


CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "filter": lambda one, _: one.filter_classes(valid=[1, 3]),
    "oversample": lambda one, _: one.filter_classes(valid=[1, 2]).subset(range(11)).oversample(mode="exact"),
    "mix": lambda one, other: one.mix(other.filter_classes(valid=[0]), weights=[2, 1], stop="all"),
    "concat": lambda one, other: kdp.concat(one, other.subset(np.array([40, -1], dtype=np.int64) % 36), one),
    "repeat": lambda one, _: one.filter_classes(valid=[3]).repeat_until(repetitions=3),
    "permute": lambda one, _: one.permute(seed=3)[5:-3:2],
    "map_classes": lambda one, _: one.map_classes({"gull": "sea", "tern": "sea", "stork": "land"}, unmapped="drop"),
    "deep": lambda one, other: (
        kdp.concat(one.permute(seed=1), other.filter_classes(valid=[2])).mix(one[::-2]).repeat_until(min_size=90)
    ),
    "bare": lambda one, _: one,
}


def in_order(chain: Any, **options: Any) -> Any:
    return chain.select("x y key").deal(batch_size=5, **options)


def whole(files: FaultyFileSystem, since: int = 0) -> list[str]:
    """Return the shards that were read from their first byte on, where no member is."""
    return sorted(one.path for one in bodies(files, since) if one.start == 0 < one.stop)


def total(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob(TARS))
