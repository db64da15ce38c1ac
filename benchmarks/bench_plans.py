"""What do plans and composed batches cost for 10^5, 10^6 and 10^7 samples?

Question: CPU time from a source in memory to the first batches of the epochs 0 and 1, the memory that is kept then, the
memory at the peak, and how the time grows with the number of samples (the exponent).
Baseline: the same chain with `deal(shuffle=True)` alone, whose cost is not subtracted.
Each measurement is a fresh process; the median of the rounds counts.

    python benchmarks/bench_plans.py            # writes benchmarks/results/plans.txt
    python benchmarks/bench_plans.py --smoke    # 10^3 and 10^4 samples, one round, in one process, writes nothing
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rounds import load, machine, parser, publish

import kdpipes as kdp

BATCH_SIZE = 64
ROUNDS = 3


def make_source(size: int) -> Any:
    """Return a table with labels of 1,000 unequal classes, widths, groups, and log-normal lengths."""
    rng = np.random.default_rng(0)
    columns = {
        "id": np.arange(size),
        "label": (1000 * rng.random(size) ** 1.2).astype(np.int32),
        "width": rng.integers(32, 1024, size, dtype=np.int32),
        "group": rng.integers(0, max(size // 10, 1), size, dtype=np.int32),
        "length": np.clip(rng.lognormal(5.5, 1.0, size).astype(np.int32), 1, 4096),
    }
    return kdp.from_table(columns, label="label")


def dealt(pipe: Any, **deal: Any) -> Any:
    return pipe.select("id").deal(**({"batch_size": BATCH_SIZE, "shuffle": True} | deal))


def halves(source: Any) -> tuple[Any, Any]:
    return source[: len(source) // 2], source[len(source) // 2 :]


def mixed(source: Any, **arguments: Any) -> Any:
    first, second = halves(source)
    return dealt(first.mix(second, **arguments))


def joined(source: Any) -> Any:
    return dealt(source.join(source.rename_fields(other="width"), fields="other"))


CHAINS: dict[str, Callable[[Any], Any]] = {
    "deal(shuffle=True) alone": dealt,
    "filter_samples": lambda source: dealt(
        source.filter_samples(columns=["width", "length"], keep=lambda width, length: (width > 256) & (length > 9))
    ),
    "split by key": lambda source: dealt(kdp.split(source, train=0.9, val=0.1)[0]),
    "split by class": lambda source: dealt(kdp.split(source, train=0.9, val=0.1, by="y")[0]),
    "split by group": lambda source: dealt(kdp.split(source, train=0.9, val=0.1, by="group")[0]),
    "few_shot, its rest": lambda source: dealt(source.few_shot(1, rest=True)),
    "deal(num_batches=)": lambda source: dealt(source, num_batches=max(len(source) // 100, 1)),
    "own_order": lambda source: dealt(
        source, shuffle=False, batching=kdp.own_order(lambda epoch, rng: rng.permutation(len(source)).astype(np.int32))
    ),
    "batches of classes": lambda source: dealt(source, batch_size=None, batching=kdp.by_class(8, 4)),
    "mix, weights by epoch": lambda source: mixed(source, weights=lambda epoch: [2, 1 + epoch]),
    "mix(per_batch=)": lambda source: mixed(source, per_batch=[48, 16]),
    'mix(batches="per_source")': lambda source: mixed(source, batches="per_source"),
    "sample_weighted(temperature=)": lambda source: dealt(source.sample_weighted(temperature=2.0)),
    "packing": lambda source: dealt(source, batch_size=8, batching=kdp.packed("length", 4096)),
    "join": joined,
}


def resident() -> int:
    """Return the bytes that the process has in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, size: int) -> dict[str, float]:
    """Return the seconds of CPU, and the bytes kept and at the peak, of one chain."""
    source = make_source(size)
    for column in ("y", "width", "length", "group", "key"):
        source.column(column)  # what the source itself keeps does not count
    before, peak_before = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun = time.process_time()
    chain = CHAINS[name](source)
    for _ in range(2):
        next(iter(chain))
    seconds = time.process_time() - begun
    kept, peak = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # Making the source has a peak of its own, below which the peak of the chain cannot be seen.
    return {"seconds": seconds, "kept": max(kept - before, 0), "peak": max(peak - max(before, peak_before), 0)}


def in_new_process(name: str, size: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, "--measure", name, str(size)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def report(sizes: list[int], rounds: int, run: Callable[[str, int], dict[str, float]]) -> str:
    lines = [
        "a shuffled deal alone vs kdpipes' plans and batches",
        f"{', '.join(f'{size:,}' for size in sizes)} samples, medians of {rounds} rounds",
        machine(load(), NumPy=np.__version__),
        "",
        f"{'':<32}{'seconds':>10}{'us/sample':>11}{'bytes kept':>12}{'at peak':>10}{'exponent':>10}",
    ]
    for name in CHAINS:
        found = []
        for size in sizes:
            runs = [run(name, size) for _ in range(rounds)]
            found.append({key: statistics.median(one[key] for one in runs) for key in runs[0]})
        first, last, size = found[-2], found[-1], sizes[-1]
        exponent = math.log(max(last["seconds"], 1e-6) / max(first["seconds"], 1e-6)) / math.log(sizes[-1] / sizes[-2])
        cells = f"{last['seconds']:>10.2f}{last['seconds'] / size * 1e6:>11.3f}{last['kept'] / size:>12.1f}"
        lines.append(f"{name:<32}{cells}{last['peak'] / size:>10.1f}{exponent:>10.2f}")
    return "\n".join([*lines, "", "seconds of CPU, and bytes per sample, are those of the largest size"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        smoke = parser(__doc__).parse_args().smoke
        text = report([10**3, 10**4], 1, measure) if smoke else report([10**5, 10**6, 10**7], ROUNDS, in_new_process)
        publish(text, "plans", is_smoke=smoke)
