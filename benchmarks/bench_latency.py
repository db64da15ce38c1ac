"""How fast do shards come from a store that takes 50 ms to answer, beside the same shards on the local disk?

Question: photos of about 110 KB in tar shards, decoded, cropped, and put into batches by two workers: how many come per
second from a store each of whose requests waits 50 ms, and how many of its bytes are read twice? Baseline, in the same
run, interleaved: the same chain over the same tars on the local disk. Four ways: whole shards into a new local cache
(`shuffle="shards"`), the next epoch of that, members by ranges (`shuffle=True`), and `stream_shards`. Time is taken
from the tenth batch on: before that, the store's answers cannot have come. The store is the local disk behind
`tests.faulty_storage`, which waits, and counts bytes; it does not limit them.

Second table: a real S3 store on this machine behind a proxy that adds 50 ms to each request, one process, nothing
decoded: what comes, and the CPU time of that process. Store and proxy run on the same cores. What each image costs
beyond reading, in batches, is contained. Before each run, a file as large as all shards is written and removed, so that
the page cache has that much memory: a virtual machine may take 2 seconds of CPU per GB that it uses for the first time,
which would be counted as the writing of whole shards into their cache.

Result (results/latency.txt): whole shards come at 1.04 and 0.96 of the local rate, `stream_shards` at 0.98. Members by
ranges, a request for each, do not reach 0.9: 0.87. No byte is read twice.

    python benchmarks/bench_latency.py            # writes benchmarks/results/latency.txt
    python benchmarks/bench_latency.py --smoke    # a few small samples, one round, writes nothing
"""

from __future__ import annotations

import io
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdpipes as kdp

# isort: split
import fsspec
import numpy as np
from PIL import Image
from rounds import load, machine, main
from skimage import data
from webdataset import TarWriter

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.proxy import slow_proxy
from tests.s3_server import s3_server

NUM_SHARDS = 16
WARM_UP = 10  # batches
LATENCY_S = 0.05


def write(folder: Path, number: int, size: int) -> None:
    """Write photos: windows of a large one, of so many pixels a side."""
    whole = Image.fromarray(data.retina())
    draw = np.random.default_rng(0)
    for shard in range(NUM_SHARDS):
        with TarWriter(str(folder / f"{shard:02}.tar")) as writer:
            for index in range(shard, number, NUM_SHARDS):
                left, top = draw.integers(0, 1_411 - size, 2).tolist()
                noise = draw.normal(0, 16, (size, size, 3))
                pixels = np.asarray(whole.crop((left, top, left + size, top + size))) + noise
                file = io.BytesIO()
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=92)
                writer.write({"__key__": f"{index:06}", "jpg": file.getvalue(), "cls": index % 10})


def chain(source: Any, batch_size: int, **deal: Any) -> Any:
    work = source.rename_fields(x="jpg", y="cls").decode_images("x").transform("x", kdp.RandomResizedCrop(224))
    return work.select("x y").deal(batch_size=batch_size, **deal).collate_samples()


def rates(pipe: Any, num_epochs: int, warm_up: int) -> list[float]:
    """Return images per second of each epoch, from its batch `warm_up` on."""
    found = []
    with kdp.Loader(pipe, num_workers=2) as loader:
        for _ in range(num_epochs):
            number, begin = 0, 0.0
            for place, (x, _) in enumerate(loader):
                if place == warm_up - 1:
                    begin = time.perf_counter()
                elif place >= warm_up:
                    number += len(x)
            found.append(number / (time.perf_counter() - begin))
    return found


class Ways:
    """What is compared: each way gives the rates of its epochs, from the store or from the local disk."""

    def __init__(self, batch_size: int, warm_up: int) -> None:
        self._batch_size, self._warm_up = batch_size, warm_up

    def whole(self, root: str) -> list[float]:
        with tempfile.TemporaryDirectory() as cache:
            source = kdp.open_shards(f"{root}{{00..{NUM_SHARDS - 1}}}.tar", cache_dir=cache)
            return rates(chain(source, self._batch_size, shuffle="shards", seed=1), 2, self._warm_up)

    def members(self, root: str) -> list[float]:
        source = kdp.open_shards(f"{root}{{00..{NUM_SHARDS - 1}}}.tar", fetch="members")
        return rates(chain(source, self._batch_size, shuffle=True, seed=1), 1, self._warm_up)

    def stream(self, root: str) -> list[float]:
        source = kdp.stream_shards(f"{root}{{00..{NUM_SHARDS - 1}}}.tar")
        return rates(chain(source, self._batch_size), 1, self._warm_up)


ROWS = [
    ("whole", 0, 'whole shards, shuffle="shards"'),
    ("whole", 1, "  the next epoch"),
    ("members", 0, "members by ranges, shuffle=True"),
    ("stream", 0, "stream_shards"),
]


def repeated(files: FaultyFileSystem, way: Callable[[str], list[float]]) -> tuple[list[float], float]:
    """Return the rates of a way from the store, and the share of its bytes that came twice."""
    before = files.stats()
    found, after = way("faulty://"), files.stats()
    again = after.bytes_repeated - before.bytes_repeated
    return found, again / max(after.bytes_delivered - before.bytes_delivered, 1)


def measure(folder: str, ways: Ways, rounds: int) -> tuple[dict[str, list[list[float]]], ...]:
    local: dict[str, list[list[float]]] = {}
    remote: dict[str, list[list[float]]] = {}
    shares: dict[str, list[list[float]]] = {}
    for _ in range(rounds):
        for name in ("whole", "members", "stream"):
            way = getattr(ways, name)
            local.setdefault(name, []).append(way(f"{folder}/"))
            with faulty_storage(folder, faults=[Fault("latency", seconds=LATENCY_S)]) as files:
                found, share = repeated(files, way)
            remote.setdefault(name, []).append(found)
            shares.setdefault(name, []).append([share, share])
    return local, remote, shares


def fill_page_cache(folder: str, size: int) -> None:
    """Write and remove a file of so many bytes."""
    piece = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(0, size, len(piece)):
            file.write(piece)


def drained(pipe: Any) -> tuple[float, float, float]:
    """Return the samples and the MB per second of an epoch in this process, and its CPU time in ms per sample."""
    number = size = 0
    with kdp.Loader(pipe) as loader:
        begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        for batch in loader:
            number += len(batch)
            size += sum(len(content) for (content,) in batch)
        seconds, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return number / seconds, size / seconds / 1e6, cpu / number * 1e3


def from_s3(number: int, size: int, num_shards: int, rounds: int) -> list[str]:
    """Return the table of reads from a real S3 store behind a slow proxy."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    content = np.random.default_rng(0).bytes(size)
    with s3_server() as bucket, tempfile.TemporaryDirectory() as cache:
        files = fsspec.filesystem("s3")
        for shard in range(num_shards):
            tar = io.BytesIO()
            with TarWriter(tar) as writer:
                for index in range(shard, number, num_shards):
                    writer.write({"__key__": f"{index:06}", "jpg": content, "cls": index % 10})
            files.pipe(f"{bucket}/{shard:02}.tar", tar.getvalue())
        files.pipe({f"{bucket}/photos/{index % 10}/{index:06}.jpg": content for index in range(min(number, 2_000))})
        urls = f"{bucket}/{{00..{num_shards - 1:02}}}.tar"
        list(kdp.open_shards(urls).column("cls"))  # the indexes
        conf, options = fsspec.config.conf, fsspec.config.conf["s3"]
        with slow_proxy(options["endpoint_url"], LATENCY_S) as proxy:
            conf["s3"] = {**options, "endpoint_url": proxy.url}
            sources: dict[str, Callable[[], tuple[Any, Any]]] = {
                "members by ranges": lambda: (kdp.open_shards(urls, fetch="members").select("jpg"), True),
                "whole shards": lambda: (
                    kdp.open_shards(urls, fetch="shards", cache_dir=tempfile.mkdtemp(dir=cache)).select("jpg"),
                    "shards",
                ),
                "stream_shards": lambda: (kdp.stream_shards(urls).select("jpg"), False),
                "image_folder": lambda: (kdp.image_folder(f"{bucket}/photos").select("x"), True),
            }
            for _ in range(rounds + 1):
                for name, source in sources.items():
                    chain, shuffle = source()
                    fill_page_cache(cache, number * size)
                    found.setdefault(name, []).append(drained(chain.deal(batch_size=64, shuffle=shuffle)))
                    for each in Path(cache).iterdir():  # so that the next run has its memory
                        shutil.rmtree(each)
            conf["s3"] = options
    lines = [f"{'one process, nothing decoded, S3':<34}{'images/s':>10}{'MB/s':>8}{'CPU ms each':>13}{'CPU s/GB':>10}"]
    for name, runs in found.items():
        rate, speed, cpu = (statistics.median(column) for column in zip(*runs[1:], strict=True))
        lines.append(f"{name:<34}{rate:>10.0f}{speed:>8.0f}{cpu:>13.2f}{cpu / size * 1e6:>10.2f}")
    return lines


def report(*, is_smoke: bool) -> str:
    number, size, rounds = (64, 64, 1) if is_smoke else (1_920, 450, 9)
    batch_size, warm_up = (4, 2) if is_smoke else (64, WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), number, size)
        content = sum(path.stat().st_size for path in Path(folder).glob("*.tar"))
        list(kdp.open_shards(f"{folder}/*.tar").column("cls"))  # the indexes
        local, remote, shares = measure(folder, Ways(batch_size, warm_up), rounds)
    lines = [
        f"local disk vs kdpipes from a store with {LATENCY_S * 1000:.0f} ms for each request: {number:,} photos of "
        f"{content / number / 1000:.0f} KB in {NUM_SHARDS} shards, two workers, decoded and cropped to 224 x 224",
        f"{rounds} interleaved rounds, from batch {warm_up} of each epoch on; {machine(load())}; "
        "medians of the rounds, and of their ratios",
        "",
        f"{'':<34}{'local/s':>9}{'store/s':>9}{'ratio':>8}{'read twice':>12}",
    ]
    for name, epoch, label in ROWS:
        here, there = ([run[epoch] for run in runs[name]] for runs in (local, remote))
        ratio = statistics.median(far / near for near, far in zip(here, there, strict=True))
        twice = max(run[epoch] for run in shares[name])
        rates = f"{statistics.median(here):>9.0f}{statistics.median(there):>9.0f}"
        lines.append(f"{label:<34}{rates}{ratio:>8.2f}{twice:>12.1%}")
    if is_smoke:
        return "\n".join([*lines, "", *from_s3(64, 1_000, 2, 1)])
    return "\n".join([*lines, "", *from_s3(3_000, 107_000, 3, 5)])


if __name__ == "__main__":
    main("latency", __doc__, report)
