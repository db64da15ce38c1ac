"""How many images per second come from JPEGs to ready batches, by kdpipes and by its peers?

Question: JPEGs of ImageNet's size and weight (corpus.py) -> RGB -> a random region (scale 0.08 to 1) resized to 224x224
with antialiasing -> flipped or not -> uint8 batches of 64 in the main process, shuffled where the peer can shuffle, on
all cores: how many per second? Each contender (peers/) has its defaults where they matter little and what its
documentation recommends where they matter, reads the same images, in the format it is made for, and has one worker for
each core: processes, or threads for SPDL and FFCV. Nothing is cached or decoded approximately. The first column with an
x is how many times the baseline's images come; the other, how many times the row's come from kdpipes.

How it is measured: each contender runs in a process of its own, one after the other, in interleaved rounds. There it
first loads an epoch that does not count (workers start, the page cache is warm), then another, of which the time counts
from its first batch received to its last, and the images that came after the first batch. So the start of workers and
of an epoch does not count for anybody. Each batch is checked for its type and shape, each epoch for its number of
images, and the mean of its pixels against the other contenders'. Ratios are of medians. Beside the rate stands what
the counted epoch cost in all of the contender's processes, in milliseconds of CPU an image, which moves less than the
rate does where others use the machine. At the end, kdpipes says of itself where its time goes.

A peer that is not installed is a row that says why. `make bench` installs those of peers.txt into .venv-bench, makes
the corpus in benchmarks/.corpus (kept for the next run; 0.2 GB for each of up to five formats), and runs all this.

    make bench                                             # writes benchmarks/results/throughput.txt and .png
    make bench ARGS="--photos DIR"                         # the corpus from photographs of your own
    python benchmarks/bench_throughput.py --only webdataset --only "kdpipes open_shards"     # writes nothing
    python benchmarks/bench_throughput.py --smoke          # a few images, one round, writes nothing
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import kdpipes  # noqa: F401 - before torchdata, whose banner it keeps quiet

# isort: split
import torch
from corpus import make_corpus, photographs
from peers import BASELINE, CONTENDERS, KDPIPES, Contender
from peers.with_kdpipes import profile
from rounds import parser

HERE = Path(__file__).parent
TIMEOUT_S = 300.0
IN_MEMORY = "kdpipes, decoded images in memory"
TARGETS = [
    (KDPIPES, BASELINE, 2.0),
    (KDPIPES, "torch DataLoader, simplejpeg", 1.4),
    (KDPIPES, "FFCV", 1.8),
    ("kdpipes image_folder", KDPIPES, 0.95),
    ("kdpipes open_shards, Pillow only", BASELINE, 1.15),
    (IN_MEMORY, KDPIPES, 3.0),
]


class Job(NamedTuple):
    """What every contender is given."""

    folder: Path
    number: int
    workers: int
    batch_size: int


class Row(NamedTuple):
    """What became of a contender: numbers of each round, `first` the rates of first epochs; or why there are none."""

    contender: Contender
    rates: list[float]
    first: list[float]
    means: list[float]
    cpu_ms: list[float]
    missing: str = ""
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def checked(batch: Any) -> torch.Tensor:
    """Return the images of a batch, which are what was asked for."""
    images = batch[0]
    if not (isinstance(images, torch.Tensor) and images.dtype == torch.uint8 and images.shape[1:] == (3, 224, 224)):
        raise TypeError(f"A batch must be uint8 [B, 3, 224, 224], but is {getattr(images, 'shape', type(images))}.")
    return images


def epoch(batches: Iterable[Any], job: Job) -> tuple[float, float, int]:
    """Return how many images come per second after the first batch, the mean of some pixels, and how many came."""
    sizes, means, times = [], [], []
    for batch in batches:
        images = checked(batch)
        times.append(time.perf_counter())
        sizes.append(len(images))
        means.append(images[:, :, ::16, ::16].double().mean().item())
    if abs(sum(sizes) - job.number) >= job.batch_size:  # an endless pass is cut between batches
        raise RuntimeError(f"{sum(sizes)} of {job.number} images have come.")
    return sum(sizes[1:]) / (times[-1] - times[0]), statistics.fmean(means), sum(sizes)


def cpu_s() -> float:
    """Return the CPU seconds that the processes of this group, ended ones included, have used so far."""
    group, ticks = str(os.getpgrp()), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if fields[2] == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def contend(contender: Contender, job: Job) -> dict[str, Any]:
    """Open a contender, and return its rates, or that it is not installed."""
    module, _, function = contender.opener.partition(":")
    try:
        opened = getattr(importlib.import_module(f"peers.{module}"), function)(job.folder, job.workers, job.batch_size)
        with opened as loader:
            first, *_ = epoch(loader, job)
            begin_s = cpu_s()
            rate, mean, number = epoch(loader, job)
            cpu_ms = 1000 * (cpu_s() - begin_s) / number
    except ImportError as error:
        return {"missing": str(error) or type(error).__name__}
    return {"rate": rate, "first": first, "mean": mean, "cpu_ms": cpu_ms}


def _alone(contender: Contender, job: Job, answers: Any) -> None:
    """Run a contender as the leader of a process group, so that whatever it leaves can be ended with it."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # peers greet
    try:
        found = contend(contender, job)
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    answers.send(found)


def in_own_process(contender: Contender, job: Job) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")  # what all contenders import is imported once
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(contender, job, theirs))
    process.start()
    theirs.close()
    try:
        found = answers.recv() if answers.poll(TIMEOUT_S) else {"failed": f"no answer in {TIMEOUT_S:g} s"}
        process.join(10)
    except EOFError:
        process.join()
        found = {"failed": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()  # it may not lead its group yet
        process.join()
        _end_group(process.pid)
    return dict(found)


def _end_group(leader: int) -> None:
    """Give what a contender has left two seconds to clean up after it, then end it."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(40):
            os.killpg(leader, 0)
            time.sleep(0.05)
        os.killpg(leader, signal.SIGKILL)


def _why_not_installed(contender: Contender, said: str) -> str:
    note = Path(sys.prefix) / "peers-failed.json"
    failed = json.loads(note.read_text()) if note.exists() else {}
    for line, reason in failed.items():
        if any(f"{name}==" in line for name in contender.distributions):
            return f"not installed: {reason}"
    return said


def run(contenders: list[Contender], job: Job, rounds: int) -> list[Row]:
    rows = {contender.name: Row(contender, [], [], [], [], contender.absent) for contender in contenders}
    for _ in range(rounds):
        for name, row in rows.items():
            if row.missing or row.failed:
                continue
            found = in_own_process(row.contender, job)
            if "rate" in found:
                row.rates.append(found["rate"])
                row.first.append(found["first"])
                row.means.append(found["mean"])
                row.cpu_ms.append(found["cpu_ms"])
            elif "missing" in found:
                rows[name] = row._replace(missing=_why_not_installed(row.contender, found["missing"]))
            else:
                rows[name] = row._replace(failed=found["failed"], rates=[])
            print(f"  {name}: {found}", file=sys.stderr)
    return list(rows.values())


def _versions(contender: Contender) -> str:
    found = []
    for name in contender.distributions:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def table(rows: list[Row]) -> list[str]:
    medians = {row.contender.name: row.median for row in rows if row.rates}
    heads = f"{'images/s':>9}{'min':>7}{'max':>7}{'CPU ms':>8}{'vs Pillow':>11}{'kdpipes is':>12}"
    lines = [f"{'peers vs kdpipes':<36}{heads}"]
    for row in rows:
        if row.rates:
            about = f"{row.contender.remark}; {_versions(row.contender)}"
            lines.append(f"  {row.contender.name:<34}{_numbers(row, medians)}   {about}")
    lines += [f"  {row.contender.name:<34}  missing: {row.missing}" for row in rows if row.missing]
    lines += [f"  {row.contender.name:<34}  FAILED: {row.failed}" for row in rows if row.failed]
    return lines


def _numbers(row: Row, medians: dict[str, float]) -> str:
    rates = f"{row.median:>9.0f}{min(row.rates):>7.0f}{max(row.rates):>7.0f}"
    ratios = _times(row.median, medians.get(BASELINE)), _times(medians.get(KDPIPES), row.median)
    return f"{rates}{statistics.median(row.cpu_ms):>8.2f}{ratios[0]:>11}{ratios[1]:>12}"


def _times(rate: float | None, other: float | None) -> str:
    return f"{rate / other:.2f}x" if rate and other else "-"


def targets(rows: list[Row]) -> Iterator[str]:
    """Say of each target what was found, where both of its rows are there."""
    found = {row.contender.name: row for row in rows if row.rates}
    for ours, theirs, wanted in TARGETS:
        if ours in found and theirs in found:
            ratio, others = found[ours].median / found[theirs].median, found[theirs].rates
            cpu = statistics.median(found[theirs].cpu_ms) / statistics.median(found[ours].cpu_ms)
            yield _target(f"{ours} vs {theirs}", wanted, ratio, found[ours].rates, others) + f"; by CPU {cpu:.2f}x"
    if (memory := found.get(IN_MEMORY)) is not None and KDPIPES in found:
        ratio = statistics.median(memory.first) / found[KDPIPES].median
        yield _target(f"{IN_MEMORY}, first epoch vs {KDPIPES}", 0.6, ratio, memory.first, found[KDPIPES].rates)


def _target(title: str, wanted: float, ratio: float, rates: list[float], others: list[float]) -> str:
    pairs = [rate / other for rate, other in zip(rates, others, strict=True)]
    met = "met" if ratio >= wanted else "NOT MET"
    return f"  {title}: {ratio:.2f}x, in rounds {min(pairs):.2f} to {max(pairs):.2f}; target {wanted:g}x {met}"


def odd_pixels(rows: list[Row]) -> list[str]:
    """Name the contenders whose batches are lighter or darker than the middle one's."""
    means = {row.contender.name: statistics.fmean(row.means) for row in rows if row.means}
    middle = statistics.median(means.values()) if means else 0.0
    return [f"  {name}: mean {mean:.0f}, not {middle:.0f}" for name, mean in means.items() if abs(mean - middle) > 20]


def plot(rows: list[Row], path: Path) -> None:
    """Draw medians as bars, with their spread and what they are of the baseline."""
    from matplotlib.figure import Figure

    ranked = sorted((row for row in rows if row.rates), key=lambda row: row.median)
    baseline = next((row.median for row in ranked if row.contender.name == BASELINE), None)
    figure = Figure(figsize=(9, 0.42 * len(ranked) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    spread = [[row.median - min(row.rates) for row in ranked], [max(row.rates) - row.median for row in ranked]]
    colors = ["tab:orange" if row.contender.name.startswith("kdpipes") else "tab:blue" for row in ranked]
    bars = axes.barh([row.contender.name for row in ranked], [row.median for row in ranked], xerr=spread, color=colors)
    axes.bar_label(bars, [f" {row.median:.0f}  ({_times(row.median, baseline)})" for row in ranked], padding=6)
    axes.set_xlabel(f"images/s, medians with min and max (in brackets: of {BASELINE})")
    axes.margins(x=0.22)
    figure.savefig(path, dpi=110)


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{platform.machine()}, {model or 'unknown'}, {os.cpu_count()} cores"


def heading(job: Job, rounds: int, told: dict[str, Any], load: float) -> list[str]:
    return [
        f"{job.number:,} JPEGs of {told['mean_bytes'] / 1000:.0f} KB and {told['mean_pixels'] / 1000:.0f} kilopixels "
        f"({told['bytes_per_pixel']:.2f} bytes a pixel, 4:2:0, {told['distinct']:,} distinct, of "
        f"{len(told['photos'])} photographs) -> uint8 {job.batch_size}x3x224x224",
        f"{job.workers} workers, {rounds} interleaved rounds; {_machine()}, load before {load:.1f}, after "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}",
        "",
    ]


def report(given: argparse.Namespace, folder: Path) -> tuple[str, list[Row]]:
    number, batch_size, rounds = (32, 4, 1) if given.smoke else (given.number, 64, given.rounds)
    load = os.getloadavg()[0]
    told = make_corpus(
        folder, number=number, seed=given.seed, photos=photographs(given.photos), processes=given.workers
    )
    job = Job(folder, number, given.workers, batch_size)
    shares = "" if given.only else profile(folder, given.workers, batch_size, 0.2 if given.smoke else 10.0)
    rows = run([c for c in CONTENDERS if not given.only or c.name in given.only], job, rounds)
    lines = [*heading(job, rounds, told, load), *table(rows)]
    if found := [] if given.smoke else list(targets(rows)):
        lines += ["", "targets", *found]
    if shares:
        lines += ["", f"where the time of {KDPIPES} goes, by `kdp.profile`", *shares.splitlines()]
    if odd := [] if given.smoke else odd_pixels(rows):
        lines += ["", "PIXELS THAT ARE NOT THE OTHERS'", *odd]
    return "\n".join(lines), rows


def arguments() -> argparse.Namespace:
    command = parser(__doc__)
    command.add_argument("--photos", metavar="DIR", help="photographs to make the corpus of")
    command.add_argument("--corpus", metavar="DIR", default=str(HERE / ".corpus"), help="where the corpus is kept")
    command.add_argument("--number", type=int, default=2_000, help="how many images")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    command.add_argument("--seed", type=int, default=0, help="of the corpus")
    command.add_argument("--only", action="append", metavar="NAME", choices=[c.name for c in CONTENDERS])
    command.add_argument("--output", metavar="DIR", default=str(HERE / "results"))
    return command.parse_args()


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # contenders' processes are to end with this one
    with tempfile.TemporaryDirectory() as temporary:
        text, rows = report(given, Path(temporary, "corpus") if given.smoke else Path(given.corpus).absolute())
    print(text)
    if not (given.smoke or given.only):
        Path(given.output).mkdir(parents=True, exist_ok=True)
        (Path(given.output) / "throughput.txt").write_text(text + "\n")
        plot(rows, Path(given.output) / "throughput.png")
    if any(row.failed for row in rows):
        sys.exit("A contender has failed: see above.")


if __name__ == "__main__":
    main()
