"""What does it cost to read a stream of shards with several workers and ranks, and how fast does it come?

Question: tars of small photos on an HTTP server that waits 0 or 50 ms before it answers. How many requests and bytes
does an epoch of `stream_shards(...).deal(...)` take with 1, 2 and 4 workers and with 2 ranks, and how many decoded
photos come per second? Baseline, in the same run, interleaved: webdataset over `pipe:curl`, with the same numbers of
workers, in torch's DataLoader. Both decode with Pillow, and make batches of 32. The second epoch is timed as a whole:
the workers of both run, and neither has batches in advance.

Result (results/streams.txt, two cores): every number of workers and ranks takes the requests and bytes of one reading.
Two workers give 1.9 times as many samples as one at 0 ms, and 1.7 times at 50 ms, where one worker already reaches its
rate at 0 ms; a third and fourth one find no free core. kdpipes gives 1.2 to 1.3 times as many samples as webdataset at
0 ms, and 1.4 to 2.2 times as many at 50 ms.

    python benchmarks/bench_streams.py            # writes benchmarks/results/streams.txt
    python benchmarks/bench_streams.py --smoke    # a few small samples, one round, writes nothing
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import kdpipes as kdp

# isort: split
import numpy as np
import webdataset as wds
from PIL import Image
from rounds import load, machine, main, medians, turns
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

BATCH_SIZE = 32
WORKERS = (1, 2, 4)
SERVER = """
import collections, http.server, json, os, sys, time
folder, delay = sys.argv[1], float(sys.argv[2])
counts = collections.Counter()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def do_HEAD(self): self.answer(False)
    def do_GET(self): self.answer(True)
    def answer(self, has_body):
        if self.path == "/counts":
            content = json.dumps(counts).encode()
            self.send_response(200); self.send_header("Content-Length", str(len(content))); self.end_headers()
            self.wfile.write(content)
            return
        time.sleep(delay)
        with open(folder + self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, stop, asked = 0, size, self.headers.get("Range")
            if asked:
                first, last = asked.removeprefix("bytes=").split("-")
                start, stop = int(first), min(int(last) + 1 if last else size, size)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", '"1"')
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            counts["requests"] += 1
            if has_body:
                file.seek(start)
                self.wfile.write(file.read(stop - start))
                counts["bytes"] += stop - start
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def served(folder: str, delay_s: float) -> Iterator[str]:
    """Serve a folder over HTTP from another process; yields its URL."""
    command = [sys.executable, "-c", SERVER, folder, str(delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def counts(root: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{root}/counts") as answer:
        found: dict[str, int] = {"requests": 0, "bytes": 0, **json.load(answer)}
    return found


def write(folder: Path, num_shards: int, per_shard: int, size: int) -> None:
    draw = np.random.default_rng(0)
    for shard in range(num_shards):
        with wds.TarWriter(str(folder / f"{shard:02}.tar")) as writer:
            for index in range(per_shard):
                file = io.BytesIO()
                pixels = draw.integers(0, 255, (size // 8, size // 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((size, size)).save(file, "JPEG", quality=95)
                writer.write({"__key__": f"{shard:02}-{index:04}", "jpg": file.getvalue(), "cls": index % 10})


def decoded(content: bytes) -> Any:
    return np.array(Image.open(io.BytesIO(content)).convert("RGB").resize((224, 224)))


def dealt(urls: list[str], **cut: Any) -> Any:
    stream = kdp.stream_shards(urls).add_field("x", lambda sample: decoded(sample["jpg"]))
    return stream.select("x").deal(shuffle="shards", **cut)


def rate(loader: Any) -> float:
    """Return samples per second of the second epoch: the workers run, and have nothing in advance."""
    for _ in loader:
        pass
    begin = time.perf_counter()
    number = sum(len(batch) for batch in loader)
    return number / (time.perf_counter() - begin)


def with_kdpipes(urls: list[str], num_workers: int) -> float:
    with kdp.Loader(dealt(urls, batch_size=BATCH_SIZE), num_workers=num_workers) as loader:
        return rate(loader)


def with_webdataset(urls: list[str], num_workers: int) -> float:
    piped = [f"pipe:curl -s -L {url}" for url in urls]
    dataset = wds.WebDataset(piped, shardshuffle=False, workersplitter=wds.split_by_worker, empty_check=False)
    dataset = dataset.to_tuple("jpg").map_tuple(decoded).batched(BATCH_SIZE, collation_fn=list)
    return rate(DataLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=True))


def costs(root: str, urls: list[str]) -> list[str]:
    """Return the requests and bytes of an epoch with each number of workers and ranks."""
    lines = []
    for num_workers, num_ranks in (*((number, 1) for number in WORKERS), (1, 2)):
        before = counts(root)
        for rank in range(num_ranks):
            pipe = dealt(urls, global_batch_size=BATCH_SIZE, split=kdp.lanes(max_ranks=2))
            pipe.apply_sharding(num_ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            with kdp.Loader(pipe, num_workers=num_workers) as loader:
                list(loader)
        after = counts(root)
        requests, size = (after[name] - before[name] for name in ("requests", "bytes"))
        lines.append(f"{num_workers} workers, {num_ranks} ranks{requests:>12,} requests{size / 1e6:>10.1f} MB")
    return lines


def report(*, is_smoke: bool) -> str:
    warnings.filterwarnings("ignore", "This DataLoader will create")
    num_shards, per_shard, size, rounds = (8, 4, 32, 1) if is_smoke else (32, 16, 384, 5)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), num_shards, per_shard, size)
        content = sum(path.stat().st_size for path in Path(folder).glob("*.tar"))
        lines += [
            f"webdataset vs kdpipes: {num_shards * per_shard:,} photos in {num_shards} shards of "
            f"{content / num_shards / 1e6:.1f} MB, {content / 1e6:.1f} MB in all, over HTTP",
            f"medians of {rounds} interleaved rounds; {machine(load())}",
            "",
        ]
        with served(folder, 0) as root:
            lines += costs(root, [f"{root}/{shard:02}.tar" for shard in range(num_shards)])
        lines += ["", f"{'samples/s':<24}" + "".join(f"{number:>6} worker(s)" for number in WORKERS)]
        for delay_s in (0.0, 0.05):
            with served(folder, delay_s) as root:
                urls = [f"{root}/{shard:02}.tar" for shard in range(num_shards)]
                ways = {"kdpipes": with_kdpipes, "webdataset": with_webdataset}
                named = [
                    ((name, number), partial(way, urls, number)) for name, way in ways.items() for number in WORKERS
                ]
                found = medians(turns({f"{name} {number}": way for (name, number), way in named}, rounds, warm_up=True))
            for name in ways:
                cells = "".join(f"{found[f'{name} {number}']:>16.0f}" for number in WORKERS)
                lines.append(f"{name + f', {delay_s * 1000:.0f} ms':<24}{cells}")
    return "\n".join(chain(lines))


if __name__ == "__main__":
    main("streams", __doc__, report)
