"""States of loaders, keys of cache entries, and what shards and records say of the chain that they were written from.

All of them contain hashes of chains. A release may change those once, with a new version number in the states, caches
and files that it writes: then `FORMAT` is raised and `versioned.json` written anew. Chains with users' functions are
left out, because their hashes depend on the version of Python, and so are images that are decoded before a cache,
because their keys contain the version of the decoder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb
import redis
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.golden.files import digests, small
from tests.golden.orders import indexed, on_ranks, stream, write_shards

FORMAT = 2


def state_of(loader: Any) -> dict[str, Any]:
    """Return a loader's state without the seed that the loader has drawn for torchdata's pipes."""
    state: dict[str, Any] = loader.state_dict()
    assert isinstance(state.pop("seed"), int)
    return state


def states(pipe: Any, *numbers: int, num_threads: int = 0, **deal: Any) -> list[Any]:
    """Return the states of a new loader after some numbers of batches; workers are threads."""
    service = kdp.ThreadReadingService(num_threads) if num_threads else None
    found = []
    for number in numbers:
        with kdp.Loader(pipe.select("x").deal(**deal), reading_service=service) as loader:
            for _ in islice(loader, number):
                pass
            found.append(state_of(loader))
    return found


def names(count: int = 3) -> Any:
    """Samples whose x is loaded when it is read."""
    return kdp.from_ids(["heron", "stork", "gull", "crane"][:count], [0, 1, 0, 1][:count], load=str.upper)


def texts() -> Any:
    """Samples with a column of lengths."""
    return kdp.from_dataset([(number, 0, 1 + number * number % 13) for number in range(20)], "x y length")


def pictures() -> Any:
    return kdp.from_dataset([(Image.new("RGB", (8 + number, 6)), number) for number in range(3)])


def picture_stream() -> Any:
    items = [(f"{number}", Image.new("RGB", (8, 6))) for number in range(2)]
    return IterableWrapper(items).to_samples(fields="key x")


def shards(folder: Path, open_them: Callable[..., Any]) -> Any:
    return open_them(write_shards(folder)).rename_fields(x="txt", y="cls")


def lmdb_keys(folder: Path, copy: Path) -> list[str]:
    """Return the keys in an LMDB file, from a copy: a process must not open the same one twice."""
    copy.mkdir()
    (copy / "data.mdb").write_bytes((folder / "data.mdb").read_bytes())
    with lmdb.open(str(copy), readonly=True, lock=False) as env, env.begin() as transaction:
        return [key.hex() for key in transaction.cursor().iternext(values=False)]


def read_sample(cached: Any) -> None:
    """Read all fields of sample 1, so that they get into the cache."""
    dict(cached[1])


def on_disk(pipe: Any, folder: Path, **options: Any) -> list[str]:
    """Return the keys in LMDB."""
    read_sample(pipe.cache_on_disk(folder / "cache", **options))
    return lmdb_keys(folder / "cache", folder / "copy")


def on_disk_stream(pipe: Any, folder: Path) -> list[str]:
    """Return the keys in LMDB of the fields of all samples of a stream."""
    for sample in pipe.cache_on_disk(folder / "cache"):
        dict(sample)
    return lmdb_keys(folder / "cache", folder / "copy")


def as_files(pipe: Any, folder: Path) -> dict[str, Any]:
    """Return the paths of the entries, and what METADATA says."""
    read_sample(pipe.cache_on_disk(folder / "cache", layout="files"))
    paths = [path.relative_to(folder / "cache") for path in (folder / "cache").rglob("*") if path.is_file()]
    entries = sorted(path.as_posix() for path in paths if not path.as_posix().startswith(("METADATA", ".counts/")))
    return {"entries": entries, "metadata": json.loads((folder / "cache" / "METADATA").read_text())}


def in_memory(pipe: Any, folder: Path) -> dict[str, Any]:
    """Return the name of the folder in shared memory, and the keys in it."""
    name = f"golden-{os.getpid()}"
    cached = pipe.cache_in_memory(name=name, max_bytes=1 << 20)
    read_sample(cached)
    [shared] = Path("/dev/shm").glob(f"kdpipes-*-{name}")
    shown = shared.name.replace(name, "{name}").replace(f"-{os.getuid()}-", "-{uid}-")
    return {"folder": shown, "keys": lmdb_keys(shared, folder / "copy")}


class Redis:
    """As much of a redis client as a cache uses: it holds nothing, and notes the keys that are written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def get(self, key: bytes) -> None:
        return None

    def mget(self, keys: list[bytes]) -> list[None]:
        return [None for _ in keys]

    def pipeline(self, **_: Any) -> Redis:
        return self

    def set(self, key: bytes, *_: Any, **__: Any) -> None:
        self.written.append(key)

    def execute(self, **_: Any) -> list[bool]:
        return [True]

    def close(self) -> None:
        pass


def in_redis(pipe: Any, **options: Any) -> list[str]:
    """Return the keys that are written, with the namespace as text."""
    client = Redis()
    with mock.patch.object(redis.Redis, "from_url", return_value=client):
        read_sample(pipe.cache_in_redis("redis://server", **options))
    return [
        f"{namespace.decode()}:{key.hex()}" for namespace, _, key in (key.partition(b":") for key in client.written)
    ]


def written_records(folder: Path) -> dict[str, Any]:
    kdp.write_records(small(), folder, num_parts=2, shuffle=True, seed=1)
    return {"records.json": json.loads((folder / "records.json").read_text()), **digests(folder, "*.index")}


def written_shards(folder: Path) -> Any:
    kdp.write_shards(small().rename_fields(bin="x"), folder / "train-%06d.tar", max_samples=2)
    return json.loads((folder / "train-shards.json").read_text())


def of_batches() -> Any:
    """Return the state of a loader whose batches are changed after `deal`."""
    dealt = indexed().transform("x", float).select("x y").deal(batch_size=4)
    with kdp.Loader(dealt.collate_samples().mixup(num_classes=4).to_device("cpu")) as loader:
        next(iter(loader))
        return state_of(loader)


def without_deal() -> Any:
    """Return the state of a loader over a stream that is not dealt."""
    with kdp.Loader(stream().select("x")) as loader:
        next(iter(loader))
        return state_of(loader)


STATES: dict[str, Callable[[Path], Any]] = {
    "deal": lambda _: states(indexed(), 0, 2, 4, batch_size=6),
    "deal, shuffle": lambda _: states(indexed(), 1, batch_size=6, shuffle=True, seed=3),
    "deal, pad": lambda _: states(indexed(), 1, batch_size=6, uneven="pad"),
    "deal, 2 ranks": lambda _: on_ranks(2, lambda: states(indexed(), 1, global_batch_size=4)),
    "deal, by length": lambda _: states(texts(), 2, shuffle=True, batching=kdp.by_length("length", max_tokens=30)),
    "image transforms": lambda _: states(
        pictures().record_ctx().transform("x", kdp.RandomResizedCrop(8), kdp.HorizontalFlip()), 1, batch_size=2
    ),
    "decode_images": lambda _: states(names().decode_images("x"), 0, batch_size=2),
    "on_error": lambda _: states(indexed().on_error("skip"), 1, batch_size=2),
    "plan": lambda _: states(
        indexed()
        .filter_classes(invalid=["heron"])
        .map_classes({"gull": "stork"}, unmapped="keep")
        .oversample(mode="exact")
        .permute(seed=1)
        .take_percent(to_percent=0.9)
        .subset(range(5, 15))
        .repeat_until(min_size=30),
        1,
        batch_size=4,
    ),
    "plan, by class": lambda _: [
        *states(indexed().few_shot(2, seed=1), 1, batch_size=4),
        *states(indexed().take_per_class(share=0.5, seed=1), 1, batch_size=4),
        *states(indexed().sample_weighted({0: 1, 1: 1, 2: 5, 3: 1}), 1, batch_size=4),
    ],
    "mix and concat": lambda _: states(
        kdp.concat(indexed().mix(indexed(100), weights=[2, 1], seed=1), indexed(200)), 2, batch_size=4
    ),
    "cache": lambda folder: states(names().cache_on_disk(folder / "cache"), 1, batch_size=2),
    "batch pipes": lambda _: of_batches(),
    "open_shards": lambda folder: states(shards(folder, kdp.open_shards), 2, batch_size=4),
    "open_shards, by shard": lambda folder: states(
        shards(folder, kdp.open_shards), 2, batch_size=4, shuffle=kdp.by_shard(window=7)
    ),
    "stream": lambda _: states(stream().shuffle(buffer_size=5), 2, batch_size=4),
    "stream, plan": lambda _: states(
        stream().filter_classes(invalid=[3]).mix(stream(100), weights=[2, 1]).repeat_until(repetitions=2),
        2,
        batch_size=4,
    ),
    "stream_shards": lambda folder: states(shards(folder, kdp.stream_shards), 2, batch_size=4),
    "stream_shards, read whole": lambda folder: states(
        shards(folder, kdp.stream_shards), 3, num_threads=2, batch_size=4, split="samples"
    ),
    "no deal": lambda _: without_deal(),
}


KEYS: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: in_memory(names(), folder),
    "disk": lambda folder: on_disk(names(), folder),
    "disk, version": lambda folder: on_disk(names(), folder, version=2),
    "disk, version as text": lambda folder: on_disk(names(), folder, version="2"),
    "disk, after plans": lambda folder: on_disk(names().permute(seed=2).oversample(), folder),
    "disk, after transforms": lambda folder: on_disk(pictures().transform("x", kdp.Resize(4)), folder),
    "disk, after recorded transforms": lambda folder: on_disk(
        pictures().record_ctx().transform("x", kdp.CenterCrop(4)), folder
    ),
    "disk, frozen randomness": lambda folder: on_disk(
        pictures().transform("x", kdp.RandomResizedCrop(4)), folder, freeze_randomness=True
    ),
    "disk, after rename_fields": lambda folder: on_disk(names().rename_fields(z="x"), folder),
    "disk, two caches": lambda folder: on_disk(
        pictures().transform("x", kdp.Resize(5)).cache_in_memory().transform("x", kdp.Resize(4)), folder
    ),
    "disk, mixed sources": lambda folder: on_disk(names(2).mix(names(), stop="all"), folder),
    "disk, stream": lambda folder: on_disk_stream(picture_stream().transform("x", kdp.Resize(4)), folder),
    "files": lambda folder: as_files(names(), folder),
    "redis": lambda _: in_redis(names()),
    "redis, namespace": lambda _: in_redis(names(), namespace="birds/1"),
}


JOBS: dict[str, Callable[[Path], Any]] = {"write_records": written_records, "write_shards": written_shards}
ENTRIES = {
    "format": lambda _: FORMAT,
    **{f"state: {name}": make for name, make in STATES.items()},
    **{f"key: {name}": make for name, make in KEYS.items()},
    **{f"job: {name}": make for name, make in JOBS.items()},
}
