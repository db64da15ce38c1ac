"""What does `Loader(profile=True)` cost?

Question: the shipped photos, decoded, cropped and put into batches of 32: how much more time of the processor does an
epoch take when it is measured? Baseline, in the same run, interleaved: the same chain without. A second chain does next
to nothing to a sample, which is the hardest for whoever measures. Time is that of the process (user and system), of
which other processes take none, beside that of the wall; without workers, so that there is one process.

Result (results/profile.txt): on a busy machine, 1.4 % more for photos, which is within the spread (quartiles
from -7 % to +9 %), and 3.1 % where a batch is nothing but 32 numbers (0.45 ms): there, what is done for each batch
shows.

    python benchmarks/bench_profile.py            # writes benchmarks/results/profile.txt
    python benchmarks/bench_profile.py --smoke    # one epoch each, writes nothing
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import kdpipes as kdp
from kdpipes.demo import write_photo_folder

# isort: split
import torch
from rounds import load, machine, main


def photos(folder: str) -> Any:
    work = kdp.image_folder(folder).oversample().decode_images("x").record_ctx()
    work = work.transform("x", kdp.RandomResizedCrop(96), kdp.HorizontalFlip()).select("x y")
    return work.deal(batch_size=32, shuffle=True).collate_samples()


def numbers(_: str) -> Any:
    return kdp.from_dataset([(n, n % 10) for n in range(4096)]).select("x y").deal(batch_size=32).collate_samples()


def epoch_of(loader: Any, num_epochs: int) -> tuple[float, float]:
    """Return the seconds of the process and of the wall that some epochs take."""
    process, wall = time.process_time(), time.perf_counter()
    for _ in range(num_epochs):
        for _ in loader:
            pass
    return time.process_time() - process, time.perf_counter() - wall


def measure(chain: Any, rounds: int, num_epochs: int) -> dict[bool, list[tuple[float, float]]]:
    """Return the times of epochs without measuring, and with it, in turns."""
    with kdp.Loader(chain) as off, kdp.Loader(chain, profile=True) as on:
        for loader in (off, on):
            epoch_of(loader, 1)  # opens files, loads libraries
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for turn in range(rounds):
            for is_on in (False, True) if turn % 2 else (True, False):
                found[is_on].append(epoch_of(on if is_on else off, num_epochs))
    return found


def row(name: str, found: dict[bool, list[tuple[float, float]]]) -> str:
    cells = []
    for place in (0, 1):
        off, on = (statistics.median(times[place] for times in found[is_on]) for is_on in (False, True))
        pairs = sorted(b[place] / a[place] - 1 for a, b in zip(found[False], found[True], strict=True))
        middle, spread = statistics.median(pairs), (pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4])
        cells.append(f"{off * 1e3:>9.1f}{on * 1e3:>9.1f}{middle:>9.2%} ({spread[0]:+.2%} to {spread[1]:+.2%})")
    return f"{name:<10}" + "  ".join(cells)


def report(*, is_smoke: bool) -> str:
    rounds, epochs = (1, 1) if is_smoke else (31, 2)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_photo_folder(Path(folder, "photos"))
        chains = {"photos": photos(f"{folder}/photos"), "numbers": numbers(folder)}
        rows = [row(name, measure(chain, rounds, epochs)) for name, chain in chains.items()]
    lines = [
        "measured vs kdpipes without: milliseconds of the process, and of the wall, for "
        f"{epochs} epochs, no workers; medians of {rounds} interleaved rounds, and of the ratios of neighbors, with "
        f"quartiles; {machine(load())}",
        "",
        f"{'chain':<10}{'off':>9}{'on':>9}{'more':>9}{'':<22}{'off wall':>9}{'on wall':>9}{'more':>9}",
        *rows,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main("profile", __doc__, report)
