"""What does a cached epoch cost with two workers, beside other caches, and beside none?

Question: when everything is cached, how many samples come per second; and while the cache is filled? "looked up": two
processes look up all entries, each in an order of its own, and do nothing else: the values are not touched. "encoded":
files of 107 KB, whose hits happen inside the workers of a loader, which pass on one byte of each; so no transport.
"decoded": arrays of 224 x 224 x 3 bytes, of which batches of 32 are delivered to the main process. "The first epoch":
of the same arrays by new chains, the start of the workers counted in.

Baselines, in the same run, interleaved: no cache (files of the system's file cache, and a decoder of PNGs); a
dictionary of `multiprocessing.Manager()`, looked up as KappaData's `SharedDictDataset` does, in torch's DataLoader, as
KappaData's users have it, and in `kdpipes.Loader`, which delivers faster; and torchdata's `in_memory_cache`, which each
worker has for itself, in its own DataLoader2 with `MultiProcessingReadingService`. Checksums are compared once per
entry and process, which the first rounds pay, not the median; those of the disk at each hit. "As views": with
`bytes_as_views=True`, where bytes are not copied; arrays never are. Ratios are of medians.

Result (results/cache.txt): a sample's field 11 times the Manager's dictionary, whole epochs 4 to 7 times; filling takes
half as long again as loading.

    python benchmarks/bench_cache.py            # writes benchmarks/results/cache.txt
    python benchmarks/bench_cache.py --smoke    # a few samples, one round, writes nothing
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import kdpipes as kdp  # before torchdata, whose banner it keeps quiet
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.store import Entries
from kdpipes.storage.codec import decode, encode

# isort: split
import torchdata
from rounds import load, machine, main, medians, spread, turns
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

NUM_WORKERS, BATCH_SIZE, IMAGE_SIZE, FILE_BYTES, PASSES = 2, 32, 224, 107_000, 5
MANAGER, OURS = "Manager().dict()", "kdpipes cache_in_memory"


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def first_byte(content: Any) -> int:
    return int(content[0])


first_byte.is_random = False  # type: ignore[attr-defined]  # nothing is seeded for it, in whichever chain


def decoded(path: str) -> Any:
    return np.array(Image.open(io.BytesIO(read(path))))


class SharedDictionary(Dataset[Any]):
    """A dataset that keeps what it loads in a dictionary of another process."""

    def __init__(self, paths: list[str], load: Callable[[str], Any], end: Callable[[Any], Any] | None = None) -> None:
        self._paths, self._load, self._end = paths, load, end
        self._manager = multiprocessing.Manager()
        self._kept = self._manager.dict()

    def __len__(self) -> int:
        return len(self._paths)

    def getitem_x(self, index: int) -> Any:
        if index not in self._kept:
            self._kept[index] = self._load(self._paths[index])
        return self._kept[index]

    def __getitem__(self, index: int) -> Any:
        value = self.getitem_x(index)
        return value if self._end is None else self._end(value)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_manager": None}

    def close(self) -> None:
        self._manager.shutdown()


@contextmanager
def by_kdpipes(pipe: Any, end: Callable[[Any], Any] | None) -> Iterator[Any]:
    pipe = pipe if end is None else pipe.transform("x", end)
    chain = pipe.select("x").deal(batch_size=BATCH_SIZE, shuffle=True).collate_samples()
    with kdp.Loader(chain, NUM_WORKERS) as loader:
        yield loader


@contextmanager
def by_torch(dataset: Dataset[Any]) -> Iterator[Any]:
    yield DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)


@contextmanager
def by_torchdata(paths: list[str], load: Callable[[str], Any], end: Callable[[Any], Any] | None) -> Iterator[Any]:
    """Give torchdata's own cache in its own loader."""
    pipe = IterableWrapper(paths, deepcopy=False).sharding_filter().map(load).in_memory_cache(size=10_000).shuffle()
    pipe = pipe if end is None else pipe.map(end)
    loader = DataLoader2(pipe.batch(BATCH_SIZE).collate(), reading_service=MultiProcessingReadingService(NUM_WORKERS))
    try:
        yield loader
    finally:
        loader.shutdown()


def rate(loader: Any, number: int) -> float:
    begin = time.perf_counter()
    num_samples = sum(len(batch[0] if isinstance(batch, list | tuple) else batch) for batch in loader)
    found = number / (time.perf_counter() - begin)
    if num_samples != number:
        raise RuntimeError(f"{num_samples} of {number} samples have come.")
    return found


def compare(
    title: str, paths: list[str], load: Callable[[str], Any], end: Callable[[Any], Any] | None, rounds: int
) -> list[str]:
    with ExitStack() as stack:
        source = kdp.from_ids(paths, load=load)
        there, here = SharedDictionary(paths, load, end), SharedDictionary(paths, load)
        for shared in (there, here):
            stack.callback(shared.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        loaders = {
            "no cache": by_kdpipes(source, end),
            f"{MANAGER}, torch DataLoader": by_torch(there),
            f"{MANAGER}, kdpipes.Loader": by_kdpipes(kdp.from_dataset(here), end),
            "torchdata in_memory_cache": by_torchdata(paths, load, end),
            OURS: by_kdpipes(source.cache_in_memory(), end),
            f"{OURS}, as views": by_kdpipes(source.cache_in_memory(bytes_as_views=True), end),
            "kdpipes cache_on_disk": by_kdpipes(source.cache_on_disk(folder), end),
        }
        ways = {name: partial(rate, stack.enter_context(loader), len(paths)) for name, loader in loaders.items()}
        found = turns(ways, rounds, warm_up=True)
    return table(title, found, f"{MANAGER}, torch DataLoader")


def first_epoch(chain: Callable[[], Any], number: int) -> float:
    """Return the rate of the first epoch of a new chain, the start of its workers counted in."""
    with by_kdpipes(chain(), None) as loader:
        return rate(loader, number)


def compare_first_epochs(paths: list[str], rounds: int) -> list[str]:
    source = kdp.from_ids(paths, load=decoded)
    with ExitStack() as stack:
        chains: dict[str, Callable[[], Any]] = {
            "no cache": lambda: source,
            OURS: source.cache_in_memory,
            "kdpipes cache_on_disk": lambda: source.cache_on_disk(stack.enter_context(tempfile.TemporaryDirectory())),
        }
        ways = {name: partial(first_epoch, chain, len(paths)) for name, chain in chains.items()}
        found = turns(ways, rounds, warm_up=True)
    return table("the first epoch of those, which fills", found, "no cache", "vs no cache", 0.9)


def look_up_all(look_up: Callable[[int], Any], number: int, seed: int, ready: Any, rates: Any) -> None:
    gc.freeze()  # as kdpipes' workers do: what is inherited is not copied for the collector
    order = random.Random(seed).sample(range(number), number)
    for index in order:
        look_up(index)
    ready.wait()
    begin = time.perf_counter()
    for index in order * PASSES:
        look_up(index)
    rates.put(PASSES * number / (time.perf_counter() - begin))


def look_ups(look_up: Callable[[int], Any], number: int) -> float:
    """Return how many look-ups a second two processes do, each of all entries, once they know them."""
    context = multiprocessing.get_context("fork")
    ready, rates = context.Barrier(NUM_WORKERS, timeout=60), context.SimpleQueue()
    processes = [
        context.Process(target=look_up_all, args=(look_up, number, seed, ready, rates)) for seed in range(NUM_WORKERS)
    ]
    for process in processes:
        process.start()
    total: float = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def compare_look_ups(paths: list[str], rounds: int) -> list[str]:
    with ExitStack() as stack:
        shared = SharedDictionary(paths, read)
        stack.callback(shared.close)
        pipe: Any = kdp.from_ids(paths, load=read).cache_in_memory(bytes_as_views=True)
        store = Entries(LmdbStore.in_memory())
        keys = [index.to_bytes(20, "little") for index in range(len(paths))]
        for index, path in enumerate(paths):
            shared.getitem_x(index)
            pipe[index]["x"]
            store.put(keys[index], encode(read(path)))

        def value(index: int) -> Any:
            return decode(store.get(keys[index], is_verified=True), verify=False, bytes_as_views=True)

        looks: dict[str, Callable[[int], Any]] = {
            MANAGER: shared.getitem_x,
            f"{OURS}, a sample's field": lambda index: pipe[index]["x"],
            f"{OURS}, the store alone": value,
        }
        ways = {name: partial(look_ups, look_up, len(paths)) for name, look_up in looks.items()}
        found = turns(ways, rounds, warm_up=False)
    return table("looked up, 107 KB, views", found, MANAGER)


def table(
    title: str,
    found: dict[str, list[float]],
    baseline: str,
    versus: str = "vs the first Manager().dict()",
    target: float = 20,
) -> list[str]:
    median = medians(found)
    lines = [f"{title:<44}{'samples/s':>10}{'min':>9}{'max':>9}  {versus}"]
    for name, rates in found.items():
        ratio = median[name] / median[baseline]
        told = f"  target {target}" if name in (OURS, f"{OURS}, as views", f"{OURS}, a sample's field") else ""
        lines.append(f"  {name:<42}{spread(rates)}{ratio:>9.{1 if target > 1 else 2}f}x{told}")
    return [*lines, ""]


def write_files(folder: Path, number: int) -> list[str]:
    paths = [str(folder / f"{index}.bin") for index in range(number)]
    for path in paths:
        Path(path).write_bytes(os.urandom(FILE_BYTES))
    return paths


def write_images(folder: Path, number: int) -> list[str]:
    rng = np.random.default_rng(0)
    paths = [str(folder / f"{index}.png") for index in range(number)]
    for path in paths:
        small = rng.integers(0, 255, (28, 28, 3), dtype=np.uint8)
        Image.fromarray(small).resize((IMAGE_SIZE, IMAGE_SIZE)).save(path)
    return paths


def report(*, is_smoke: bool) -> str:
    number, rounds = (40, 1) if is_smoke else (2_000, 11)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, images = write_files(folder, number), write_images(folder, number)
        lines = [
            f"{number:,} samples, {NUM_WORKERS} workers, {rounds} interleaved rounds after one that fills the caches; "
            f"{machine(load(), torch=torch.__version__, torchdata=torchdata.__version__)}",
            "",
            *compare_look_ups(files, rounds),
            *compare("encoded, 107 KB, in the workers", files, read, first_byte, rounds),
            *compare("decoded, 224 x 224 x 3, delivered", images, decoded, None, rounds),
            *compare_first_epochs(images, rounds),
        ]
    return "\n".join(["peers vs kdpipes", *lines])


if __name__ == "__main__":
    main("cache", __doc__, report)
