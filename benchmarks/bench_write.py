"""How fast are photos written as shards?

Question: the same JPEGs and their classes, from a folder whose files are in the page cache, written as tars on a disk:
how many samples a second, by one process and by two? Baselines, in the same run, interleaved: webdataset's
`ShardWriter`, told to write the bytes as they are; and LitData's `optimize`, if it is installed, whose own format holds
the same bytes. kdpipes writes the index and the checksums along with each tar; webdataset writes none. Every way ends
with as many samples as there are, which is checked. Ratios are of medians. The photos are random bytes.

Result (results/write.txt): 1.4 to 2.3 times webdataset by one process, 2.4 to 2.6 times by two, on a machine of two
CPUs; LitData reaches 0.12 to 0.16, most of which is the start of its processes, at each call.

    python benchmarks/bench_write.py            # writes benchmarks/results/write.txt
    python benchmarks/bench_write.py --smoke    # a few small samples, one round, writes nothing
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kdpipes as kdp

# isort: split
import webdataset as wds
from rounds import main, medians, spread, turns

HAS_LITDATA = importlib.util.find_spec("litdata") is not None
NUM_CLASSES = 10


def write_photos(folder: Path, number: int, size: int) -> Path:
    """Write `number` files that begin as JPEGs do, in a folder for each class."""
    for index in range(number):
        path = folder / f"class-{index % NUM_CLASSES}" / f"{index:07}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + random.randbytes(size - 3))
    return folder


def by_kdpipes(photos: Path, target: Path, per_shard: int, num_workers: int) -> int:
    result = kdp.write_shards(
        kdp.image_folder(photos), target / "train-%06d.tar", max_samples=per_shard, num_workers=num_workers
    )
    return result.num_samples


def by_webdataset(photos: Path, target: Path, per_shard: int) -> int:
    paths = sorted(photos.glob("*/*.jpg"))
    with wds.ShardWriter(str(target / "train-%06d.tar"), maxcount=per_shard, verbose=0) as writer:
        for path in paths:
            key, label = f"{path.parent.name}/{path.stem}", int(path.parent.name.rpartition("-")[2])
            writer.write({"__key__": key, "jpg": path.read_bytes(), "cls": label})
    return len(paths)


def litdata_sample(path: str) -> dict[str, Any]:
    return {"jpg": Path(path).read_bytes(), "cls": int(Path(path).parent.name.rpartition("-")[2])}


def by_litdata(photos: Path, target: Path, chunk_bytes: int, num_workers: int) -> int:
    method = multiprocessing.get_start_method(allow_none=True)
    from litdata import StreamingDataset, optimize

    paths = [str(path) for path in sorted(photos.glob("*/*.jpg"))]
    optimize(
        fn=litdata_sample, inputs=paths, output_dir=str(target), chunk_bytes=chunk_bytes, num_workers=num_workers,
        verbose=False,
    )  # fmt: skip
    number = len(StreamingDataset(str(target)))
    multiprocessing.set_start_method(method, force=True)  # it lets all processes be spawned, ours as well
    return number


def rate(way: Callable[[Path], int], folder: Path, number: int) -> float:
    """Return how many samples are written per second, all of which are there."""
    target = folder / "target"
    target.mkdir()
    try:
        begin = time.perf_counter()
        num_written = way(target)
        took = time.perf_counter() - begin
    finally:
        shutil.rmtree(target)
    if num_written != number:
        raise RuntimeError(f"{num_written} of {number} samples were written.")
    return number / took


def compare(ways: dict[str, Callable[[Path], int]], folder: Path, number: int, rounds: int) -> list[str]:
    found = turns({name: partial(rate, way, folder, number) for name, way in ways.items()}, rounds, warm_up=True)
    median = medians(found)
    lines = [f"{'':<36}{'samples/s':>10}{'min':>9}{'max':>9}{'vs webdataset':>15}"]
    for name, rates in found.items():
        ratio = median[name] / median["webdataset ShardWriter"]
        lines.append(f"  {name:<34}{spread(rates)}{ratio:>14.2f}x")
    return [*lines, ""]


def ways_for(photos: Path, per_shard: int, size: int) -> dict[str, Callable[[Path], int]]:
    ways: dict[str, Callable[[Path], int]] = {
        "webdataset ShardWriter": lambda target: by_webdataset(photos, target, per_shard),
    }
    for workers in (0, 2):
        ways[f"kdpipes write_shards, {workers} workers"] = partial(
            lambda target, workers: by_kdpipes(photos, target, per_shard, workers), workers=workers
        )
    if HAS_LITDATA:
        ways["LitData optimize, 2 workers"] = lambda target: by_litdata(photos, target, per_shard * size, 2)
    return ways


def report(*, is_smoke: bool) -> str:
    rounds, cases = (1, [(40, 1000, 10)]) if is_smoke else (5, [(2000, 110_000, 250), (4000, 5_000, 500)])
    lines = [
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"webdataset {wds.__version__}, {'with' if HAS_LITDATA else 'without'} LitData; median of {rounds}",
        "",
    ]
    for number, size, per_shard in cases:
        with tempfile.TemporaryDirectory() as folder:
            photos = write_photos(Path(folder) / "photos", number, size)
            lines.append(f"webdataset and others vs kdpipes: {number:,} photos of {size:,} bytes, {per_shard} a shard")
            lines += compare(ways_for(photos, per_shard, size), Path(folder), number, rounds)
    return "\n".join(lines[:-1])


if __name__ == "__main__":
    main("write", __doc__, report)
