"""How fast do shards of photos come from disk, with nothing decoded?

Question: samples of a JPEG of 110 KB and a class, written by webdataset's own writer (an extended header before every
member), read in one process while the page cache is warm: how many come per second? Baselines, in the same run,
interleaved: webdataset, and torchdata's `load_from_tar().webdataset()`, the contents of its members read. The index of
`open_shards` is read before the time is taken; beside that, how many headers of tiny members are read per second.
Ratios are of medians. The photos are random bytes.

Result (results/tar.txt): 4.9 times webdataset front to back, 8.4 and 8.3 times by position. webdataset's time goes into
Python's tarfile, which reads a stream in pieces of 10 KB and every field of a header; here a content is copied once.

    python benchmarks/bench_tar.py            # writes benchmarks/results/tar.txt
    python benchmarks/bench_tar.py --smoke    # a few small samples, one round, writes nothing
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import kdpipes as kdp  # before torchdata, whose banner it keeps quiet
from kdpipes.storage.files import version_of
from kdpipes.storage.tar import index_shard

# isort: split
import torchdata
import webdataset as wds
from rounds import load, machine, main, medians, spread, turns
from torchdata.datapipes.iter import FileOpener, IterableWrapper

NUM_SHARDS = 4


def write(folder: Path, name: str, number: int, size: int) -> list[str]:
    """Write `number` samples into shards."""
    paths = [str(folder / f"{name}-{shard}.tar") for shard in range(NUM_SHARDS)]
    for shard, path in enumerate(paths):
        with wds.TarWriter(path) as writer:
            for index in range(shard, number, NUM_SHARDS):
                writer.write({"__key__": f"birds/{index:07}", "jpg": random.randbytes(size), "cls": index % 1000})
    return paths


def by_webdataset(paths: list[str]) -> Iterator[tuple[bytes, Any]]:
    for sample in wds.WebDataset(paths, shardshuffle=False):
        yield sample["jpg"], sample["cls"]


def by_torchdata(paths: list[str]) -> Iterator[tuple[bytes, Any]]:
    for sample in FileOpener(IterableWrapper(paths), mode="b").load_from_tar().webdataset():
        yield sample[".jpg"].read(), sample[".cls"].read()


def by_position(pipe: Any, order: Iterable[int]) -> Iterator[tuple[bytes, Any]]:
    for index in order:
        sample = pipe[index]
        yield sample["jpg"], sample["cls"]


def streamed(paths: list[str]) -> Iterator[tuple[bytes, Any]]:
    for sample in kdp.stream_shards(paths):
        yield sample["jpg"], sample["cls"]


def rate(samples: Iterator[tuple[bytes, Any]], number: int, size: int) -> float:
    """Return how many samples come per second, all of which are whole."""
    begin = time.perf_counter()
    num_whole = sum(len(photo) == size for photo, _ in samples)
    found = num_whole / (time.perf_counter() - begin)
    if num_whole != number:
        raise RuntimeError(f"{num_whole} of {number} samples have come.")
    return found


def compare(ways: dict[str, Callable[[], float]], rounds: int) -> list[str]:
    found = turns(ways, rounds, warm_up=True)
    median = medians(found)
    lines = [f"{'':<36}{'samples/s':>10}{'min':>9}{'max':>9}{'vs webdataset':>15}"]
    for name, rates in found.items():
        ratio = median[name] / median["webdataset"]
        lines.append(f"  {name:<34}{spread(rates)}{ratio:>14.1f}x")
    return [*lines, ""]


def photos(folder: Path, number: int, size: int, rounds: int) -> list[str]:
    paths = write(folder, "photos", number, size)
    pipe = kdp.open_shards(paths)
    straight = range(len(pipe))
    mixed = random.Random(0).sample(straight, len(pipe))
    ways = {
        "webdataset": lambda: rate(by_webdataset(paths), number, size),
        "torchdata load_from_tar": lambda: rate(by_torchdata(paths), number, size),
        "kdpipes stream_shards": lambda: rate(streamed(paths), number, size),
        "kdpipes open_shards, in order": lambda: rate(by_position(pipe, straight), number, size),
        "kdpipes open_shards, random order": lambda: rate(by_position(pipe, mixed), number, size),
    }
    return compare(ways, rounds)


def headers(folder: Path, number: int, rounds: int) -> str:
    paths = write(folder, "tiny", number, 3)
    rates = []
    for _ in range(rounds):
        begin = time.perf_counter()
        num_members = 2 * sum(len(index_shard(path, version_of(path)).keys) for path in paths)
        rates.append(num_members / (time.perf_counter() - begin))
    return (
        f"index of {num_members:,} members of 3 bytes: {statistics.median(rates):,.0f} members/s "
        f"(min {min(rates):,.0f}, max {max(rates):,.0f})"
    )


def report(*, is_smoke: bool) -> str:
    number, size, rounds = (20, 1_000, 1) if is_smoke else (2_000, 110_000, 5)
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            f"{number:,} samples of {size:,} bytes and a class in {NUM_SHARDS} shards, one process, {rounds} "
            f"interleaved rounds after one that warms up; "
            f"{machine(load(), webdataset=wds.__version__, torchdata=torchdata.__version__)}",
            "nothing is decoded but the class; webdataset and torchdata vs kdpipes, ratios of medians",
            "",
            *photos(Path(folder), number, size, rounds),
            headers(Path(folder), 20 if is_smoke else 100_000, rounds),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main("tar", __doc__, report)
