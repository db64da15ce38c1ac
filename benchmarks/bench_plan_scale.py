"""How long does it take from ten million labels to the first batch, and how much memory?

Question: a filter, oversampling, repetition and a shuffled epoch over 10^7 labeled samples of 1,000 unequal classes.
Baselines, in the same run, interleaved: the same plan with torch's own parts (a `Subset` of an index list and a
`RandomSampler`, which makes a list of the permutation), and with NumPy index arrays and `permutation`.
Each measurement is a fresh process, so that peak memory is its own; ratios are of medians.

    python benchmarks/bench_plan_scale.py            # writes benchmarks/results/plan_scale.txt
    python benchmarks/bench_plan_scale.py --smoke    # a thousandth of the size, one round, writes nothing
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import machine, medians, parser, publish, turns

import kdpipes as kdp

NUM_CLASSES = 1_000
BATCH_SIZE = 256


def make_labels(size: int) -> np.ndarray:
    """Return labels of classes whose sizes fall off like a power law."""
    rng = np.random.default_rng(0)
    return (NUM_CLASSES * rng.random(size) ** 1.2).astype(np.int32)


class Labels(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset whose items are their numbers."""

    def __init__(self, labels: np.ndarray) -> None:
        self.targets = labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(self.targets[index])


def with_kdpipes(labels: np.ndarray) -> list[Any]:
    plan = kdp.from_dataset(Labels(labels)).filter_classes(valid=range(NUM_CLASSES // 2)).oversample()
    return next(iter(plan.repeat_until(repetitions=2).select("x y").deal(BATCH_SIZE, shuffle=True)))


def _oversampled(labels: np.ndarray) -> np.ndarray:
    kept = np.flatnonzero(labels < NUM_CLASSES // 2)
    counts = np.bincount(labels[kept])
    order = np.argsort(labels[kept], kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    extra = [
        np.tile(order[start : start + count], counts.max() // count - 1)
        for start, count in zip(starts, counts, strict=True)
    ]
    return kept[np.concatenate([np.arange(len(kept)), *extra])]


def with_numpy(labels: np.ndarray) -> list[Any]:
    plan = np.tile(_oversampled(labels), 2)
    dataset = Labels(labels)
    return [dataset[index] for index in plan[np.random.default_rng(0).permutation(len(plan))[:BATCH_SIZE]]]


def with_torch(labels: np.ndarray) -> list[Any]:
    subset = torch.utils.data.Subset(Labels(labels), np.tile(_oversampled(labels), 2).tolist())
    sampler = iter(torch.utils.data.RandomSampler(subset))
    return [subset[next(sampler)] for _ in range(BATCH_SIZE)]


WAYS = {"kdpipes": with_kdpipes, "numpy": with_numpy, "torch": with_torch}


def _peak_gb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6


def measure_here(way: str, size: int) -> dict[str, float]:
    """Return seconds to the first batch, and what memory grew by at its peak in GB."""
    labels = make_labels(size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here, not with what making the labels took
    before = _peak_gb()
    begin = time.perf_counter()
    assert len(WAYS[way](labels)) == BATCH_SIZE
    took = time.perf_counter() - begin
    return {"s": took, "gb": _peak_gb() - before}


def measure(way: str, size: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", way, "--size", str(size)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def report(size: int, rounds: int) -> str:
    found = turns({way: partial(measure, way, size) for way in WAYS}, rounds, warm_up=False)
    median = medians({way: [run["s"] for run in runs] for way, runs in found.items()})
    lines = [
        f"{size:,} labels: filter, oversample, repeat, shuffle, batch of {BATCH_SIZE}; {rounds} interleaved rounds",
        machine(torch=torch.__version__, NumPy=np.__version__),
        f"{'':<10}{'median s':>10}{'min':>8}{'max':>8}{'+GB peak':>10}{'time vs kdpipes':>17}",
    ]
    for way, runs in found.items():
        seconds = [run["s"] for run in runs]
        memory = statistics.median(run["gb"] for run in runs)
        lines.append(
            f"{way:<10}{median[way]:>10.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{memory:>10.2f}"
            f"{median[way] / median['kdpipes']:>16.1f}x"
        )
    return "\n".join(lines)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--measure", choices=WAYS)
    command.add_argument("--size", type=int, default=10_000_000)
    given = command.parse_args()
    if given.measure:
        print(json.dumps(measure_here(given.measure, given.size)))
    else:
        size, rounds = (10_000, 1) if given.smoke else (given.size, 5)
        publish(report(size, rounds), "plan_scale", is_smoke=given.smoke)


if __name__ == "__main__":
    main()
