"""What does a cached epoch cost with two workers, beside other caches, and beside none?

Question: when everything is cached, how many samples come per second? Two cases. "encoded": files of 107 KB, whose hits
happen inside the workers, which pass on one byte of each; so the cost of a look-up, and no transport. "decoded": arrays
of 224 x 224 x 3 bytes, of which batches of 32 are delivered to the main process. Baselines, in the same run,
interleaved: no cache (files of the system's file cache, and a decoder of PNGs); a dictionary of
`multiprocessing.Manager()`, as in KappaData's shared dictionary; and torchdata's `in_memory_cache`, which each worker
has for itself. The first three in `kdpipes.Loader`, torchdata's in its own DataLoader2 with
`MultiProcessingReadingService`. Checksums are compared once per entry and process, which the first rounds pay, not the
median; those of the disk at each hit. "As views": with `bytes_as_views=True`, where bytes are not copied; arrays never
are. Ratios are of medians.

Result (results/cache.txt): on a busy machine, 5 times the rate of the Manager's dictionary.

    python benchmarks/bench_cache.py            # writes benchmarks/results/cache.txt
    python benchmarks/bench_cache.py --smoke    # a few samples, one round, writes nothing
"""

from __future__ import annotations

import io
import multiprocessing
import os
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

import kdpipes as kdp  # before torchdata, whose banner it keeps quiet

# isort: split
import torchdata
from rounds import load, machine, main, medians, spread, turns
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

NUM_WORKERS, BATCH_SIZE, IMAGE_SIZE, FILE_BYTES = 2, 32, 224, 107_000


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def first_byte(content: Any) -> int:
    return int(content[0])


first_byte.is_random = False  # type: ignore[attr-defined]  # nothing is seeded for it, in whichever chain


def decoded(path: str) -> Any:
    return np.array(Image.open(io.BytesIO(read(path))))


class SharedDictionary:
    """A dataset that keeps what it loads in a dictionary of another process."""

    def __init__(self, paths: list[str], load: Callable[[str], Any], manager: Any) -> None:
        self._paths, self._load, self._kept = paths, load, manager.dict()

    def __len__(self) -> int:
        return len(self._paths)

    def getitem_x(self, index: int) -> Any:
        if index not in self._kept:
            self._kept[index] = self._load(self._paths[index])
        return self._kept[index]


def dealt(pipe: Any, end: Callable[[Any], Any] | None) -> Any:
    pipe = pipe if end is None else pipe.transform("x", end)
    return pipe.select("x").deal(batch_size=BATCH_SIZE, shuffle=True).collate_samples()


@contextmanager
def others(paths: list[str], load: Callable[[str], Any], end: Callable[[Any], Any] | None) -> Iterator[Any]:
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
        manager = stack.enter_context(multiprocessing.Manager())
        source = kdp.from_ids(paths, load=load)
        chains = {
            "no cache": source,
            "Manager().dict()": kdp.from_dataset(SharedDictionary(paths, load, manager)),
            "kdpipes cache_in_memory": source.cache_in_memory(),
            "kdpipes cache_in_memory, as views": source.cache_in_memory(bytes_as_views=True),
            "kdpipes cache_on_disk": source.cache_on_disk(stack.enter_context(tempfile.TemporaryDirectory())),
        }
        loaders: dict[str, Any] = {
            name: stack.enter_context(kdp.Loader(dealt(chain, end), NUM_WORKERS)) for name, chain in chains.items()
        }
        loaders["torchdata in_memory_cache"] = stack.enter_context(others(paths, load, end))
        ways = {name: partial(rate, loader, len(paths)) for name, loader in loaders.items()}
        found = turns(ways, rounds, warm_up=True)
    median = medians(found)
    lines = [f"{title:<36}{'samples/s':>10}{'min':>9}{'max':>9}{'vs kdpipes cache_in_memory':>29}"]
    for name, rates in found.items():
        ratio = median[name] / median["kdpipes cache_in_memory"]
        lines.append(f"  {name:<34}{spread(rates)}{ratio:>28.2f}x")
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
    number, rounds = (40, 1) if is_smoke else (1_000, 15)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            f"{number:,} samples, {NUM_WORKERS} workers, {rounds} interleaved rounds after one that fills the caches; "
            f"{machine(load(), torch=torch.__version__, torchdata=torchdata.__version__)}",
            "",
            *compare("encoded, 107 KB, in the workers", write_files(folder, number), read, first_byte, rounds),
            *compare("decoded, 224 x 224 x 3, delivered", write_images(folder, number), decoded, None, rounds),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main("cache", __doc__, report)
