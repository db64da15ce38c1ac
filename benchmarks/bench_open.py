"""How long does it take to open ten million samples in tar shards that are indexed, and how much memory?

Question: 1,000 shards of 10,000 samples with two members each (a photo and a class), sidecars beside them: from
`kdp.open_shards(...)` in a new process to the length, the labels, the first batch of a shuffled epoch, and the first
batch of one that goes by shards. Baseline, in the same run, interleaved: another new process that reads the bytes of
the same sidecars and does nothing with them. The tars are holes of the right size: no content is read.

Result (results/open.txt): 1.7 s and 0.71 GiB, while other work kept one of two cores busy: 2.8 times what the mere
bytes take.

    python benchmarks/bench_open.py            # writes benchmarks/results/open.txt
    python benchmarks/bench_open.py --smoke    # a few samples, one round, writes nothing
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rounds import load, machine, main

from kdpipes.core.shared import PackedStrings
from kdpipes.storage.files import version_of
from kdpipes.storage.index_home import index_url
from kdpipes.storage.shard_index import Places, ShardIndex

OURS = """
import resource, sys, time
import kdpipes as kdp
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
def note(what):
    print(what, time.perf_counter() - begin, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
source = kdp.open_shards(sys.argv[1] + "/*.tar").rename_fields(x="jpg", y="cls")
assert len(source) == int(sys.argv[2])
note("length")
labels = source.column("y")
note("labels")
for shuffle in (True, "shards"):
    chain = source.select("index").deal(batch_size=64, shuffle=shuffle)
    assert len(next(iter(chain))) == 64
    note(f"shuffle={shuffle!r}")
"""
BASELINE = """
import pathlib, resource, sys, time
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
kept = [path.read_bytes() for path in sorted(pathlib.Path(sys.argv[1]).glob("*.index"))]
print("bytes", time.perf_counter() - begin, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def write(folder: Path, num_shards: int, num_samples: int) -> None:
    """Write tars that are holes, and their sidecars."""
    sizes = np.full(num_samples, 110_000)
    offsets = 1_536 + np.arange(num_samples) * 113_664
    for shard in range(num_shards):
        path = folder / f"{shard:05}.tar"
        with path.open("wb") as file:
            file.truncate(int(offsets[-1]) + 113_664)
        keys = PackedStrings([f"{shard * num_samples + place:08}" for place in range(num_samples)])
        labels = (np.arange(num_samples) * 7_919 + shard) % 1_000
        fields = {
            "jpg": Places(offsets, sizes),
            "cls": Places(offsets + 111_616, np.full(num_samples, 3), None, labels),
        }
        Path(index_url(str(path))).write_bytes(ShardIndex(version_of(str(path)), keys, fields).to_bytes())


def measure(program: str, folder: Path, number: int) -> dict[str, tuple[float, float]]:
    """Return seconds since the beginning, and GiB of memory, by what was reached."""
    command = [sys.executable, "-c", program, str(folder), str(number)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.rsplit(maxsplit=2) for line in found.splitlines()]
    return {what: (float(seconds), float(memory)) for what, seconds, memory in rows}


def report(*, is_smoke: bool) -> str:
    num_shards, num_samples, rounds = (3, 100, 1) if is_smoke else (1_000, 10_000, 5)
    number = num_shards * num_samples
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, num_shards, num_samples)
        runs = [{**measure(BASELINE, folder, number), **measure(OURS, folder, number)} for _ in range(rounds)]
    lines = [
        f"bytes of the sidecars vs kdpipes; {number:,} samples in {num_shards:,} shards, all in the page cache",
        f"{rounds} interleaved rounds of new processes; {machine(load(), NumPy=np.__version__)}",
        "",
        f"{'up to':<20}{'seconds':>9}{'min':>8}{'max':>8}{'vs bytes':>10}{'GiB':>8}",
    ]
    baseline = statistics.median(run["bytes"][0] for run in runs)
    for what in runs[0]:
        seconds = [run[what][0] for run in runs]
        median, memory = statistics.median(seconds), statistics.median(run[what][1] for run in runs)
        lines.append(
            f"{what:<20}{median:>9.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{median / baseline:>9.1f}x{memory:>8.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main("open", __doc__, report)
